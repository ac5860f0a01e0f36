"""The first measurements to make on a GPU: bash bench.sh gpu [--out DIR] [--from STEP] [--device cpu]

Runs steps of at most 8 minutes, the cheapest first, each in processes of its own with a time limit. Their output is
kept in DIR/STEP.log. When a step ends, its measurements are appended to DIR/report.jsonl, and in readable form to
DIR/report.md. A step that fails stops no other. With `--device cpu` the steps use small shapes, which tests the steps.
"""

import runtime.startup  # noqa: F401

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from runtime.device import machine, pick_device
from terminal.cli import run

ROOT = Path(__file__).resolve().parent.parent
METHODS = (  # groups that run side by side
    "full,full:bits=8,full:bits=4,kivi,streaming,snapkv",
    "snapkv++,pyramidkv,rocketkv,rocketkv:bits=4,hybrid,exact_topk",
    "quest,sparq,duo,simlayer:recent=64,infllm:block=32,h2o",
    "roco,cam,d2o,omnikv,omnikv:offload=true,brute_offload",
    "tailorkv,tailorkv:bits=2,pqcache,omnikv:offload=true:engine=threads",
)
THREADS = (
    "omnikv:offload=true:engine=threads,tailorkv:engine=threads,pqcache:engine=threads",
    "infllm:block=32:offload=true:engine=threads,brute_offload,omnikv:offload=true:engine=direct",
)


@dataclass
class Step:
    """Commands that run side by side, as arguments of python, with their time limit."""

    name: str
    about: str
    commands: list[list[str]]
    minutes: float = 8
    env: dict[str, str] = field(default_factory=dict)


def bench(device: str, about: str, *arguments: str, small: str = "") -> list[str]:
    """Arguments of the benchmark; `small` replaces those that do not suit a CPU."""
    shape = ["--shape", "llama-3.1-8b", "--limit", "270", *arguments]  # a compile may take minutes
    if device == "cpu":
        shape = ["--shape", "needle/config.json", "--steps", "2", "--repeats", "1", *small.split()]
    return ["-m", "bench", *shape, "--device", device, "--json", f"{about}.json", "--results", os.devnull]


def steps(device: str) -> list[Step]:
    """The steps, the cheapest first."""

    def smoke(methods: str, *more: str) -> list[str]:
        length = ["--length", "600"] if device == "cpu" else []
        return ["-m", "bench.smoke", "--kv", methods, "--device", device, *length, *more]

    groups = METHODS if device != "cpu" else ("full,rocketkv", "omnikv:offload=true")
    threads = THREADS if device != "cpu" else ("omnikv:offload=true:engine=threads",)
    near, far = "--context 16384".split(), "--context 131072 --no-prefill".split()
    tiny = "--context 512 --budget 64 --no-prefill"
    main = "full,streaming,rocketkv,omnikv,quest,tailorkv"
    budget = ["--budget", "1024"]

    def speed(name: str, about: str, *arguments: str, small: str = tiny + " --kv full,rocketkv") -> Step:
        return Step(name, about, [bench(device, name, *arguments, small=small)])

    def attention(form: str, by: str) -> Step:
        about = f"attention by {by} at 128K, where flex_attention is a guess (step long)"
        small = tiny + " --kv full,streaming"
        command = bench(device, form, "--kv", "full,streaming", *budget, *far, small=small)
        return Step(form, about, [command], env={"KV_FAST_PRODUCT": form})

    return [
        Step(
            "tests",
            "the tests that need a GPU",
            [
                [
                    "-m",
                    "pytest",
                    "-m",
                    "cuda",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "tests/test_offload.py",
                    "tests/test_ops.py",
                    "tests/test_engine.py",
                    "tests/test_omnikv.py",
                ]
            ],
            5,
        ),
        Step(
            "methods",
            "every method on the needle checkpoint, eager and compiled (side by side: the times are not "
            "those of an idle GPU)",
            [smoke(group) for group in groups],
        ),
        Step("offload", "threads that fetch with pauses: the same tokens", [smoke(g, "--delays") for g in threads]),
        speed("short", "8B at 16K, with prefill", "--kv", main, *budget, *near, "--baseline", "naive"),
        speed("long", "8B at 128K", "--kv", main, *budget, *far),
        attention("kernel", "SDPA"),
        attention("fused", "products and sums that Inductor fuses"),
        Step(
            "tiles",
            "a top-k that sorts the maxima of tiles first, where one sort is a guess (step long)",
            [bench(device, "tiles", "--kv", "full,tailorkv", *budget, *far, small=tiny + " --kv full,tailorkv")],
            env={"KV_FAST_TILES": "1"},
        ),
        speed(
            "prefill",
            "a prompt of 128K",
            "--kv",
            "full,rocketkv,omnikv",
            *budget,
            "--context",
            "131072",
            "--steps",
            "3",
            small="--context 512 --budget 64 --kv full",
        ),
        speed("batch", "8 rows at 16K", "--kv", main, *budget, *near, "--no-prefill", "--batch", "8"),
        speed(
            "int4",
            "int4 weights at 128K",
            "--kv",
            "full,rocketkv,quest",
            *budget,
            *far,
            "--quantize",
            "int4",
            small=tiny + " --kv full --quantize int4 --groupsize 32",
        ),
        speed(
            "peer",
            "transformers' caches at 16K",
            "--kv",
            "full",
            *near,
            "--no-prefill",
            "--peer",
            "transformers",
            small=tiny + " --kv full",
        ),
        speed(
            "speculation",
            "drafts at 128K",
            "--kv",
            "full,rocketkv,streaming",
            *budget,
            *far,
            "--speculate",
            "2,4",
            small=tiny + " --kv full,streaming --speculate 2",
        ),
        speed(
            "omnikv",
            "a cache on the host: 256K",
            "--kv",
            "omnikv:offload=true",
            *budget,
            "--context",
            "262144",
            "--no-prefill",
            small=tiny + " --kv omnikv:offload=true",
        ),
        speed(
            "tailorkv",
            "int4 weights and 128K in 24 GB",
            "--kv",
            "tailorkv",
            *budget,
            *far,
            "--quantize",
            "int4",
            "--memory-cap",
            "24",
            small=tiny + " --kv tailorkv",
        ),
        speed(
            "generations",
            "whole generations, as many rows as fit",
            "--kv",
            "full,h2o,d2o",
            *budget,
            "--context",
            "2048",
            "--generate",
            "2048",
            "--batch",
            "max",
            "--steps",
            "4",
            small="--context 64 --generate 16 --batch 2 --budget 32 --kv full,h2o",
        ),
        speed(
            "trace",
            "a trace of two steps with offload: trace.trace.json",
            "--kv",
            "omnikv:offload=true",
            *budget,
            *near,
            "--no-prefill",
            "--steps",
            "3",
            "--profile",
            "trace.trace.json",
            small=tiny + " --kv omnikv:offload=true --profile trace.trace.json",
        ),
    ]


