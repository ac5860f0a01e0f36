"""Imported before what takes seconds to import: Ctrl-C then ends a tool in one line, and torch's version is checked."""

import os
import re
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OLDEST, NEWEST = (2, 11), (2, 13)  # of torch: what the tests have run on


def interrupted(*_) -> None:
    """While modules are imported there is nothing to tidy up, and some of them turn KeyboardInterrupt into another."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def is_tool() -> bool:
    """Whether this process runs a file of this repository, and does not only import from it."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and Path(path).resolve().parent in (ROOT, ROOT / "bench", ROOT / "needle")


def check_torch() -> None:
    """Raises ImportError for a torch that is missing or too old; says so if it is newer than those tested."""
    supported = " to ".join(".".join(map(str, v)) for v in (OLDEST, NEWEST))
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise ImportError("torch is not installed: pip install -r requirements.txt") from None
    number = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if number < OLDEST:
        raise ImportError(f"torch {found} is too old, kv-fast runs on {supported}: pip install -r requirements.txt")
    if number > NEWEST:
        print(f"kv-fast is tested with torch {supported}, and this is {found}", file=sys.stderr)


if is_tool() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupted)  # until cli.run
try:
    check_torch()
except ImportError as error:
    if not is_tool():
        raise
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
