"""Prompts that are prefilled once and continued many times, in memory and in files."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from conftest import slow, write_random
from safetensors import safe_open
from test_contract import VARIANTS

from engine import Engine
from generate import main
from kv import METHODS
from runtime import prefix
from terminal import cli

TEXT = [(7 * i) % 90 + 3 for i in range(50)]
QUESTIONS = [[5, 6, 7], [9], list(range(20, 40)), [3, 3]]
OPTIONS = {name: options for name, (base, options) in VARIANTS.items() if name == base}
OPTIONS["duo"] = {"sinks": 2, "recent": 6, "head_scores": [[3.0, 1.0], [2.0, 4.0], [6.0, 5.0]]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("prefix") / "m", num_hidden_layers=3)


def load(checkpoint, kv="full", batch=2, **more):
    budget = {} if not METHODS[kv].budgeted else {"budget": 24}
    more |= {"options": OPTIONS.get(kv, {}), "room": 60, "compile": False, "seed": 1}
    return Engine.load(checkpoint, kv, batch=batch, **budget, **more)


def saved(engine, path: Path, text=TEXT) -> Path:
    """A file of a row that holds `text`."""
    (row,) = engine.start([text])
    row.save(path)
    row.close()
    return path


@pytest.mark.parametrize("kv", [kv if kv in ("full", "rocketkv", "omnikv", "kivi") else slow(kv) for kv in METHODS])
def test_a_saved_row_is_continued_like_the_row_itself(checkpoint, kv, tmp_path):
    """After its prompt and after an answer, in forks, in another engine, in another row."""
    engine, other = load(checkpoint, kv), load(checkpoint, kv, batch=3)
    (row,) = engine.start([TEXT])
    for step in range(2):
        assert row.save(tmp_path / "text.kv") > 0 and [file.name for file in tmp_path.iterdir()] == ["text.kv"]
        rows = [other.load_row(tmp_path / "text.kv")]
        rows += [rows[0].fork() for _ in QUESTIONS[:2]]
        assert (rows[0].tokens, rows[0].pending) == (row.tokens, row.pending) and rows[0].prompt_tokens == len(TEXT)
        answers = other.ask(rows, QUESTIONS[:3], 6)
        for question, answer in zip(QUESTIONS[:3], answers, strict=True):
            fork = row.fork()
            assert engine.ask([fork], [question], 6) == [answer]
            fork.close()
        for each in rows:
            each.close()
        if step == 0:
            engine.ask([row], [QUESTIONS[3]], 4)
            assert row.pending is not None  # the file holds it too
    engine.close()
    other.close()


def test_a_row_of_other_caches_is_refused(checkpoint, tmp_path):
    file = saved(load(checkpoint, "streaming"), tmp_path / "text.kv")
    for engine, message in (
        (load(checkpoint), "saved with kv=streaming and this engine has kv=full"),
        (load(checkpoint, "streaming", dtype="bfloat16"), "saved with dtype=float32 and .* dtype=bfloat16"),
        (load(write_random(tmp_path / "m", num_hidden_layers=3, seed=5), "streaming"), "saved with another checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_row(file)
        assert engine.plan is None  # no cache was allocated for it
        assert engine.generate([TEXT], 3)[0].tokens
    engine = load(checkpoint, "streaming")
    engine.start([[1, 2, 3]])
    with pytest.raises(ValueError, match="rows are in use"):
        engine.load_row(file)


def test_a_row_longer_than_max_prompt_is_refused(checkpoint, tmp_path):
    file, engine = saved(load(checkpoint), tmp_path / "text.kv"), load(checkpoint, max_prompt=40)
    with pytest.raises(ValueError, match="50 tokens and max_prompt is 40"):
        engine.load_row(file)
    assert engine.generate([[3, 4]], 3)[0].tokens


def test_a_row_keeps_its_rope_frequencies(tmp_path):
    """Dynamic NTK's follow from each row's own length."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = write_random(tmp_path / "m", num_hidden_layers=3, max_position_embeddings=32, rope_scaling=scaling)
    engine, other = load(model, max_prompt=60), load(model, max_prompt=60)
    (row,) = engine.start([TEXT])
    expected = engine.ask([row.fork()], [[5, 6, 7]], 6)
    for copy in (other.load_row(saved(load(model, max_prompt=60), tmp_path / "text.kv")), row):
        assert copy.engine.ask([copy], [[5, 6, 7]], 6) == expected


def test_100_damaged_files_are_refused(checkpoint, tmp_path):
    engine = load(checkpoint, "rocketkv")
    good, chance, file = saved(engine, tmp_path / "good.kv").read_bytes(), random.Random(0), tmp_path / "bad.kv"
    for i in range(100):
        bad = bytearray(good)
        at = chance.randrange(len(bad))
        if i % 3 == 0:
            bad[at] ^= 1 << chance.randrange(8)
        elif i % 3 == 1:
            del bad[at:]
        else:
            bad[at : at + 64] = chance.randbytes(64)
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"^[^\n]*bad\.kv[^\n]*$"):
            engine.load_row(file)
        assert engine.rows == [None, None]
    assert rb"\"prompt\": 50" in good
    file.write_bytes(good.replace(rb"\"prompt\": 50", rb"\"prompt\": 49"))
    with pytest.raises(ValueError, match="its header"):
        engine.load_row(file)
    assert engine.load_row(tmp_path / "good.kv").tokens == TEXT
    with pytest.raises(FileNotFoundError):
        engine.load_row(tmp_path / "none.kv")


