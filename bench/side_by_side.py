"""Contenders in processes of their own: they compile side by side on shared weights, and each is timed alone.

On a GPU compiling takes a minute or two a method, on one core; timing takes a second. Nothing else runs on the GPU
while a contender is timed, nor while a compiler tries block sizes for a kernel.
"""

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

import kv as methods
from bench.contenders import Case, Ours, random_weights, seconds
from bench.measure import compare, largest_batch, prepare, timing
from runtime.device import free_bytes, memory_errors
from terminal.cli import Choice, one_line

MOST = 12
SPARE = 2.5e9  # bytes that a process takes beside its weights and caches


@dataclass
class Job:
    case: Case
    method: Choice
    bytes: float  # on the device
    group: int  # of those that are compared
    process: Any = None
    pipe: Connection | None = None


def side_by_side(args: argparse.Namespace, cases: list[Case], chosen: list[Choice]) -> Iterator[dict]:
    """Yields a row of the JSON object for each contender, as they are timed; at most MOST run at once.

    A case with a batch of 0 has the largest one for each method.
    """
    shared = next((case for case in cases if not case.quantize), None)
    weights, context, begin = shared and random_weights(shared), mp.get_context("spawn"), time.monotonic()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    os.environ["TORCHINDUCTOR_UNIQUE_KERNEL_NAMES"] = "0"  # so that methods share compiled kernels
    lock, free, waiting, running, done = context.RLock(), free_bytes(cases[0].device), [], [], {}
    for (group, case), method in itertools.product(enumerate(cases), chosen):
        try:
            batch = case.batch or largest_batch(case, method, free - SPARE - own_weights(case), args.cache)
            if not batch:
                raise ValueError(f"{method.label} does not fit even with one row")
            case = replace(case, batch=batch)
            waiting.append(Job(case, method, needed(case, method, free), group))
        except ValueError as error:
            print(f"left out: {one_line(error)}", file=sys.stderr)
    try:
        while waiting or running:
            if args.limit is not None and time.monotonic() - begin > args.limit and waiting:
                print(f"left out: contenders after --limit {args.limit}", file=sys.stderr)
                waiting.clear()
                continue
            while waiting and len(running) < MOST and sum(job.bytes for job in running) + waiting[0].bytes <= free:
                running.append(started(context, waiting.pop(0), args, weights, lock))
            pipe = wait([job.pipe for job in running])[0]
            job = next(job for job in running if job.pipe is pipe)
            running.remove(job)
            if (row := turn(job, running)) is not None:
                rows = done.setdefault(job.group, [])
                rows.append(row)
                compare(rows)
                yield row
    finally:
        for job in running:
            job.process.kill()  # one that stands still, too


def own_weights(case: Case) -> int:
    """Bytes of weights that a contender does not share."""
    return sum(t.nbytes for t in case.model().state_dict().values()) if case.quantize else 0


def needed(case: Case, method: Choice, free: int) -> float:
    """Bytes that a contender takes on the device, beside weights that it shares. Raises ValueError if not so many are
    free, or if the method cannot be built."""
    device, host = methods.planned_bytes(method.kv, case.plan(), method.budget, method.options)
    total = device + own_weights(case) + SPARE + (host if case.device.type == "cpu" else 0)
    if total > free:
        raise ValueError(f"{method.label} takes {total / 1e9:.1f} GB, and {free / 1e9:.1f} are free")
    return total


def started(context, job: Job, args: argparse.Namespace, weights: dict | None, lock) -> Job:
    job.pipe, theirs = context.Pipe()
    job.process = context.Process(target=contend, args=(job.case, job.method, args, weights, lock, theirs), daemon=True)
    job.process.start()
    theirs.close()
    return job


def turn(job: Job, others: list[Job]) -> dict | None:
    """Times a contender that is ready, while the others stand still. None if it failed, and has said why."""
    for other in others:
        os.kill(other.process.pid, signal.SIGSTOP)
    try:
        job.pipe.recv()
        job.pipe.send(None)
        return job.pipe.recv()
    except EOFError:
        return None
    finally:
        for other in others:
            os.kill(other.process.pid, signal.SIGCONT)
        job.process.join()


def contend(case: Case, method: Choice, args: argparse.Namespace, weights: dict | None, lock, pipe: Connection) -> None:
    """A process: makes and warms up the contender, waits for its turn, and sends its row."""
    tune_alone(lock)
    try:
        with memory_errors():
            if case.quantize or weights is None:
                with lock:
                    weights = random_weights(case)
            contender = Ours(case, method, weights)
            with lock:
                row = prepare(case, contender, weights)
    except ValueError as error:
        print(f"left out: {one_line(error)}", file=sys.stderr)
        return
    pipe.send(None)
    pipe.recv()
    for _ in range(3):
        contender.step()
    pipe.send(row | timing(args, case, row, [1e3 * seconds(contender.step) for _ in range(args.repeats * args.steps)]))


def tune_alone(lock) -> None:
    """Makes this process's compiler hold `lock` while it times a kernel."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    bench = CachingAutotuner.bench

    def locked(*inputs, **named):
        with lock:
            return bench(*inputs, **named)

    CachingAutotuner.bench = locked
