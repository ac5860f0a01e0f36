"""Damaged checkpoints, senseless command lines and kills: each ends in one clear line or in a correct run. A run
samples them; with --exhaustive there are 300 checkpoints, 100 command lines per tool and 20 kills more."""

import importlib
import io
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import ANY

import pytest
from chat_templates import LLAMA2
from conftest import exhaustive, slow, write_random
from test_convert import hf_model, save

import bench.__main__ as bench
import convert_hf_checkpoint
import eval as evaluation
import generate
from bench import compare
from engine import Engine
from runtime import cpu
from runtime.checkpoint import open_weights, write_checkpoint
from runtime.device import resident_bytes
from runtime.hf_config import from_hf
from terminal import cli
from text.tokenizer import PRIVATE, load_tokenizer

ROOT = Path(__file__).parent.parent
HOSTILE = (None, True, -1, 0, 3, 1.5, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "x", "64", [], [1], {}, {"a": 1})
SENSELESS = ("", *"x -1 0 1.5 2 nan inf -inf 1e400".split(), "1" + "0" * 30, *", : = a=b=c full, é☃ \udcff".split())
SENSELESS += (*"/proc/nowhere/x / full:bits=3 streaming:sinks=-1 none - -- [ %s ~".split(),)
FLAGS = ("--nosuch", "--chat", "--json", "--batch", "--kv", "--budget", "--length", "--samples", "--force", "--device")
METHODS = (["full"], ["omnikv", "--budget", "32"], ["tailorkv", "--budget", "48"], ["duo", "--budget", "0.5"])


class Hangs(BaseException):
    pass


@contextmanager
def guarded(seconds: int, bytes_: int):
    """Fails if the block takes longer, or makes this process's memory grow by more."""

    def hang(*_):
        raise Hangs(f"more than {seconds} s")

    old = signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak, VmHWM
    before = resident_bytes("VmRSS")
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert resident_bytes("VmHWM") - before < bytes_