def forged(good: Path, file: Path, fields: dict, tensors: dict) -> Path:
    """A copy of a saved row with other header fields and tensors, and checksums that fit them."""
    with safe_open(good, "pt") as old:
        about, held = json.loads(old.metadata()["about"]), {name: old.get_tensor(name) for name in old.keys()}
    held |= tensors
    about |= {"checksums": {name: prefix.checksum(x) for name, x in held.items()}} | fields
    about = json.dumps(about)
    header = {"format": prefix.FORMAT, "about": about, "checksum": str(zlib.crc32(about.encode()))}
    prefix.save_file(held, file, header)
    return file


FORGED = {  # header fields, tensors, and the reason that the refusal gives
    "a budget that is a text": ({"budget": "24"}, {}, "(budget cannot be "),
    "a plan of no tokens": ({"max_new_tokens": 0}, {}, "(plan)"),
    "a plan for 3e12 tokens": ({"max_prompt": 3 * 10**12}, {}, "(plan)"),
    "a plan for 3e9 tokens": ({"max_prompt": 3 * 10**9}, {}, "GB are free"),
    "a prompt longer than the plan": ({"prompt": 51}, {}, "(plan)"),
    "no prompt": ({"prompt": 0}, {}, "(plan)"),
    "no drafts": ({"speculate": -1}, {}, "(speculate)"),
    "a pending token beyond the vocabulary": ({"pending": 128}, {}, "(tokens)"),
    "a pending token that is true": ({"pending": True}, {}, "(pending cannot be "),
    "no list of tensors": ({"checksums": []}, {}, "(its tensors)"),
    "frequencies of one value": ({}, {"inv_freq": torch.ones(1)}, "(tokens)"),
    "tokens beyond the vocabulary": ({}, {"tokens": torch.full((50,), 128)}, "(tokens)"),
    "no tokens": ({}, {"tokens": torch.empty(0, dtype=torch.int64)}, "(tokens)"),
    "more tokens than the plan": ({}, {"tokens": torch.ones(111, dtype=torch.int64)}, "(too many tokens)"),
    "a NaN": ({}, {"0.k": torch.full((2, 50, 16), torch.nan)}, "(NaN)"),
    "a layer too many": ({}, {"9.k": torch.ones(2)}, "out of range"),
    "a tensor of another size": ({}, {"0.k": torch.ones(2, 3, 16)}, "does not fit this cache"),
    "a tensor of another dtype": ({}, {"0.k": torch.ones(2, 50, 16, dtype=torch.bfloat16)}, "does not fit this cache"),
}


@pytest.fixture(scope="module")
def good(checkpoint, tmp_path_factory) -> Path:
    return saved(load(checkpoint), tmp_path_factory.mktemp("good") / "good.kv")


@pytest.mark.parametrize("what", FORGED)
def test_a_file_whose_checksums_fit_is_still_checked(checkpoint, good, tmp_path, what):
    (fields, tensors, reason), engine = FORGED[what], load(checkpoint)
    with pytest.raises(ValueError, match=rf"^[^\n]*{re.escape(reason)}[^\n]*$"):
        engine.load_row(forged(good, tmp_path / "bad.kv", fields, tensors))
    assert not any(engine.rows)
    known_late = reason in ("does not fit this cache", "(too many tokens)")
    assert engine.plan is None or known_late  # else nothing is allocated
    assert engine.load_row(good).tokens == TEXT


def test_a_row_that_outgrew_the_plan_is_saved_too(checkpoint, tmp_path):
    """A method whose memory is fixed lets a row generate more than was planned."""
    engine = load(checkpoint, "streaming")
    (row,) = engine.start([TEXT])
    engine.ask([row], [[3, 4, 5]])
    engine.ask([row], [[3, 4, 5]])
    row.save(tmp_path / "long.kv")
    copy = engine.load_row(tmp_path / "long.kv")
    assert len(copy.tokens) > len(TEXT) + engine.room
    one, other = engine.ask([row, copy], [[6, 7], [6, 7]])
    assert one.tokens == other.tokens


