"""Measures speed, memory and distance from the hardware's limit: python -m bench --kv all --budget 256,1024

Needs no checkpoint: a model of a known shape gets random weights. All methods decode at the same context and take turns
of --steps steps. A step's floor is the time to read its bytes (the weights with the head but without the embedding
table, and the method's reads of its cache) at the read bandwidth of a large sum, measured in the same run. Leave the
machine otherwise idle.
"""

import runtime.startup  # noqa: F401

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import torch

import kv as methods
from bench import generations, llama_cpp
from bench.contenders import SHAPES
from bench.measure import measure, new_case, read_bandwidth
from bench.papers import Found, published
from bench.report import draw, extensions, is_wide, speculations, table
from quantize import MODES
from runtime import processes, tune
from runtime.checkpoint import read_json
from runtime.device import DTYPES, cap_memory, free_bytes, machine, pick_device, pick_dtype
from terminal.cli import check_output, choices, columns, number, numbers, profile_lines, run, write_json

PEERS = {"transformers": {"transformers": "transformers"}, "llama.cpp": llama_cpp.NEEDED}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--shape", help=f"{', '.join(SHAPES)}, or the path of a config.json (default: what fits here)")
    p.add_argument("--kv", default="all", help="comma-separated methods; with options: name:option=value:...")
    p.add_argument("--budget", default="256,1024", help="tokens per KV head, or shares of the prompt; comma-separated")
    p.add_argument("--context", help="tokens in the cache, comma-separated (default: chosen for the device)")
    p.add_argument("--batch", default="1", help="rows decoded at once, comma-separated (default: 1); max: all that fit")
    p.add_argument("--generate", type=int, metavar="N", help="time whole generations of N tokens after --context")
    p.add_argument("--extend", type=int, metavar="N", help="also time a follow-up of N tokens, added at once")
    p.add_argument(
        "--speculate",
        default="",
        metavar="N,..",
        help="also time rounds, in which the methods draft N tokens and the full cache verifies them",
    )
    p.add_argument(
        "--accept",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="--speculate: the probability that a "
        "drafted token is accepted, for ms/token (default: 0.8); the time of a round does not depend on it",
    )
    p.add_argument("--quantize", default="none", help=f"none, {', '.join(MODES)}; comma-separated")
    p.add_argument("--groupsize", type=int, default=128, help="int4: input channels that share a scale (default: 128)")
    p.add_argument(
        "--embeddings",
        action="store_true",
        help="with int8 or int4: quantize the embedding table and the head too, to int8",
    )
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and caches (default: bfloat16)")
    p.add_argument("--steps", type=int, default=20, help="timed steps per contender and turn (default: 20)")
    p.add_argument("--repeats", type=int, default=3, help="turns per contender (default: 3)")
    p.add_argument("--limit", type=int, metavar="SECONDS", help="start no contender after this time")
    first_token = "time a prompt to its first token (default: yes)"
    p.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True, help=first_token)
    p.add_argument("--baseline", choices=["naive"], help="the full cache with K and V repeated for every query head")
    p.add_argument("--peer", choices=PEERS, help="also time another engine's step, in the same shape and dtype")
    p.add_argument("--paper", action="store_true", help="measure the settings of the papers, beside their figures")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--memory-cap", type=float, metavar="GB", help="behave as if the device had only this much memory")
    p.add_argument("--profile", metavar="FILE", help="write a trace of two steps per contender")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    p.add_argument("--plot", metavar="FILE", help="draw ms/token, speedup and memory")
    p.add_argument("--results", metavar="FILE", default="bench-results.jsonl", help="append a line per finished case")
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for flag in ("json", "plot", "profile", "results"):
        check_output(getattr(args, flag), f"--{flag}")
    for flag in ("steps", "repeats", "groupsize", "generate", "extend", "limit"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1")
    args.speculate = numbers(args.speculate, "--speculate", int) if args.speculate else []
    if not 0 <= args.accept <= 1:
        raise ValueError(f"--accept must lie between 0 and 1, not {args.accept}")
    if args.speculate and (args.paper or args.generate):
        raise ValueError("--speculate times single rounds: leave out --paper and --generate")
    if args.paper and args.generate:
        raise ValueError("--paper has settings of its own: leave out --generate")
    missing = [p for module, p in PEERS.get(args.peer, {}).items() if not importlib.util.find_spec(module)]
    if missing:
        raise ValueError(f"--peer {args.peer} needs it: pip install {' '.join(missing)}")
    if args.memory_cap is not None and args.memory_cap <= 0:
        raise ValueError(f"--memory-cap must be positive, not {args.memory_cap}")
    ranks = processes.join()
    if ranks.count > 1 and (args.peer or args.paper or args.generate):
        raise ValueError("--peer, --paper and --generate need one process: start it with python, not torchrun")
    if ranks.rank:
        args.json, args.plot, args.results = None, None, os.devnull
        args.profile = args.profile and os.devnull
    device, dtype = pick_device(args.device), pick_dtype(args.dtype)
    if args.memory_cap is not None:
        cap_memory(int(args.memory_cap * 1e9), device)
    args.shape = processes.same(ranks, args.shape or default_shape(device))
    config = shape_config(args.shape)
    contexts = numbers(args.context, "--context", int) if args.context else default_contexts(device)
    if args.batch == "max" and args.generate is None:
        raise ValueError("--batch max needs --generate N")
    batches = None if args.batch == "max" else numbers(args.batch, "--batch", int)
    budgets = numbers(args.budget, "--budget", number) if args.budget else []
    chosen = choices(",".join(methods.METHODS) if args.kv == "all" else args.kv, budgets)
    modes = [None if mode == "none" else mode for mode in args.quantize.split(",")]
    if unknown := set(modes) - {None, *MODES}:
        raise ValueError(f"--quantize {unknown.pop()}: known are none, {', '.join(MODES)}")
    if args.embeddings and modes == [None]:
        raise ValueError("--embeddings needs --quantize int8 or int4")
    bandwidth = read_bandwidth(device)
    about = {"machine": machine(device), "commit": commit(), "date": f"{datetime.date.today()}"}
    about |= {"command": " ".join(["python -m bench", *(sys.argv[1:] if argv is None else argv)])}
    about |= {"bandwidth_gbs": bandwidth / 1e9}
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"{about['machine']}, reads {bandwidth / 1e9:.0f} GB/s; {args.shape}", file=out)
    result, lines, stopped = about | {"rows": []} | ({"generations": []} if args.paper else {}), [], False

    def asked() -> Found:
        for mode, context in itertools.product(modes, contexts):
            if args.generate:
                case = new_case(args, config, mode, dtype, device, context, 1)
                case.steps, case.prefill = args.generate + args.steps + 2, False
                for row in generations.generations(case, chosen, batches, args.generate, args.steps, bandwidth):
                    yield "rows", [row]
                continue
            for batch in batches:
                case = new_case(args, config, mode, dtype, device, context, batch)
                yield "rows", measure(args, case, chosen, bandwidth)
                torch._dynamo.reset()

    try:
        for key, found in published(args, device, dtype, bandwidth, lines) if args.paper else asked():
            result[key] += found
            if found:
                with open(args.results, "a") as file:
                    file.write(json.dumps(about | {key: found}) + "\n")
                if args.json != "-":
                    write_json(args.json, result)
    except KeyboardInterrupt:  # finished cases are still shown
        stopped = True
    if len(lines) > 1:
        print(columns(lines), file=out)
    show(args, result["rows"], out)
    if args.json == "-":
        write_json(args.json, result)
    if stopped:
        raise KeyboardInterrupt
    if not result["rows"] and not args.paper:
        raise ValueError("nothing was measured: every method was left out")


