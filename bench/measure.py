"""Times contenders: steps in turns, with the memory and the kernels they use, and whole generations."""

import argparse
import math
import statistics
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch
from tqdm import tqdm

import kv as methods
from bench.contenders import Case, Ours, random_weights, seconds, step_weights
from bench.peers import LlamaCpp, Transformers, llama
from bench.tables import tokens_per_round
from runtime.device import free_bytes, memory_errors, resident_bytes, trim
from terminal.cli import Choice, one_line

POINTS = 16  # lengths at which the steps of a generation are timed
LARGEST = 4096  # the most rows of a generation
NEEDED = 2**25  # bytes of free memory that measuring takes
FULL = Choice("full", None, {})
UNKNOWN = """budget compile_s kv_device_bytes kv_host_bytes step_device_bytes step_host_bytes floor_ms graphs
peak_prefill_bytes peak_decode_bytes""".split()  # of other engines


def read_bandwidth(device: torch.device) -> float:
    """Bytes/s of a large sum. Raises ValueError if too little memory is free."""
    most, free = 2**30 if device.type == "cuda" else 2**29, free_bytes(device)
    if free < NEEDED:
        raise ValueError(
            f"{device} has {max(0, free) / 1e9:.3f} GB free, and measuring takes {NEEDED / 1e9:.3f}: free some, or "
            "raise --memory-cap, which counts what this process holds already"
        )
    data = torch.ones(min(most, free // 16), dtype=torch.float32, device=device)
    return data.nbytes / statistics.median(seconds(lambda: data.sum().item()) for _ in range(11))


def rise(device: torch.device, what: Callable) -> tuple:
    """(the result of what(), the bytes by which the device's memory use rose at its peak; None if unknown)"""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = what()
        return result, torch.cuda.max_memory_allocated(device) - before
    trim()  # so that the reuse of freed memory counts
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the kernel's peak
    except OSError:
        return what(), None
    before = resident_bytes("VmRSS")
    result = what()
    return result, max(0, resident_bytes("VmHWM") - before)  # the kernel counts pages late: it may seem to fall


def replays(step: Callable[[], object]) -> int:
    """The number of CUDA graphs that a step replays."""
    replay, graphs = torch.cuda.CUDAGraph.replay, []

    def counted(graph):
        graphs.append(graph)
        return replay(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
        step()
    return len(graphs)


def attention_kernel(contender: Ours) -> str:
    """The profiler's name for the attention kernel."""
    with torch.profiler.profile(acc_events=True) as trace:
        contender.step()
    names = [e.key for e in trace.key_averages() if any(w in e.key.lower() for w in ("attention", "flash", "flex"))]
    return min(names, key=lambda name: (name.startswith("aten::scaled_dot"), -len(name)), default="fused by Inductor")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def measure(args: argparse.Namespace, case: Case, chosen: list[Choice]) -> list[dict]:
    """One row of the JSON object per contender, all timed in turns."""
    weights = random_weights(case)
    entered, begin = [], time.monotonic()  # each contender with its row and the times of its steps
    for make in tqdm(makers(args, case, chosen, weights), unit="method", disable=None, leave=False):
        if args.limit is not None and time.monotonic() - begin > args.limit:
            print(f"left out: contenders after --limit {args.limit}", file=sys.stderr)
            break
        try:
            with memory_errors():
                contender = make()
                entered.append((contender, prepare(case, contender, weights), []))
        except ValueError as error:
            print(f"left out: {one_line(error)}", file=sys.stderr)
    for _ in range(args.repeats):
        for contender, _, times in entered:
            contender.step()  # not timed: warms up after the other contenders' turns
            times += [1e3 * seconds(contender.step) for _ in range(args.steps)]
    rows = [row for _, row, _ in entered]
    for contender, row, times in entered:
        row |= timing(args, case, row, times)
        if args.extend and isinstance(contender, Ours):
            row |= {"extend": args.extend, "extend_ms": 1e3 * contender.extend_s(args.extend, args.repeats)}
    compare(rows)
    if args.profile:
        profile([contender for contender, _, _ in entered], args.profile)
    return rows


def timing(args: argparse.Namespace, case: Case, row: dict, times: list[float]) -> dict:
    """The keys of a row that follow from the milliseconds of its steps."""
    found, tokens = {}, 1
    if row.get("speculate"):
        tokens = tokens_per_round(row["speculate"], args.accept)
        found = {"accept": args.accept, "round_ms": percentile(times, 0.5), "floor_ms": row["floor_ms"] / tokens}
    for key, share in (("ms_per_token", 0.5), ("p10", 0.1), ("p90", 0.9)):
        found[key] = percentile(times, share) / tokens
    floor = found.get("floor_ms", row["floor_ms"])
    return found | {
        "tokens_per_s": case.batch * 1e3 / found["ms_per_token"],
        "times_floor": floor and found["ms_per_token"] / floor,
    }


def compare(rows: list[dict]) -> None:
    """Adds to each row of a case how many times the tokens/s of full and naive it has, and how much of their memory."""
    for name in ("full", "naive"):
        base = next((row for row in rows if row["kv"] == name and not row["options"]), None)
        for row in rows:
            row[f"speedup_vs_{name}"] = base and row["tokens_per_s"] / base["tokens_per_s"]
            peaks = row["peak_decode_bytes"], base and base["peak_decode_bytes"]
            row[f"memory_vs_{name}"] = None if None in peaks else peaks[0] / peaks[1]


def prepare(case: Case, contender, weights: dict) -> dict:
    """Fills a contender's rows and warms it up; returns its row of the JSON object without the times of its steps."""
    prefill_s, prefill_rise = rise(case.device, contender.start)
    for _ in range(3):
        contender.step()
    _, decode_rise = rise(case.device, contender.step)
    weight_bytes, read_bytes = sum(t.nbytes for t in weights.values()), step_weights(case, weights)
    row = dict.fromkeys(UNKNOWN) | {"kv": contender.label, "options": {}, "profile": {}, "products": {}} | case.about()
    row |= {"prefill_s": prefill_s, "weight_bytes": weight_bytes, "step_weight_bytes": read_bytes}
    row |= {"ranks": case.ranks.count, "step_exchanged_bytes": case.exchanged()}
    if not isinstance(contender, Ours):
        return row
    row |= contender.about()
    held = weight_bytes + row["kv_device_bytes"]
    row["peak_decode_bytes"] = None if decode_rise is None else held + decode_rise
    if case.prefill:  # otherwise the rise came from filling in random keys and values
        row["peak_prefill_bytes"] = None if prefill_rise is None else held + prefill_rise
    read = read_bytes * (1 + row["speculate"]) + row["step_device_bytes"]
    row["floor_ms"] = case.floor_ms(read, row["step_host_bytes"])
    if case.device.type == "cuda":
        row["graphs"] = replays(contender.step)
    if row["kv"] in ("full", "naive"):
        row["kernel"] = attention_kernel(contender)
    return row


def makers(args: argparse.Namespace, case: Case, chosen: list[Choice], weights: dict) -> list[Callable]:
    """Functions that make the contenders."""
    ours = partial(Ours, case, weights=weights)
    every = [partial(ours, method) for method in chosen]
    every += [partial(ours, method, speculate=n) for n in args.speculate for method in chosen if method != FULL]
    if args.baseline:
        every.append(partial(ours, FULL, naive=True))
    if args.peer == "llama.cpp":
        every += [partial(LlamaCpp, case, flash) for flash in (True, False)]
    if args.peer == "transformers":
        theirs = partial(Transformers, case, cache(partial(llama, case)))  # they share the model
        budgets = {x.budget for x in chosen if isinstance(x.budget, int)}
        every += [partial(theirs, name) for name in ("dynamic", "static")]
        every += [partial(theirs, "dynamic", kept) for kept in sorted(budgets) if kept < case.context]
        every += [partial(theirs, "static, compiled")] * case.compile
    return every


def profile(contenders: list, path: str) -> None:
    """Writes a trace of two steps per contender, for chrome://tracing or perfetto."""
    with torch.profiler.profile(acc_events=True) as trace:
        for contender in contenders:
            with torch.profiler.record_function(contender.label):
                contender.step()
                contender.step()
    trace.export_chrome_trace(path)


# Whole generations


def largest_batch(case: Case, method: Choice, free: float, cache: float | None) -> int:
    """The most rows whose caches fit in `cache` GB, and in `free` bytes beside a prompt in one layer and three copies
    of their logits."""
    most = math.inf if cache is None else 1e9 * cache
    logits = 3 * 4 * case.config["vocab_size"]
    layer = 8 * case.context * case.config["hidden_size"] * case.dtype.itemsize

    def overflows(batch: int) -> bool:
        plan = replace(case, batch=batch).plan()
        device, host = methods.planned_bytes(method.kv, plan, method.budget, method.options)
        whole = device + batch * logits + layer
        if case.device.type == "cpu":
            return device > most or whole + host > free
        return device > most or whole > free or host > free_bytes(torch.device("cpu"))

    return bisect(range(1, LARGEST + 1), False, key=overflows)


def generation(case: Case, method: Choice, weights: dict, new: int, steps: int) -> dict:
    """One row of the JSON object. Caches are planned for `case.steps` new tokens; the generation has `new` of them.

    Steps are timed at evenly spaced lengths from the prompt's to the final one. In between, the rows' positions
    advance without decoding: cache contents do not change the time. A token's share of the time in which rows make room
    on the way (`every`) is added to each. The ceiling is the tokens/s of the floors.
    """
    contender, batch = Ours(case, method, weights), case.batch
    engine, times, floors, room_s, skipped = contender.engine, [], [], 0.0, 0
    contender.start()
    lengths = [case.context + (new - 1) * i // (POINTS - 1) for i in range(POINTS)]
    for length in lengths:
        skipped += max(0, length - case.context - contender.new)
        room_s += contender.skip(length)
        contender.step()  # not timed: warms up
        times.append(1e3 * statistics.median(seconds(contender.step) for _ in range(steps)))
        device, host = (batch * bytes_ for bytes_ in engine.layers.step_bytes(length + 1))
        floors.append(case.floor_ms(step_weights(case, weights) + device, host))
    times = [ms + 1e3 * room_s / max(1, skipped) for ms in times]
    row = case.about() | contender.about() | {"new": new, "lengths": lengths, "ms": times}
    row |= {"ms_per_token": statistics.mean(times), "first_ms": times[0], "last_ms": times[-1]}
    row |= {"tokens_per_s": 1e3 * batch / statistics.mean(times)}
    row |= {"ceiling_tokens_per_s": 1e3 * batch / statistics.mean(floors)}
    return row | {"full_bytes": engine.plan.full_bytes(), "weight_bytes": sum(t.nbytes for t in weights.values())}


def generations(
    case: Case, chosen: list[Choice], batches: list[int] | None, cache: float | None, new: int, steps: int
) -> Iterator[dict]:
    """Yields a row per method and batch. batches None: the largest batch that fits on the device, or in `cache` GB."""
    case = replace(case, steps=new + steps + 2, prefill=False)
    weights = random_weights(case)
    for method in tqdm(chosen, unit="method", disable=None, leave=False):
        for batch in batches or [largest_batch(case, method, free_bytes(case.device), cache)]:
            if not batch:
                print(f"left out: {method.label} does not fit even with one row", file=sys.stderr)
                continue
            yield generation(replace(case, batch=batch), method, weights, new, steps)
            torch._dynamo.reset()
