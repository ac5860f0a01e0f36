"""bench/gpu.py: its steps survive each other's failures, end in time, and are kept as they come."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu import Step, main

STUCK = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print('begun', flush=True); time.sleep(60)"
)


def python(code: str) -> list[str]:
    return ["-c", code]


@pytest.fixture
def steps(monkeypatch):
    found = [
        Step("good", "it works", [python('print(\'{"kv": "full"}\')'), python("print('beside')")]),
        Step("bad", "it fails", [python("raise SystemExit('broken')")]),
        Step("slow", "it hangs", [python(STUCK)], minutes=0.03),
        Step("last", "it measures", [python("open('last.json', 'w').write('[1]')")]),
    ]
    monkeypatch.setattr(gpu, "steps", lambda device: found)
    return found


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]


def test_a_step_that_fails_or_hangs_stops_no_other(steps, tmp_path):
    begin = time.monotonic()
    main(["--out", str(tmp_path), "--device", "cpu"])
    assert time.monotonic() - begin < 30
    found = lines(tmp_path)
    assert [(line["step"], line["exit"]) for line in found] == [
        ("good", [0, 0]),
        ("bad", [1]),
        ("slow", ["out of time"]),
        ("last", [0]),
    ]
    assert found[0]["methods"] == [{"kv": "full"}] and found[1]["tail"] == ["broken"] and found[3]["result"] == [1]
    report = (tmp_path / "report.md").read_text()
    assert "## bad: it fails" in report and "**exit 1**" in report and "**exit out of time**" in report
    alive = [p for p in Path("/proc").glob("[0-9]*/cmdline") if "time.sleep(60)" in read(p) and read(p) != STUCK]
    assert not [p for p in alive if f"/{os.getpid()}/" not in str(p)]


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_run_continues_with_a_step(steps, tmp_path):
    main(["--out", str(tmp_path), "--device", "cpu", "--only", "good"])
    main(["--out", str(tmp_path), "--device", "cpu", "--from", "last"])
    assert [line["step"] for line in lines(tmp_path)] == ["good", "last"]
    with pytest.raises(ValueError, match="unknown step 'none'; there are: good, bad, slow, last"):
        main(["--out", str(tmp_path), "--device", "cpu", "--from", "none"])


def test_the_tests_that_need_a_gpu_are_those_that_its_step_runs():
    marked = {
        f"tests/{file.name}" for file in Path(__file__).parent.glob("test_*.py") if "mark.cuda" in file.read_text()
    }
    assert marked - {f"tests/{Path(__file__).name}"} == set(gpu.TESTS.split())


def test_every_test_file_that_a_command_or_document_names_exists():
    files = [gpu.ROOT / "bench.sh", *gpu.ROOT.glob("*.md"), *gpu.ROOT.glob("docs/*.md"), *gpu.ROOT.glob("bench/*.py")]
    named = {name for file in files for name in re.findall(r"tests/\w+\.py", file.read_text())}
    assert "tests/test_contract.py" in named and not [name for name in named if not (gpu.ROOT / name).is_file()]


def test_every_command_of_the_steps_parses(tmp_path, monkeypatch):
    """On a GPU and on a CPU, the benchmark accepts the arguments of every step."""
    from bench.__main__ import parse
    from bench.smoke import parser
    from terminal.cli import choices

    monkeypatch.chdir(tmp_path)
    parses = {"bench": parse, "bench.smoke": parser().parse_args}
    for device in ("cuda", "cpu"):
        for step in gpu.steps(device):
            assert step.minutes <= 8
            for _, module, *arguments in step.commands:
                if module != "pytest":
                    choices(parses[module](arguments).kv, [256])