def test_a_save_that_fails_leaves_the_old_file(checkpoint, tmp_path, monkeypatch):
    engine = load(checkpoint)
    before = saved(engine, tmp_path / "text.kv").read_bytes()

    def fails(tensors, path, header):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(prefix, "save_file", fails)
    with pytest.raises(OSError):
        saved(engine, tmp_path / "text.kv")
    assert (tmp_path / "text.kv").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_prompt_is_saved_and_asked_twice_from_the_command_line(tiny_checkpoint, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("There was once a mouse who lived in a mill. " * 6)
    common = ["--checkpoint", str(tiny_checkpoint), "--no-compile", "--json", str(tmp_path / "out.json")]
    file = str(tmp_path / "book.kv")
    save = ["--prompt-file", str(tmp_path / "book.txt"), "--kv", "rocketkv", "--budget", "24", "--save-prompt", file]
    main([*common, *save, "--max-new-tokens", "50", "--batch", "4"])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["saved_full_bytes"] == 2 * 2 * 2 * 16 * 4 * report["prompt_tokens"]  # one row's
    assert report["saved_bytes"] < report["saved_full_bytes"] and report["room"] == 50
    said = capsys.readouterr().err
    assert f"in {file}" in said and "as large as" not in said
    main([*common, *save[:2], "--kv", "sparq", "--budget", "24", "--save-prompt", str(tmp_path / "large.kv")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["saved_bytes"] >= report["saved_full_bytes"]
    assert "warning: this file is as large as the full cache or larger" in capsys.readouterr().err
    for question in ("Who lived?", "Where?"):
        main([*common, "--load-prompt", file, "--prompt", question, "--seed", "3", "--chunk", "64"])
        report = json.loads((tmp_path / "out.json").read_text())
        assert (report["kv"], report["budget"], report["prefill_tokens_per_s"]) == ("rocketkv", 24, None)
        assert report["chunk"] == 64
        assert report["tokens_reused"] == report["completions"][0]["prompt_tokens"]
        assert 0 < report["completions"][0]["new_tokens"] < 50
    book = (tmp_path / "book.kv").read_bytes()
    (tmp_path / "cut.kv").write_bytes(book[:-100])
    capsys.readouterr()
    for flags, message in (
        (["--load-prompt", file, "--prompt", "x", "--kv", "full"], "leave out --kv"),
        (["--load-prompt", file, "--prompt", "x", "--chat", "--offload"], "leave out options, --chat"),
        (["--load-prompt", file, "--prompt", "x" * 400], "no room for another question"),
        (["--load-prompt", str(tmp_path / "cut.kv"), "--prompt", "x"], "cut.kv"),
        (["--prompt", "x", "--save-prompt", str(tmp_path / "no" / "book.kv")], "not a file in an existing folder"),
        (["--batch-file", str(tmp_path / "book.txt"), "--save-prompt", file], "leave out --batch-file"),
        (["--prompt", "x", "--save-prompt", file, "--out", str(tmp_path / "out")], "leave out --out"),
        (["--prompt", "x", "--chat", "--load-prompt", file], "leave out"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.run(lambda flags=flags: main([*common[:-2], *flags]))
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.strip().count("\n") <= 2, error
        assert message in error.strip().splitlines()[-1]
    assert (tmp_path / "book.kv").read_bytes() == book


@pytest.mark.slow
def test_another_process_continues_a_saved_prompt(tiny_checkpoint, tmp_path):
    common = ["--checkpoint", str(tiny_checkpoint), "--no-compile"]
    save = [*common, "--kv", "rocketkv", "--budget", "24", "--save-prompt", str(tmp_path / "text.kv")]
    ask = [*common, "--load-prompt", str(tmp_path / "text.kv"), "--prompt", "Where?", "--seed", "3"]
    for args in ([*save, "--prompt", "A mouse lived in a mill. " * 9], [*ask, "--json", str(tmp_path / "out.json")]):
        main(args)
    (answer,) = json.loads((tmp_path / "out.json").read_text())["completions"][0]["answers"]
    program = [sys.executable, str(Path(__file__).parent.parent / "generate.py"), *ask]
    assert subprocess.run(program, capture_output=True, text=True).stdout.strip() == answer["text"].strip()


def test_a_text_in_the_chat_format_is_saved_and_questions_complete_its_turn(tiny_checkpoint, tmp_path):
    file, out, folder = str(tmp_path / "book.kv"), str(tmp_path / "out.json"), tmp_path / "chat"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}({{ m.role }}) {{ m.content | trim }} {% endfor %}(assistant)"
    )
    common = ["--checkpoint", str(folder), "--no-compile", "--json", out]
    main([*common, "--prompt", "A mouse lived in a mill. ", "--chat", "--system", "Be brief.", "--save-prompt", file])
    main([*common, "--load-prompt", file, "--prompt", "Who lived?", "--max-new-tokens", "3"])
    entry = json.loads(Path(out).read_text())["completions"][0]
    tokenizer = Engine.load(folder, compile=False).tokenizer
    begin, end = tokenizer.chat_begin("A mouse lived in a mill. ", "Be brief."), tokenizer.chat_end("Who lived?")
    assert tokenizer.decode(begin + end) == tokenizer.decode(
        tokenizer.chat("A mouse lived in a mill. Who lived?", "Be brief.")
    )
    assert prefix.read_header(file).chat and entry["prompt_tokens"] == len(begin)


def test_a_link_is_followed_and_what_is_no_file_is_kept(checkpoint, tmp_path):
    engine = load(checkpoint)
    (tmp_path / "link").symlink_to(tmp_path / "text.kv")
    saved(engine, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "text.kv").is_file()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a file"):
        saved(engine, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
