"""What every command line of this repo does with mistakes: exceptions that are not bugs, unwritable outputs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def run(main: Callable[[], object]) -> NoReturn:
    """Exits with 0; with 2 and `error: one line` for the user's mistake (ValueError, OSError); with 130 for Ctrl-C."""
    try:
        main()
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def check_output(name: str | None, flag: str) -> None:
    """Raises ValueError if a file of that name (- is stdout) could not be written once the work is done."""
    if name not in (None, "-") and (Path(name).is_dir() or not Path(name).absolute().parent.is_dir()):
        raise ValueError(f"{flag} {name}: not a file in an existing folder")
