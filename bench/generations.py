"""python -m bench --generate: tokens/s of whole generations, with --batch max for as many rows as fit in memory.

Steps are timed at evenly spaced lengths from the prompt's to the final one. In between, the rows' positions
advance without decoding: cache contents do not change the time. The ceiling is the tokens/s that the floors would give.
"""

import statistics
import sys
from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace

import torch
from tqdm import tqdm

import kv as methods
from bench.contenders import Case, Ours, random_weights, seconds, step_weights
from runtime.device import free_bytes
from terminal.cli import Choice

POINTS = 16  # lengths at which steps are timed
LARGEST = 4096  # the most rows


def largest_batch(case: Case, method: Choice, free: int) -> int:
    """The most rows whose caches fit in `free` bytes, beside three copies of their logits and a prompt in one layer."""
    logits = 3 * 4 * case.config["vocab_size"]
    layer = 8 * case.context * case.config["hidden_size"] * case.dtype.itemsize

    def overflows(batch: int) -> bool:
        shape = replace(case, batch=batch).shape()
        device, host = methods.planned_bytes(method.kv, shape, method.budget, method.options)
        device += batch * logits + layer
        if case.device.type == "cpu":
            return device + host > free
        return device > free or host > free_bytes(torch.device("cpu"))

    return bisect(range(1, LARGEST + 1), False, key=overflows)


def generation(case: Case, method: Choice, weights: dict, new: int, steps: int) -> dict:
    """One row of the JSON object. Caches are planned for `case.steps` new tokens; the generation has `new` of them."""
    contender = Ours(case, method, weights)
    engine, batch = contender.engine, case.batch
    contender.start()
    times, floors, lengths = [], [], [case.context + (new - 1) * i // (POINTS - 1) for i in range(POINTS)]
    for length in lengths:
        engine.state.pos.fill_(length)
        contender.new = length - case.context
        contender.step()  # not timed: warms up
        times.append(1e3 * statistics.median(seconds(contender.step) for _ in range(steps)))
        device, host = (batch * bytes_ for bytes_ in methods.step_bytes(engine.layers, length + 1))
        floors.append(case.floor_ms(step_weights(case, weights) + device, host))
    return (
        case.about()
        | contender.about()
        | {
            "new": new,
            "ms_per_token": statistics.mean(times),
            "first_ms": times[0],
            "last_ms": times[-1],
            "lengths": lengths,
            "ms": times,
            "tokens_per_s": 1e3 * batch / statistics.mean(times),
            "ceiling_tokens_per_s": 1e3 * batch / statistics.mean(floors),
            "full_bytes": engine.shape.full_bytes(),
            "weight_bytes": sum(t.nbytes for t in weights.values()),
        }
    )


def generations(
    case: Case, chosen: list[Choice], batches: list[int] | None, new: int, steps: int, memory: int | None = None
) -> Iterator[dict]:
    """Yields a row per method and batch. batches None: the largest batch that fits, within `memory` bytes if given."""
    case = replace(case, steps=new + steps + 2, prefill=False)
    weights = random_weights(case)
    weight_bytes = sum(t.nbytes for t in weights.values())
    for method in tqdm(chosen, unit="method", disable=None, leave=False):
        free = free_bytes(case.device)
        if memory is not None:
            free = min(free, memory - weight_bytes)
        for batch in batches or [largest_batch(case, method, free)]:
            if not batch:
                print(f"left out: {method.label} does not fit even with one row", file=sys.stderr)
                continue
            yield generation(replace(case, batch=batch), method, weights, new, steps)
            torch._dynamo.reset()
