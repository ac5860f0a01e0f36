"""The command line as a user meets it."""

import errno
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from chat_templates import LLAMA2
from conftest import slow
from torch._inductor.exc import CppCompileError, InductorError

import generate
from engine import Engine
from model import Transformer
from runtime.checkpoint import SAMPLING, open_weights, write_checkpoint
from runtime.compile import compile_errors
from runtime.hf_config import from_hf
from terminal import cli, options
from terminal.batch import Results

ROOT = Path(__file__).parent.parent
NEEDLE = ROOT / "needle"
SHORT = ["--max-new-tokens", "6", "--no-compile"]


def run_process(*args, stdin="", **environment):
    command = [sys.executable, ROOT / "generate.py", *map(str, args)]
    return subprocess.run(command, input=stdin, text=True, capture_output=True, env=os.environ | environment)


def run(*args, stdin=""):
    """The same in this process, which saves seconds of imports; stdin: a text or an open file."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        piped = io.TextIOWrapper(io.BytesIO(stdin.encode())) if isinstance(stdin, str) else stdin
        patch.setattr(sys, "stdin", piped)
        with pytest.raises(SystemExit) as end:
            cli.run(lambda: generate.main([str(arg) for arg in args]))
    return subprocess.CompletedProcess(args, end.value.code, out.getvalue(), err.getvalue())


def assert_refused(result, *words):
    """Exit code 2, nothing on stdout, and one line with these words after the lines of phases that succeeded."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if not line.startswith("-- "))
    for word in words:
        assert word in line, line


def test_a_prompt_is_answered_and_its_cost_is_reported(text_checkpoint):
    result = run_process("--checkpoint", text_checkpoint, "--prompt", "The keeper", *SHORT)
    assert result.returncode == 0, result.stderr
    expected = Engine.load(text_checkpoint, compile=False).generate("The keeper", max_new_tokens=6)[0].text
    assert result.stdout == expected + "\n"
    for line in ("prompt tokens", "prefill", "ms/token", "tokens/s", "on the device", "on the host", "full cache"):
        assert line in result.stderr


KEYS = "kv budget options checkpoint device dtype compile_s prefill_s decode_ms_per_token tokens_per_s kv_device_bytes"
KEYS = {*KEYS.split(), "kv_host_bytes", "kv_full_bytes", "peak_bytes", "completions"}


def test_json_on_stdout_stands_alone_and_is_complete_and_progress_is_lines_on_stderr(text_checkpoint, tmp_path):
    flags = ["--checkpoint", text_checkpoint, "--prompt", "The keeper", *SHORT, "--json"]
    result = run(*flags)
    report, lines = json.loads(result.stdout), result.stderr.splitlines()
    assert set(report) >= KEYS
    (completion,) = report["completions"]
    assert set(completion) >= {"prompt_tokens", "new_tokens", "text", "tokens", "finish_reason", "answers"}
    assert completion["new_tokens"] == len(completion["tokens"]) == 6 and completion["finish_reason"] == "length"
    assert report["tokens_per_s"] == pytest.approx(1e3 / report["decode_ms_per_token"])  # one row
    assert completion["text"] in result.stderr and report["decode_ms_per_token"] > 0 and report["peak_bytes"] > 1e7
    tokens, said = completion["prompt_tokens"], [line for line in lines if line.startswith("-- ")]
    assert report["prefill_tokens_per_s"] == pytest.approx(tokens / report["prefill_s"])
    assert report["load_s"] > 0 and report["first_token_s"] >= report["prefill_s"] and report["past_context"] == []
    assert f"-- prefill {tokens} tokens" in said and said[-1] == "-- full, bfloat16, " + report["device"]
    assert "\x1b" not in result.stderr and "layer" not in result.stderr
    assert {"load", "prefill", "first"} <= {line.split()[0] for line in lines if line}
    to_file = run(*flags, tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert to_file.stdout == report["completions"][0]["text"] + "\n"


def test_prompts_come_from_files_and_stdin(text_checkpoint, tmp_path):
    marked = {"encoding": "utf-8-sig"}  # a byte order mark is no part of a prompt
    (tmp_path / "prompt.txt").write_text("The keeper\nand the light", **marked)
    lines = "The keeper\n\nA much longer line about the sea and the light\nfog\n"
    (tmp_path / "batch.txt").write_text(lines, **marked)
    common = ("--checkpoint", text_checkpoint, "--json", *SHORT)
    from_file = json.loads(run("--prompt-file", tmp_path / "prompt.txt", *common).stdout)
    for flag in ("--prompt-file", "--prompt"):
        from_stdin = json.loads(run(flag, "-", *common, stdin="The keeper\nand the light").stdout)
        assert from_file["completions"] == from_stdin["completions"]
    batch = json.loads(run("--batch-file", tmp_path / "batch.txt", "--batch", 2, *common).stdout)
    assert len(batch["completions"]) == 3 and batch["batch"] == 2
    for i, prompt in ((0, "The keeper"), (2, "fog")):
        alone = json.loads(run("--prompt", prompt, *common).stdout)
        assert batch["completions"][i]["tokens"] == alone["completions"][0]["tokens"]


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_answers_reach_a_terminal_of_another_encoding_and_closed_streams(text_checkpoint, tmp_path):
    (tmp_path / "batch").write_text("The keéper\nAt low tide ☃\n")
    flags = ["--checkpoint", text_checkpoint, "--batch-file", tmp_path / "batch", "--no-compile", "--max-new-tokens", 4]
    result = run_process(*flags, PYTHONIOENCODING="ascii")
    assert result.returncode == 0 and "The ke?per -> " in result.stdout and "At low tide ? -> " in result.stdout
    command = [sys.executable, ROOT / "generate.py", *flags, "--json", tmp_path / "out.json"]
    closed = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *map(str, command)])
    assert closed.returncode == 0 and len(json.loads((tmp_path / "out.json").read_text())["completions"]) == 2


