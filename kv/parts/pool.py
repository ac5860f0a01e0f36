"""A pool of rows in memory that the device can address: its own, or pinned host memory."""

import resource
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from weakref import finalize

import torch
from torch import Tensor

from kv.parts import inductor
from runtime.device import free_bytes

BACKLOG = 4  # writes that may be in flight


class Pool:
    """[rows, *width] on the device or, with `host`, in pinned host memory; `what` names it in errors."""

    counts = (0, 0)  # rows requested from threads, and rows they fetched
    staged_bytes = 0  # bytes of the device buffer where fetched rows arrive

    def __init__(
        self, what: str, rows: int, width: tuple[int, ...], dtype: torch.dtype, device: torch.device, host: bool = False
    ):
        self.what, self.device, self.on_host = what, device, host
        if host:
            self.memory, self.rows = host_memory(what, (rows, *width), dtype, device)
        else:
            self.memory = self.rows = torch.zeros(rows, *width, dtype=dtype, device=device)
        self.stream = torch.cuda.Stream(device) if host and device.type == "cuda" else None
        self.writing: deque[torch.cuda.Event | Future] = deque()

    @property
    def host_bytes(self) -> int:
        return self.memory.nbytes if self.on_host else 0

    @property
    def buffer(self) -> Tensor | None:
        """The pool's memory on the device, for its owner to register; None if there is none."""
        return None if self.on_host else self.rows

    def write(self, start: int, values: Tensor, *column: int | slice) -> None:
        """Writes values [n, ...] to `column` of n rows from `start` on; later layers may compute meanwhile."""
        target = self.rows[(slice(start, start + len(values)), *column)]
        if self.stream is None:
            target.copy_(values)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(values)
            values.record_stream(self.stream)
            self.pend(self.stream.record_event())

    def part(self, start: int, count: int) -> Tensor:
        """A view of `count` rows from `start` on, where the pool is: [count, *width]. Waits for writes and fetches."""
        self.settle()
        return self.memory[start : start + count]

    def read(self, start: int, count: int) -> Tensor:
        """`count` rows from `start` on, on the device: [count, *width]."""
        return self.part(start, count).to(self.device)

    def pend(self, write: torch.cuda.Event | Future) -> None:
        self.writing.append(write)
        self.settle(BACKLOG)

    def settle(self, left: int = 0) -> None:
        """Waits until at most `left` writes are in flight. Raises what a write raised."""
        while len(self.writing) > left:
            write = self.writing.popleft()
            write.result() if isinstance(write, Future) else write.synchronize()

    def issue(self, ids: Tensor, active: Tensor, y: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Requests rows ids [N] int64 (below 0: none), as many for each of active [B]; inactive ones are not fetched.

        Returns a ticket for `wait`, and y. The fetch starts after `after` (default: ids) is known and before the
        returned y is used: the caller continues with that one, because only a data dependence makes a compiler keep
        the order of two ops.
        """
        return ids, y

    def wait(self, ticket: Tensor, before: Tensor) -> Tensor:
        """Returns the input of `take`. Waits only when `before` is known: its computation overlaps with the fetch."""
        return ticket

    def ticket(self, count: int) -> Tensor:
        """A tensor of the size and dtype of what `issue` and `wait` return for `count` rows.

        A layer that leaves it for another layer copies it to a registered buffer of that size.
        """
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def take(self, waited: Tensor, *column: int | Tensor) -> Tensor:
        """`column` of the requested rows, [N, ...]; undefined where no row was requested."""
        rows = inductor.stored(waited.clamp(min=0))  # a loop that also computed the numbers would read rows more slowly
        return self.rows[(rows, *column)]

    def overhead(self) -> int:
        """Bytes of buffers beside the pool itself, on the device and on the host."""
        return 0

    def close(self) -> None:
        """Ends background work, and discards what a write raised."""
        for write in self.writing:
            write.exception() if isinstance(write, Future) else write.synchronize()
        self.writing.clear()


def host_memory(what: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Host memory, and the same memory as a tensor on `device`; pinned if that is a GPU.

    Raises ValueError, with the bytes needed and free, if it cannot be allocated or pinned.
    """
    if device.type == "meta":
        memory = torch.empty(size, dtype=dtype, device=device)
        return memory, memory
    needed = torch.empty(size, dtype=dtype, device="meta").nbytes
    free = free_bytes(torch.device("cpu"))
    asked = f"{what} need {needed / 1e9:.2f} GB of host memory"
    if needed > free:
        raise ValueError(f"{asked} and {free / 1e9:.2f} GB are free: shorten the prompt, or lower --batch")
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
        raise ValueError(f"{asked}: pinning failed (CUDA error {error}, {free / 1e9:.2f} GB free, ulimit -l {limit})")
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
