"""Tests and measures a GPU: bash bench.sh gpu [--out DIR] [--from STEP] [--device cpu]

Runs steps of at most 8 minutes, the most telling first, each in processes of its own with a time limit. Their output
is kept in DIR/STEP.log, STEP1.log, ... When a step ends, its measurements are appended to DIR/report.jsonl and, in
readable form, to DIR/report.md. A step that fails stops no other. With `--device cpu` the steps use small shapes.
"""

import runtime.startup  # noqa: F401

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime.device import machine, pick_device
from terminal.cli import Parser, run

ROOT = Path(__file__).resolve().parent.parent
TESTS = (  # those that need a GPU
    "tests/test_offload.py tests/test_ops.py tests/test_quantize.py tests/test_sparse.py tests/test_engine.py "
    "tests/test_omnikv.py"
)
METHODS = (  # groups that run side by side
    "full,streaming full:bits=8,full:bits=4 kivi,tova snapkv,pyramidkv snapkv++,lagkv rocketkv,expected "
    "rocketkv:bits=4,rkv hybrid,exact_topk quest,keynorm sparq,duo simlayer:recent=64,h2o infllm:block=32,keydiff "
    "roco,cam d2o,brute_offload omnikv,omnikv:offload=true tailorkv,rocketkv:turns=true:offload=true "
    "pqcache,omnikv:offload=true:engine=threads"
).split()
THREADS = (
    "infllm:block=32:offload=true:engine=threads,brute_offload,omnikv:offload=true:engine=direct",
    "omnikv:offload=true:engine=threads,tailorkv:engine=threads,pqcache:engine=threads",
)
NEAR, FAR = "--context 16384", "--context 131072 --no-prefill"
MAIN, MORE = (
    "full,streaming,rocketkv,omnikv,quest,tailorkv",
    "snapkv,h2o,d2o,exact_topk,sparq,full:bits=8,kivi,rocketkv:bits=4",
)
SPEED = {  # runs of the benchmark: what each is about, methods, arguments
    "memory": (
        "8B at 32K: as many rows as 20 GB of caches hold",
        "full,rocketkv,snapkv++,d2o,full:bits=4,omnikv:offload=true",
        "--context 32768 --no-prefill --batch max --cache 20 --side-by-side",
    ),
    "speed": ("8B at 128K", f"{MAIN},{MORE}", f"{FAR} --side-by-side"),
    "batch": ("one row and 8 at 16K", MAIN, f"{NEAR} --no-prefill --batch 1,8 --side-by-side"),
    "int4": ("int4 weights at 128K", "full,rocketkv", f"{FAR} --quantize int4 --side-by-side"),
    "prefill": ("a prompt of 128K", "full,rocketkv,omnikv", "--context 131072 --steps 3 --no-compile"),
    "peer": ("transformers' caches at 16K", "full,snapkv++", f"{NEAR} --no-prefill --peer transformers"),
    "speculation": ("drafts at 128K", "full,streaming,rocketkv", f"{FAR} --speculate 2,4"),
    "omnikv": ("a cache on the host: 256K", "omnikv:offload=true", "--context 262144 --no-prefill"),
    "tailorkv": ("int4 weights and 128K in 24 GB", "tailorkv", f"{FAR} --quantize int4 --memory-cap 24"),
    "generations": (
        "whole generations, as many rows as fit",
        "full,h2o,d2o",
        "--context 2048 --generate 2048 --batch max --steps 4",
    ),
    "trace": (
        "a trace of two steps with offload: trace.trace.json",
        "omnikv:offload=true",
        f"{NEAR} --no-prefill --steps 3 --profile trace.trace.json",
    ),
}
FEW = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # for many processes
ON_A_CPU = {  # arguments that replace a step's
    "memory": "--no-prefill --batch max --cache .02 --side-by-side",
    "peer": "--no-prefill",
    "generations": "--generate 16 --batch 2",
}
SMALL = "--shape needle/config.json --context 512 --budget 64 --steps 2 --repeats 1"


@dataclass
class Step:
    """Commands that run side by side, as arguments of python, with their time limit."""

    name: str
    about: str
    commands: list[list[str]]
    minutes: float = 8
    env: dict[str, str] = field(default_factory=dict)