def test_out_may_be_a_pipe(text_checkpoint, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        flags = ["--checkpoint", text_checkpoint, "--prompt", "The keeper", "--no-compile", "--max-new-tokens", 4]
        assert run(*flags, "--out", tmp_path / "pipe").returncode == 0
        assert json.loads(reader.communicate()[0])["finish_reason"] == "length"


def test_answers_to_a_batch_of_json_lines_are_written_one_by_one(text_checkpoint, tmp_path, monkeypatch):
    batch, out = tmp_path / "batch", tmp_path / "out.jsonl"
    prompts = {"a": "The keeper", 7: "fog\nand light", "c": "At low tide"}
    batch.write_text("\n".join(json.dumps({"id": i, "prompt": p, "more": 1}) for i, p in prompts.items()) + "\n\n")
    out.write_text('{"id": "cut o')  # left by a run that was killed
    seen, write = [], Results.write

    def note(results, entry):
        write(results, entry)
        seen.append((entry["id"], len(out.read_text().splitlines()), prefilled[-1]))

    prefilled, prefill = [0], Transformer.prefill

    def count(model, *args, **kwargs):
        prefilled.append(prefilled[-1] + 1)
        return prefill(model, *args, **kwargs)

    monkeypatch.setattr(Results, "write", note)
    monkeypatch.setattr(Transformer, "prefill", count)
    common = ("--checkpoint", text_checkpoint, "--json", *SHORT)
    report = json.loads(run("--batch-file", batch, "--out", out, "--batch", 1, *common).stdout)
    assert seen == [("a", 2, 1), (7, 3, 2), ("c", 4, 3)]  # each answer is in the file before the next prefill
    cut, *written = out.read_text().splitlines()
    assert cut == '{"id": "cut o' and [json.loads(line) for line in written] == report["completions"]
    assert [completion["id"] for completion in report["completions"]] == ["a", 7, "c"]
    piped = json.loads(run("--batch-file", "-", *common, stdin=batch.read_text()).stdout)
    assert piped["completions"] == report["completions"]
    alone = json.loads(run("--prompt", prompts[7], *common).stdout)["completions"]
    assert [alone[0] | {"id": 7}] == report["completions"][1:2]


def test_a_prompt_that_is_too_long_fails_alone(text_checkpoint, tmp_path):
    (tmp_path / "batch.txt").write_text("fog\n\n" + "a b c d " * 9000 + "\nlight\n")
    flags = ("--batch-file", tmp_path / "batch.txt", "--out", tmp_path / "out.jsonl", "--json", *SHORT)
    result = run("--checkpoint", text_checkpoint, *flags)
    report, written = json.loads(result.stdout), lines_of(tmp_path / "out.jsonl")
    assert result.returncode == 2 and "prompt 3: the prompt has" in result.stderr
    assert result.stderr.splitlines()[-1] == "error: 1 of 3 prompts failed: 3"
    assert [completion["id"] for completion in report["completions"]] == [1, 4]
    assert report["failed"] == written[:1] and "context is 32768" in written[0]["error"] and written[0]["id"] == 3
    assert sorted(line["id"] for line in written) == [1, 3, 4]


def test_a_prompt_whose_caches_cannot_be_fails_alone(text_checkpoint, tmp_path):
    folder = shutil.copytree(text_checkpoint, tmp_path / "windowed")
    edit_model(folder / "config.json", window=64)
    (tmp_path / "batch.txt").write_text("fog\n" + "fog and light " * 50 + "\nlight\n")
    flags = ("--batch-file", tmp_path / "batch.txt", "--json", "--kv", "streaming", "--budget", 16, *SHORT)
    result = run("--checkpoint", folder, *flags)
    report = json.loads(result.stdout)
    assert [completion["id"] for completion in report["completions"]] == [1, 3]
    assert result.returncode == 2 and "does not honour this model's sliding window" in report["failed"][0]["error"]


@pytest.mark.parametrize("rows", (2, slow(1), slow(8)))
def test_a_question_about_a_saved_prompt_that_does_not_fit_fails_alone(text_checkpoint, tmp_path, rows):
    common, out = ("--checkpoint", text_checkpoint, "--no-compile"), tmp_path / "out.jsonl"
    run(*common, "--prompt", "The keeper", "--save-prompt", tmp_path / "book.kv", "--max-new-tokens", 30)
    questions = {"a": "Who?", 2: "x " * 60, "c": "Where?", "d": "y " * 60, "e": "When?"}
    lines = [json.dumps({"id": name, "prompt": text}) for name, text in questions.items()]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    flags = ("--load-prompt", tmp_path / "book.kv", "--batch-file", tmp_path / "q.jsonl", "--batch", rows)
    result = run(*common, *flags, "--out", out, "--json", "--max-new-tokens", 4)
    report, written = json.loads(result.stdout), {line["id"]: line for line in lines_of(out)}
    assert result.returncode == 2 and result.stderr.endswith("error: 2 of 5 prompts failed: 2, d\n")
    assert set(written) == set(questions) and [written[name] for name in "ace"] == report["completions"]
    assert [written[2], written["d"]] == report["failed"] and "--max-new-tokens" in written[2]["error"]
    for completion in report["completions"]:
        flags = ("--load-prompt", tmp_path / "book.kv", "--prompt", questions[completion["id"]], "--max-new-tokens", 4)
        assert run(*common, *flags).stdout == completion["text"] + "\n"
    more = run(*common, *flags[:-1], 31)
    assert more.returncode == 0 and "note: the prompt was saved with room for 30 more tokens" in more.stderr


@pytest.mark.slow
def test_a_rerun_answers_what_the_file_of_out_does_not(text_checkpoint, tmp_path, monkeypatch):
    """Ids are texts and numbers; a line of a killed run is cut off, and a line with an error is no answer."""
    prompts = {"a": "The keeper", 7: "fog", "7": "light", "long": "a b c d " * 9000, "e": "At low tide"}
    lines = [json.dumps({"id": name, "prompt": text}) for name, text in prompts.items()]
    batch, out = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    batch.write_text("\n".join(lines))
    flags = ("--checkpoint", text_checkpoint, "--batch-file", batch, "--out", out, "--json", *SHORT)
    whole = json.loads(run(*flags).stdout)["completions"]
    by_id = {line["id"]: json.dumps(line) for line in lines_of(out)}
    kept = [by_id[7], by_id["long"], by_id[7], '{"id": "other", "text": ""}', "not JSON", by_id["a"][:-9]]
    out.write_text("\n".join(kept))
    result = run(*flags)
    report = json.loads(result.stdout)
    assert f"-- {out} answers 1 of 5 prompts: skipped\n" in result.stderr and report["skipped"] == 1
    assert report["completions"] == [completion for completion in whole if completion["id"] != 7]
    assert out.read_text().splitlines()[: len(kept)] == kept
    new = [json.loads(line)["id"] for line in out.read_text().splitlines()[len(kept) :]]
    assert sorted(new) == ["7", "a", "e", "long"]

    batch.write_text("\n".join(line for line in lines if "long" not in line))
    before = out.read_bytes()
    monkeypatch.setattr("generate.Engine.load", lambda *_, **__: pytest.fail("loaded"))
    result = run(*flags)
    assert result.returncode == 0 and json.loads(result.stdout) == {"completions": [], "failed": [], "skipped": 4}
    assert "answers 4 of 4 prompts" in result.stderr and out.read_bytes() == before
    for more in (("--kv", "streaming", "--budget", 32), ("--stop", "x"), ("--temperature", 0.5)):
        assert_refused(run(*flags, *more), "but for another prompt or other flags: name another --out")
    batch.write_text('{"id": "a", "prompt": "Another one"}')
    assert_refused(run(*flags), f"{out} answers the id 'a', but for another prompt or other flags")
    assert out.read_bytes() == before
    assert_refused(run(*flags[:4], "--out", batch), "--out names the --batch-file itself")


def test_ctrl_c_in_a_batch_counts_what_is_kept_and_prints_it(text_checkpoint, tmp_path, monkeypatch):
    batch, out = tmp_path / "batch.txt", tmp_path / "out.jsonl"
    batch.write_text("fog\nlight\nThe keeper\nAt low tide\n")
    flags = ("--checkpoint", text_checkpoint, "--batch-file", batch, "--out", out, "--batch", 1, *SHORT)
    write = Results.write

    def then_stop(results, entry):
        write(results, entry)
        if entry["id"] == answered:
            signal.raise_signal(signal.SIGINT)

    for answered in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Results, "write", then_stop)
            result = run(*flags)
        assert result.returncode == 130 and len(lines_of(out)) == answered
        said = f"-- {answered} of 4 answers are in {out}: the same command continues\ninterrupted\n"
        assert result.stderr.endswith(said) and result.stdout.splitlines()[-1].startswith(f"{answered}: ")
    assert run(*flags).returncode == 0 and [line["id"] for line in lines_of(out)] == [1, 2, 3, 4]


