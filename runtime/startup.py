"""Import this before slow modules: it makes Ctrl-C end a tool with one line, sets how its idle threads wait and how it
gets memory on a CPU, and checks torch's version."""

import ctypes
import os
import re
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (2, 11), (2, 13)  # torch versions the tests have run on
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def interrupted(*_) -> None:
    """Exits at once: imports leave nothing to clean up, and some of them turn KeyboardInterrupt into another error."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def is_tool() -> bool:
    """Whether this process runs a file of this repository rather than only importing from it."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and Path(path).resolve().parent in (ROOT, ROOT / "bench", ROOT / "needle")


def check_torch() -> None:
    """Raises ImportError if torch is missing or too old; prints a notice if it is newer than tested."""
    supported = " to ".join(".".join(map(str, v)) for v in (OLDEST, NEWEST))
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise ImportError(
            "torch is not installed here: source .venv/bin/activate, or pip install -r requirements.txt"
        ) from None
    number = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if number < OLDEST:
        raise ImportError(f"torch {found} is too old, kv-fast runs on {supported}: pip install -r requirements.txt")
    if number > NEWEST:
        print(f"kv-fast is tested with torch {supported}, and this is {found}", file=sys.stderr)


def keep_freed_memory() -> None:
    """Lets glibc keep up to 256 MB that this process freed, unless the user sets MALLOC_TRIM_THRESHOLD_.

    Otherwise a step over a long cache returns its buffers to the system, layer by layer, and gets cleared pages back.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that glibc accepts; larger buffers are always returned
        mallopt(M_TRIM_THRESHOLD, 2**28)


if is_tool():
    # Between parallel loops OpenMP's threads spin, on cores that another process may need. If its threads spin as well,
    # each waits for the other, and a step takes 20 times as long; after a millisecond it is better to sleep.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for pages of 2 MB, which take fewer translations
    keep_freed_memory()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)  # until cli.run restores the default
try:
    check_torch()
except ImportError as error:
    if not is_tool():
        raise
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
