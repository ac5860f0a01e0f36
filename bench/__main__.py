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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

import kv as methods
from bench import peers, tables
from bench.contenders import SHAPES, Case, checked
from bench.measure import generations, measure, read_bandwidth
from bench.side_by_side import side_by_side
from runtime import cpu, parallel
from runtime.device import DTYPES, cap_memory, free_bytes, machine, pick_device, pick_dtype
from runtime.linear import GROUPS, MODES
from terminal.cli import Choice, Parser, check_output, choices, number, numbers, profile_lines, run, write_json
from text.files import read_json

ALONE = ("generate", "speculate", "baseline", "peer", "extend", "profile")  # not with --side-by-side


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", help=f"{', '.join(SHAPES)}, or the path of a config.json (default: what fits here)")
    p.add_argument("--kv", default="all", help="comma-separated methods; with options: name:option=value:...")
    p.add_argument("--budget", default="256,1024", help="tokens per KV head, or shares of the prompt; comma-separated")
    p.add_argument("--context", help="tokens in the cache, comma-separated (default: chosen for the device)")
    p.add_argument("--batch", default="1", help="rows decoded at once, comma-separated (default: 1); max: all that fit")
    cache = "--batch max: the memory on the device that a contender's caches may take (default: what is free)"
    p.add_argument("--cache", type=float, metavar="GB", help=cache)
    p.add_argument("--generate", type=int, metavar="N", help="time whole generations of N tokens after --context")
    p.add_argument("--extend", type=int, metavar="N", help="also time a follow-up of N tokens, added at once")
    drafts = "also time rounds, in which the methods draft N tokens and the full cache verifies them"
    p.add_argument("--speculate", default="", metavar="N,..", help=drafts)
    accept = "--speculate: the probability that a drafted token is accepted, for ms/token (default: 0.8)"
    p.add_argument("--accept", type=float, default=0.8, metavar="SHARE", help=accept)
    p.add_argument("--quantize", default="none", help=f"none, {', '.join(MODES)}; comma-separated")
    groups = f"int4: channels that share a scale (default: the first of {GROUPS} that divides the model's)"
    p.add_argument("--groupsize", type=int, help=groups)
    p.add_argument("--embeddings", action="store_true", help="quantize the embedding table and the head too, to int8")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and caches (default: bfloat16)")
    p.add_argument("--steps", type=int, default=20, help="timed steps per contender and turn (default: 20)")
    p.add_argument("--repeats", type=int, default=3, help="turns per contender (default: 3)")
    p.add_argument("--limit", type=int, metavar="SECONDS", help="start no contender after this time")
    beside = "compile contenders in processes of their own, all at once, and time each alone: quicker on a GPU"
    p.add_argument("--side-by-side", action="store_true", help=beside)
    p.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True, help="time a prompt too")
    p.add_argument("--baseline", choices=["naive"], help="the full cache with K and V repeated for every query head")
    p.add_argument("--peer", choices=peers.NEEDED, help="also time another engine's step, in the same shape and dtype")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--memory-cap", type=float, metavar="GB", help="behave as if the device had only this much memory")
    p.add_argument("--profile", metavar="FILE", help="write a trace of two steps per contender")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    p.add_argument("--plot", metavar="FILE", help="draw ms/token, speedup and memory")
    p.add_argument("--results", metavar="FILE", default="bench-results.jsonl", help="append a line per finished case")
    return p


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for arguments that conflict or cannot be met."""
    for flag in ("json", "plot", "profile", "results"):
        check_output(getattr(args, flag), f"--{flag}")
    for flag in ("steps", "repeats", "groupsize", "generate", "extend", "limit"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1")
    missing = [p for module, p in peers.NEEDED.get(args.peer, {}).items() if not importlib.util.find_spec(module)]
    unknown = set(args.quantize) - {None, *MODES}
    for wrong, why in (
        (not 0 <= args.accept <= 1, f"--accept must lie between 0 and 1, not {args.accept}"),
        (args.memory_cap is not None and args.memory_cap <= 0, f"--memory-cap must be positive, not {args.memory_cap}"),
        (args.cache is not None and args.cache <= 0, f"--cache must be positive, not {args.cache}"),
        (args.cache is not None and args.batch != "max", "--cache needs --batch max"),
        (args.speculate and args.generate, "--speculate times single rounds: leave out --generate"),
        (
            args.batch == "max" and args.generate is None and not args.side_by_side,
            "--batch max needs --generate N or --side-by-side",
        ),
        (
            args.side_by_side and any(getattr(args, name) for name in ALONE),
            f"--side-by-side times single steps: leave out {', '.join('--' + name for name in ALONE)}",
        ),
        (args.peer == "transformers" and any(args.quantize), "--peer transformers has no --quantize: leave one out"),
        (missing, f"--peer {args.peer} needs it: pip install {' '.join(missing)}"),
        (unknown, f"--quantize {', '.join(map(str, unknown))}: known are none, {', '.join(MODES)}"),
        (args.embeddings and not any(args.quantize), "--embeddings needs --quantize int8 or int4"),
        (
            parallel.launched() and (args.peer or args.generate),
            "--peer and --generate need one process: start it with python, not torchrun",
        ),
    ):
        if wrong:
            raise ValueError(why)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    args = parser().parse_args(argv)
    args.speculate = numbers(args.speculate, "--speculate", int) if args.speculate else []
    args.quantize = [None if mode == "none" else mode for mode in args.quantize.split(",")]
    check(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    ranks = parallel.join()
    if ranks.rank:
        args.json, args.plot, args.results = None, None, os.devnull
        args.profile = args.profile and os.devnull
    device, dtype = pick_device(args.device), pick_dtype(args.dtype)
    if args.memory_cap is not None:
        cap_memory(int(args.memory_cap * 1e9), device)
    shape = parallel.same(ranks, args.shape or default_shape(device))
    contexts = args.context or ("4096,16384" if device.type == "cpu" else "4096,16384,65536,131072")
    contexts = numbers(contexts, "--context", int)
    batches = None if args.batch == "max" else numbers(args.batch, "--batch", int)
    budgets = numbers(args.budget, "--budget", number) if args.budget else []
    names = ["full", *(name for name in methods.METHODS if name != "full")] if args.kv == "all" else [args.kv]
    chosen = choices(",".join(names), budgets)
    bandwidth, steps = read_bandwidth(device), args.repeats * (args.steps + 1) + 8 + (args.extend or 0)
    common = dtype, device, bandwidth, contexts[0], steps, args.compile, args.prefill, ranks
    base = Case(shape, shape_config(shape), *common, groupsize=args.groupsize, embeddings=args.embeddings)
    by_mode = [checked(replace(base, quantize=mode)) for mode in args.quantize]  # all, before the first is measured
    about = {"machine": machine(device), "commit": commit(), "date": f"{datetime.date.today()}"}
    about |= {"command": " ".join(["python -m bench", *(sys.argv[1:] if argv is None else argv)])}
    about |= {"bandwidth_gbs": bandwidth / 1e9}
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"{about['machine']}, reads {bandwidth / 1e9:.0f} GB/s; {shape}", file=out)
    result = about | {"rows": []}
    try:
        for rows in asked(args, by_mode, contexts, batches, chosen):
            result["rows"] += rows
            if rows:
                with open(args.results, "a") as file:
                    file.write(json.dumps(about | {"rows": rows}) + "\n")
                if args.json != "-":
                    write_json(args.json, result)
    finally:  # whatever was measured is shown
        if result["rows"]:
            show(args, result["rows"], out)
        if args.json == "-":
            write_json(args.json, result)
    if not result["rows"]:
        raise ValueError("nothing was measured: every method was left out")


def asked(
    args: argparse.Namespace, by_mode: list[Case], contexts: list[int], batches: list[int] | None, chosen: list[Choice]
) -> Iterator[list[dict]]:
    """Measures the cases that the command line names, and yields rows of the JSON object."""
    if args.side_by_side:
        every = itertools.product(by_mode, contexts, batches or [0])
        cases = [replace(case, context=context, batch=batch) for case, context, batch in every]
        yield from ([row] for row in side_by_side(args, cases, chosen))
        return
    for case, context in itertools.product(by_mode, contexts):
        case = replace(case, context=context)
        if args.generate:
            for row in generations(case, chosen, batches, args.cache, args.generate, args.steps):
                yield [row]
            continue
        for batch in batches:
            yield measure(args, replace(case, batch=batch), chosen)
            torch._dynamo.reset()


def show(args: argparse.Namespace, rows: list[dict], out: TextIO) -> None:
    rows = sorted(rows, key=lambda row: (row["quantize"] or "", row["context"])) if args.side_by_side else rows
    lines = [tables.generations(rows) if args.generate else tables.steps(rows)]
    if args.extend and not args.generate:
        lines.append(tables.extensions([r for r in rows if "extend" in r]))
    if any(r.get("speculate") for r in rows):
        lines.append(tables.speculations(rows))
    lines += profile_lines(rows)
    if rows[0].get("ranks", 1) > 1:
        sizes = sorted({(r["batch"], r["step_exchanged_bytes"]) for r in rows})
        each = ", ".join(f"{size / 1e6:.2f} MB with batch {batch}" for batch, size in sizes)
        lines.append(f"{rows[0]['ranks']} ranks, bytes are those of one; they exchange {each} a step")
    lines += sorted({f"{r['kv']} attends with {r['kernel']}" for r in rows if "kernel" in r})
    lines += cpu.lines({size: times for r in rows for size, times in r.get("products", {}).items()})
    if not args.generate and any(map(tables.is_wide, rows)):
        lines.append("! the spread is too wide to conclude: is the machine idle?")
    print("\n".join(lines), file=out)
    if args.plot:
        (tables.draw_generations if args.generate else tables.draw)(rows, args.plot)


def shape_config(name: str) -> dict:
    if name in SHAPES:
        return SHAPES[name]
    file = Path(name)
    if not file.is_file():
        raise ValueError(f"unknown shape {name!r}; there are: {', '.join(SHAPES)}, or give the path of a config.json")
    config, profile = read_json(file) | {"max_position_embeddings": 2**20}, file.with_name("kv_profile.json")
    return config | ({"kv_profile": methods.read_profile(read_json(profile))} if profile.is_file() else {})


def default_shape(device: torch.device) -> str:
    if device.type == "cpu":
        return "llama-160m"
    return "llama-3.1-8b" if free_bytes(device) > 40e9 else "llama-3.2-1b"


def commit() -> str | None:
    """The git commit of this code, with a + if files differ from it; None if unknown."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    run(main, ranks=True)
