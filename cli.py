"""What every command line of this repo does with an exception that is not a bug."""

import sys
from collections.abc import Callable
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