def test_a_batch_prints_each_prompt_in_one_line_after_its_id_and_no_prefills(text_checkpoint, tmp_path):
    prompts = {"a": "\nTwo\tlines,\n\nand " + "more " * 99, 7: "fog\x1b[2J"}
    lines = [json.dumps({"id": name, "prompt": text}) for name, text in prompts.items()]
    (tmp_path / "batch.jsonl").write_text("\n".join(lines))
    flags = ("--batch-file", tmp_path / "batch.jsonl", "--json", tmp_path / "out.json", *SHORT)
    result = run("--checkpoint", text_checkpoint, *flags)
    texts = [completion["text"] for completion in json.loads((tmp_path / "out.json").read_text())["completions"]]
    first = "Two lines, and " + "more " * 9
    assert "-- prefill" not in result.stderr
    assert result.stdout == f"a: {first} -> {texts[0]}\n7: fog\\x1b[2J -> {texts[1]}\n"


BATCHES = {
    "not JSON": ('{"prompt": "x"}\n{"prompt"', ["line 2", "prompt"]),
    "no prompt": ('{"prompt": "x"}\n\n{"text": "x"}', ["line 3", "prompt"]),
    "an empty prompt": ('{"prompt": "x"}\n{"prompt": ""}', ["line 2", "empty"]),
    "an id twice": ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', ["line 2", "'a'"]),
    "an odd id": ('{"id": [1], "prompt": "x"}', ["line 1", "id"]),
    "nothing": ("\n\n", ["no prompt"]),
    "a list": ('[\n "x",\n "y"\n]', ["stdin is one JSON value", "JSONL"]),
    "an object": ('{\n "id": 1,\n "prompt": "x"\n}', ["stdin is one JSON value", "JSONL"]),
}


@pytest.mark.parametrize("what", BATCHES)
def test_a_bad_batch_is_refused_by_the_number_of_its_line_and_not_answered_as_text(text_checkpoint, what):
    text, words = BATCHES[what]
    assert_refused(run("--checkpoint", text_checkpoint, "--batch-file", "-", stdin=text), *words)


def test_stop_flags_cut_the_answer(text_checkpoint):
    common = ("--checkpoint", text_checkpoint, "--prompt", "The keeper", *SHORT)
    free = run(*common).stdout.removesuffix("\n")
    at = len(free) // 2
    stopped = run(*common, "--stop", "never said", "--stop", free[at : at + 2])
    assert stopped.stdout == free[: free.index(free[at : at + 2])] + "\n"


