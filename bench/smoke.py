"""Whether methods work on a device: python -m bench.smoke --kv full,rocketkv:bits=4 --budget 384

Each method answers the checkpoint's demo question, eager and compiled. Prints one line of JSON per method: the answers,
ms per token, seconds to compile, CUDA graphs per step, skipped CUDA graphs, recompiles, and how far logits differ: in
fp32 from the CPU's, and compiled from eager. With --delays, threads that fetch rows pause at random, and no token may
change.
"""

import runtime.startup  # noqa: F401

import argparse
import json
import random
import sys
import time
import traceback
from contextlib import closing
from unittest import mock

import torch
from torch import Tensor

from bench.measure import replays
from engine import Engine
from kv.parts.offload import ThreadedPool
from runtime.device import pick_device
from terminal.cli import Choice, Parser, choices, number, numbers, run
from terminal.options import NEEDLE

FORCED = [5, 9, 17, 33, 65, 129, 257, 513] * 2  # tokens after which logits are compared
NEW = 24  # tokens of an answer


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m bench.smoke", description=__doc__.splitlines()[0])
    p.add_argument("--kv", default="full", help="comma-separated methods; with options: name:option=value:...")
    p.add_argument("--budget", default="384", help="tokens per KV head (default: 384)")
    p.add_argument("--length", type=int, default=4000, help="the most tokens of the prompt, its last ones")
    p.add_argument("--delays", action="store_true", help="compare tokens with and without pauses of fetching threads")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    return p


def load(method: Choice, ids: list[int], device: torch.device, dtype: str, compile: bool) -> Engine:
    plan = {"max_prompt": len(ids), "room": 2 * NEW, "device": device, "dtype": dtype, "seed": 0}
    return Engine.load(NEEDLE, method.kv, method.budget, method.options, compile=compile, **plan)


def differences(logits: Tensor, expected: Tensor) -> dict:
    """The largest absolute difference of two logits [n, vocab], and the share of positions with the same best token."""
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    return {"largest": float((logits - expected).abs().max()), "same best": float(same)}


def check(method: Choice, ids: list[int], device: torch.device) -> dict:
    """A line of the output, but for the method's name."""
    from torch._dynamo.utils import counters

    line, logits = {}, {}
    for name, dtype, place, compile in (
        ("cpu, fp32", "float32", torch.device("cpu"), False),
        ("fp32", "float32", device, False),
        ("eager", "bfloat16", device, False),
        ("compiled", "bfloat16", device, True),
    ):
        if name == "fp32" and device.type == "cpu":
            continue
        torch._dynamo.reset()
        counters.clear()
        with closing(load(method, ids, place, dtype, compile)) as engine:
            logits[name], compiles = engine.logits(ids, FORCED).cpu(), engine.stats.compiles
            if dtype == "bfloat16":
                answer = engine.generate(ids, NEW)[0].text
                line[name] = {"answer": answer, "ms": engine.stats.ms_per_token}
            if compile:
                line[name] |= {"recompiles": engine.stats.compiles - compiles, "compile_s": engine.stats.compile_s}
                line[name] |= {"cudagraph_skips": counters["inductor"]["cudagraph_skips"]}
            if compile and device.type == "cuda":
                line[name]["graphs"] = replays(lambda: engine.logits(ids, FORCED)) / (len(FORCED) - 1)
    if "fp32" in logits:
        line["fp32, against the CPU"] = differences(logits["fp32"], logits["cpu, fp32"])
    return line | {"compiled, against eager": differences(logits["compiled"], logits["eager"])}


def check_delays(method: Choice, ids: list[int], device: torch.device) -> dict:
    gather, chance, tokens = ThreadedPool.gather, random.Random(0), []

    def slow(pool: ThreadedPool, *args) -> Tensor:
        time.sleep(2e-3 * chance.random())
        return gather(pool, *args)

    for own in (gather, slow):
        with mock.patch.object(ThreadedPool, "gather", own):
            with closing(load(method, ids, device, "bfloat16", True)) as engine:
                tokens.append(engine.generate(ids, NEW)[0].tokens)
    return {"same tokens": tokens[0] == tokens[1], "tokens": len(tokens[0])}


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    device, chosen = pick_device(args.device), choices(args.kv, numbers(args.budget, "--budget", number))
    with closing(Engine.load(NEEDLE, compile=False)) as engine:
        ids = engine.encode((NEEDLE / "demo.txt").read_text())
    ids, failed = ids[:1] + ids[1:][1 - args.length :], 0
    for method in chosen:
        begin, line = time.perf_counter(), {"kv": method.label}
        try:
            line |= (check_delays if args.delays else check)(method, ids, device)
        except Exception as error:  # of whatever kind: the other methods still run
            traceback.print_exc(file=sys.stderr)
            line["error"], failed = f"{type(error).__name__}: {error}"[:500], failed + 1
        print(json.dumps(line | {"s": round(time.perf_counter() - begin, 1)}), flush=True)
    if failed:
        raise ValueError(f"{failed} of {len(chosen)} methods failed")


if __name__ == "__main__":
    run(main)
