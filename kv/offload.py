"""Rows of memory that a step picks from, on the device or on the host: the one room that knows of two places.

A pool is [rows, ...]; what a layer reads in a step is a few of its rows. `Pool` is memory that the device itself can
address: its own, or pinned memory of the host, which a gather on a GPU reads through a view (the direct engine: no
host round trip, all of it inside a captured graph). `ThreadedPool` is host memory of which threads gather the wanted
rows into pinned staging buffers, two for each thread, and copy them to the device on a stream of their own.

Both are used alike: `write` during prefill, `settle` when it is over; in a step `issue` as soon as the wanted rows are
known, `wait` when they are needed, `take` for each layer's part. The threads work meanwhile; the direct engine reads
when rows are taken. The host's work in a step is two custom ops that CUDA graphs leave out. Without a GPU all of it
runs in ordinary memory.
"""

import itertools
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from kv.base import Method, Shape, option
from kv.pool import Pool

CHUNK = 4 << 20  # bytes of a staging buffer
WIDE = 64 << 10  # bytes of a row that is worth a copy of its own


@dataclass(frozen=True)
class OffloadMethod(Method):
    """A method that may keep most of the prompt on the host."""

    offload: bool = option(False, "most of the prompt lives on the host")
    engine: Literal["auto", "direct", "threads"] = option("auto", "who fetches: the GPU itself, or threads of the host")
    threads: int = option(4, "of the host, that fetch", min=1, max=256)

    def threaded(self, shape: Shape, early: bool = False) -> bool:
        """Whether threads fetch rows; unless told, they do if rows are wanted `early`."""
        direct = self.engine == "direct" or (self.engine == "auto" and shape.device.type == "cuda" and not early)
        return self.offload and not direct

    def staged(self, slots: int, width: tuple[int, ...], shape: Shape, early: bool = False) -> "Staged | None":
        """Where rows arrive, at most `slots` a step, if threads fetch them."""
        return Staged(slots, width, shape.dtype, shape.device) if self.threaded(shape, early) else None

    def pool(self, what: str, rows: int, width: tuple[int, ...], staged: "Staged | None", shape: Shape,
             workers: "Workers", delta: bool = False) -> "Pool":  # fmt: skip
        """Where the options say, and with `delta` as in ThreadedPool."""
        if staged is None:
            return Pool(what, rows, width, shape.dtype, shape.device, host=self.offload)
        return ThreadedPool(what, rows, width, staged, workers, delta)


class Workers:
    """Threads that pools share, and for each of them two pinned buffers; they begin with the first work."""

    def __init__(self, threads: int):
        self.threads, self.free = threads, queue.SimpleQueue()
        self.executor = ThreadPoolExecutor(threads, "kv-offload", initializer=torch.set_num_threads, initargs=(1,))
        self.owner: int | None = None  # the pool that counts the buffers
        self.buffers = torch.empty(threads, 2, 0, dtype=torch.uint8)

    def reserve(self, pool: "ThreadedPool", size: int) -> None:
        """Buffers of at least so many bytes."""
        self.owner = pool.handle if self.owner is None else self.owner
        if size > self.buffers.shape[2]:
            where = {"device": "meta"} if pool.device.type == "meta" else {"pin_memory": pool.device.type == "cuda"}
            self.buffers = torch.zeros(self.threads, 2, size, dtype=torch.uint8, **where)
            self.free = queue.SimpleQueue()
            for pair in self.buffers:
                self.free.put([[buffer, None] for buffer in pair])  # each with the event of the copy from it


