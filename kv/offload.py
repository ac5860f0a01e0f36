"""Rows of memory that a step picks from, on the device or on the host: the one room that knows of two places.

A pool is [rows, ...]; what a layer reads in a step is a few of its rows. `Pool` is memory that the device itself can
address: its own, or pinned memory of the host, which a gather on a GPU reads through a view (the direct engine: no
host round trip, all of it inside a captured graph). `ThreadedPool` is host memory of which threads gather the wanted
rows into pinned staging buffers, two for each thread, and copy them to the device on a stream of their own.

Both are used alike: `write` during prefill, `settle` when it is over; in a step `issue` as soon as the wanted rows are
known, `wait` when they are needed, `take` for each layer's part. The host's work in a step is two custom ops that CUDA
graphs leave out; their order comes from the token that `issue` returns and `wait` takes. Without a GPU all of it runs
in ordinary memory.
"""

import itertools
import resource
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from kv.base import Shape

CHUNK = 4 << 20  # bytes of a staging buffer
BACKLOG = 4  # writes that may be under way


@dataclass(frozen=True)
class Options:
    """Of every method that offloads."""

    offload: bool = field(default=False, metadata={"help": "most of the prompt lives on the host"})
    engine: Literal["auto", "direct", "threads"] = field(
        default="auto", metadata={"help": "who fetches: the GPU itself, or threads of the host"}
    )
    threads: int = field(default=4, metadata={"help": "of the host, that fetch", "min": 1, "max": 256})

    def workers(self) -> ThreadPoolExecutor:
        """Threads for pools to share. They begin with the first work, and end with the pools or with Python."""
        return workers(self.threads)

    def pool(self, what: str, rows: int, width: tuple[int, ...], slots: int, shape: Shape,
             workers: ThreadPoolExecutor, delta: bool = False) -> "Pool":  # fmt: skip
        """Where the options say: a step wants at most `slots` of its rows, and `delta` as in ThreadedPool."""
        direct = self.engine == "direct" or (self.engine == "auto" and shape.device.type == "cuda")
        if direct or not self.offload:
            return Pool(what, rows, width, shape.dtype, shape.device, host=self.offload)
        return ThreadedPool(what, rows, width, shape.dtype, shape.device, slots, workers, delta)


class Pool:
    """[rows, *width] where the device can address it: on the device, or `host`."""

    host_bytes = 0  # taken on the host
    counts = (0, 0)  # rows that threads were asked for, and rows that they fetched

    def __init__(self, what: str, rows: int, width: tuple[int, ...], dtype: torch.dtype, device: torch.device,
                 host: bool = False):  # fmt: skip
        self.what, self.device = what, device
        if host:
            self.memory, self.rows = host_memory(what, (rows, *width), dtype, device)
            self.host_bytes = self.memory.nbytes
        else:
            self.memory = self.rows = torch.zeros(rows, *width, dtype=dtype, device=device)
        self.stream = torch.cuda.Stream(device) if host and device.type == "cuda" else None
        self.writing: deque[torch.cuda.Event | Future] = deque()

    def write(self, start: int, values: Tensor, *column: int) -> None:
        """values [n, ...] become `column` of the rows from `start` on; later layers may compute meanwhile."""
        target = self.rows[(slice(start, start + len(values)), *column)]
        if self.stream is None:
            target.copy_(values)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(values)
            values.record_stream(self.stream)
            self.pend(self.stream.record_event())

    @property
    def buffer(self) -> Tensor | None:
        """What the pool holds on the device, for its owner to register."""
        return None if self.host_bytes else self.rows

    def pend(self, write: torch.cuda.Event | Future) -> None:
        self.writing.append(write)
        self.settle(BACKLOG)

    def settle(self, left: int = 0) -> None:
        """Waits until at most `left` writes are under way. Raises what a write raised."""
        while len(self.writing) > left:
            write = self.writing.popleft()
            write.result() if isinstance(write, Future) else write.synchronize()

    def issue(self, ids: Tensor) -> Tensor:
        """Says which rows are wanted, ids [N] int64, below 0 none -> what `wait` takes."""
        return ids

    def wait(self, token: Tensor) -> Tensor:
        """-> what `take` takes."""
        return token

    def take(self, waited: Tensor, *column: int) -> Tensor:
        """`column` of the wanted rows, [N, ...]; where none was wanted it is any."""
        return self.rows[(waited.clamp(min=0), *column)]

    def overhead(self) -> int:
        """Bytes of staging buffers, on the device and on the host."""
        return 0

    def close(self) -> None:
        """Ends what runs beside the caller."""
        self.settle()


