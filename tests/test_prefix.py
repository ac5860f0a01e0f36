"""Prompts that are prefilled once and continued many times, in memory and in files."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_random
from test_contract import VARIANTS

from engine import Engine
from generate import main
from kv import METHODS
from runtime import prefix

TEXT = [(7 * i) % 90 + 3 for i in range(50)]
QUESTIONS = [[5, 6, 7], [9], list(range(20, 40)), [3, 3]]
OPTIONS = {name: options for name, (base, options) in VARIANTS.items() if name == base}
OPTIONS["duo"] = {"sinks": 2, "recent": 6, "head_scores": [[3.0, 1.0], [2.0, 4.0], [6.0, 5.0]]}
WEIGHTS = "0123456789abcdef"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("prefix") / "m", num_hidden_layers=3)


def load(checkpoint, kv="full", batch=2, **more):
    budget = {} if not METHODS[kv].budgeted else {"budget": 24}
    more |= {"options": OPTIONS.get(kv, {}), "max_new_tokens": 60, "compile": False, "seed": 1}
    return Engine.load(checkpoint, kv, batch=batch, **budget, **more)


def tokens(completions):
    return [[answer.tokens for answer in completion.answers] for completion in completions]


@pytest.mark.parametrize("kv", METHODS)
def test_prompts_that_continue_a_prefix_are_answered_like_questions_about_it(checkpoint, kv, tmp_path):
    """In memory, from a file, in another engine, in rows that are refilled."""
    engine = load(checkpoint, kv)
    ask = [[question, [8, 8]] for question in QUESTIONS]
    expected = engine.generate([TEXT] * 4, 12, follow_ups=ask, answer_prompts=False)
    later = [[[8, 8]]] * 4
    found = engine.generate(QUESTIONS, 12, prefix=TEXT, follow_ups=later)
    assert tokens(found) == tokens(expected)
    assert engine.stats.prefill_tokens == 50 and engine.stats.tokens_reused == 200
    engine.prefix(TEXT).save(tmp_path / "text.kv", WEIGHTS)
    assert [file.name for file in tmp_path.iterdir()] == ["text.kv"]
    other = load(checkpoint, kv, batch=3)
    saved = prefix.load(tmp_path / "text.kv", WEIGHTS)
    assert tokens(other.generate(QUESTIONS, 12, prefix=saved, follow_ups=later)) == tokens(expected)
    assert other.stats.prefill_tokens == 0


def test_with_the_full_cache_a_prefix_and_a_prompt_are_one_prompt(checkpoint):
    engine = load(checkpoint)
    whole = engine.generate([TEXT + question for question in QUESTIONS], 12, temperature=1.0)
    again = load(checkpoint)
    assert tokens(again.generate(QUESTIONS, 12, temperature=1.0, prefix=TEXT)) == tokens(whole)


def test_a_prefix_of_other_caches_is_refused(checkpoint):
    saved = load(checkpoint, "streaming").prefix(TEXT)
    for engine, message in (
        (load(checkpoint), "prefilled with kv=streaming and this engine has kv=full"),
        (load(checkpoint, "streaming", dtype="bfloat16"), "prefilled with dtype=float32 and .* dtype=bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([[5]], prefix=saved)
        assert engine.generate([TEXT], 3)[0].answers[0].tokens
    engine = load(checkpoint)
    with pytest.raises(ValueError, match="room for 60 more tokens and 63 are needed"):
        engine.generate([[5] * 33], 30, prefix=engine.prefix(TEXT))


def test_100_damaged_files_are_refused(checkpoint, tmp_path):
    load(checkpoint, "rocketkv").prefix(TEXT).save(tmp_path / "good.kv", WEIGHTS)
    good, chance, file = (tmp_path / "good.kv").read_bytes(), random.Random(0), tmp_path / "bad.kv"
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
            prefix.load(file, WEIGHTS)
    assert prefix.load(tmp_path / "good.kv", WEIGHTS).tokens == TEXT
    with pytest.raises(ValueError, match="saved with another checkpoint"):
        prefix.load(tmp_path / "good.kv", "another")
    with pytest.raises(FileNotFoundError):
        prefix.load(tmp_path / "none.kv", WEIGHTS)


def test_a_save_that_fails_leaves_the_old_file(checkpoint, tmp_path, monkeypatch):
    found = load(checkpoint).prefix(TEXT)
    found.save(tmp_path / "text.kv", WEIGHTS)
    before = (tmp_path / "text.kv").read_bytes()

    def fails(tensors, path, header):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(prefix, "save_file", fails)
    with pytest.raises(OSError):
        found.save(tmp_path / "text.kv", WEIGHTS)
    assert (tmp_path / "text.kv").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_prompt_is_saved_and_asked_twice_from_the_command_line(tiny_checkpoint, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("There was once a mouse who lived in a mill. " * 6)
    common = ["--checkpoint", str(tiny_checkpoint), "--no-compile", "--json", str(tmp_path / "out.json")]
    file = str(tmp_path / "book.kv")
    save = ["--prompt-file", str(tmp_path / "book.txt"), "--kv", "rocketkv", "--budget", "24", "--save-prompt", file]
    main([*common, *save, "--max-new-tokens", "50"])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["saved_bytes"] < report["saved_full_bytes"] and report["room"] == 50
    assert f"in {file}" in capsys.readouterr().err
    for question in ("Who lived?", "Where?"):
        main([*common, "--load-prompt", file, "--prompt", question, "--seed", "3"])
        report = json.loads((tmp_path / "out.json").read_text())
        assert (report["kv"], report["budget"], report["prefill_tokens_per_s"]) == ("rocketkv", 24, None)
        assert report["tokens_reused"] == report["completions"][0]["prompt_tokens"]
        assert 0 < report["completions"][0]["new_tokens"] < 50
    program = [sys.executable, str(Path(__file__).parent.parent / "generate.py"), *common[:-2]]
    run = [*program, "--load-prompt", file, "--prompt", "Where?", "--seed", "3"]
    both = [subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
    answers = [process.communicate()[0].strip() for process in both]
    assert answers == [report["completions"][0]["answers"][0]["text"].strip()] * 2
    book = (tmp_path / "book.kv").read_bytes()
    (tmp_path / "cut.kv").write_bytes(book[:-100])
    for flags, message in (
        (["--load-prompt", file, "--prompt", "x", "--kv", "full"], "leave out --kv"),
        (["--load-prompt", file, "--prompt", "x", "--max-new-tokens", "80"], "room for 50 more tokens"),
        (["--load-prompt", str(tmp_path / "cut.kv"), "--prompt", "x"], "cut.kv"),
        (["--load-prompt", str(tmp_path / "none.kv"), "--prompt", "x"], "there is no file"),
        (["--prompt", "x", "--save-prompt", str(tmp_path / "no" / "book.kv")], "not a file in an existing folder"),
        (["--batch-file", str(tmp_path / "book.txt"), "--save-prompt", file], "leave out --batch-file"),
        (["--prompt", "x", "--chat", "--load-prompt", file], "leave out"),
    ):
        result = subprocess.run([*program, *flags], capture_output=True, text=True)
        assert result.returncode == 2 and result.stderr.strip().count("\n") <= 2, result.stderr
        assert message in result.stderr.strip().splitlines()[-1]
    assert (tmp_path / "book.kv").read_bytes() == book


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
    assert prefix.read_about(file)["chat"] and entry["prompt_tokens"] == len(begin)


REUSE = {"full", "quest", "sparq", "exact_topk", "hybrid"}  # they keep every token as it is


@pytest.mark.parametrize("kv", METHODS)
def test_prompts_that_begin_alike_are_prefilled_once(checkpoint, kv, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST", 20)
    prompts = [TEXT + question for question in QUESTIONS] + [[4] * 30, [4] * 30 + [5], [6, 7]]
    engine = load(checkpoint, kv)
    found = tokens(engine.generate(prompts, 12))
    assert (engine.stats.tokens_reused > 0) == (kv in REUSE)
    total = sum(map(len, prompts))
    assert engine.stats.prefill_tokens + engine.stats.tokens_reused == total
    monkeypatch.setattr(prefix, "LEAST", 1000)
    assert found == tokens(engine.generate(prompts, 12)) and engine.stats.prefill_tokens == total


def test_what_consecutive_prompts_share():
    a, b = list(range(300)), list(range(400, 1000))
    found = prefix.Shared.find([[*a, 1], [*a, 2, 3], [*b, 1], [*b, 2], [*b[:280], 3], [5], a])
    shared = [x and (x.tokens, x.users) for x in found]
    assert shared == [(a, 2), (a, 2), (b, 2), (b, 2), None, None, None]
    assert found[0] is found[1] is not found[2]
    twice = prefix.Shared.find([a, a])
    assert twice[0].tokens == a[:-1] and twice[0] is twice[1]
