"""What the command-line tools share: user errors, lists of methods and budgets, tables."""

import argparse
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

import kv as methods
from runtime import parallel, startup
from runtime.device import memory_errors
from text.files import replacing

LINE = 1_000  # characters shown of an error
SILENT = 10  # seconds after which a line says how far something is


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the flags)")


def run(main: Callable[[], object], ranks: bool = False) -> NoReturn:
    """Runs main; exits with 0, 2 after `error: one line` for a user error (ValueError, OSError), or 130 for Ctrl-C.

    ranks: whether torchrun may start it in several parallel. Rank 0 alone prints then, and one rank reports an error.
    """
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(os.devnull, mode)  # closed by the caller
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding does not
    if parallel.launched():
        return run_ranks(main, ranks)
    if signal.getsignal(signal.SIGINT) is startup.interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with memory_errors():
            main()
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        complain(error)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def run_ranks(main: Callable[[], object], ranks: bool) -> NoReturn:
    """`run` in one of several parallel. If one fails, torchrun ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a process even while it waits for another
    stderr = sys.stderr
    try:
        with memory_errors():
            if parallel.join().rank:
                sys.stdout = sys.stderr = open(os.devnull, "w")
            if not ranks:
                raise ValueError("this tool runs in one process: start it with python, not torchrun")
            main()
        sys.stdout.flush()
    except Exception as error:
        sys.stderr = stderr  # also for a traceback
        if parallel.first_to_fail():
            if not isinstance(error, ValueError | OSError):
                raise
            complain(error)
        stderr.flush()
        os._exit(2)  # at once: leaving torch.distributed in order would wait for the other ranks
    parallel.leave()
    stderr.flush()
    os._exit(0)  # torch.distributed's threads may abort a process that Python tears down


def complain(error: Exception) -> None:
    """Prints an error's line, but for a pipe that its reader closed."""
    if not isinstance(error, BrokenPipeError):
        print("error:", one_line(error), file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            sys.stdout.close()  # otherwise Python would complain of it at exit


def one_line(error: object) -> str:
    """An error's text without line breaks and escape sequences; of a long one, its beginning and its end."""
    text = str(error)
    if len(text) > 2 * LINE:
        text = f"{text[:LINE]} ... {text[-LINE:]}"
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return text if len(text) <= LINE else f"{text[: LINE // 2]} ... {text[-LINE // 2 :]}"


def progress(items: Iterable, what: str, but: str = "") -> Iterable:
    """Shows on stderr that `what` is going on: a bar on a terminal; otherwise lines, unless it begins with `but`."""
    if sys.stderr.isatty():
        return tqdm(items, what, leave=False)
    if but and what.startswith(but):
        return items
    print(f"-- {what}", file=sys.stderr, flush=True)
    return told(items, what)


def told(items: Iterable, what: str) -> Iterable:
    """The items; says how far they are when SILENT seconds have passed without a line."""
    begin = last = time.monotonic()
    for i, item in enumerate(items, 1):
        yield item
        if (now := time.monotonic()) > last + SILENT and i < len(items):
            left = (now - begin) / i * (len(items) - i)
            print(f"-- {what}: {i} of {len(items)}, about {left:.0f} seconds left", file=sys.stderr, flush=True)
            last = now


def check_output(name: str | None, flag: str) -> None:
    """Raises ValueError, before the work starts, if the file cannot be written or --plot cannot draw its format.

    `--json -` means stdout.
    """
    if name is None or (name, flag) == ("-", "--json"):
        return
    path = Path(name).absolute()
    if name == "-" or path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{flag} {name}: not a file in an existing folder")
    try:
        if path.is_file():
            open(path, "ab").close()
        elif not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{flag} {name}: cannot be written ({error.strerror}); name another file") from None
    if flag == "--plot":
        known = load_pyplot().Figure().canvas.get_supported_filetypes()
        if path.suffix and path.suffix[1:].lower() not in known:
            raise ValueError(f"{flag} {name}: the format is unknown; known: {', '.join(sorted(known))}")


def read_text(name: str) -> str:
    """A text file's content, or stdin's for `-`. Raises ValueError if it cannot be read or is not UTF-8."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = "stdin" if name == "-" else name
        raise ValueError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the file {name!r}: {getattr(error, 'strerror', None) or error}") from None


def whole_text(flag: str, name: str) -> str:
    """`read_text` of the file that a flag names. Raises ValueError if the text is empty."""
    text = read_text(name)
    if not text.strip():
        raise ValueError(f"{flag} {name}: the text is empty")
    return text


def write_json(name: str | None, found: dict) -> None:
    """Writes to the file that --json names, or to stdout for `-`; does nothing without --json."""
    if name == "-":
        print(json.dumps(found))
    elif name is not None:
        with replacing(name) as new:
            new.write_text(json.dumps(found) + "\n")


def number(text: str) -> int | float:
    """A budget: an int in tokens, or a float as a share of the prompt."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def numbers(text: str, flag: str, kind: Callable[[str], int | float]) -> list:
    """One or more positive numbers, separated by commas. Raises ValueError for anything else."""
    try:
        values = [kind(part) for part in text.split(",") if part]
    except ValueError:
        raise ValueError(f"{flag} {text}: expected numbers with commas between them") from None
    if not values or any(value <= 0 for value in values):
        raise ValueError(f"{flag} {text}: must be positive")
    return values


@dataclass(frozen=True)
class Choice:
    """A KV method and options as the command line names them, with one budget."""

    kv: str
    budget: int | float | None
    options: dict

    @property
    def label(self) -> str:
        options = "".join(f":{key}={value}" for key, value in self.options.items())
        return self.kv + options + (f" {self.budget}" if self.budget is not None else "")


def choices(text: str, budgets: list) -> list[Choice]:
    """Parses a list like `full,streaming:sinks=8`; a method that takes a budget appears once per budget."""
    chosen = []
    for part in text.split(","):
        name, *given = part.split(":")
        options = {}
        for option in given:
            key, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"--kv {part}: write options as name:option=value")
            if options.get(key, value) != value:
                raise ValueError(f"--kv {part}: the option {key} is given twice: {options[key]} and {value}")
            options[key] = value
        takes = methods.parse_options(name, options).takes_budget  # rejects unknown names and options
        if takes and not budgets:
            raise ValueError(f"{name} needs --budget, in tokens or as a share of the prompt")
        chosen += [Choice(name, budget, options) for budget in (budgets if takes else [None])]
    return chosen


def profile_lines(rows: list[dict]) -> list[str]:
    """One line per method option that kv_profile.json set; `rows` are rows of a report, with `kv` and `profile`."""
    lines = {}
    for row in rows:
        for name, value in row.get("profile", {}).items():
            short = value if len(str(value)) <= 40 else f"{len(value)} rows"
            lines[f"{row['kv']}: {name}={short}, from kv_profile.json"] = None
    return list(lines)


def table(lines: list[dict[str, object]]) -> str:
    """A table of lines that map headings to cells: the first column is left-aligned, the others right-aligned."""
    lines = [list(lines[0]), *([str(cell) for cell in line.values()] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(w) if i else text.ljust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def load_pyplot():
    """matplotlib.pyplot, to draw into files. Raises ValueError if it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    return pyplot