class ThreadedPool(Pool):
    """Threads bring at most `slots` rows at a time; with `delta` only those that their slots do not hold already.

    They come to a buffer of the pool's own, or to `staged`, which pools that are waited for in turn may share.
    """

    def __init__(self, what: str, rows: int, width: tuple[int, ...], dtype: torch.dtype, device: torch.device,
                 slots: int, workers: ThreadPoolExecutor, delta: bool, staged: Tensor | None = None):  # fmt: skip
        super().__init__(what, rows, width, dtype, device, host=True)
        self.workers, self.delta, threads = workers, delta, workers._max_workers
        self.staged = torch.zeros(slots, *width, dtype=dtype, device=device) if staged is None else staged
        self.parts = [(i * slots // threads, (i + 1) * slots // threads) for i in range(threads)]
        self.parts = [part for part in self.parts if part[0] < part[1]]
        self.jobs: list[Future] = []
        self.held = torch.full((slots,), -1)  # the row in each slot
        row = max(1, self.memory[:1].nbytes)
        size = (len(self.parts), 2, min(max(1, CHUNK // row), -(-slots // threads)), *width)
        where = {"device": "meta"} if device.type == "meta" else {"pin_memory": device.type == "cuda"}
        self.ids = torch.full((slots,), -1, **where)  # wanted now
        self.staging = torch.zeros(size, dtype=dtype, **where)
        self.host_bytes += self.overhead() - self.staged.nbytes
        self.handle = next(_handles)
        _pools[self.handle] = self

    def write(self, start: int, values: Tensor, *column: int) -> None:
        self.held[(self.held >= start) & (self.held < start + len(values))] = -1
        if self.stream is not None:
            return super().write(start, values, *column)
        self.pend(self.workers.submit(self.rows[(slice(start, start + len(values)), *column)].copy_, values))

    def issue(self, ids: Tensor) -> Tensor:
        return torch.ops.kv_fast.issue(ids, self.handle)

    def wait(self, token: Tensor) -> Tensor:
        return torch.ops.kv_fast.wait(token, self.handle)

    def take(self, waited: Tensor, *column: int) -> Tensor:
        return waited[(slice(None), *column)]

    @property
    def buffer(self) -> Tensor:
        return self.staged

    def start(self, ids: Tensor) -> None:
        """Sets the threads to work."""
        self.drain()
        self.ids.copy_(ids, non_blocking=True)
        known = None if self.stream is None else torch.cuda.current_stream().record_event()
        self.jobs = [self.workers.submit(self.fetch, i, known) for i in range(len(self.parts))]

    def finish(self) -> Tensor:
        """What they brought, [slots, *width]. Raises RuntimeError if one of them failed."""
        errors = self.drain()
        if errors:
            raise RuntimeError(f"{self.what}: {errors[0]}") from errors[0]
        return self.staged.clone()

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
                torch.cuda.current_stream().wait_event(copied)
        self.jobs = []
        return errors

    def fetch(self, part: int, known: torch.cuda.Event | None) -> tuple[int, int, torch.cuda.Event | None]:
        """One thread's part of the slots: (rows wanted, rows fetched, when they are there)."""
        first, end = self.parts[part]
        if known is not None:
            known.synchronize()
        ids, held, copied = self.ids[first:end], self.held[first:end], [None, None]
        any_row = ids >= 0
        wanted = (any_row & (ids != held) if self.delta else any_row).nonzero().flatten()
        held[wanted] = -1
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if known is not None:
                self.stream.wait_event(known)  # what was there has been read
            for i, slots in enumerate(wanted.split(self.staging.shape[2]) if len(wanted) else ()):
                if copied[i % 2] is not None:
                    copied[i % 2].synchronize()
                rows = ids[slots]
                try:
                    found = self.gather(rows, self.staging[part, i % 2, : len(slots)])
                except Exception as error:
                    names = f"{rows.min()} to {rows.max()}"
                    raise RuntimeError(f"rows {names} could not be fetched ({error})") from error
                to = (slots + first).to(self.device)
                self.staged.index_copy_(0, to, found.to(self.device, non_blocking=True))
                copied[i % 2] = None if self.stream is None else self.stream.record_event()
        held[wanted] = ids[wanted]
        done = None if self.stream is None else self.stream.record_event()
        return int(any_row.sum()), len(wanted), done

    def gather(self, ids: Tensor, staging: Tensor) -> Tensor:
        """Rows of the pool, one after the other in pinned memory: where they lie if they follow each other there."""
        if (ids.diff() == 1).all():
            return self.memory[ids[0] : ids[0] + len(ids)]
        return torch.index_select(self.memory, 0, ids, out=staging)

    def overhead(self) -> int:
        return sum(x.nbytes for x in (self.staged, self.staging, self.ids, self.held))

    def close(self) -> None:
        self.workers.shutdown(cancel_futures=True)
        super().close()


def workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "kv-offload", initializer=torch.set_num_threads, initargs=(1,))


def host_memory(what: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory of the host, and the same as `device` sees it: pinned, where that is a GPU.

    Raises ValueError with what was asked for and what there is.
    """
    if device.type == "meta":
        memory = torch.empty(size, dtype=dtype, device=device)
        return memory, memory
    needed = torch.empty(size, dtype=dtype, device="meta").nbytes
    free = available()
    asked = f"{what} need {needed / 1e9:.2f} GB of host memory"
    if needed > free:
        raise ValueError(f"{asked} and {free / 1e9:.2f} GB are free: shorten the prompt, or lower --batch")
    try:
        memory = torch.zeros(size, dtype=dtype)
    except RuntimeError as error:
        raise ValueError(f"{asked}, which cannot be allocated ({str(error).splitlines()[0]})") from None
    if device.type != "cuda":
        return memory, memory
    cuda = torch.cuda.cudart()  # torch's own pinned memory comes in powers of two
    if error := int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 2)):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "no limit" if limit == resource.RLIM_INFINITY else f"a limit of {limit / 1e9:.2f} GB"
        raise ValueError(f"{asked}, which cannot be pinned (CUDA error {error}; {free / 1e9:.2f} GB are free, {limit})")
    finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
    return memory, as_device(memory, device)


def as_device(memory: Tensor, device: torch.device) -> Tensor:
    """Pinned memory of the host as a tensor of a GPU, which reads and writes it over the bus."""
    integer = {2: torch.int16, 4: torch.int32}[memory.dtype.itemsize]  # the interface knows no bfloat16

    class Pinned:
        owner = memory
        __cuda_array_interface__ = {
            "shape": tuple(memory.shape), "typestr": f"<i{memory.dtype.itemsize}", "strides": None, "version": 3,
            "data": (memory.data_ptr(), False),
        }  # fmt: skip

    view = torch.as_tensor(Pinned(), device=device)
    assert view.dtype == integer and view.data_ptr() == memory.data_ptr()
    view = view.view(memory.dtype)
    torch._dynamo.mark_static_address(view)
    return view


def available() -> int:
    """Bytes of host memory that could still be allocated."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


# A compiled step names its pools by number.
_handles = itertools.count()
_pools: WeakValueDictionary[int, ThreadedPool] = WeakValueDictionary()


@torch.library.custom_op("kv_fast::issue", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _issue(ids: Tensor, pool: int) -> Tensor:
    _pools[pool].start(ids)
    return ids.new_zeros(1)


@_issue.register_fake
def _(ids: Tensor, pool: int) -> Tensor:
    return ids.new_empty(1)


@torch.library.custom_op("kv_fast::wait", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _wait(token: Tensor, pool: int) -> Tensor:
    return _pools[pool].finish()


@_wait.register_fake
def _(token: Tensor, pool: int) -> Tensor:
    like = _pools[pool].staged
    return token.new_empty(like.shape, dtype=like.dtype)