@pytest.mark.slow
def test_the_planned_cache_is_a_share_of_the_full_one_and_too_large_a_one_names_a_flag(text_checkpoint):
    def shown(*flags, words=300):
        err = run("--checkpoint", text_checkpoint, "--prompt", "fog " * words, *SHORT, *flags).stderr
        [line] = [line for line in err.splitlines() if line.startswith("-- cache for")]
        return line, [line for line in err.splitlines() if line.startswith("warning: this cache")]

    line, warnings = shown()
    assert re.fullmatch(r"-- cache for \d+ \+ 6 tokens: \d+\.\d MB", line) and not warnings
    line, warnings = shown("--kv", "snapkv", "--budget", "64")
    share = int(re.search(r", (\d+)% of the full cache's \d+\.\d MB$", line)[1])
    assert 4 < share < 50 and not warnings
    assert "the budget covers the whole prompt" in shown("--kv", "rocketkv", "--budget", "2000")[1][0]
    line, [warning] = shown("--kv", "rocketkv", "--budget", "580")
    flag = re.search(r"(--budget \d+) takes less", warning)[1].split()
    line, warnings = shown("--kv", "rocketkv", *flag)
    assert not warnings and "100%" not in line
    assert "it saves reads, not memory" in shown("--kv", "quest", "--budget", "64")[1][0]
    for packed in (["full", "--kv-bits", "8"], ["kvarn"]):  # a longer prompt fills more tiles
        assert "that of a longer prompt takes less" in shown("--kv", *packed, words=3)[1][0]
    line, [warning] = shown("--kv", "rocketkv", "--budget", "64", "--max-new-tokens", "900", words=3)
    assert "are for new tokens, see --max-new-tokens" in warning


@pytest.mark.parametrize(
    "flags, compiles",
    [((), None), (("--max-new-tokens", "2000"), True), (("--compile",), True), (("--no-compile",), False)],
)
def test_the_step_is_compiled_if_many_tokens_are_asked_for(text_checkpoint, flags, compiles, monkeypatch):
    monkeypatch.setattr("generate.Engine.load", lambda *_, compile, **__: pytest.fail(str(compile)))
    with pytest.raises(pytest.fail.Exception, match=str(compiles)):
        generate.main(["--checkpoint", str(text_checkpoint), "--prompt", "x", *flags])


def test_a_prompt_is_read_in_chunks(tiny_checkpoint):
    flags = ("--checkpoint", tiny_checkpoint, "--prompt", "fog " * 30, "--json", *SHORT)
    whole, chunked = run(*flags), run(*flags, "--chunk", 16)
    reports = [json.loads(result.stdout) for result in (whole, chunked)]
    assert [report["chunk"] for report in reports] == [0, 16]
    tokens, digests = ({report["completions"][0][key] for report in reports} for key in ("text", "request_digest"))
    assert len(tokens) == 1 and len(digests) == 2
    assert chunked.stderr.count("-- prefill") == whole.stderr.count("-- prefill") == 1


def test_drafts_are_reported_under_the_name_of_the_full_cache(text_checkpoint):
    flags = ("--kv", "streaming", "--budget", "64", "--speculate", "2")
    result = run("--checkpoint", text_checkpoint, "--prompt", "fog " * 100, *SHORT, *flags)
    assert "\n-- full, with drafts by streaming 64, bfloat16, " in result.stderr


def test_progress_is_a_bar_on_a_terminal_and_otherwise_a_line_but_for_some():
    for terminal, but in ((True, ""), (True, "prefill"), (False, ""), (False, "prefill"), (False, "compile")):
        err = io.StringIO()
        err.isatty = lambda terminal=terminal: terminal
        with redirect_stderr(err):
            assert list(cli.progress(range(7), "prefill 9000 tokens", but)) == list(range(7))
        if terminal:
            assert "prefill 9000 tokens:   0%" in err.getvalue() and "0/7" in err.getvalue()
        else:
            assert err.getvalue() == ("" if but == "prefill" else "-- prefill 9000 tokens\n")


def test_progress_that_takes_long_says_how_far_it_is(monkeypatch):
    now = iter([0, 6, 12, 18, 24, 48])
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(now))
    with redirect_stderr(err := io.StringIO()):
        assert list(cli.progress("abcde", "prefill")) == [*"abcde"]
    assert err.getvalue().splitlines()[1:] == [
        "-- prefill: 2 of 5, about 18 seconds left",
        "-- prefill: 4 of 5, about 6 seconds left",
    ]


def test_a_conversation_beyond_the_context_is_reported(text_checkpoint, tmp_path):
    folder = shutil.copytree(text_checkpoint, tmp_path / "short")
    edit_model(folder / "config.json", max_length=20)
    flags = ("--prompt", "The keeper rowed", "--max-new-tokens", "30", "--no-compile", "--json")
    result = run("--checkpoint", folder, *flags)
    assert json.loads(result.stdout)["past_context"] == [0] and "context of 20 tokens" in result.stderr


def test_a_method_its_budget_and_options_are_flags(text_checkpoint):
    flags = ("--kv", "streaming", "--budget", "0.5", "--kv-opt", "sinks=2")
    report = json.loads(run("--checkpoint", text_checkpoint, "--prompt", "fog " * 100, *flags, "--json", *SHORT).stdout)
    assert (report["kv"], report["budget"], report["options"]) == ("streaming", 0.5, {"sinks": "2"})
    assert report["kv_device_bytes"] < 0.8 * report["kv_full_bytes"]


