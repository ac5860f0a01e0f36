"""Pools of K and V, on the device or on the host, from which a step fetches a few rows.

A pool is [rows, ...]. `Pool` (pool.py) is memory that the device can address: its own, or pinned host memory, which
a gather on a GPU reads through a view (the direct engine: no host round trip, all of it inside a captured graph).
`ThreadedPool` is host memory: threads gather the requested rows into pinned staging buffers, two per thread, and copy
them to the device on the pool's own stream.

Both have one interface. During prefill, call `write`, and `settle` at its end. In a step, call `issue` as soon as the
requested rows are known, `wait` when they are needed, `take` for each layer's part. Threads fetch between `issue` and
`wait`; the direct engine reads in `take`. The host's work in a step is two custom ops, which CUDA graphs leave out.
Without a GPU everything runs in ordinary memory.
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

from kv.method import Method, Shape, option
from kv.parts import inductor
from kv.parts.pool import Pool

CHUNK = 4 << 20  # the most bytes of a staging buffer
WIDE = 64 << 10  # bytes from which a row gets a copy of its own, without staging


@dataclass(frozen=True)
class OffloadMethod(Method):
    """A method that may keep most of the prompt on the host."""

    offload: bool = option(False, "most of the prompt lives on the host")
    engine: Literal["auto", "direct", "threads"] = option("auto", "who fetches: the device, or host threads")
    threads: int = option(4, "host threads that fetch", min=1, max=256)

    def threaded(self, shape: Shape, early: bool = False) -> bool:
        """Whether threads fetch rows. With engine=auto they do for rows issued `early` to a GPU.

        On a CPU they would compete for the cores that compute; engine=threads is for those with cores to spare.
        """
        auto = early and shape.device.type == "cuda"
        return self.offload and (self.engine == "threads" or (self.engine == "auto" and auto))

    def staged(self, slots: int, width: tuple[int, ...], shape: Shape, early: bool = False) -> "Staged | None":
        """The buffer where rows arrive, at most `slots` per step; None unless threads fetch them."""
        return Staged(slots, width, shape.dtype, shape.device) if self.threaded(shape, early) else None

    def pool(
        self,
        what: str,
        rows: int,
        width: tuple[int, ...],
        staged: "Staged | None",
        shape: Shape,
        workers: "Workers",
        delta: bool = False,
    ) -> "Pool":
        """A pool of the kind the options ask for; `what` names it in errors; `delta`: see ThreadedPool."""
        if staged is None:
            return Pool(what, rows, width, shape.dtype, shape.device, host=self.offload)
        return ThreadedPool(what, rows, width, staged, workers, delta)


class Workers:
    """Threads that pools share, each with two pinned staging buffers; they start with the first job."""

    def __init__(self, threads: int):
        self.threads, self.free = threads, queue.SimpleQueue()
        self.executor = ThreadPoolExecutor(threads, "kv-offload", initializer=torch.set_num_threads, initargs=(1,))
        self.owner: int | None = None  # handle of the pool that counts the buffers' bytes
        self.buffers = torch.empty(threads, 2, 0, dtype=torch.uint8)

    def reserve(self, pool: "ThreadedPool", size: int) -> None:
        """Ensures that each staging buffer has at least `size` bytes."""
        self.owner = pool.handle if self.owner is None else self.owner
        if size > self.buffers.shape[2]:
            where = {"device": "meta"} if pool.device.type == "meta" else {"pin_memory": pool.device.type == "cuda"}
            self.buffers = torch.zeros(self.threads, 2, size, dtype=torch.uint8, **where)
            self.free = queue.SimpleQueue()
            for pair in self.buffers:
                self.free.put([[buffer, None] for buffer in pair])  # each with the event of the last copy from it


class Staged:
    """A device buffer where fetched rows arrive; pools without `delta` that fetch in turn may share it."""

    def __init__(self, slots: int, width: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.rows = torch.zeros(slots, *width, dtype=dtype, device=device)
        if device.type == "cuda":
            torch._dynamo.mark_static_address(self.rows)
        self.user: ref[ThreadedPool] = lambda: None  # the pool that fetched last
        self.owner: int | None = None  # handle of the pool that counts the buffer's bytes


class ThreadedPool(Pool):
    """Threads fetch rows to the slots of `staged`; with `delta`, only rows that a slot does not already hold."""

    def __init__(self, what: str, rows: int, width: tuple[int, ...], staged: Staged, workers: Workers, delta: bool):
        dtype, device, slots = staged.rows.dtype, staged.rows.device, len(staged.rows)
        super().__init__(what, rows, width, dtype, device, host=True)
        self.staged, self.workers, self.delta = staged, workers, delta
        count = min(workers.threads, slots)
        self.parts = [(i * slots // count, (i + 1) * slots // count) for i in range(count)]
        row = self.memory[:1].nbytes
        self.chunk = min(max(1, CHUNK // row), -(-slots // count))  # rows per staging buffer
        self.handle = next(_handles)
        self.number = inductor.symbol(self.handle, device)
        staged.owner = self.handle if staged.owner is None else staged.owner
        workers.reserve(self, self.chunk * row if row < WIDE else 1)
        where = {"device": "meta"} if device.type == "meta" else {"pin_memory": device.type == "cuda"}
        # For each slot, the row requested and the row held; and slot numbers that are copied to the device.
        self.ids, self.held, self.numbers = (torch.full((slots,), -1, **where) for _ in range(3))
        self.jobs: list[Future] = []
        _pools[self.handle] = self

    @property
    def host_bytes(self) -> int:
        return self.memory.nbytes + self.overhead() - self.staged_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of `staged` on the device, or 0 if another pool counts them."""
        return self.staged.rows.nbytes if self.staged.owner == self.handle else 0

    @property
    def buffer(self) -> Tensor:
        return self.staged.rows

    def overhead(self) -> int:
        shared = self.workers.buffers.nbytes if self.workers.owner == self.handle else 0
        return sum(x.nbytes for x in (self.ids, self.held, self.numbers)) + self.staged_bytes + shared

    def part(self, start: int, count: int) -> Tensor:
        self.drain()
        self.held[(self.held >= start) & (self.held < start + count)] = -1  # the caller may write to it
        return super().part(start, count)

    def write(self, start: int, values: Tensor, *column: int | slice) -> None:
        self.drain()
        self.held[(self.held >= start) & (self.held < start + len(values))] = -1
        if self.stream is not None:
            return super().write(start, values, *column)
        target = self.rows[(slice(start, start + len(values)), *column)]
        self.pend(self.workers.executor.submit(target.copy_, values))

    def settle(self, left: int = 0) -> None:
        super().settle(left)
        torch.set_num_threads(torch.get_num_threads())  # else new threads would inherit the workers' setting, 1

    def issue(self, ids: Tensor, active: Tensor, y: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        asked = torch.where(active[:, None], ids.view(len(active), -1), -1).flatten()
        ticket = torch.ops.kv_fast.issue(asked, ids if after is None else after, self.number.shape[0])
        return ticket, y + ticket.to(y.dtype)  # adds 0: only the data dependence matters

    def wait(self, ticket: Tensor, before: Tensor) -> Tensor:
        return torch.ops.kv_fast.wait(ticket, before, self.number.shape[0])

    def take(self, waited: Tensor, *column: int | Tensor) -> Tensor:
        slots = torch.arange(len(self.staged.rows), device=self.device) + waited  # adds 0, as `issue` does
        return self.staged.rows[(slots, *column)]

    def ticket(self, count: int) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    def start(self, ids: Tensor) -> None:
        """Makes the threads fetch rows ids [slots]; below 0: none."""
        before = self.staged.user()
        if before is not None:
            before.drain()
        self.staged.user = ref(self)
        self.ids.copy_(ids, non_blocking=True)
        known = None if self.stream is None else torch.cuda.current_stream(self.device).record_event()
        self.jobs = [self.workers.executor.submit(self.fetch, *part, known) for part in self.parts]

    def finish(self) -> None:
        """Waits until the rows are in `staged`. Raises RuntimeError if a thread failed."""
        errors = self.drain()
        if errors:
            raise RuntimeError(f"{self.what}: {errors[0]}") from errors[0]

    def drain(self) -> list[BaseException]:
        """Waits for the threads, and makes the device wait for their copies; returns the threads' errors."""
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
        """Fetches one thread's part of the slots: (rows requested, rows fetched, event after the copies)."""
        if known is not None:
            known.synchronize()  # now the ids are here, and the device has read the slots' earlier contents
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
                for i in range(0, len(slots), self.chunk):
                    self.bring(ids[i : i + self.chunk], slots[i : i + self.chunk], buffers[i // self.chunk % 2])
        finally:
            self.workers.free.put(buffers)
        self.held[slots] = ids
        return asked, len(slots), None if self.stream is None else self.stream.record_event()

    def bring(self, ids: Tensor, slots: Tensor, buffer: list) -> None:
        """Copies rows to slots, through a pinned buffer unless they are wide; buffer: [memory, last copy's event]."""
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
        if consecutive(slots):
            self.staged.rows[slots[0] : slots[-1] + 1].copy_(found, non_blocking=True)
        else:
            numbers = self.numbers[slots[0] : slots[0] + len(slots)].copy_(slots)  # this thread's part of `numbers`
            to = numbers.to(self.device, non_blocking=True)
            self.staged.rows.index_copy_(0, to, found.to(self.device, non_blocking=True))
        buffer[1] = None if self.stream is None else self.stream.record_event()

    def gather(self, ids: Tensor, buffer: Tensor) -> Tensor:
        """The rows in one piece of pinned memory: a view of the pool if consecutive, else gathered in `buffer`."""
        if consecutive(ids):
            return self.memory[ids[0] : ids[-1] + 1]
        return torch.index_select(self.memory, 0, ids, out=buffer)

    def close(self) -> None:
        self.workers.executor.shutdown()
        super().close()


def consecutive(numbers: Tensor) -> bool:
    """Whether each number is the previous one plus 1."""
    return bool((numbers.diff() == 1).all())


# Compiled steps refer to pools by handle: a number that equals no size, so that a compiler does not relate them.
_handles = itertools.count(1 << 40)
_pools: WeakValueDictionary[int, ThreadedPool] = WeakValueDictionary()


@torch.library.custom_op("kv_fast::issue", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _issue(ids: Tensor, after: Tensor, pool: int) -> Tensor:
    _pools[pool].start(ids)
    return ids.new_zeros(1)


@_issue.register_fake
def _(ids: Tensor, after: Tensor, pool: int) -> Tensor:
    return ids.new_empty(1)


@torch.library.custom_op("kv_fast::wait", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _wait(ticket: Tensor, before: Tensor, pool: int) -> Tensor:
    _pools[pool].finish()
    return ticket.new_zeros(1)


@_wait.register_fake
def _(ticket: Tensor, before: Tensor, pool: int) -> Tensor:
    return ticket.new_empty(1)
