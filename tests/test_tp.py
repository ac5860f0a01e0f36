"""Tensor parallelism: the ranks together compute what one process computes."""

import io
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import tp_worker
from conftest import llama_8b, slow, with_scores, write_random
from torch import Tensor, nn

import bench.__main__ as bench
import eval as evaluation
import generate
import kv
from engine import Engine
from kv import METHODS
from kv.parts.ranks import ALONE, Ranks
from model import ModelConfig
from quantize import quantize
from runtime import load
from runtime.checkpoint import load_checkpoint, read_config
from runtime.hf_config import from_hf
from runtime.linear import read_quantization

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 130}
SCORES = [[3.0, 1.0, 2.5, 0.5], [2.0, 4.0, 0.1, 0.2], [6.0, 5.0, 0.3, 0.4]]
VARIANTS: dict[str, tuple[str, dict]] = {name: (name, {}) for name in METHODS} | {
    "full:bits": ("full", {"bits": 8}),
    "rocketkv": ("rocketkv", {"window": 8, "kernel": 5}),
    "quest": ("quest", {"page": 4, "skip_layers": 0}),
    "snapkv:heads": ("snapkv", {"gqa": False}),
    "snapkv:adaptive": ("snapkv", {"heads": "adaptive"}),
    "kvzip:equal": ("kvzip", {"heads": "equal"}),
    "infllm": ("infllm", {"block": 6}),
    "simlayer": ("simlayer", {"sinks": 2, "recent": 6, "threshold": 0.3}),
    "kivi": ("kivi", {"bits": 2, "group": 8, "recent": 4}),
    "kvarn": ("kvarn", {"tile": 16}),
    "tailorkv": ("tailorkv", {"group": 8, "channels": 4}),
    "tailorkv:threads": ("tailorkv", {"group": 8, "channels": 4, "engine": "threads", "threads": 2}),
    "pqcache": ("pqcache", {"codebits": 3}),
    "duo": ("duo", {"sinks": 2, "recent": 6, "head_scores": SCORES}),
    "omnikv:threads": ("omnikv", {"offload": True, "engine": "threads", "threads": 2, "delta": True}),
    "omnikv:prefill": ("omnikv", {"prefill": 0.5, "chunk": 8}),
}
BUDGETS = {"simlayer": 90}
# Each rank chooses tokens for its own heads
PER_RANK = [name for name in VARIANTS if name.startswith("omnikv") or name.endswith("adaptive") or name == "kvzip"]
QUICK = ("full", "omnikv", "tied, biased, full")
# With 4 ranks, which have one KV head each: what ranks exchange, and how weights and choices are split.
FOUR = ("full", "infllm", "omnikv", "duo", "d2o", "tailorkv", "tied, biased, full", "int4, full")


def use(name: str, **more) -> dict:
    method, options = VARIANTS[name]
    budget = BUDGETS.get(name, 24) if METHODS[method].budgeted else None
    if budget is not None and name not in BUDGETS:
        budget = max(budget, METHODS[method](**options).minimum(SHAPE))
    return {"kv": method, "options": options, "budget": budget, **more}