def test_methods_are_listed_and_explained():
    listed = run("--list-kv")
    assert listed.returncode == 0 and {"full", "streaming"} <= {line.split()[0] for line in listed.stdout.splitlines()}
    explained = run("--kv-help", "streaming")
    assert "sinks" in explained.stdout and "2309.17453" in explained.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stdout, err", ((">/dev/full", "error: [Errno 28] No space left on device\n"), ("| true", "")))
def test_what_cannot_be_printed_ends_a_tool_in_one_line(stdout, err):
    """A closed pipe ends it without one."""
    command = f"set -o pipefail; {sys.executable} {ROOT / 'generate.py'} --list-kv {stdout}"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    result = subprocess.run(["bash", "-c", command], text=True, capture_output=True, env=buffered)
    assert (result.returncode, result.stderr) == (2, err)


@pytest.fixture
def chat_checkpoint(text_checkpoint, tmp_path):
    """A checkpoint with a chat template."""
    folder = shutil.copytree(text_checkpoint, tmp_path / "chat")
    config = {"chat_template": LLAMA2, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Terminal:
    """The command line in its own terminal, as a user at the keyboard sees it."""

    def __init__(self, *args):
        self.end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "generate.py", *map(str, args)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm"},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.end)

    def type(self, text: bytes) -> None:
        os.write(self.end, text)

    def until(self, pattern: bytes) -> bytes:
        """The output up to the first match."""
        shown = b""
        while not re.search(pattern, shown):
            assert select.select([self.end], [], [], 120)[0], shown
            try:
                shown += os.read(self.end, 1)
            except OSError:  # the process has ended
                raise AssertionError(shown) from None
        return shown

    def wait(self) -> int:
        """The exit code, after reading the rest of the output."""
        while True:
            try:
                if not os.read(self.end, 4096):
                    break
            except OSError:
                break
        return self.process.wait(60)


ASKED = rb"\x1b\[\?2004h> "  # the prompt, in bracketed-paste mode
CTRL_C, UP = b"\x03", b"\x1b[A"


@pytest.mark.slow
def test_a_conversation_takes_pastes_and_history_and_ctrl_c_stops_only_the_answer(chat_checkpoint, tmp_path):
    flags = ("--checkpoint", chat_checkpoint, "--chat", "--prompt", "Who?", "--json", tmp_path / "out.json")
    flags += ("--no-compile", "--dtype", "float32", "--max-new-tokens", 60, "--system", "Be brief.")
    with Terminal(*flags) as terminal:
        begun = terminal.until(ASKED)
        assert b"/exit or Ctrl-D" in begun and b"(cut at 60 tokens: --max-new-tokens)" in begun
        terminal.type(b"/help\r")
        assert b"/exit or Ctrl-D" in terminal.until(ASKED)
        terminal.type(b"\r")
        terminal.until(ASKED)
        terminal.type(b"\x1b[200~Two lines\r\r/exit\rand a third\x1b[201~\r")
        terminal.until(ASKED)
        terminal.type(UP + b"\r")
        assert b"Two lines" in terminal.until(rb"2004l\r")
        terminal.until(rb"[^\r\n]")  # the answer has begun
        terminal.type(CTRL_C)
        terminal.until(ASKED)
        terminal.type(b"And?\r")
        terminal.until(ASKED)
        terminal.type(b"/exit\r")
        assert terminal.wait() == 0
    (completion,) = json.loads((tmp_path / "out.json").read_text())["completions"]
    answers = completion["answers"]
    assert [a["finish_reason"] == "interrupted" for a in answers] == [False, False, True, False]
    engine = Engine.load(chat_checkpoint, compile=False, dtype="float32", max_prompt=400, room=60)
    turns = [engine.tokenizer.chat_next(text) for text in ("Two lines\n\n/exit\nand a third",) * 2 + ("And?",)]
    ids = engine.tokenizer.chat("Who?", "Be brief.")
    for turn, answer in zip([[], *turns], answers, strict=True):  # every answer continues the whole conversation
        ids += turn
        limit = len(answer["tokens"])
        assert engine.generate([ids], max_new_tokens=limit)[0].tokens == answer["tokens"]
        ids += answer["tokens"]


@pytest.mark.parametrize(
    "flags, typed, prompts, answers",
    (
        (["--prompt", "Who?"], b"And the fog?\n\n  \nAnd then?\n\x04", 5, 3),
        slow([], b"\n  \nWho?\nAnd then?\n\x04", 5, 2),
        slow([], b"Who?\n/quit\n\x04", 2, 1),
        slow([], b"/bye\n\x04", 1, 0),
        slow([], b"\x04", 1, 0),
    ),
)
def test_chat_on_a_terminal_asks_until_it_ends(chat_checkpoint, flags, typed, prompts, answers):
    """It ignores empty lines. Stdout, a pipe here, carries only the JSON."""
    terminal, stdin = pty.openpty()
    os.write(terminal, typed)
    flags = ("--checkpoint", chat_checkpoint, "--chat", *flags, "--json", *SHORT)
    command = [sys.executable, ROOT / "generate.py", *flags]
    result = subprocess.run(command, stdin=stdin, text=True, capture_output=True)
    os.close(terminal)
    os.close(stdin)
    assert result.returncode == 0, result.stderr
    assert (result.stderr.count("/exit or Ctrl-D"), result.stderr.count("> ")) == (1, prompts)
    given = json.loads(result.stdout)["completions"][0]["answers"] if result.stdout else []
    assert len(given) == answers


@pytest.fixture
def keyboard():
    """A terminal at which nobody types."""
    terminal, stdin = pty.openpty()
    with open(stdin) as file:
        yield file
    os.close(terminal)


def test_a_conversation_that_fills_its_caches_names_the_flag(chat_checkpoint, keyboard, monkeypatch):
    monkeypatch.setattr(generate, "CHAT_TURNS", 3)
    typed = iter(["And " + "then " * 40, "never read"])
    monkeypatch.setattr("terminal.conversation.typed", lambda *_: next(typed))
    result = run("--checkpoint", chat_checkpoint, "--chat", "--prompt", "Who?", *SHORT, stdin=keyboard)
    [line] = [line for line in result.stderr.splitlines() if "no room" in line]
    assert "the caches hold 36 tokens" in line and "--max-new-tokens" in line and next(typed) == "never read"


def test_a_chat_that_cannot_be_is_refused_before_one_types(text_checkpoint, keyboard, monkeypatch):
    monkeypatch.setattr("terminal.options.first_question", lambda *_: pytest.fail("asked"))
    for folder, why in ((text_checkpoint, "no chat template"), ("/nowhere", "no checkpoint folder /nowhere")):
        assert_refused(run("--checkpoint", folder, "--chat", stdin=keyboard), why)


@pytest.mark.parametrize("place", ("terminal.conversation.typed", "model.Transformer.prefill"))
def test_ctrl_c_exits_at_the_prompt_and_before_the_first_token(chat_checkpoint, keyboard, place, monkeypatch, tmp_path):
    """At the prompt, the answers so far are written."""
    out, report = tmp_path / "out.jsonl", tmp_path / "out.json"
    flags = ["--checkpoint", chat_checkpoint, "--chat", "--prompt", "Who?", *SHORT, "--out", out, "--json", report]
    default = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(place, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    result = run(*flags, stdin=keyboard)
    assert result.returncode == 130 and result.stderr.endswith("interrupted\n"), result.stderr
    assert signal.getsignal(signal.SIGINT) is default
    written = lines_of(out)
    assert report.exists() == bool(written) == (place == "terminal.conversation.typed")
    if written:
        assert len(written[0]["answers"]) == 1 and json.loads(report.read_text())["completions"] == written


RECOMMENDED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
SAMPLINGS = {  # name -> generation_config.json, flags, what --generation-config adds to the flags' sampling
    "all": (RECOMMENDED | {"min_p": 0.01}, [], RECOMMENDED | {"min_p": 0.01}),
    "flags win": (RECOMMENDED, ["--temperature", "0.9", "--top-k", "3"], {"top_p": 0.95, "repetition_penalty": 1.05}),
    "no cut": (RECOMMENDED, ["--top-k", "0"], {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05}),
    "a greedy flag": (RECOMMENDED, ["--temperature", "0"], {"repetition_penalty": 1.05}),
    "greedy": (RECOMMENDED | {"do_sample": False}, [], {"repetition_penalty": 1.05}),
    "temperature alone": ({"temperature": 0.7}, [], {}),
    "sampling alone": ({"do_sample": True}, [], {"temperature": 1.0, "top_k": 50}),
    "a cut alone": ({"top_p": 0.9}, [], {}),
    "nothing": ({"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1.0}, [], {}),
    "no file": (None, [], {}),
}


@pytest.fixture
def recommending(tiny_checkpoint, tmp_path):
    """A function that writes a checkpoint's generation_config.json; -> the beginning of a command line."""

    def given(content: dict | None) -> list:
        folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
        if content is not None:
            (folder / "generation_config.json").write_text(json.dumps(content))
        return ["--checkpoint", folder, "--prompt", "The keeper", "--json", *SHORT]

    return given


@pytest.mark.parametrize("case", SAMPLINGS)
def test_what_a_checkpoint_recommends_is_named_once_and_applied_if_asked(recommending, case):
    content, flags, added = SAMPLINGS[case]
    common = [*recommending(content), "--seed", 1, *flags]
    plain, applied = run(*common), run(*common, "--generation-config")
    notes = [line for line in plain.stderr.splitlines() if "generation_config" in line]
    added = {name: added[name] for name in SAMPLING if name in added}
    listed = ", ".join(f"{name} {value}" for name, value in added.items())
    said = f"note: generation_config.json recommends {listed}; --generation-config applies it"
    missing = f"note: {common[1]} has no generation_config.json, so --generation-config changes nothing"
    assert notes == [said] * bool(added)
    assert [x for x in applied.stderr.splitlines() if "generation_config" in x] == [missing] * (content is None)
    unasked, used = (json.loads(result.stdout) for result in (plain, applied))
    assert used["sampling"] == unasked["sampling"] | added
    how = {name: value for name, value in used["sampling"].items() if value is not None}
    expected = Engine.load(common[1], compile=False, seed=1).generate("The keeper", 6, **how)[0].tokens
    assert used["completions"][0]["tokens"] == expected


def test_a_temperature_applies_the_cuts_of_a_generation_config_that_is_greedy(recommending):
    common = [*recommending({"top_p": 0.9}), "--temperature", "0.5"]
    used = [json.loads(run(*common, *more).stdout)["sampling"] for more in ([], ["--generation-config"])]
    assert [(how["temperature"], how["top_k"], how["top_p"]) for how in used] == [(0.5, None, None), (0.5, 50, 0.9)]


def test_what_is_not_supported_of_a_generation_config_is_named_in_one_note(recommending):
    content = {"num_beams": 4, "suppress_tokens": [1, 2], "typical_p": 0.9, "min_length": 0, "max_length": 4096}
    common, ignored = recommending(content), "num_beams 4, suppress_tokens [1, 2]"
    for more in ([], ["--generation-config"]):
        notes = [line for line in run(*common, *more).stderr.splitlines() if line.startswith("note:")]
        assert notes == [f"note: generation_config.json also sets {ignored}: not supported, and ignored"]


MISTAKES = {
    "unknown method": (["--prompt", "x", "--kv", "nosuch"], ["'nosuch'", "full", "streaming"]),
    "small budget": (["--prompt", "x", "--kv", "streaming", "--budget", "3"], ["at least 5"]),
    "no budget": (["--prompt", "x", "--kv", "streaming"], ["--budget"]),
    "budget for full": (["--prompt", "x", "--budget", "3"], ["no budget"]),
    "unknown option": (["--prompt", "x", "--kv-opt", "page=3"], ["no option 'page'"]),
    "half an option": (["--prompt", "x", "--kv-opt", "page"], ["name=value"]),
    "long prompt": (["--prompt", "a b c d " * 9000], ["tokens", "context is 32768"]),
    "empty prompt": (["--prompt", ""], ["empty"]),
    "no prompt": ([], ["--prompt"]),
    "a conversation without a terminal": (["--chat"], ["a conversation needs a terminal"]),
    "no such file": (["--prompt-file", "/nowhere/x"], ["/nowhere/x"]),
    "no such device": (["--prompt", "x", "--device", "cuda:99"], ["cuda:99"]),
    "no tokens": (["--prompt", "x", "--max-new-tokens", "0"], ["at least 1"]),
    "too large": (["--prompt", "x", "--max-new-tokens", "999999999"], ["GB", "--max-new-tokens"]),
    "negative temperature": (["--prompt", "x", "--temperature", "-1"], ["temperature"]),
    "no chat template": (["--prompt", "x", "--chat"], ["chat template"]),
    "unknown flag": (["--prompt", "x", "--nosuch"], ["--nosuch"]),
    "json nowhere": (["--prompt", "x", "--json", "/nowhere/x.json"], ["--json", "/nowhere/x.json"]),
    "a folder": (["--prompt-file", "/tmp"], ["/tmp", "directory"]),
    "far too large": (["--prompt", "x", "--max-new-tokens", "1" + "0" * 30], ["any machine", "--max-new-tokens"]),
    "empty stop text": (["--prompt", "x", "--stop", ""], ["--stop"]),
    "system without chat": (["--prompt", "x", "--system", "Be brief."], ["--chat"]),
    "out nowhere": (["--prompt", "x", "--out", "/nowhere/x.jsonl"], ["--out", "/nowhere/x.jsonl"]),
    "two bits": (["--prompt", "x", "--kv-bits", "8", "--kv-opt", "bits=4"], ["option bits is given twice: 8 and 4"]),
    "options of a list": (
        ["--prompt", "x", "--kv", "kvarn:kbits=8"],
        ["KV method 'kvarn:kbits=8': give its options apart, with --kv-opt"],
    ),
    "no bits": (["--prompt", "x", "--kv", "tova", "--budget", "9", "--kv-bits", "4"], ["'bits', which full, hybrid,"]),
    "offload or not": (
        ["--prompt", "x", "--kv", "omnikv", "--budget", "9", "--offload", "--kv-opt", "offload=false"],
        ["option offload is given twice: true and false"],
    ),
    "top-p and greedy": (["--prompt", "x", "--top-p", "0.9"], ["temperature 0", "--temperature"]),
    "penalty of 0": (["--prompt", "x", "--repetition-penalty", "0"], ["repetition penalty must lie between"]),
    "penalty and drafts": (
        ["--prompt", "x", "--speculate", "2", "--repetition-penalty", "1.1"],
        ["leave out --speculate, or set --repetition-penalty 1"],
    ),
    "a chunk of 0": (["--prompt", "x", "--chunk", "0"], ["--chunk must be at least 1, not 0"]),
    "a chunk of x": (["--prompt", "x", "--chunk", "x"], ["--chunk"]),
    "d2o in chunks": (["--prompt", "x", "--kv", "d2o", "--budget", "99", "--chunk", "9"], ["d2o", "leave out --chunk"]),
    "budget not a number": (["--prompt", "x", "--budget", "many"], ["--budget"]),
}


def test_an_option_may_be_given_twice_with_the_same_value():
    flags = ["--kv-bits", "8", "--kv-opt", "bits=8", "--offload", "--kv-opt", "offload=1", "--kv", "omnikv"]
    given = options.given_options(options.parser("").parse_args(flags))
    assert given == {"bits": "8", "offload": "1"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(text_checkpoint, mistake):
    flags, words = MISTAKES[mistake]
    assert_refused(run("--checkpoint", text_checkpoint, *flags), *words)


@pytest.mark.parametrize("mistake", ("unknown method", "small budget", "budget for full", "d2o in chunks", None))
def test_a_mistake_is_named_before_the_weights_are_read(text_checkpoint, tmp_path, mistake, monkeypatch):
    monkeypatch.setattr("runtime.load.load_checkpoint", lambda *_: pytest.fail("read"))
    flags, words = MISTAKES[mistake] if mistake else (["--prompt", "x"], ["tokenizer"])
    folder = shutil.copytree(text_checkpoint, tmp_path / "model")
    if not mistake:
        (folder / "tokenizer.model").unlink()
    assert_refused(run("--checkpoint", folder, *flags), *words)


def test_a_mistake_in_a_process_of_its_own_exits_with_2(text_checkpoint):
    assert_refused(run_process("--checkpoint", text_checkpoint, "--prompt", "x", "--kv", "nosuch"), "'nosuch'")


def test_a_prompt_that_is_not_text_is_refused(text_checkpoint, tmp_path):
    (tmp_path / "prompt").write_bytes(b"abc\xff\xfe")
    assert_refused(run("--checkpoint", text_checkpoint, "--prompt-file", tmp_path / "prompt"), "UTF-8", "byte 3")


def edit(config: Path, **changes) -> None:
    content = json.loads(config.read_text()) | changes
    config.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_section(config: Path, **changes) -> None:
    edit(config, kv_fast=json.loads(config.read_text())["kv_fast"] | changes)


def edit_model(config: Path, **changes) -> None:
    edit_section(config, model=json.loads(config.read_text())["kv_fast"]["model"] | changes)


def lose_shard(folder: Path) -> None:
    """Writes the weights in shards, one of which is missing."""
    config, stored = json.loads((folder / "config.json").read_text()), open_weights(folder)
    tensors = {name: t.read() for name, t in stored.items()}
    whole = folder.rename(folder.with_name("whole"))
    write_checkpoint(folder, config, from_hf(config), tensors, tensors.__getitem__, shard_bytes=1_000_000)
    next(folder.glob("model-00002-of-*")).unlink()
    shutil.copy(whole / "tokenizer.model", folder)


def cut(file: Path, end: int) -> None:
    file.write_bytes(file.read_bytes()[:end])


CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.model"
BROKEN = {  # what is done to a folder, and the words of the refusal
    "no folder": (shutil.rmtree, ["no checkpoint folder"]),
    "a file": (lambda f: (shutil.rmtree(f), f.touch()), ["is a file", "convert it first"]),
    "no config": (lambda f: (f / CONFIG).unlink(), ["config.json"]),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ["model.safetensors"]),
    "no tokenizer": (lambda f: (f / TOKENIZER).unlink(), ["tokenizer"]),
    "missing shard": (lose_shard, ["model-00002-of-", "is missing"]),
    "truncated weights": (lambda f: cut(f / WEIGHTS, -1000), ["model.safetensors is damaged or cut off"]),
    "damaged tokenizer": (lambda f: cut(f / TOKENIZER, 999), ["tokenizer.model"]),
    "not JSON": (lambda f: cut(f / CONFIG, 40), ["JSON"]),
    "foreign tokenizer": (lambda f: edit_model(f / CONFIG, vocab_size=1000), ["1024 tokens", "another checkpoint"]),
    "wrong shapes": (
        lambda f: edit_model(f / CONFIG, ffn_dim=512),
        ["shape", "[768, 256]", "[512, 256]", "feed_forward"],
    ),
    "unknown RoPE": (lambda f: edit_model(f / CONFIG, rope={"rope_type": "longrope"}), ["longrope"]),
    "endless layers": (lambda f: edit_model(f / CONFIG, n_layer=10**9), ["n_layer", "at most 1000"]),
    "odd EOS": (lambda f: edit(f / CONFIG, eos_token_id={"a": 1}), ["config.json", "eos_token_id"]),
    "quantized": (lambda f: edit_section(f / CONFIG, quantization={"mode": "int3"}), ["int3", "int8, int4"]),
    "odd dtype": (lambda f: edit_section(f / CONFIG, dtype=["x"]), ["dtype", "bfloat16"]),
    "not converted": (lambda f: edit(f / CONFIG, kv_fast=None), ["convert_hf_checkpoint.py"]),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_is_one_line_and_exit_code_2(text_checkpoint, tmp_path, how):
    folder = shutil.copytree(text_checkpoint, tmp_path / "broken")
    breaks, words = BROKEN[how]
    breaks(folder)
    assert_refused(run("--checkpoint", folder, "--prompt", "x", *SHORT), *words)


@pytest.mark.slow
def test_a_missing_compiler_is_one_line_that_names_the_flag(text_checkpoint, tmp_path):
    no_compiler = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    result = run_process("--checkpoint", text_checkpoint, "--prompt", "x", "--compile", **no_compiler)
    assert_refused(result, "g++", "--no-compile")


@pytest.mark.slow
def test_a_compile_cache_that_cannot_be_written_is_one_line(text_checkpoint):
    nowhere = {"TORCHINDUCTOR_CACHE_DIR": "/proc/nowhere"}
    result = run_process("--checkpoint", text_checkpoint, "--prompt", "x", "--compile", **nowhere)
    assert_refused(result, "compile cache /proc/nowhere", "TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.parametrize(
    "inner, words",
    (
        (OSError(errno.ENOSPC, "No space left on device"), "compile cache .*No space left.*TORCHINDUCTOR_CACHE_DIR"),
        (CppCompileError(["g++"], "as: main.o: No space left on device"), "compile cache .*No space left"),
        (CppCompileError(["g++"], "fatal error: Python.h: No such file or directory"), "install g\\+\\+"),
        (TypeError("a bug"), None),
    ),
)
def test_errors_of_the_compile_cache_and_of_the_compiler_are_told_apart_and_others_unchanged(inner, words):
    with pytest.raises(ValueError if words else InductorError, match=words or "a bug"), compile_errors():
        raise InductorError(inner, None)


@pytest.mark.slow
def test_the_demo_answers_without_arguments():
    result = run_process()
    assert result.returncode == 0, result.stderr
    text = (NEEDLE / "demo.txt").read_text()
    number = re.search(r"magic numbers for .* is: (\d{7})\.", text)[1]
    assert number in result.stdout and "What is the special magic number" in result.stderr


def test_a_plot_that_could_not_be_drawn_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="--plot needs matplotlib"):
        cli.check_output(str(tmp_path / "out.png"), "--plot")
    cli.check_output(str(tmp_path / "out.json"), "--json")


def test_an_output_is_refused_before_the_work_if_it_could_not_be_written(tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    for name in (kept, tmp_path / "new.json", "/dev/null", tmp_path / "new.PDF", tmp_path / "no-suffix"):
        cli.check_output(str(name), "--plot" if name in (tmp_path / "new.PDF", tmp_path / "no-suffix") else "--json")
    assert kept.read_text() == "{}" and list(tmp_path.iterdir()) == [kept]  # the check leaves nothing behind
    for name, flag, words in (
        ("/proc/x.json", "--results", "--results /proc/x.json: cannot be written"),
        ("/proc/version", "--json", "--json /proc/version: cannot be written"),
        (tmp_path / "x.foo", "--plot", "x.foo: the format is unknown; known: .*png"),
    ):
        with pytest.raises(ValueError, match=words):
            cli.check_output(str(name), flag)
