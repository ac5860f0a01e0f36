"""What the machine has: devices, dtypes and free memory."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}  # of weights and caches
# RuntimeErrors for want of memory: torch's own, oneDNN's and C++'s.
OUT_OF_MEMORY = ("can't allocate memory", "could not create a primitive", "std::bad_alloc")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, within the limit of `cap_memory`."""
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used
    else:
        trim()
        used, free = resident_bytes("VmRSS"), min(_kilobytes("/proc/meminfo", "MemAvailable"), group_free())
    return min(free, _caps[device.type] - used) if device.type in _caps else free


def group_free(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes left of this process's control group, which is a container's limit; its cached files count as free."""
    try:
        left = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return left + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # no control groups, or no limit: "max"
        return float("inf")


def trim() -> None:
    """Gives freed host memory back to the system: glibc keeps what lies between blocks in use."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(what: str) -> int:
    """This process's host memory: VmRSS now, VmHWM the peak since its start or a reset by /proc/self/clear_refs."""
    return _kilobytes("/proc/self/status", what)


def _kilobytes(path: str, name: str) -> int:
    with open(path) as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


_caps: dict[str, int] = {}


def cap_memory(limit: int, device: torch.device) -> None:
    """Limits what this process plans, and on CUDA allocates, on devices of this type to `limit` bytes."""
    _caps[device.type] = limit
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)


def machine(device: torch.device) -> str:
    """The device's name, its threads if it is a CPU, and torch's version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    with open("/proc/cpuinfo") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "CPU")
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns out-of-memory errors of torch and Python into a ValueError: one line with the reason and what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"out of memory ({reason}): shorten the prompt, read it by --chunk, lower --max-new-tokens, --batch or "
            "--budget, or choose a --kv that keeps less"
        ) from None


def pick_device(name: str | torch.device | None) -> torch.device:
    """The device of that name; None selects a GPU if there is one. Raises ValueError if it does not exist.

    Under torchrun, "cuda" is a different GPU in each process on a machine.
    """
    count = torch.cuda.device_count()
    try:
        device = torch.device(name or ("cuda" if count else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
    if device.type == "cuda" and index < count:
        return torch.device("cuda", index)
    if device == torch.device("cuda") and count:
        raise ValueError(f"this machine has {count} GPUs: start at most that many processes")
    raise ValueError(f"device {name!r} is not here; use cpu" + ", cuda" * bool(count))


def pick_dtype(name: str | torch.dtype) -> torch.dtype:
    """The dtype of that name. Raises ValueError if weights and caches do not support it."""
    dtype = DTYPES.get(name) if isinstance(name, str) else name
    if dtype not in list(DTYPES.values()):
        raise ValueError(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    return dtype


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_later(tokens: Tensor) -> Callable[[], list[list[int]]]:
    """Starts a copy of tokens to the host; the returned function waits for it and returns the tokens."""
    if tokens.device.type != "cuda":
        values = tokens.tolist()
        return lambda: values
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return lambda: (event.synchronize(), host.tolist())[1]
