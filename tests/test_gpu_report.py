"""bench/gpu.py: its steps survive each other's failures, end in time, and are kept as they come."""

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bench import gpu
from bench.__main__ import parse
from bench.gpu import Step, main
from bench.smoke import parser
from terminal.cli import choices

SLEEP = "import time; print('begun', flush=True); time.sleep(61.5)"
STUCK = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"


@pytest.fixture
def steps(monkeypatch):
    found = [
        Step("good", "it works", [["-c", 'print(\'{"kv": "full"}\')'], ["-c", "print('beside')"]]),
        Step("bad", "it fails", [["-c", "raise SystemExit('broken')"]]),
        Step("slow", "it hangs", [["-c", STUCK]], minutes=0.03),
        Step("last", "it measures", [["-c", "open('last.json', 'w').write('[1]')"]]),
    ]
    monkeypatch.setattr(gpu, "steps", lambda device: found)


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]


def test_a_step_that_fails_or_hangs_stops_no_other(steps, tmp_path):
    main(["--out", str(tmp_path), "--device", "cpu"])
    found = lines(tmp_path)
    exits = {"good": [0, 0], "bad": [1], "slow": ["out of time"], "last": [0]}
    assert {line["step"]: line["exit"] for line in found} == exits
    assert found[0]["methods"] == [{"kv": "full"}] and found[1]["tail"] == ["broken"] and found[3]["result"] == [1]
    report = (tmp_path / "report.md").read_text()
    assert "## bad: it fails" in report and "**exit 1**" in report and "**exit out of time**" in report
    end = time.monotonic() + 30
    while sleeping() and time.monotonic() < end:  # a killed process takes a while to end
        time.sleep(0.05)
    assert not sleeping()  # the process that the step started in turn has ended, too


def sleeping() -> bool:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if "time.sleep(61.5)" in process.read_text():
                return True
    return False


def test_a_run_continues_with_a_step(steps, tmp_path):
    main(["--out", str(tmp_path), "--device", "cpu", "--only", "good"])
    main(["--out", str(tmp_path), "--device", "cpu", "--from", "last"])
    assert [line["step"] for line in lines(tmp_path)] == ["good", "last"]
    with pytest.raises(ValueError, match="unknown step 'none'; there are: good, bad, slow, last"):
        main(["--out", str(tmp_path), "--device", "cpu", "--from", "none"])


def test_the_tests_that_need_a_gpu_are_those_that_its_step_runs():
    tests = [file for file in Path(__file__).parent.glob("test_*.py") if file.name != Path(__file__).name]
    marked = {f"tests/{file.name}" for file in tests if "mark.cuda" in file.read_text()}
    assert marked == set(gpu.TESTS.split())


def test_every_command_of_the_steps_parses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parses = {"bench": parse, "bench.smoke": parser().parse_args}
    for step in (*gpu.steps("cuda"), *gpu.steps("cpu")):
        for _, module, *arguments in step.commands:
            if module != "pytest":
                choices(parses[module](arguments).kv, [256])
