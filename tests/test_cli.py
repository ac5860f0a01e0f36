"""The command line as a user meets it."""

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from conftest import write_random

import cli
import generate
from checkpoint import open_weights, write_checkpoint
from engine import Engine

ROOT = Path(__file__).parent.parent
NEEDLE = ROOT / "needle"
SHORT = ["--max-new-tokens", "6", "--no-compile"]


def run_process(*args, stdin="", **environment):
    command = [sys.executable, ROOT / "generate.py", *map(str, args)]
    return subprocess.run(command, input=stdin, text=True, capture_output=True, env=os.environ | environment)


def run(*args, stdin=""):
    """The same in this process, which saves seconds of imports."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as end:
            cli.run(lambda: generate.main([str(arg) for arg in args]))
    return subprocess.CompletedProcess(args, end.value.code, out.getvalue(), err.getvalue())


def assert_refused(result, *words):
    """One line that says these words, exit code 2, nothing on stdout."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    *usage, line = result.stderr.splitlines()
    assert not usage or usage[0].startswith("usage:")  # argparse says how a flag is written, then what is wrong
    for word in words:
        assert word in line, line


def test_a_prompt_is_answered_and_what_it_took_is_printed(text_checkpoint):
    result = run_process("--checkpoint", text_checkpoint, "--prompt", "The keeper", *SHORT)
    assert result.returncode == 0, result.stderr
    expected = Engine.load(text_checkpoint, compile=False).generate("The keeper", max_new_tokens=6)[0].answers[0].text
    assert result.stdout == expected + "\n"
    for line in ("prompt tokens", "prefill", "ms/token", "tokens/s", "on the device", "on the host", "full cache"):
        assert line in result.stderr


def test_json_goes_alone_to_stdout_with_everything_in_it(text_checkpoint):
    result = run("--checkpoint", text_checkpoint, "--prompt", "The keeper", "--json", *SHORT)
    report = json.loads(result.stdout)
    assert set(report) >= {
        "kv", "budget", "options", "checkpoint", "device", "dtype", "compile_s", "prefill_s", "decode_ms_per_token",
        "tokens_per_s", "kv_device_bytes", "kv_host_bytes", "kv_full_bytes", "peak_bytes", "completions",
    }  # fmt: skip
    (completion,) = report["completions"]
    assert set(completion) >= {"prompt_tokens", "new_tokens", "text", "tokens", "finish_reason", "answers"}
    assert completion["new_tokens"] == len(completion["tokens"]) == 6 and completion["finish_reason"] == "length"
    assert completion["text"] in result.stderr and report["decode_ms_per_token"] > 0 and report["peak_bytes"] > 1e7


def test_json_to_a_file_leaves_the_text_on_stdout(text_checkpoint, tmp_path):
    result = run("--checkpoint", text_checkpoint, "--prompt", "The keeper", "--json", tmp_path / "out.json", *SHORT)
    report = json.loads((tmp_path / "out.json").read_text())
    assert result.stdout == report["completions"][0]["text"] + "\n"


def test_prompts_come_from_files_and_stdin(text_checkpoint, tmp_path):
    (tmp_path / "prompt.txt").write_text("The keeper\nand the light")
    (tmp_path / "batch.txt").write_text("The keeper\n\nA much longer line about the sea and the light\nfog\n")
    common = ("--checkpoint", text_checkpoint, "--json", *SHORT)
    from_file = json.loads(run("--prompt-file", tmp_path / "prompt.txt", *common).stdout)
    from_stdin = json.loads(run("--prompt-file", "-", *common, stdin="The keeper\nand the light").stdout)
    assert from_file["completions"] == from_stdin["completions"]
    batch = json.loads(run("--batch-file", tmp_path / "batch.txt", "--batch", 2, *common).stdout)
    assert len(batch["completions"]) == 3 and batch["batch"] == 2
    alone = json.loads(run("--prompt", "fog", *common).stdout)
    assert batch["completions"][2]["text"] == alone["completions"][0]["text"]


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