def perform(step: Step, out: Path) -> dict:
    """Runs a step; returns a line of report.jsonl."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/kv-fast-gpu-inductor"
    env = os.environ | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": cache}  # shared by the steps
    env |= {"KV_FAST_PRODUCT": "auto", "KV_FAST_TILES": ""} | step.env
    begin, processes = time.monotonic(), []
    for i, command in enumerate(step.commands):
        log = open(out / (f"{step.name}.log" if len(step.commands) == 1 else f"{step.name}.{i + 1}.log"), "wb")
        command = [sys.executable, *(str(ROOT / a) if a.startswith(("needle/", "tests/")) else a for a in command)]
        processes.append(
            (
                subprocess.Popen(
                    command, cwd=out, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                ),
                log,
            )
        )
    codes = []
    try:
        for process, log in processes:
            try:
                codes.append(process.wait(max(0.1, begin + 60 * step.minutes - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append("out of time")
            log.close()
    finally:  # a step's processes, with those that they started, end with it
        for process, _ in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = {"step": step.name, "about": step.about, "date": f"{datetime.date.today()}", "exit": codes}
    found |= {"seconds": round(time.monotonic() - begin, 1), "commands": [" ".join(c) for c in step.commands]}
    if (result := out / f"{step.name}.json").exists() and codes == [0]:
        found["result"] = json.loads(result.read_text())
    text = "".join(file.read_text(errors="replace") for file in sorted(out.glob(f"{step.name}*.log")))
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"kv"')]
    return found | ({"methods": lines} if lines else {}) | {"tail": text.splitlines()[-60:]}


def readable(found: dict) -> str:
    """A section of report.md."""
    failed = "" if set(found["exit"]) == {0} else f" **exit {', '.join(map(str, found['exit']))}**"
    said = [f"## {found['step']}: {found['about']}", "", f"{found['date']}, {found['seconds']:.0f} s{failed}", ""]
    said += ["```", *(f"python {command}" for command in found["commands"]), "```", "", "```"]
    if "methods" in found and not failed:
        said += [json.dumps(line) for line in found["methods"]]
    else:
        said += found["tail"]
    return "\n".join([*said, "```", "", ""])


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="bash bench.sh gpu", description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=os.environ.get("OUT", "gpu-report"), metavar="DIR")
    p.add_argument("--from", dest="first", metavar="STEP", help="continue with this step")
    p.add_argument("--only", metavar="STEP,..", help="run only these steps")
    p.add_argument("--device", help="cpu: small shapes (default: cuda where there is one)")
    args = p.parse_args(argv)
    device = pick_device(args.device)
    every = steps(device.type)
    names, only = [step.name for step in every], (args.only or "").split(",") if args.only else None
    for name in [*(only or []), *([args.first] if args.first else [])]:
        if name not in names:
            raise ValueError(f"unknown step {name!r}; there are: {', '.join(names)}")
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(f"{machine(device)}; results in {out}", flush=True)
    small = "Small shapes: this tests the steps, not the machine.\n\n" if device.type == "cpu" else ""
    with open(out / "report.md", "a") as file:
        file.write(f"# {machine(device)}\n\n{small}")
    begun = args.first is None
    for step in every:
        begun |= step.name == args.first
        if not begun or (only is not None and step.name not in only):
            continue
        print(f"{step.name}: {step.about}", flush=True)
        found = perform(step, out)
        with open(out / "report.jsonl", "a") as file:
            file.write(json.dumps(found) + "\n")
        with open(out / "report.md", "a") as file:
            file.write(readable(found))
        print(f"  exit {', '.join(map(str, found['exit']))}, {found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    run(main)
