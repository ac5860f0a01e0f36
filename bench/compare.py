"""Joins the results of eval.py and bench for the same methods: python -m bench.compare ANSWERS.json SPEED.json

Prints a Markdown table with one line per method and budget: answers (percent right; first question / later ones),
perplexity, the bytes of a row's cache, the bytes a step reads, and ms per token. --plot draws answers over bytes read.
`bash bench.sh compare` makes both files and calls this.
"""

import runtime.startup  # noqa: F401

import argparse
import itertools
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from bench.results import markdown
from terminal.cli import Choice, check_output, run
from terminal.plots import logarithmic, panels
from text.files import parse_json

COLUMNS = {  # the table's columns of numbers: key, factor and format
    "perplexity": ("perplexity", 1, ".1f"),
    "KV, MB": ("kv_device_bytes", 1e-6, ".2f"),
    "on the host": ("kv_host_bytes", 1e-6, ".2f"),
    "read a step, MB": ("read", 1e-6, ".2f"),
    "ms/token": ("ms", 1, ".1f"),
}


def join(answers: list[dict], speed: list[dict]) -> dict[tuple, dict]:
    """(method, budget) -> its results. Scores are means over the graded tasks, bytes those of the last such task."""
    results, graded = {}, defaultdict(list)
    for row in answers:
        if row["score"] is None:  # refused
            continue
        own = results.setdefault(method_of(row), {})
        if row["task"] == "perplexity":
            own["perplexity"] = row["score"]
        else:
            graded[method_of(row)].append(row)
    for key, rows in graded.items():
        for when in ("first", "later"):
            if scores := [row[when] for row in rows if row[when] is not None]:
                results[key][when] = fmean(scores)
        results[key] |= {name: rows[-1][name] for name in ("kv_device_bytes", "kv_host_bytes")}
        results[key]["read"] = rows[-1]["step_device_bytes"] + rows[-1]["step_host_bytes"]
    for row in speed:
        own = results.get(method_of(row), {})
        if "ms" in own:
            raise ValueError(f"{' '.join(map(str, method_of(row)))} was timed more than once")
        own["ms"] = row["ms_per_token"]
    return results


def method_of(row: dict) -> tuple[str, int | float | None]:
    return Choice(row["kv"], None, row["options"]).label, row["budget"]


def table(results: dict[tuple, dict]) -> str:
    lines = [["method", "budget", "answers", *COLUMNS]]
    for (method, budget), own in results.items():
        answers = " / ".join(f"{own[when]:.0f}" for when in ("first", "later") if when in own)
        numbers = [format(own[key] * by, form) if key in own else "-" for key, by, form in COLUMNS.values()]
        lines.append([method, "" if budget is None else str(budget), answers or "-", *numbers])
    return markdown(lines)


def draw(results: dict[tuple, dict], path: str) -> None:
    """Draws one panel per budget: answers (the mean of first and later questions) over the bytes a step reads, with one
    named mark per method."""
    budgets = sorted({budget for _, budget in results if budget is not None}) or [None]
    with panels(path, len(budgets), 1, 11, 7) as axes:
        drawn = []
        for axis, wanted in zip(axes[:, 0], budgets, strict=True):
            points = [
                (name, own["read"] / 1e6, (own["first"] + own.get("later", own["first"])) / 2)
                for (name, budget), own in results.items()
                if budget in (None, wanted) and "first" in own
            ]
            for _, x, y in points:
                axis.plot(x, y, markersize=8)
            axis.set(xlabel="MB of cache read a step", ylabel="answers right, %", ylim=(-8, 116))
            axis.set_title("" if wanted is None else f"budget {wanted}")
            axis.margins(x=0.12)
            logarithmic(axis, [x for _, x, _ in points])
            drawn.append((axis, points))
        axes[0, 0].figure.draw_without_rendering()  # settles the layout, since names are placed in pixels
        for axis, points in drawn:
            name_marks(axis, points)


def name_marks(axis, points: list[tuple[str, float, float]]) -> None:
    """Writes each mark's name in the nearest free space and draws a line to it."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
    how = {"xytext": (0, 0), "textcoords": "offset points", "fontsize": 9, "va": "center", "arrowprops": line}
    pixels = axis.transData.transform([point[1:] for point in points])
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in pixels]
    for name, *mark in sorted(points, key=lambda point: point[1:]):
        note = axis.annotate(name, mark, **how)
        note.update_positions(axis.figure.canvas.get_renderer())
        for radius, turn in itertools.product(range(10, 400, 6), range(24)):
            right, up = radius * math.cos(math.tau * turn / 24), radius * math.sin(math.tau * turn / 24)
            note.set(position=(right, up), horizontalalignment="left" if right > 0 else "right")
            box = Text.get_window_extent(note).padded(2)
            inside = axis.bbox.contains(box.x0, box.y0) and axis.bbox.contains(box.x1, box.y1)
            if inside and not box.count_overlaps(taken):
                break
        taken.append(box)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("answers", type=Path, metavar="ANSWERS.json")
    p.add_argument("speed", type=Path, metavar="SPEED.json")
    p.add_argument("--plot", metavar="FILE", help="draw answers over bytes read")
    args = p.parse_args(argv)
    check_output(args.plot, "--plot")
    try:
        results = join(*(parse_json(path.read_bytes(), path)["rows"] for path in (args.answers, args.speed)))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{args.answers} and {args.speed} must be the files that eval.py and bench wrote with --json "
            f"({type(error).__name__}: {error})"
        ) from None
    print(table(results))
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    run(main)
