"""Pools of K and V, on the device or on the host, from which a step fetches a few entries.

`Pool` is memory that the device can address: its own, or pinned host memory, which a gather on a GPU reads
through a view (the direct engine: no host round trip, all of it inside a captured graph). `ThreadedPool` is host
memory: threads gather the requested entries into pinned staging buffers, two per thread, and copy them to the device on
the pool's own stream.

Both have one interface. During prefill, call `write`, and `settle` at its end. In a step, call `issue` as soon as the
requested entries are known, `wait` when they are needed, `take` for each layer's part. Threads fetch between `issue`
and `wait`; the direct engine reads in `take`. The host's work in a step is two custom ops, which CUDA graphs leave out.
Without a GPU everything runs in ordinary memory.
"""

import itertools
import queue
import resource
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor

from kv.method import Method, Plan, option
from kv.parts import inductor

BACKLOG = 4  # writes that may be in flight; until then, what they write stays in the device's memory
CHUNK = 4 << 20  # the most bytes of a staging buffer
WIDE = 64 << 10  # bytes from which an entry gets a copy of its own, without staging


class Pool:
    """Entries of each row, size [B,count,...], on the device or, with `host`, in pinned host memory.

    `what` names the pool in errors.
    """

    writing: deque[torch.cuda.Event | Future] = deque()  # in flight, of all pools
    counts = (0, 0)  # entries requested from threads, and entries they fetched

    def __init__(self, what: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, host: bool = False):
        self.what, (self.batch, self.count), self.device, self.on_host = what, size[:2], device, host
        size = (self.batch * self.count, *size[2:])  # [B count,...]
        if host:
            self.memory, self.entries = host_memory(what, size, dtype, device)
        else:
            self.memory = self.entries = torch.zeros(size, dtype=dtype, device=device)
        self.stream = torch.cuda.Stream(device) if host and device.type == "cuda" else None

    @property
    def host_bytes(self) -> int:
        return self.memory.nbytes if self.on_host else 0

    @property
    def buffer(self) -> Tensor | None:
        """The pool's memory on the device, for its owner to register; None if there is none."""
        return None if self.on_host else self.entries

    def reset(self, row: int) -> None:
        """Zeroes what `take` reads of a row where no entry is requested."""
        self.part(row, 1).zero_()

    def write(self, row: int, start: int, values: Tensor, *column: int | slice) -> None:
        """Writes values [n, ...] to `column` of a row's entries from `start` on; later layers may compute meanwhile."""
        first = row * self.count + start
        self.copy(self.entries[(slice(first, first + len(values)), *column)], values)

    def copy(self, target: Tensor, values: Tensor) -> None:
        """Starts a write."""
        if self.stream is None:
            target.copy_(values)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(values)
            values.record_stream(self.stream)
            self.pend(self.stream.record_event())

    def part(self, row: int, count: int) -> Tensor:
        """A view of a row's first `count` entries, where the pool is: [count, *width]. Waits for writes and fetches."""
        self.settle()
        return self.memory[row * self.count :][:count]

    def read(self, row: int, count: int) -> Tensor:
        """A row's first `count` entries, on the device: [count, *width]."""
        return self.part(row, count).to(self.device)

    def pend(self, write: torch.cuda.Event | Future) -> None:
        self.writing.append(write)
        self.settle(BACKLOG)

    def settle(self, left: int = 0) -> None:
        """Waits until at most `left` writes of these pools are in flight. Raises what a write raised."""
        while len(self.writing) > left:
            write = self.writing.popleft()
            write.result() if isinstance(write, Future) else write.synchronize()

    def issue(self, index: Tensor, active: Tensor, y: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Requests of each row the entries index [B,...] int64 (below 0: none); of inactive rows nothing is fetched.

        Returns a ticket for `wait`, and y. The fetch starts after `after` (default: the index) is known and before the
        returned y is used: the caller continues with that one, because only a data dependence makes a compiler keep
        the order of two ops.
        """
        index = index.flatten(1)
        return (index.clamp(min=0) + self.firsts(index)).flatten(), y  # where none is requested, the row's first

    def firsts(self, index: Tensor) -> Tensor:
        """The number of each row's first entry, for index [B,...]: [B,1]."""
        return torch.arange(len(index), device=index.device)[:, None] * self.count

    def numbers(self, index: Tensor) -> Tensor:
        """The entries index [B,...] of each row, numbered over all rows: [N]; below 0: none."""
        index = index.flatten(1)
        return torch.where(index < 0, -1, index + self.firsts(index)).flatten()

    def wait(self, ticket: Tensor, before: Tensor) -> Tensor:
        """Returns the input of `take`. Waits only when `before` is known: its computation overlaps with the fetch."""
        return ticket

    def ticket(self, count: int) -> Tensor:
        """A tensor of the size and dtype of what `issue` and `wait` return for `count` entries of each row.

        A layer that leaves it for another layer copies it to a registered buffer of that size.
        """
        return torch.zeros(self.batch * count, dtype=torch.int64, device=self.device)

    def take(self, waited: Tensor, *column: int | Tensor) -> Tensor:
        """`column` of the requested entries, [N, ...]; undefined where none was requested."""
        at = inductor.stored(waited)  # a loop that also computed the numbers would read more slowly
        return self.entries[(at, *column)]

    def close(self) -> None:
        """Ends background work, and discards what a write raised."""
        for write in self.writing:
            write.exception() if isinstance(write, Future) else write.synchronize()
        self.writing.clear()


def host_memory(what: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Host memory, and the same memory as a tensor on `device`; pinned if that is a GPU.

    Raises ValueError, with the bytes needed, if it cannot be allocated or pinned.
    """
    if device.type == "meta":
        memory = torch.empty(size, dtype=dtype, device=device)
        return memory, memory
    needed = torch.empty(size, dtype=dtype, device="meta").nbytes
    asked = f"{what} need {needed / 1e9:.2f} GB of host memory"
    try:
        memory = torch.zeros(size, dtype=dtype)
    except RuntimeError as error:
        raise ValueError(f"{asked}, which cannot be allocated ({str(error).splitlines()[0]})") from None
    if device.type != "cuda":
        return memory, memory
    cuda = torch.cuda.cudart()  # torch would round pinned memory up to a power of two
    if error := int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 2)):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e9:.2f} GB"
        with suppress(RuntimeError):  # else the next call of CUDA would report the error again
            torch.zeros(1, device=device)
        raise ValueError(f"{asked}: pinning failed (CUDA error {error}, ulimit -l {limit})")
    finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
    return memory, as_device(memory, device)


def as_device(memory: Tensor, device: torch.device) -> Tensor:
    """Pinned host memory as a tensor on a GPU, which reads and writes it over the bus."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[memory.dtype.itemsize]  # the interface has no bfloat16

    interface = {
        "shape": tuple(memory.shape),
        "typestr": f"<i{memory.dtype.itemsize}",
        "strides": None,
        "version": 3,
        "data": (memory.data_ptr(), False),
    }
    view = torch.as_tensor(SimpleNamespace(owner=memory, __cuda_array_interface__=interface), device=device)
    assert view.dtype == integer and view.data_ptr() == memory.data_ptr()
    view = view.view(memory.dtype)
    torch._dynamo.mark_static_address(view)
    return view


class Workers:
    """Threads that pools share, each with two pinned staging buffers; they start with the first job."""

    def __init__(self, threads: int):
        self.threads, self.free, self.writing = threads, queue.SimpleQueue(), deque()
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
    """A device buffer [B,n,...] where `workers` put entries; pools without `delta` that fetch in turn may share it."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, workers: Workers):
        self.workers = workers
        self.slots = torch.zeros(size, dtype=dtype, device=device).flatten(0, 1)
        if device.type == "cuda":
            torch._dynamo.mark_static_address(self.slots)
        self.user: ref[ThreadedPool] = lambda: None  # the pool that fetched last


class ThreadedPool(Pool):
    """Threads fetch entries to the slots of `staged`; with `delta`, only those that a slot does not already hold."""

    def __init__(self, what: str, size: tuple[int, ...], staged: Staged, delta: bool = False):
        dtype, device, slots = staged.slots.dtype, staged.slots.device, len(staged.slots)
        super().__init__(what, size, dtype, device, host=True)
        self.staged, self.workers, self.delta = staged, staged.workers, delta
        self.writing = self.workers.writing  # a failed write is raised in its own engine
        entry = self.memory[:1].nbytes
        self.wide = entry >= WIDE
        threads = 1 if self.wide and self.stream else min(self.workers.threads, slots)  # a GPU copies wide ones itself
        self.parts = [(i * slots // threads, (i + 1) * slots // threads) for i in range(threads)]
        self.chunk = slots if self.wide else min(max(1, CHUNK // entry), -(-slots // threads))  # per staging buffer
        self.handle = next(_handles)
        self.symbol = inductor.symbol(self.handle, device)
        self.workers.reserve(self, 1 if self.wide else self.chunk * entry)
        where = {"device": "meta"} if device.type == "meta" else {"pin_memory": device.type == "cuda"}
        # For each slot, the entry requested and the entry held; and slot numbers that are copied to the device.
        self.ids, self.held, self.arrived = (torch.full((slots,), -1, **where) for _ in range(3))
        self.jobs: list[Future] = []
        _pools[self.handle] = self

    @property
    def host_bytes(self) -> int:
        own = (self.memory, self.ids, self.held, self.arrived)
        shared = self.workers.buffers.nbytes if self.workers.owner == self.handle else 0
        return sum(x.nbytes for x in own) + shared

    @property
    def buffer(self) -> Tensor:
        return self.staged.slots

    def part(self, row: int, count: int) -> Tensor:
        self.forget(row)  # the caller may write to it
        return super().part(row, count)

    def write(self, row: int, start: int, values: Tensor, *column: int | slice) -> None:
        self.forget(row)
        super().write(row, start, values, *column)

    def copy(self, target: Tensor, values: Tensor) -> None:
        if self.stream is None:
            self.pend(self.workers.executor.submit(target.copy_, values))
        else:
            super().copy(target, values)

    def reset(self, row: int) -> None:
        self.forget(row)
        self.staged.slots.unflatten(0, (self.batch, -1))[row] = 0

    def forget(self, row: int) -> None:
        """No slot holds what a row's entries will be."""
        self.drain()
        self.held[self.held.div(self.count, rounding_mode="floor") == row] = -1

    def settle(self, left: int = 0) -> None:
        super().settle(left)
        torch.set_num_threads(torch.get_num_threads())  # else new threads would inherit the workers' setting, 1

    def issue(self, index: Tensor, active: Tensor, y: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        asked = self.numbers(torch.where(active[:, None], index.flatten(1), -1))
        ticket = torch.ops.kv_fast.issue(asked, asked if after is None else after, inductor.value(self.symbol))
        return ticket, y + ticket.to(y.dtype)  # adds 0: only the data dependence matters

    def wait(self, ticket: Tensor, before: Tensor) -> Tensor:
        return torch.ops.kv_fast.wait(ticket, before, inductor.value(self.symbol))

    def take(self, waited: Tensor, *column: int | Tensor) -> Tensor:
        slots = torch.arange(len(self.staged.slots), device=self.device) + waited  # adds 0, as `issue` does
        return self.staged.slots[(slots, *column)]

    def ticket(self, count: int) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    def start(self, ids: Tensor) -> None:
        """Makes the threads fetch the entries ids [slots]; below 0: none."""
        before = self.staged.user()
        if before is not None:
            before.drain()
        self.staged.user = ref(self)
        self.ids.copy_(ids, non_blocking=True)
        known = None if self.stream is None else torch.cuda.current_stream(self.device).record_event()
        self.jobs = [self.workers.executor.submit(self.fetch, *part, known) for part in self.parts]

    def finish(self) -> None:
        """Waits until the entries are in `staged`. Raises RuntimeError if a thread failed."""
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
        """Fetches one thread's part of the slots: (entries requested, fetched, event after the copies)."""
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
        """Copies entries to slots, narrow ones through a pinned buffer: [memory, the event of its last copy]."""
        if buffer[1] is not None:
            buffer[1].synchronize()
        try:
            if self.wide:
                to, come = [self.staged.slots[i] for i in slots.tolist()], [self.memory[i] for i in ids.tolist()]
                torch._foreach_copy_(to, come, non_blocking=True)
                return
            size = len(ids) * self.memory[:1].nbytes
            entries = self.gather(ids, buffer[0][:size].view(self.memory.dtype).view(len(ids), *self.memory.shape[1:]))
        except Exception as error:
            raise RuntimeError(f"entries {ids.min()} to {ids.max()} could not be fetched ({error})") from error
        if consecutive(slots):
            self.staged.slots[slots[0] : slots[-1] + 1].copy_(entries, non_blocking=True)
        else:
            arrived = self.arrived[slots[0] : slots[0] + len(slots)].copy_(slots)  # this thread's part
            to = arrived.to(self.device, non_blocking=True)
            self.staged.slots.index_copy_(0, to, entries.to(self.device, non_blocking=True))
        buffer[1] = None if self.stream is None else self.stream.record_event()

    def gather(self, ids: Tensor, buffer: Tensor) -> Tensor:
        """The entries in one piece of pinned memory: a view of the pool if consecutive, else gathered in `buffer`."""
        if consecutive(ids):
            return self.memory[ids[0] : ids[-1] + 1]
        return torch.index_select(self.memory, 0, ids, out=buffer)

    def close(self) -> None:
        self.workers.executor.shutdown()
        super().close()


def consecutive(numbers: Tensor) -> bool:
    """Whether each number is the previous one plus 1."""
    return bool((numbers.diff() == 1).all())


def keep_slots(ids: Tensor, last: Tensor, count: int) -> Tensor:
    """Reorders ids [B,k], below `count`, so that those in the last step's ids [B,k] keep their slots; -1: none."""

    def flags(ids: Tensor) -> Tensor:
        marks = torch.zeros(ids.shape[0], count + 1, dtype=torch.bool, device=ids.device)
        return marks.scatter(1, torch.where(ids < 0, count, ids), True)

    k = ids.shape[1]
    stays = flags(ids).gather(1, last.clamp(0)) & (last >= 0)  # [B,k] slots
    enters = ~flags(last).gather(1, ids.clamp(0)) & (ids >= 0)
    # The n-th entering one goes to the n-th free slot; the free slots left get -1.
    order = torch.where(enters, enters.cumsum(1) - 1, k)
    queue = torch.full((ids.shape[0], k + 1), -1, device=ids.device).scatter(1, order, ids)
    free = ((~stays).cumsum(1) - 1).clamp(min=0)
    return torch.where(stays, last, queue.gather(1, free))


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


@dataclass(frozen=True)
class OffloadMethod(Method):
    """A method that may keep most of the prompt on the host."""

    offload: bool = option(False, "most of the prompt lives on the host")
    engine: Literal["auto", "direct", "threads"] = option("auto", "who fetches: the device, or host threads")
    threads: int = option(4, "host threads that fetch", min=1, max=256)

    def threaded(self, plan: Plan, early: bool = False) -> bool:
        """Whether threads fetch. With engine=auto they fetch what is issued `early` to a GPU.

        On a CPU they would compete for the cores that compute; engine=threads is for those with cores to spare.
        """
        auto = early and plan.device.type == "cuda"
        return self.offload and (self.engine == "threads" or (self.engine == "auto" and auto))

    def staged(
        self, size: tuple[int, ...], plan: Plan, workers: Workers | None = None, early: bool = False
    ) -> Staged | None:
        """The buffer [B,*size] where the entries that a step fetches arrive; None unless threads fetch them."""
        if not self.threaded(plan, early):
            return None
        return Staged((plan.batch, *size), plan.dtype, plan.device, workers or Workers(self.threads))

    def pool(self, what: str, size: tuple[int, ...], staged: Staged | None, plan: Plan, delta: bool = False) -> Pool:
        """A pool [B,*size] of the kind the options ask for; `delta`: see ThreadedPool."""
        if staged is None:
            return Pool(what, (plan.batch, *size), plan.dtype, plan.device, host=self.offload)
        return ThreadedPool(what, (plan.batch, *size), staged, delta)
