"""Rows of memory that the device can address: its own, or pinned memory of the host."""

import resource
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from weakref import finalize

import torch
from torch import Tensor

from device import free_bytes

BACKLOG = 4  # writes that may be under way


class Pool:
    """[rows, *width] where the device can address it: on the device, or `host`."""

    counts = (0, 0)  # rows that threads were asked for, and rows that they fetched
    staged_bytes = 0  # of buffers on the device

    def __init__(self, what: str, rows: int, width: tuple[int, ...], dtype: torch.dtype, device: torch.device,
                 host: bool = False):  # fmt: skip
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
        """What the pool holds on the device, for its owner to register."""
        return None if self.on_host else self.rows

    def write(self, start: int, values: Tensor, *column: int | slice) -> None:
        """values [n, ...] become `column` of the rows from `start` on; later layers may compute meanwhile."""
        target = self.rows[(slice(start, start + len(values)), *column)]
        if self.stream is None:
            target.copy_(values)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(values)
            values.record_stream(self.stream)
            self.pend(self.stream.record_event())

    def pend(self, write: torch.cuda.Event | Future) -> None:
        self.writing.append(write)
        self.settle(BACKLOG)

    def settle(self, left: int = 0) -> None:
        """Waits until at most `left` writes are under way. Raises what a write raised."""
        while len(self.writing) > left:
            write = self.writing.popleft()
            write.result() if isinstance(write, Future) else write.synchronize()

    def issue(self, ids: Tensor, asked: Tensor, y: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Says which rows are wanted: ids [N] int64, below 0 none; slots that are not `asked` [N] keep what they have.

        Returns a token for `wait`, and y: not before `after` (default: ids) is known, and not after y is used, as long
        as the caller goes on with the y returned. Nothing else holds a compiler to an order of two ops that share no
        data.
        """
        return ids, y

    def wait(self, token: Tensor, before: Tensor) -> Tensor:
        """-> what `take` takes; not before `before` is known, so that what leads there runs meanwhile."""
        return token

    def take(self, waited: Tensor, *column: int) -> Tensor:
        """`column` of the wanted rows, [N, ...]; where none was wanted it is any."""
        return self.rows[(waited.clamp(min=0), *column)]

    def overhead(self) -> int:
        """Bytes of staging buffers, on the device and on the host."""
        return 0

    def close(self) -> None:
        """Ends what runs beside the caller; what a write raised is lost."""
        for write in self.writing:
            write.exception() if isinstance(write, Future) else write.synchronize()
        self.writing.clear()


def host_memory(what: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory of the host, and the same as `device` sees it: pinned, where that is a GPU.

    Raises ValueError with what was asked for and what there is.
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
    cuda = torch.cuda.cudart()  # torch's own pinned memory comes in powers of two
    if error := int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 2)):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "no limit" if limit == resource.RLIM_INFINITY else f"a limit of {limit / 1e9:.2f} GB"
        raise ValueError(f"{asked}, which cannot be pinned (CUDA error {error}; {free / 1e9:.2f} GB are free, {limit})")
    finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
    return memory, as_device(memory, device)


def as_device(memory: Tensor, device: torch.device) -> Tensor:
    """Pinned memory of the host as a tensor of a GPU, which reads and writes it over the bus."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[memory.dtype.itemsize]  # the interface knows no bfloat16

    interface = {
        "shape": tuple(memory.shape), "typestr": f"<i{memory.dtype.itemsize}", "strides": None, "version": 3,
        "data": (memory.data_ptr(), False),
    }  # fmt: skip
    view = torch.as_tensor(SimpleNamespace(owner=memory, __cuda_array_interface__=interface), device=device)
    assert view.dtype == integer and view.data_ptr() == memory.data_ptr()
    view = view.view(memory.dtype)
    torch._dynamo.mark_static_address(view)
    return view
