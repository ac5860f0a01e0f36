"""What the machine has: devices, dtypes and free memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}  # of weights and caches


def free_bytes(device: torch.device) -> int:
    """Memory of the device that could still be allocated."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns torch's out-of-memory errors, which say what was needed, into a line that says what helps."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ValueError(
            f"out of memory ({str(error).splitlines()[0]}): shorten the prompt, lower --max-new-tokens, --batch or "
            "--budget, or choose a --kv that keeps less"
        ) from None


def pick_device(name: str | torch.device | None) -> torch.device:
    """The device of that name; None: a GPU where there is one. Raises ValueError for one that is not here."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name or default)
    except RuntimeError:
        device = torch.device("meta")
    here = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if (device.index or 0) >= here.get(device.type, 0):
        raise ValueError(f"device {name!r} is not here; use cpu" + ", cuda" * torch.cuda.is_available())
    return device


def pick_dtype(name: str | torch.dtype) -> torch.dtype:
    """The dtype of that name. Raises ValueError for one that weights and caches do not come in."""
    dtype = DTYPES.get(name) if isinstance(name, str) else name
    if dtype not in list(DTYPES.values()):
        raise ValueError(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    return dtype