class Staged:
    """Where rows arrive on the device; pools that are waited for in turn may share it."""

    def __init__(self, slots: int, width: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.rows = torch.zeros(slots, *width, dtype=dtype, device=device)
        self.user: ref[ThreadedPool] = lambda: None  # whose rows came last
        self.owner: int | None = None  # the pool that counts them


class ThreadedPool(Pool):
    """Threads bring rows to `staged`; with `delta` only those that their slots do not hold already."""

    def __init__(self, what: str, rows: int, width: tuple[int, ...], staged: Staged, workers: Workers, delta: bool):
        dtype, device, slots = staged.rows.dtype, staged.rows.device, len(staged.rows)
        super().__init__(what, rows, width, dtype, device, host=True)
        self.staged, self.workers, self.delta = staged, workers, delta
        count = min(workers.threads, slots)
        self.parts = [(i * slots // count, (i + 1) * slots // count) for i in range(count)]
        row = self.memory[:1].nbytes
        self.chunk = min(max(1, CHUNK // row), -(-slots // count))  # rows of a buffer
        self.handle = next(_handles)
        staged.owner = self.handle if staged.owner is None else staged.owner
        workers.reserve(self, self.chunk * row if row < WIDE else 1)
        where = {"device": "meta"} if device.type == "meta" else {"pin_memory": device.type == "cuda"}
        # The row wanted in each slot, the row in it, and numbers of slots on their way to the device.
        self.ids, self.held, self.numbers = (torch.full((slots,), -1, **where) for _ in range(3))
        self.jobs: list[Future] = []
        _pools[self.handle] = self

    @property
    def host_bytes(self) -> int:
        return self.memory.nbytes + self.overhead() - self.staged_bytes

    @property
    def staged_bytes(self) -> int:
        """If no other pool counts them."""
        return self.staged.rows.nbytes if self.staged.owner == self.handle else 0

    @property
    def buffer(self) -> Tensor:
        return self.staged.rows

    def overhead(self) -> int:
        shared = self.workers.buffers.nbytes if self.workers.owner == self.handle else 0
        return sum(x.nbytes for x in (self.ids, self.held, self.numbers)) + self.staged_bytes + shared

    def write(self, start: int, values: Tensor, *column: int | slice) -> None:
        self.drain()
        self.held[(self.held >= start) & (self.held < start + len(values))] = -1
        if self.stream is not None:
            return super().write(start, values, *column)
        target = self.rows[(slice(start, start + len(values)), *column)]
        self.pend(self.workers.executor.submit(target.copy_, values))

    def settle(self, left: int = 0) -> None:
        super().settle(left)
        torch.set_num_threads(torch.get_num_threads())  # for threads to come, what a worker has set for itself

    def issue(self, ids: Tensor, asked: Tensor, y: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        token = torch.ops.kv_fast.issue(torch.where(asked, ids, -1), ids if after is None else after, self.handle)
        return token, y + token.to(y.dtype)  # it is 0

    def wait(self, token: Tensor, before: Tensor) -> Tensor:
        return torch.ops.kv_fast.wait(token, before, self.handle)

    def take(self, waited: Tensor, *column: int) -> Tensor:
        return waited[(slice(None), *column)]

    def start(self, ids: Tensor) -> None:
        """Sets the threads to work."""
        before = self.staged.user()
        if before is not None:
            before.drain()
        self.staged.user = ref(self)
        self.ids.copy_(ids, non_blocking=True)
        known = None if self.stream is None else torch.cuda.current_stream(self.device).record_event()
        self.jobs = [self.workers.executor.submit(self.fetch, *part, known) for part in self.parts]

    def finish(self) -> Tensor:
        """What they brought, [slots, *width]. Raises RuntimeError if one of them failed."""
        errors = self.drain()
        if errors:
            raise RuntimeError(f"{self.what}: {errors[0]}") from errors[0]
        return self.staged.rows.clone()

    def drain(self) -> list[BaseException]:
        """Waits for the threads: what went wrong. The device waits for their copies."""
        errors = []
        for job in self.jobs:
            if job.exception() is not None:
                errors.append(job.exception())
                continue
            asked, fetched, copied = job.result()
            self.counts = (self.counts[0] + asked, self.counts[1] + fetched)
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)
        self.jobs = []
        return errors

    def fetch(self, first: int, end: int, known: torch.cuda.Event | None) -> tuple[int, int, torch.cuda.Event | None]:
        """One thread's part of the slots: (rows wanted, rows fetched, when they are there)."""
        if known is not None:
            known.synchronize()
        wanted = self.ids[first:end] >= 0
        asked = int(wanted.sum())
        if self.delta:
            wanted &= self.ids[first:end] != self.held[first:end]
        slots = wanted.nonzero().flatten() + first
        ids = self.ids[slots]
        self.held[slots] = -1
        buffers = self.workers.free.get()
        try:
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                if known is not None:
                    self.stream.wait_event(known)  # what was there has been read
                for i in range(0, len(slots), self.chunk):
                    self.bring(ids[i : i + self.chunk], slots[i : i + self.chunk], buffers[i // self.chunk % 2])
        finally:
            self.workers.free.put(buffers)
        self.held[slots] = ids
        return asked, len(slots), None if self.stream is None else self.stream.record_event()

    def bring(self, ids: Tensor, slots: Tensor, buffer: list) -> None:
        """Rows to slots, by way of a pinned buffer if they are short."""
        if buffer[1] is not None:
            buffer[1].synchronize()
        try:
            if self.memory[:1].nbytes >= WIDE:
                for row, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                    self.staged.rows[slot].copy_(self.memory[row], non_blocking=True)
                return
            size = len(ids) * self.memory[:1].nbytes
            found = self.gather(ids, buffer[0][:size].view(self.memory.dtype).view(len(ids), *self.memory.shape[1:]))
        except Exception as error:
            raise RuntimeError(f"rows {ids.min()} to {ids.max()} could not be fetched ({error})") from error
        if follow(slots):
            self.staged.rows[slots[0] : slots[-1] + 1].copy_(found, non_blocking=True)
        else:
            numbers = self.numbers[slots[0] : slots[0] + len(slots)].copy_(slots)  # in one's own part of them
            to = numbers.to(self.device, non_blocking=True)
            self.staged.rows.index_copy_(0, to, found.to(self.device, non_blocking=True))
        buffer[1] = None if self.stream is None else self.stream.record_event()

    def gather(self, ids: Tensor, buffer: Tensor) -> Tensor:
        """Rows of the pool, one after the other in pinned memory: where they lie if they follow each other there."""
        if follow(ids):
            return self.memory[ids[0] : ids[-1] + 1]
        return torch.index_select(self.memory, 0, ids, out=buffer)

    def close(self) -> None:
        self.workers.executor.shutdown()
        super().close()


def follow(numbers: Tensor) -> bool:
    """Whether each is the one before and 1."""
    return bool((numbers.diff() == 1).all())


# A compiled step names its pools by number.
_handles = itertools.count()
_pools: WeakValueDictionary[int, ThreadedPool] = WeakValueDictionary()


@torch.library.custom_op("kv_fast::issue", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _issue(ids: Tensor, after: Tensor, pool: int) -> Tensor:
    _pools[pool].start(ids)
    return ids.new_zeros(1)


@_issue.register_fake
def _(ids: Tensor, after: Tensor, pool: int) -> Tensor:
    return ids.new_empty(1)


@torch.library.custom_op("kv_fast::wait", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _wait(token: Tensor, before: Tensor, pool: int) -> Tensor:
    return _pools[pool].finish()


@_wait.register_fake
def _(token: Tensor, before: Tensor, pool: int) -> Tensor:
    like = _pools[pool].staged.rows
    return token.new_empty(like.shape, dtype=like.dtype)