def outcome(main, args: list, bytes_: int = 300_000_000) -> tuple[int, str]:
    """(exit code, stderr) of a command line that must run, or be refused in one line, within 60 s and `bytes_`."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end, guarded(60, bytes_):
        cli.run(lambda: main([str(arg) for arg in args]))
    text = err.getvalue()
    assert end.value.code in (0, 2) and "Traceback" not in text, text
    if end.value.code == 2:
        line = text.splitlines()[-1]
        assert len(line.partition("error: ")[2]) > 10 and "object has no attribute" not in line, text
    return end.value.code, text


# Checkpoints


@pytest.fixture(scope="module")
def whole(text_checkpoint, tmp_path_factory) -> Path:
    """A small checkpoint with shards, a tokenizer, a chat template and a profile."""
    root = tmp_path_factory.mktemp("hostile")
    single = write_random(root / "single", vocab_size=1024, num_hidden_layers=4, bos_token_id=1, eos_token_id=2)
    stored = open_weights(single)
    tensors = {name: t.read() for name, t in stored.items()}
    config = json.loads((single / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    del config["kv_fast"]
    write_checkpoint(root / "whole", config, from_hf(config), tensors, tensors.__getitem__, shard_bytes=400_000)
    whole = root / "whole"
    assert len(list(whole.glob("*.safetensors"))) > 1
    shutil.copy(text_checkpoint / "tokenizer.model", whole)
    profile = {"filter_layers": [1], "quant_layers": [0], "head_scores": [[1.0, 2.0]] * 4}
    files = {
        "tokenizer_config.json": {"chat_template": LLAMA2, "add_bos_token": True},
        "generation_config.json": {"eos_token_id": [2, 3]},
        "kv_profile.json": profile,
    }
    for name, content in files.items():
        (whole / name).write_text(json.dumps(content))
    return whole


def change_json(folder: Path, draw: random.Random) -> str:
    """Gives a field, perhaps a nested one, a value it must not have, or deletes it."""
    file = draw.choice(sorted(folder.glob("*.json")) + [folder / "config.json"] * 8)
    content = json.loads(file.read_text())
    place = content
    while True:
        key = draw.choice(sorted(place))
        if not isinstance(place[key], dict) or not place[key] or draw.random() < 0.3:
            break
        place = place[key]
    if draw.random() < 0.1:
        del place[key]
        said = f"{file.name} without {key}"
    else:
        place[key] = draw.choice(HOSTILE)
        said = f"{file.name}: {key}={place[key]!r}"
    file.write_text(json.dumps(content))
    return said


def cut(folder: Path, draw: random.Random) -> str:
    file = draw.choice([f for f in sorted(folder.iterdir()) if f.is_file()])
    data = file.read_bytes()
    n = draw.choice((0, 1, 7, draw.randrange(len(data)), len(data) - 1))
    file.write_bytes(data[:n])
    return f"{file.name} cut to {n} of {len(data)} bytes"


def flip(folder: Path, draw: random.Random) -> str:
    """Flips bits of a header or of data; flipped data must be read, because nothing shows that it is wrong."""
    file = draw.choice([f for f in sorted(folder.iterdir()) if f.is_file()])
    data = bytearray(file.read_bytes())
    end = len(data)
    if file.suffix == ".safetensors" and draw.random() < 0.8:
        end = 8 + struct.unpack("<Q", data[:8])[0]
    places = [draw.randrange(end) for _ in range(draw.choice((1, 1, 3)))]
    for place in places:
        data[place] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return f"{file.name} with other bits at {places}"


def swap(folder: Path, draw: random.Random) -> str:
    one, two = draw.sample(sorted(folder.glob("*.safetensors")), 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first if draw.random() < 0.5 else second)
    return f"{one.name} and {two.name} swapped"


def lose(folder: Path, draw: random.Random) -> str:
    file = draw.choice(sorted(folder.iterdir()))
    file.unlink()
    if draw.random() < 0.3:
        file.mkdir()
    return f"{file.name} lost, or a folder"


def borrow(folder: Path, draw: random.Random) -> str:
    """Replaces the tokenizer by another model's, or by a file that is not a tokenizer."""
    kind = draw.choice(("needle", "json", "text"))
    if kind == "needle":
        shutil.copy(ROOT / "needle" / "tokenizer.model", folder)
    elif kind == "json":
        (folder / "tokenizer.model").unlink()
        vocab = {"a": draw.choice((0, 5000)), "b": draw.choice((0, 1))}
        model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
        (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    else:
        (folder / "tokenizer.model").write_text("the tokenizer of nothing\n" * 50)
    return f"a tokenizer of {kind}"


MUTATIONS = (change_json, change_json, change_json, cut, flip, swap, lose, borrow)
ANSWER = ("--prompt", "The keeper " * 30, "--max-new-tokens", 4, "--no-compile", "--kv")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method[0])
def test_the_undamaged_checkpoint_answers(whole, method):
    assert outcome(generate.main, ["--checkpoint", whole, *ANSWER, *method]) == (0, ANY)


@pytest.mark.parametrize("seed", [*range(8), *map(slow, range(8, 40)), *map(exhaustive, range(40, 300))])
def test_a_damaged_checkpoint_is_refused_in_one_line_or_answers(whole, tmp_path, seed):
    folder, draw = tmp_path / "damaged", random.Random(seed)
    shutil.copytree(whole, folder)
    said = MUTATIONS[seed % len(MUTATIONS)](folder, draw)
    code, text = outcome(generate.main, ["--checkpoint", folder, *ANSWER, *draw.choice(METHODS)])
    print(said, code, text.splitlines()[-1] if code else "answered")