SHAPE = kv.Plan(3, 8, 4, 16, 64, "default", 1e4, torch.float32, torch.device("meta"), batch=3, max_prompt=90, room=60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints that differ in what a rank must split."""
    root = tmp_path_factory.mktemp("tp")
    found = {"llama": write_random(root / "llama", **SIZES)}
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    found["tied, biased"] = write_random(root / "tied", **SIZES, **biased)
    found["qwen3"] = write_random(root / "qwen3", architectures=["Qwen3ForCausalLM"], **SIZES)
    for mode, how in (("int8", {"embeddings": True}), ("int4", {"groupsize": 8})):
        found[mode] = root / mode
        quantize(found["tied, biased"], found[mode], mode, **how)
    return found


@pytest.fixture(scope="module")
def cases(folders) -> dict[str, dict]:
    found = {name: {"checkpoint": str(folders["llama"]), "use": use(name)} for name in VARIANTS}
    found |= {f"{name}, full": {"checkpoint": str(folder), "use": use("full")} for name, folder in folders.items()}
    found["full, compiled"] = found["full"] | {"compile": True}
    for name in ("tova", "snapkv", "simlayer", "infllm"):
        found[f"{name}, in chunks"] = {"checkpoint": str(folders["llama"]), "use": use(name, chunk=24)}
    found["speculation"] = {"checkpoint": str(folders["llama"]), "use": use("rocketkv", speculate=3)}
    return found


def torchrun(world: int, *command: str, stdin: int | None = None) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launcher, *command], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def run_ranks(*command, world: int = 2) -> str:
    """Standard output of a command line of two ranks."""
    run = torchrun(world, *map(str, command))
    out, errors = run.communicate(timeout=900)
    assert run.returncode == 0, errors
    return out


class Apart(nn.Module):
    """KV modules that each have a share of the heads: what ranks compute, in one process."""

    wants_lookahead, error = False, None

    def __init__(self, *parts: kv.KV):
        super().__init__()
        self.parts, self.pools = nn.ModuleList(parts), kv.Cache(parts).pools

    def each(self, name: str, *inputs, **more) -> Tensor:
        shares = [
            x.chunk(len(self.parts), 1) if torch.is_tensor(x) and x.dim() == 4 else [x] * len(self.parts)
            for x in inputs
        ]
        return torch.cat([getattr(p, name)(*own, **more) for p, *own in zip(self.parts, *shares, strict=True)], 1)

    def prefill(self, row, q, k, v, **chunk):
        return self.each("prefill", row, q, k, v, **chunk)

    def second_pass(self, prompt, tokenizer):
        return [part.second_pass(prompt, tokenizer) for part in self.parts][0]

    def observe(self, row, q, k, v):
        return self.each("observe", row, q, k, v)

    def extend(self, row, q, k, v, pos):
        return self.each("extend", row, q, k, v, pos=pos)

    def decode(self, q, k, v, pos, active):
        return self.each("decode", q, k, v, pos, active)

    def finish(self, row):
        return [part.finish(row) for part in self.parts]

    def reset(self, row):
        return [part.reset(row) for part in self.parts]

    def make_room(self, row, length):
        return [part.make_room(row, length) for part in self.parts]

    def before_step(self, length, new):
        return [part.before_step(length, new) for part in self.parts]


def per_rank(case: dict, world: int) -> dict:
    """`tp_worker.run` of one process, in which groups of KV heads choose by themselves."""
    engine = Engine.load(case["checkpoint"], compile=False, seed=0)
    engine.use(batch=3, max_prompt=90, room=60, **case["use"])
    small = replace(engine.plan, n_head=8 // world, n_kv_head=4 // world)
    parts = [kv.build(engine.method, small, engine.budget, engine.options) for _ in range(world)]
    whole, engine.layers[:] = kv.Cache(engine.layers), [Apart(*layer) for layer in zip(*parts, strict=True)]
    engine.model.set_kv(engine.layers)
    logits = engine.logits(tp_worker.PROMPTS, tp_worker.FORCED)
    tokens = tp_worker.conversations(engine)
    engine.close()
    whole.close()
    return {"logits": logits, "tokens": tokens}


@pytest.mark.parametrize(("world", "names"), ((2, QUICK), slow(2, None), slow(4, FOUR)))
def test_ranks_compute_what_one_process_does(cases, tmp_path, world, names):
    """Logits to 1e-5 of their size, equal tokens; PER_RANK equal a process whose heads choose in groups."""
    names, wrong, engines = names or [name for name in cases if name not in QUICK], [], {}
    torch.save({name: cases[name] for name in names}, tmp_path / "cases")
    run_ranks("tests/tp_worker.py", tmp_path / "cases", tmp_path / "results", world=world)
    for name, found in torch.load(tmp_path / "results", weights_only=False).items():
        case = cases[name] | {"compile": False}
        expected = per_rank(case, world) if name in PER_RANK else tp_worker.run(case, engines)
        size = max(x.abs().max() for x in expected["logits"])
        pairs = zip(found["logits"], expected["logits"], strict=True)
        error = torch.stack([(a - b).abs().max() for a, b in pairs]).max() / size
        if not error <= 1e-5 or found["tokens"] != expected["tokens"]:
            wrong.append((name, float(error)))
    assert not wrong


@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_are_divided_by_the_ranks(name):
    method, options = VARIANTS[name]
    alone = llama_8b(max_prompt=8000, room=192, batch=1)
    arguments = 1024 if METHODS[method].budgeted else None, with_scores(method, options, alone)
    halves = [replace(alone, n_head=16, n_kv_head=4, ranks=Ranks(rank, 2)) for rank in range(2)]
    parts = sum(sum(kv.planned_bytes(method, plan, *arguments)) for plan in halves)
    assert 1 <= parts / sum(kv.planned_bytes(method, alone, *arguments)) < 1.03


@pytest.mark.parametrize("kind", ("llama", "tied, biased", "qwen3", "int8", "int4"))
def test_the_parts_of_a_checkpoint_make_up_the_whole(folders, kind):
    """Each rank's part is loaded without starting it."""
    config, world, parts = read_config(folders[kind]), 4, []
    sizes, quantization = ModelConfig(**config["kv_fast"]["model"]), read_quantization(config)
    whole = load.skeleton(sizes, quantization, ALONE)
    for rank in range(world):
        ranks = Ranks(rank, world)
        part = load.skeleton(sizes, quantization, ranks)
        read = partial(load.read_part, c=part.config, ranks=ranks)
        parts.append(load_checkpoint(folders[kind], part, "cpu", torch.float32, whole, read))
    whole = load_checkpoint(folders[kind], whole, "cpu", torch.float32)
    states = [part.state_dict() for part in parts]
    for name, expected in whole.state_dict().items():
        found = [state[name] for state in states]
        split = [dim for dim, size in enumerate(expected.shape) if found[0].shape[dim] != size]
        if name.endswith(("wo.bias", "w2.bias")):  # added once
            assert torch.equal(sum(found), expected) and not found[1].any()
        elif not split:
            assert all(torch.equal(x, expected) for x in found), name
        elif "wqkv" in name:
            heads = [x.split([n * 16 // world for n in (8, 4, 4)], split[0]) for x in found]
            joined = torch.cat([torch.cat(parts, split[0]) for parts in zip(*heads, strict=True)], split[0])
            assert torch.equal(joined, expected), name
        else:
            joined, size = torch.cat(found, split[0]), expected.shape[split[0]]
            assert torch.equal(joined.narrow(split[0], 0, size), expected), name
            assert not joined.narrow(split[0], size, joined.shape[split[0]] - size).any(), name


LOAD = """
import sys
from functools import partial
from pathlib import Path
import torch
from runtime import load, parallel
from runtime.checkpoint import load_checkpoint, read_config
from model import ModelConfig
from runtime.device import resident_bytes
from kv.parts.ranks import ALONE, Ranks

sizes, ranks = ModelConfig(**read_config(sys.argv[1])["kv_fast"]["model"]), Ranks(1, 4)
model, whole = (load.skeleton(sizes, None, r) for r in (ranks, ALONE))
part = sum(t.numel() * 2 for t in model.state_dict().values())
largest = max(t.numel() * 2 for t in model.state_dict().values())
Path("/proc/self/clear_refs").write_text("5")
resident = resident_bytes("VmRSS")
read = partial(load.read_part, c=model.config, ranks=ranks)
load_checkpoint(sys.argv[1], model, "cpu", torch.bfloat16, whole, read)
print(part, largest, resident_bytes("VmHWM") - resident)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
def test_a_rank_holds_only_its_part(tmp_path):
    sizes = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4}
    folder = write_random(tmp_path / "m", dtype=torch.bfloat16, **sizes, intermediate_size=4096, vocab_size=8000)
    done = subprocess.run([sys.executable, "-c", LOAD, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    part, largest, peak = map(int, done.stdout.split())
    assert part <= peak < part + largest + 32 * 2**20  # the system decides how much of the file is mapped around a page


INT4 = {"mode": "int4", "groupsize": 32, "embeddings": False}
THREE = {"num_key_value_heads": 3, "num_attention_heads": 6, "head_dim": 8, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("world", "changes", "quantization", "expected"),
    [
        (3, {}, None, "4 KV heads do not divide among 3 ranks: start 1 or 2 or 4"),
        (2, THREE, None, "start 1 or 3"),
        (4, {"intermediate_size": 98}, None, "98 MLP channels do not divide among 4 ranks: start 1 or 2"),
        (4, {}, INT4, "input channels on every rank: use --groupsize 8$"),
        (4, {}, INT4 | {"groupsize": 8}, None),
    ],
)
def test_what_does_not_divide_is_refused(folders, world, changes, quantization, expected):
    config = from_hf(read_config(folders["llama"]) | changes)
    with pytest.raises(ValueError, match=expected) if expected else nullcontext():
        load.skeleton(config, quantization, Ranks(0, world))


# The processes


def run_here(main: Callable, *args) -> str:
    """Standard output of a command line that runs in this process, which saves the seconds of its imports."""
    with redirect_stdout(io.StringIO()) as out:
        main([str(arg) for arg in args])
    return out.getvalue()


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error:")]


def test_the_command_line_answers_as_one_process(tiny_checkpoint, tmp_path, monkeypatch):
    """Rank 0 prints and writes; sampled answers are the same."""
    (tmp_path / "prompt").write_text("a text to continue")
    command = ["--checkpoint", tiny_checkpoint, "--prompt-file", tmp_path / "prompt", "--no-compile"]
    command += ["--temperature", "1", "--seed", "5", "--max-new-tokens", "12", "--kv", "streaming", "--budget", "16"]
    found = []
    for ranks, run in ((1, partial(run_here, generate.main)), (2, partial(run_ranks, "generate.py"))):
        files = tmp_path / f"{ranks}.json", tmp_path / f"{ranks}.jsonl"
        shown = run(*command, "--json", files[0], "--out", files[1])
        report = json.loads(files[0].read_text())
        found.append((shown, files[1].read_text(), report["completions"]))
        assert report["ranks"] == ranks
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_chat_may_end_at_its_first_prompt(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    terminal, stdin = pty.openpty()
    os.write(terminal, b"/exit\n")
    run = torchrun(2, "generate.py", "--checkpoint", str(folder), "--chat", "--no-compile", stdin=stdin)
    out, errors = run.communicate(timeout=120)
    os.close(terminal)
    os.close(stdin)
    assert run.returncode == 0 and out == "" and "Traceback" not in errors, errors


SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from terminal import cli
from engine import Engine
cli.run(lambda: Engine.load(sys.argv[1] if os.environ["RANK"] == "0" else "/none"), ranks=True)
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    (
        ("generate.py --checkpoint {folder} --prompt x --kv none", "unknown KV method 'none'"),
        slow(
            "quantize.py --checkpoint {folder} --mode int8 --out {out}", "this tool runs in one process: start it with"
        ),
        slow("{script} {folder}", "error: rank 1: there is no checkpoint folder /none"),
    ),
)
def test_a_mistake_is_reported_once(tiny_checkpoint, tmp_path, command, expected):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = command.format(folder=tiny_checkpoint, out=tmp_path / "q", script=tmp_path / "script.py")
    run = torchrun(2, *command.split())
    (line,) = lines(run.communicate(timeout=120)[1])
    assert run.returncode and expected in line


def by_hand(rank: int, port: int, *arguments: str, seconds: int = 60) -> subprocess.Popen:
    """generate.py as rank `rank` of 2, started without torchrun."""
    code = "import datetime; from terminal import cli; from runtime import parallel\n"
    code += f"parallel.ARRIVE = datetime.timedelta(seconds={seconds})\n"
    code += "import generate; cli.run(generate.main, ranks=True)"
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=os.environ | where, stderr=subprocess.PIPE, text=True
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_a_missing_rank_is_reported():
    run = by_hand(0, free_port(), "--prompt", "x", seconds=2)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 2
    (line,) = lines(errors)
    assert "1/2 clients joined" in line and line.endswith("start all with torchrun, with the same address and port")


@pytest.mark.slow
def test_other_arguments_on_a_rank_are_refused():
    port = free_port()
    runs = [by_hand(rank, port, "--prompt", "x", "--seed", str(rank)) for rank in range(2)]
    errors = [line for run in runs for line in lines(run.communicate(timeout=60)[1])]
    assert [run.returncode for run in runs] == [2, 2]
    assert errors == ["error: rank 1 has other arguments than rank 0: --prompt x --seed 1"]


@pytest.mark.parametrize("end", ("one rank killed", slow("Ctrl-C")))
def test_no_rank_outlives_another(tiny_checkpoint, end):
    command = ["generate.py", "--checkpoint", str(tiny_checkpoint), "--prompt", "x", "--no-compile"]
    run = torchrun(2, *command, "--max-new-tokens", "30000", "--kv", "streaming", "--budget", "16")
    assert run.stdout.read(1)  # it decodes
    files = Path(f"/proc/{run.pid}/task").glob("*/children")
    workers = [int(pid) for file in files for pid in file.read_text().split()]
    assert len(workers) == 2
    os.kill(*((workers[1], signal.SIGKILL) if end == "one rank killed" else (run.pid, signal.SIGINT)))
    run.communicate(timeout=30)
    assert run.returncode != 0
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
def test_an_evaluation_gives_the_same_answers(tiny_checkpoint, tmp_path):
    """The model shared, the samples shared, and a run with another number of ranks that continues a stopped one."""
    command = ["--checkpoint", tiny_checkpoint, "--tasks", "niah_single_1,perplexity"]
    command += "--length 600 --samples 3 --kv full,streaming --budget 64 --no-compile --json".split()
    found = {}
    for name, run in (
        ("alone", partial(run_here, evaluation.main)),
        ("model", partial(run_ranks, "eval.py")),
        ("data", partial(run_ranks, "eval.py", "--ranks", "data")),
    ):
        file = tmp_path / f"{name}.json"
        run(*command, file)
        report = json.loads(file.read_text())
        found[name] = [(s["index"], s["prediction"], float(f"{s['score']:.4g}")) for s in report["samples"]]
        assert report["ranks"] == (1 if name == "alone" else 2)
        assert len((tmp_path / f"{name}.json.progress.jsonl").read_text().splitlines()) == 12
    assert found["alone"] == found["model"] == found["data"]
    progress = tmp_path / "data.json.progress.jsonl"
    progress.write_text("".join(progress.read_text().splitlines(keepends=True)[:5]))
    run_here(evaluation.main, *command, tmp_path / "data.json")
    assert len(progress.read_text().splitlines()) == 12


@pytest.mark.slow
def test_the_benchmark_measures_one_rank(tmp_path):
    command = f"--shape {ROOT}/needle/config.json --context 128 --steps 2 --repeats 1 --no-compile --kv full,duo"
    command = [*command.split(), "--budget", "64", "--results", os.devnull, "--json"]
    run_here(bench.main, *command, tmp_path / "alone.json")
    shown = run_ranks("-m", "bench", *command, tmp_path / "ranks.json")
    assert re.search(r"2 ranks, bytes are those of one; they exchange 0\.\d\d MB with batch 1 a step", shown)
    rows = [json.loads((tmp_path / name).read_text())["rows"] for name in ("alone.json", "ranks.json")]
    c = json.loads((ROOT / "needle" / "config.json").read_text())
    for one, half in zip(*rows, strict=True):
        assert (one["ranks"], half["ranks"], one["step_exchanged_bytes"]) == (1, 2, 0)
        assert half["step_exchanged_bytes"] == 2 * (2 * c["num_hidden_layers"] * c["hidden_size"] + c["vocab_size"])
        assert half["step_device_bytes"] == one["step_device_bytes"] // 2
        assert 0.4 < half["step_weight_bytes"] / one["step_weight_bytes"] < 0.6