def test_chat_on_a_terminal_asks_again_after_each_answer(text_checkpoint, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(text_checkpoint, folder)
    config = {"chat_template": "{{ '[INST] <<SYS>>' }}", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    terminal, stdin = pty.openpty()
    os.write(terminal, b"And the fog?\nAnd then?\n\n")
    flags = ("--checkpoint", folder, "--chat", "--prompt", "Who?", "--json", *SHORT)
    command = [sys.executable, ROOT / "generate.py", *flags]
    result = subprocess.run(command, stdin=stdin, text=True, capture_output=True)
    os.close(terminal)
    os.close(stdin)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["completions"][0]["answers"]) == 3


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
    "no such file": (["--prompt-file", "/nowhere/x"], ["/nowhere/x"]),
    "no such device": (["--prompt", "x", "--device", "cuda:99"], ["cuda:99"]),
    "no tokens": (["--prompt", "x", "--max-new-tokens", "0"], ["at least 1"]),
    "too large": (["--prompt", "x", "--max-new-tokens", "999999999"], ["GB", "--max-new-tokens"]),
    "negative temperature": (["--prompt", "x", "--temperature", "-1"], ["temperature"]),
    "no chat template": (["--prompt", "x", "--chat"], ["chat template"]),
    "unknown flag": (["--prompt", "x", "--nosuch"], ["--nosuch"]),
    "json nowhere": (["--prompt", "x", "--json", "/nowhere/x.json"], ["--json", "/nowhere/x.json"]),
    "empty chat": (["--prompt", "", "--chat"], ["empty"]),
    "a folder": (["--prompt-file", "/tmp"], ["/tmp", "directory"]),
    "far too large": (["--prompt", "x", "--max-new-tokens", "1" + "0" * 30], ["GB", "--max-new-tokens"]),
    "budget not a number": (["--prompt", "x", "--budget", "many"], ["--budget"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(text_checkpoint, mistake):
    flags, words = MISTAKES[mistake]
    assert_refused(run("--checkpoint", text_checkpoint, *flags), *words)


def test_a_mistake_in_a_process_of_its_own_exits_with_2(text_checkpoint):
    assert_refused(run_process("--checkpoint", text_checkpoint, "--prompt", "x", "--kv", "nosuch"), "'nosuch'")


def test_a_prompt_that_is_not_text_is_refused(text_checkpoint, tmp_path):
    (tmp_path / "prompt").write_bytes(b"abc\xff\xfe")
    assert_refused(run("--checkpoint", text_checkpoint, "--prompt-file", tmp_path / "prompt"), "UTF-8", "byte 3")


def break_checkpoint(folder: Path, how: str) -> None:
    config, weights = folder / "config.json", folder / "model.safetensors"
    if how == "no folder":
        shutil.rmtree(folder)
    elif how == "no config":
        config.unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "missing shard":
        stored = open_weights(folder)
        layout = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in stored.items()}
        config_was = json.loads(config.read_text())
        tensors = {name: t.read() for name, t in stored.items()}
        shutil.rmtree(folder)
        write_checkpoint(folder, config_was, layout, tensors.__getitem__, shard_bytes=1_000_000)
        next(folder.glob("model-00002-of-*")).unlink()
    elif how == "not JSON":
        config.write_text(config.read_text()[:40])
    elif how == "foreign tokenizer":
        edit(config, vocab_size=1000)
    elif how == "wrong shapes":
        edit(config, intermediate_size=512)
    elif how == "unknown architecture":
        edit(config, architectures=["GemmaForCausalLM"])
    elif how == "unknown RoPE":
        edit(config, rope_scaling={"rope_type": "longrope"})
    elif how == "endless layers":
        edit(config, num_hidden_layers=10**9)
    elif how == "odd EOS":
        edit(config, eos_token_id={"a": 1})
    elif how == "quantised":
        edit(config, kv_fast={"format": 1, "dtype": "bfloat16", "quantization": {"mode": "int3"}})
    elif how == "odd dtype":
        edit(config, kv_fast={"format": 1, "dtype": ["x"], "quantization": None})
    elif how == "not converted":
        edit(config, kv_fast=None)
    elif how == "damaged tokenizer":
        (folder / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes()[:999])
    elif how == "no tokenizer":
        (folder / "tokenizer.model").unlink()


def edit(config: Path, **changes) -> None:
    content = json.loads(config.read_text()) | changes
    config.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


BROKEN = {
    "no folder": ["no checkpoint folder"],
    "no config": ["config.json"],
    "no weights": ["model.safetensors"],
    "missing shard": ["model-00002-of-", "is missing"],
    "truncated weights": ["truncated", "model.safetensors", "tensor"],
    "not JSON": ["JSON"],
    "foreign tokenizer": ["1024 tokens", "another checkpoint"],
    "wrong shapes": ["shape", "[768, 256]", "[512, 256]", "feed_forward"],
    "unknown architecture": ["GemmaForCausalLM"],
    "unknown RoPE": ["longrope"],
    "endless layers": ["num_hidden_layers", "at most 1000"],
    "odd EOS": ["config.json", "eos_token_id"],
    "quantised": ["int3", "int8, int4"],
    "odd dtype": ["dtype", "bfloat16"],
    "not converted": ["convert_hf_checkpoint.py"],
    "damaged tokenizer": ["tokenizer.model"],
    "no tokenizer": ["tokenizer"],
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_is_one_line_and_exit_code_2(text_checkpoint, tmp_path, how):
    folder = tmp_path / "broken"
    shutil.copytree(text_checkpoint, folder)
    break_checkpoint(folder, how)
    assert_refused(run("--checkpoint", folder, "--prompt", "x", *SHORT), *BROKEN[how])


def test_a_missing_compiler_is_one_line_that_names_the_flag(text_checkpoint, tmp_path):
    no_compiler = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    result = run_process("--checkpoint", text_checkpoint, "--prompt", "x", "--max-new-tokens", "2", **no_compiler)
    assert_refused(result, "g++", "--no-compile")


def test_a_checkpoint_without_a_tokenizer_takes_ids(tmp_path):
    folder = write_random(tmp_path / "ids")
    assert_refused(run("--checkpoint", folder, "--prompt", "x"), "tokenizer")
    assert Engine.load(folder, compile=False).generate([[1, 2, 3]], max_new_tokens=2)[0].new_tokens == 2


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