@pytest.mark.slow
@pytest.mark.parametrize("name", ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"))
def test_senseless_sampling_in_a_checkpoint_is_a_note_or_refused_in_one_line(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "senseless")
    file, refused = folder / "generation_config.json", 0
    for value in (*HOSTILE, "x" * 10**6, 10**400, "\x1b[2J\n"):
        file.write_text(json.dumps({"do_sample": True, "temperature": 0.5} | {name: value}))
        code, said = outcome(generate.main, ["--checkpoint", folder, *ANSWER, "full"])
        notes = [line for line in said.splitlines() if line.startswith("note: ")]
        assert code == 0 and len(notes) <= 1 and "\x1b" not in said and len(said) < 2000
        code, said = outcome(generate.main, ["--checkpoint", folder, *ANSWER, "full", "--generation-config"])
        if code:
            assert (
                notes == [f"note: {file}: " + said.partition("generation_config.json: ")[2].strip()] and len(said) < 500
            )
            refused += 1
    assert refused > 10


DEEP = "[" * 100_000
JSONS = ("config.json", "tokenizer_config.json", "generation_config.json", "kv_profile.json")
JSONS += ("model.safetensors.index.json",)


@pytest.mark.parametrize("name", (*JSONS, "a header"))
def test_a_file_that_is_nested_too_deeply_is_refused_in_one_line(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "deep")
    file = next(folder.glob("model-00001*")) if name == "a header" else folder / name
    file.write_bytes(struct.pack("<Q", len(DEEP)) * (name == "a header") + DEEP.encode())
    code, said = outcome(generate.main, ["--checkpoint", folder, *ANSWER, "full"])
    assert code == 2 and file.name in said and ("too deeply" in said or "is damaged or cut off" in said)


@pytest.mark.parametrize("kind", ("a result", "scores of heads", "a dataset", slow("a shape")))
def test_a_tools_file_that_is_nested_too_deeply_is_refused_in_one_line(whole, tmp_path, kind):
    for name in ("found.json", "squad.json"):
        (tmp_path / name).write_text(DEEP + "\n")
    found, checkpoint = tmp_path / "found.json", ["--checkpoint", whole]
    main, args = {
        "a result": (compare.main, [found, found]),
        "scores of heads": (generate.main, [*checkpoint, *ANSWER, *METHODS[-1], "--kv-opt", f"heads={found}"]),
        "a dataset": (
            evaluation.main,
            [*checkpoint, "--length", 400, "--samples", 1, "--data", tmp_path, "--tasks", "qa_1"],
        ),
        "a shape": (bench.main, ["--shape", found]),
    }[kind]
    assert outcome(main, args)[0] == 2


@pytest.mark.parametrize("kind", ("lists", "fifo"))
def test_measured_products_that_cannot_be_read_are_passed_over(tmp_path, kind):
    file = tmp_path / "products.json"
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.write_text(DEEP)
    with guarded(10, 100_000_000):
        assert cpu.read(file) == {}
        cpu.write(file, {"m": {"s": {"fused": 1.0}}})
        assert bool(cpu.read(file)) is (kind != "fifo")


PATTERNS = {
    "alternatives": "(?:x|x)+y",
    "a back reference": r"(x+)+\1y",
    "too many parentheses": "(" * 100_000 + "x" + ")" * 100_000,
    "either case": "(?i:" + "ffi" * 1300 + ")",
    "counts": "(?:" * 8 + r"\p{L}+x?" + "){1,5}" * 8,
}


@pytest.mark.parametrize("where", ("pre_tokenizer", "normalizer"))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_of_4_kb_takes_little_memory(whole, tmp_path, pattern, where):
    folder, given = tmp_path / "pattern", {"pattern": {"Regex": PATTERNS[pattern]}}
    shutil.copytree(whole, folder)
    (folder / "tokenizer.model").unlink()
    content = {"model": {"type": "BPE", "vocab": {"x": 0, "y": 1}, "merges": []}, "added_tokens": []}
    split = {"type": "Split", "behavior": "Isolated", "invert": False} | given
    content[where] = split if where == "pre_tokenizer" else {"type": "Replace", "content": "y"} | given
    (folder / "tokenizer.json").write_text(json.dumps(content))
    args = ["--checkpoint", folder, *ANSWER, "full", "--prompt", "x" * 40]
    outcome(generate.main, args)


@pytest.mark.parametrize("shard", ("../single/model.safetensors", "a/../../single/model.safetensors", "/dev/zero"))
def test_an_index_that_leads_out_of_its_folder_is_refused(whole, tmp_path, shard):
    folder, single = tmp_path / "led", tmp_path / "single"
    shutil.copytree(whole, folder)
    shutil.copytree(whole.parent / "single", single)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(open_weights(single), shard)}))
    code, said = outcome(generate.main, ["--checkpoint", folder, *ANSWER, "full"])
    assert code == 2 and f"{shard}, which is not in its folder" in said


FILES = (
    "config.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "kv_profile.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model-00001",
)


@pytest.mark.parametrize(
    "name, kind", [*((name, "link") for name in FILES), *((FILES[0], kind) for kind in ("chain", "fifo", "dangling"))]
)
def test_links_out_of_the_folder_and_special_files_are_refused(whole, tmp_path, name, kind):
    folder = tmp_path / "linked"
    shutil.copytree(whole, folder)
    file = next(folder.glob(f"{name}*"))
    file.rename(tmp_path / "outside")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "chain":
        (folder / "between").symlink_to(tmp_path / "outside")
        file.symlink_to("between")
    else:
        file.symlink_to(tmp_path / ("outside" if kind == "link" else "nothing"))
    code, said = outcome(generate.main, ["--checkpoint", folder, *ANSWER, "full"])
    wrong = "is a link out of its folder" if kind in ("link", "chain") else "is not a regular file"
    assert code == 2 and f"{file.name} {wrong}" in said, said