def steps(device: str) -> list[Step]:
    """The steps, the most telling first."""
    cpu = device == "cpu"

    def smoke(groups: Iterable[str], more: str = "") -> list[list[str]]:
        small = "--length 600" * cpu
        return [f"-m bench.smoke --kv {group} --device {device} {small} {more}".split() for group in groups]

    tests = [f"-m pytest -q -p no:cacheprovider -m cuda {file}".split() for file in TESTS.split()]
    groups, threads = (["full,rocketkv", "omnikv:offload=true"], THREADS[1:]) if cpu else (METHODS, THREADS)
    busy = "side by side: the times are not those of an idle GPU"
    every = [
        Step("tests", "the tests that need a GPU", tests, 5),
        Step("methods", f"every method, eager and compiled ({busy})", smoke(groups), env=FEW),
        Step("offload", "threads that fetch with pauses: the same tokens", smoke(threads, "--delays")),
    ]
    for name, (about, methods, arguments) in SPEED.items():
        sizes = "--shape llama-3.1-8b --budget 512 --limit 270"  # compiling takes a minute or two
        if cpu:
            methods, arguments, sizes = ",".join(methods.split(",")[:2]), ON_A_CPU.get(name, arguments), SMALL
        out = f"--device {device} --json {name}.json --results {os.devnull}"
        command = f"-m bench --kv {methods} {arguments} {sizes} {out}".split()
        every.append(Step(name, about, [command]))
    return every


def perform(step: Step, out: Path) -> dict:
    """Runs a step; returns a line of report.jsonl."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/kv-fast-gpu-inductor"
    env = os.environ | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": cache} | step.env
    begin, codes, processes, logs = time.monotonic(), [], [], []
    how = {"cwd": out, "env": env, "stderr": subprocess.STDOUT, "start_new_session": True}
    for number, command in enumerate(step.commands):  # a log each, or lines would run into each other
        logs.append(out / f"{step.name}{number or ''}.log")
        here = [str(ROOT / a) if a.startswith(("needle/", "tests/")) else a for a in command]
        with open(logs[-1], "wb") as file:
            processes.append(subprocess.Popen([sys.executable, *here], stdout=file, **how))
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, begin + 60 * step.minutes - time.monotonic()))
            codes.append("out of time" if process.returncode is None else process.returncode)
    finally:  # a step's processes, with those that they started, end with it
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    line = {"step": step.name, "about": step.about, "date": f"{datetime.date.today()}", "exit": codes}
    line |= {"seconds": round(time.monotonic() - begin, 1), "commands": [" ".join(c) for c in step.commands]}
    if (result := out / f"{step.name}.json").exists() and codes == [0]:
        line["result"] = json.loads(result.read_text())
    said = [text for log in logs for text in log.read_text(errors="replace").splitlines()]
    if methods := [json.loads(text) for text in said if text.startswith('{"kv"')]:
        line["methods"] = methods
    return line | {"tail": said[-60:]}


def section(line: dict) -> str:
    """A section of report.md."""
    failed = "" if set(line["exit"]) == {0} else f" **exit {', '.join(map(str, line['exit']))}**"
    said = line["tail"] if failed or "methods" not in line else map(json.dumps, line["methods"])
    head = [f"## {line['step']}: {line['about']}", "", f"{line['date']}, {line['seconds']:.0f} s{failed}", ""]
    commands = ["```", *(f"python {command}" for command in line["commands"]), "```", "", "```"]
    return "\n".join([*head, *commands, *said, "```", "", ""])


def main(argv: list[str] | None = None) -> None:
    p = Parser(prog="bash bench.sh gpu", description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=os.environ.get("OUT", "gpu-report"), metavar="DIR")
    p.add_argument("--from", dest="first", metavar="STEP", help="continue with this step")
    p.add_argument("--only", metavar="STEP,..", help="run only these steps")
    p.add_argument("--device", help="cpu: small shapes (default: cuda where there is one)")
    args = p.parse_args(argv)
    device = pick_device(args.device)
    every = {step.name: step for step in steps(device.type)}
    names = list(every)
    asked = args.only.split(",") if args.only else names
    for name in (*asked, args.first or names[0]):
        if name not in every:
            raise ValueError(f"unknown step {name!r}; there are: {', '.join(every)}")
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(f"{machine(device)}; results in {out}", flush=True)
    with open(out / "report.md", "a") as report, open(out / "report.jsonl", "a") as results:
        small = "Small shapes: this tests the steps, not the machine.\n\n" if device.type == "cpu" else ""
        report.write(f"# {machine(device)}\n\n{small}")
        for name in names[names.index(args.first) if args.first else 0 :]:
            if name not in asked:
                continue
            print(f"{name}: {every[name].about}", flush=True)
            line = perform(every[name], out)
            print(json.dumps(line), file=results, flush=True)
            print(section(line), end="", file=report, flush=True)
            print(f"  exit {', '.join(map(str, line['exit']))}, {line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    run(main)
