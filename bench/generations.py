"""python -m bench --generate: tokens/s of whole generations, with --batch max for as many rows as fit in memory.

Steps are timed at evenly spaced lengths from the prompt's to the final one. In between, the rows' positions
advance without decoding: cache contents do not change the time. The ceiling is the tokens/s that the floors would give.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from tqdm import tqdm

import kv as methods
from bench.contenders import Case, Ours, floor_ms, random_weights, step_weights
from runtime.device import free_bytes
from terminal.cli import Choice, columns, load_pyplot

POINTS = 16  # lengths at which steps are timed
LARGEST = 4096  # the most rows


def largest_batch(case: Case, method: Choice, free: int) -> int:
    """The most rows whose caches fit in `free` bytes, beside three copies of their logits and a prompt in one layer."""
    logits = 3 * 4 * case.config["vocab_size"]
    layer = 8 * case.context * case.config["hidden_size"] * case.dtype.itemsize

    def fits(batch: int) -> bool:
        shape = replace(case, batch=batch).shape()
        device, host = methods.planned_bytes(method.kv, shape, method.budget, method.options)
        device += batch * logits + layer
        if case.device.type == "cpu":
            return device + host <= free
        return device <= free and host <= free_bytes(torch.device("cpu"))

    low, high = 0, 1
    while high <= LARGEST and fits(high):
        low, high = high, 2 * high
    high = min(high, LARGEST + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def generation(case: Case, method: Choice, weights: dict, new: int, steps: int, bandwidth: float) -> dict:
    """One row of the JSON object. Caches are planned for `case.steps` new tokens; the generation has `new` of them."""
    contender = Ours(case, method, weights)
    engine, batch = contender.engine, case.batch
    contender.start()
    times, floors, lengths = [], [], [case.context + (new - 1) * i // (POINTS - 1) for i in range(POINTS)]
    for length in lengths:
        engine.decoder.pos.fill_(length)
        own = []
        for i in range(steps + 1):
            contender.new = length - case.context + i
            begin = time.perf_counter()
            contender.step()
            own.append(time.perf_counter() - begin)
        times.append(1e3 * statistics.median(own[1:]))
        device, host = (batch * bytes_ for bytes_ in engine.step_bytes(length + 1))
        floors.append(floor_ms(case.device, step_weights(case, weights) + device, host, bandwidth))
    device, host, full = engine.kv_bytes()
    return {
        "kv": method.kv,
        "budget": method.budget,
        "options": method.options,
        "profile": engine.from_profile(),
        "context": case.context,
        "new": new,
        "batch": batch,
        "dtype": str(case.dtype).removeprefix("torch."),
        "quantize": case.quantize,
        "embeddings": bool(case.quantize) and case.embeddings,
        "ms_per_token": statistics.mean(times),
        "first_ms": times[0],
        "last_ms": times[-1],
        "lengths": lengths,
        "ms": times,
        "tokens_per_s": 1e3 * batch / statistics.mean(times),
        "ceiling_tokens_per_s": 1e3 * batch / statistics.mean(floors),
        "kv_device_bytes": device,
        "kv_host_bytes": host,
        "full_bytes": full,
        "weight_bytes": sum(t.nbytes for t in weights.values()),
    }


def generations(
    case: Case,
    chosen: list[Choice],
    batches: list[int] | None,
    new: int,
    steps: int,
    bandwidth: float,
    memory: int | None = None,
) -> Iterator[dict]:
    """Yields a row per method and batch. batches None: the largest batch that fits, within `memory` bytes if given."""
    weights = random_weights(case)
    held = sum(t.nbytes for t in weights.values())
    for method in tqdm(chosen, unit="method", disable=None, leave=False):
        free = free_bytes(case.device) if memory is None else min(free_bytes(case.device), memory - held)
        for batch in batches or [largest_batch(case, method, free)]:
            if not batch:
                print(f"left out: {method.label} does not fit even with one row", file=sys.stderr)
                continue
            yield generation(replace(case, batch=batch), method, weights, new, steps, bandwidth)
            torch._dynamo.reset()


def table(rows: list[dict]) -> str:
    """Compares each row with the full cache at the same batch size if that ran, else at the first that ran."""
    head = ["method", "weights", "prompt + new", "batch", "tokens/s", "ceiling", "vs full", "ms first", "ms last", "KV"]
    lines = [head]
    for r in rows:
        same = ("context", "new", "quantize")
        fulls = [f for f in rows if f["kv"] == "full" and all(f[key] == r[key] for key in same)]
        full = max(fulls, key=lambda f: f["batch"] == r["batch"], default=None)
        lines.append(
            [
                Choice(r["kv"], r["budget"], r["options"]).label,
                r["quantize"] or r["dtype"],
                f"{r['context']} + {r['new']}",
                str(r["batch"]),
                f"{r['tokens_per_s']:.1f}",
                f"{r['ceiling_tokens_per_s']:.1f}",
                f"{r['tokens_per_s'] / full['tokens_per_s']:.2f}" if full else "-",
                f"{r['first_ms']:.2f}",
                f"{r['last_ms']:.2f}",
                f"{r['kv_device_bytes'] / 1e6:.1f} MB",
            ]
        )
    return columns(lines)


def draw(rows: list[dict], path: str) -> None:
    """Draws ms per step and the cache's bytes over the tokens generated."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for r in rows:
        label = Choice(r["kv"], r["budget"], r["options"]).label + f", batch {r['batch']}"
        new = [length - r["context"] for length in r["lengths"]]
        axes[0].plot(new, r["ms"], marker="o", label=label)
        axes[1].plot(new, [r["kv_device_bytes"] / 1e6] * len(new), label=label)
    axes[0].set(xlabel="tokens generated", ylabel="ms a step", ylim=(0, None))
    axes[1].set(xlabel="tokens generated", ylabel="MB of cache allocated", ylim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