def test_links_within_the_folder_and_a_folder_that_is_a_link_are_followed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "real")
    for file in list((tmp_path / "real").iterdir()):
        file.rename(file.with_name(f"own-{file.name}"))
        file.symlink_to(f"own-{file.name}")
    (tmp_path / "link").symlink_to("real")
    assert outcome(generate.main, ["--checkpoint", tmp_path / "link", *ANSWER, "full"])[0] == 0


@pytest.mark.parametrize("sharp", (False, True))
def test_links_to_the_hub_caches_blobs_are_followed_and_other_links_are_refused(tmp_path, sharp):
    cache = tmp_path / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    save(hf_model(), snapshot)
    blobs.mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(f"../../blobs/{i}")
    if sharp:  # a private file that the converted folder must not contain
        (tmp_path / "secret").write_text("{}")
        (snapshot / "special_tokens_map.json").symlink_to("../../../secret")
    code, said = outcome(convert_hf_checkpoint.main, [snapshot, "--out", tmp_path / "out"])
    assert code == (2 if sharp else 0) and ("is a link out of its folder" in said) is sharp
    assert (tmp_path / "out").exists() is not sharp
    assert sharp or not any(file.is_symlink() for file in (tmp_path / "out").iterdir())


# Error lines

CLEAR = "\x1b[2J"  # clears a terminal
LONG = {
    "a name": ("model.safetensors.index.json", {"weight_map": {"x": "../" + CLEAR * 250_000}}),
    "a template": (
        "tokenizer_config.json",
        {"chat_template": "{{ raise_exception('\x1b[2J' * 250_000) }}", "add_bos_token": True},
    ),
}


@pytest.mark.parametrize("kind", LONG)
def test_an_error_line_is_short_and_has_no_escape_sequence(whole, tmp_path, kind):
    folder, (name, content) = tmp_path / "long", LONG[kind]
    shutil.copytree(whole, folder)
    old = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(old | content))
    code, said = outcome(generate.main, ["--checkpoint", folder, "--chat", *ANSWER, "full"])
    line = said.splitlines()[-1]
    assert code == 2 and line.isprintable() and len(line) < 1_050


@pytest.mark.parametrize(
    "error, said",
    (
        (MemoryError(), "out of memory (MemoryError): shorten the prompt"),
        (MemoryError("Unable to allocate 9 GiB"), "out of memory (Unable to allocate 9 GiB): shorten the prompt"),
        (RuntimeError("could not create a primitive"), "out of memory (could not create a primitive): shorten"),
        (RuntimeError("std::bad_alloc"), "out of memory (std::bad_alloc): shorten"),
    ),
)
def test_every_error_for_want_of_memory_is_one_line(error, said):
    def full(args):
        raise error

    code, text = outcome(full, [])
    assert code == 2 and text.startswith(f"error: {said}") and text.count("\n") == 1


@pytest.mark.parametrize("error", (MemoryError, KeyboardInterrupt))
def test_an_answer_that_fails_ends_its_line_before_the_error(whole, monkeypatch, capsys, error):
    def fail(engine, prompts, on_token, **how):
        on_token(0, 5, "The light")
        raise error

    monkeypatch.setattr(Engine, "generate", fail)
    with pytest.raises(SystemExit):
        cli.run(lambda: generate.main([str(arg) for arg in ("--checkpoint", whole, *ANSWER, "full")]))
    said = capsys.readouterr()
    assert said.out == "The light\n" and said.err.endswith("\n")


def test_a_message_of_all_private_use_characters_is_encoded_or_refused_in_one_line(whole):
    tokenizer, text = load_tokenizer(whole), "".join(map(chr, range(0xE000, 0xF900)))
    assert text in tokenizer.decode(tokenizer.chat(text))
    args = ["--checkpoint", whole, "--chat", "--prompt", "".join(map(chr, PRIVATE)), "--no-compile"]
    code, said = outcome(generate.main, args)
    assert code == 2 and "all private-use characters" in said


# Command lines