def show(args: argparse.Namespace, rows: list[dict], out: TextIO) -> None:
    if not rows:
        return
    print(generations.table(rows) if args.generate else table(rows), file=out)
    if extended := [r for r in rows if r.get("extend")]:
        print(extensions(extended), file=out)
    if speculated := [r for r in rows if r.get("speculate")]:
        print(speculations(speculated, rows), file=out)
    kernels = sorted({f"{r['kv']} attends with {r['kernel']}" for r in rows if "kernel" in r})
    products = tune.lines({size: times for r in rows for size, times in r.get("products", {}).items()})
    ranks = []
    if rows[0].get("ranks", 1) > 1:
        sizes = sorted({(r["batch"], r["step_exchanged_bytes"]) for r in rows})
        each = ", ".join(f"{size / 1e6:.2f} MB with batch {batch}" for batch, size in sizes)
        ranks.append(f"{rows[0]['ranks']} ranks, bytes are those of one; they exchange {each} a step")
    for line in profile_lines(rows) + ranks + kernels + products:
        print(line, file=out)
    if not args.generate and any(map(is_wide, rows)):
        print("! the spread is too wide to conclude: is the machine idle?", file=out)
    if args.plot:
        generations.draw(rows, args.plot) if args.generate else draw(rows, args.plot)


def shape_config(name: str) -> dict:
    if name in SHAPES:
        return SHAPES[name]
    if not Path(name).is_file():
        raise ValueError(f"unknown shape {name!r}; there are: {', '.join(SHAPES)}, or give the path of a config.json")
    profile = Path(name).with_name("kv_profile.json")
    known = {"kv_profile": methods.read_profile(read_json(profile))} if profile.is_file() else {}
    return {**read_json(Path(name)), "max_position_embeddings": 2**20, **known}


def default_shape(device: torch.device) -> str:
    free = free_bytes(device)
    return "llama-160m" if device.type == "cpu" else "llama-3.1-8b" if free > 40e9 else "llama-3.2-1b"


def default_contexts(device: torch.device) -> list[int]:
    return [4096, 16384] if device.type == "cpu" else [4096, 16384, 65536, 131072]


def commit() -> str | None:
    """The git commit of this code, with a + if files differ from it; None if unknown."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    run(main, ranks=True)