@pytest.fixture(scope="module")
def lines_of(whole, tmp_path_factory) -> dict:
    """tool -> a command line that works."""
    root = tmp_path_factory.mktemp("lines")
    source = save(hf_model(), root / "hf")
    for file in source.glob("tokenizer*"):
        file.unlink()
    (root / "text.txt").write_text("The keeper rowed to the light. " * 60)
    method = {"kv": "full", "budget": None, "options": {}}
    method |= dict.fromkeys(("kv_device_bytes", "kv_host_bytes", "step_device_bytes", "step_host_bytes"), 10**6)
    asked = method | {"task": "x", "length": 400, "score": 50.0, "first": 50.0, "later": None}
    (root / "answers.json").write_text(json.dumps({"rows": [asked]}))
    (root / "speed.json").write_text(json.dumps({"rows": [method | {"context": 384, "ms_per_token": 3.0}]}))
    tiny = "--batch 1 --quantize none --steps 1 --repeats 1 --no-compile"
    lines = {
        "generate": f"--checkpoint {whole} --prompt x --kv streaming --budget 32 --max-new-tokens 3 --no-compile "
        "--seed 1 --temperature 0.5",
        "eval": f"--checkpoint {whole} --tasks niah_single_1,perplexity --length 400 --samples 1 --batch 2 --seed 3 "
        f"--kv full,streaming:sinks=2 --budget 32,0.5 --json {root}/out.json",
        "bench.__main__": f"--shape {whole}/config.json --kv full,streaming --budget 32 --context 64 {tiny} "
        f"--results {root}/results.jsonl",
        "quantize": f"--checkpoint {whole} --mode int4 --groupsize 32 --out {root}/q --force",
        "convert_hf_checkpoint": f"{source} --out {root}/c --dtype float32 --force",
        "calibrate": f"--checkpoint {whole} --text {root}/text.txt --length 200 --tau 0.3 --tolerance 0.4 --full 5 "
        "--sinks 4 --recent 16",
        "bench.compare": f"{root}/answers.json {root}/speed.json --plot {root}/plot.png",
    }
    return {tool: line.split() for tool, line in lines.items()}


SLOW = ("eval", "bench.__main__", "convert_hf_checkpoint", "calibrate", "bench.compare")


@pytest.mark.parametrize("lines", [2, slow(8), exhaustive(100)])
@pytest.mark.parametrize("tool", ["generate", "quantize", *map(slow, SLOW)])
def test_a_senseless_command_line_is_refused_in_one_line_or_runs(lines_of, tmp_path, monkeypatch, tool, lines):
    main, args = importlib.import_module(tool).main, lines_of[tool]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert outcome(main, args) == (0, ANY)
    draw = random.Random(tool)
    for _ in range(lines):
        own, place = list(args), draw.randrange(len(args))
        kind = draw.random()
        if kind < 0.6:
            own[place] = draw.choice(SENSELESS)
        elif kind < 0.75:
            del own[place]
        elif kind < 0.9:
            own.insert(place, draw.choice((*SENSELESS, *FLAGS)))
        else:
            own += [draw.choice(FLAGS), draw.choice(SENSELESS)]
        print(own)
        outcome(main, own)


# Kills

EVALUATE = """
import json, sys
import eval
from terminal import cli
print("ready", flush=True)
cli.run(lambda: eval.main(json.loads(sys.argv[1])))
"""


def evaluate(args: list, seconds: float | None) -> tuple[int, float]:
    """(exit code, seconds of work) of an evaluation that is killed after `seconds` of work, if these are given."""
    command = [sys.executable, "-c", EVALUATE, json.dumps([str(arg) for arg in args])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        begin = time.perf_counter()
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        return process.wait(), time.perf_counter() - begin


@pytest.mark.parametrize("kills", [slow(2), exhaustive(20)])
def test_an_evaluation_that_is_killed_resumes_to_the_same_result(lines_of, tmp_path, kills):
    args = [*lines_of["eval"], "--samples", 6]

    def results(name: str) -> dict:
        found = json.loads((tmp_path / name).read_text())
        return {key: found[key] for key in ("rows", "samples")}

    code, whole_run = evaluate([*args, "--json", tmp_path / "whole.json"], None)
    assert code == 0
    draw = random.Random(0)
    for _ in range(kills):
        evaluate([*args, "--json", tmp_path / "out.json"], draw.uniform(0, 2 * whole_run / kills))
    assert outcome(evaluation.main, [*args, "--json", tmp_path / "out.json"])[0] == 0
    assert results("out.json") == results("whole.json")
