"""Joins the results of eval.py and bench for the same methods: python -m bench.compare ANSWERS.json SPEED.json

Prints a Markdown table with one line per method and budget: answers (percent right; first question / later ones),
perplexity, the bytes of a row's cache, the bytes a step reads, and ms per token. --plot draws answers over bytes read.
`bash bench.sh compare` makes both files and calls this.
"""

import runtime.startup  # noqa: F401

import argparse
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

from terminal.cli import Choice, check_output, load_pyplot, run

COLUMNS = {  # the table's columns of numbers: key, factor and format
    "perplexity": ("perplexity", 1, ".1f"),
    "KV, MB": ("kv_device_bytes", 1e-6, ".2f"),
    "on the host": ("kv_host_bytes", 1e-6, ".2f"),
    "read a step, MB": ("read", 1e-6, ".2f"),
    "ms/token": ("ms", 1, ".1f"),
}


def join(answers: list[dict], speed: list[dict]) -> dict[tuple, dict]:
    """(method, budget) -> its results. Scores are means over the graded tasks, bytes those of the last such task."""
    results, scores = defaultdict(dict), defaultdict(lambda: defaultdict(list))
    for row in answers:
        key = Choice(row["kv"], None, row["options"]).label, row["budget"]
        if row["score"] is None:  # refused
            continue
        if row["task"] == "perplexity":
            results[key]["perplexity"] = row["score"]
            continue
        for when in ("first", "later"):
            if row[when] is not None:
                scores[key][when].append(row[when])
        results[key] |= {name: row[name] for name in ("kv_device_bytes", "kv_host_bytes")}
        results[key]["read"] = row["step_device_bytes"] + row["step_host_bytes"]
    for key, own in scores.items():
        results[key] |= {when: sum(values) / len(values) for when, values in own.items()}
    for row in speed:
        key = Choice(row["kv"], None, row["options"]).label, row["budget"]
        if "ms" in results.get(key, {}):
            raise ValueError(f"{' '.join(map(str, key))} was timed more than once")
        if key in results:
            results[key]["ms"] = row["ms_per_token"]
    return dict(results)


def table(results: dict[tuple, dict]) -> str:
    head = ["method", "budget", "answers", *COLUMNS]
    lines = [head, ["---"] * len(head)]
    for (method, budget), own in results.items():
        answers = " / ".join(f"{own[when]:.0f}" for when in ("first", "later") if when in own)
        numbers = [format(own[key] * by, form) if key in own else "-" for key, by, form in COLUMNS.values()]
        lines.append([method, "" if budget is None else str(budget), answers or "-", *numbers])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(results: dict[tuple, dict], path: str) -> None:
    """Draws one panel per budget: answers (the mean of first and later questions) over the bytes a step reads, with one
    named mark per method."""
    pyplot = load_pyplot()
    budgets = sorted({budget for _, budget in results if budget is not None}) or [None]
    size = (11, 7 * len(budgets))
    figure, axes = pyplot.subplots(len(budgets), 1, figsize=size, layout="constrained", squeeze=False)
    panels = {}
    for axis, wanted in zip(axes[:, 0], budgets, strict=True):
        panels[axis] = [
            (name, own["read"] / 1e6, (own["first"] + own.get("later", own["first"])) / 2)
            for (name, budget), own in results.items()
            if budget in (None, wanted) and "first" in own
        ]
        for i, (_, x, y) in enumerate(panels[axis]):
            axis.plot(x, y, "os^Dv"[i % 5], markersize=8, color=pyplot.get_cmap("tab20")(i % 20))
        axis.set(xscale="log", xlabel="MB of cache read a step", ylabel="answers right, %", ylim=(-8, 116))
        axis.set_title("" if wanted is None else f"budget {wanted}")
        axis.margins(x=0.12)
        axis.minorticks_off()
        ticks = [step * 10.0**power for power in range(-3, 6) for step in (1, 2, 5)]
        low, high = axis.get_xlim()
        axis.set_xticks([x for x in ticks if low < x < high], [f"{x:g}" for x in ticks if low < x < high])
        axis.grid(alpha=0.3)
    figure.draw_without_rendering()  # settles the layout, since names are placed in pixels
    for axis, points in panels.items():
        name_marks(axis, points)
    figure.savefig(path, dpi=figure.dpi)
    pyplot.close(figure)


def name_marks(axis, points: list[tuple[str, float, float]]) -> None:
    """Writes each mark's name in the nearest free space and draws a line to it."""
    places = [(name, *axis.transData.transform((x, y))) for name, x, y in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for _, x, y in places]  # left, lower, right, upper: in pixels
    left, lower, right, upper = axis.bbox.extents
    for name, x, y in sorted(places, key=lambda place: place[1:]):
        text = axis.text(x, y, name, fontsize=9, transform=None)  # pixels
        width, height = text.get_window_extent().size
        for radius, turn in itertools.product(range(10, 400, 6), range(24)):
            angle = math.tau * turn / 24
            near = x + radius * math.cos(angle), y + radius * math.sin(angle)  # where the name's box begins
            corner = near[0] - width * (1 - math.cos(angle)) / 2, near[1] - height * (1 - math.sin(angle)) / 2
            box = (corner[0] - 2, corner[1] - 2, corner[0] + width + 2, corner[1] + height + 2)
            inside = left < box[0] and lower < box[1] and box[2] < right and box[3] < upper
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in taken):
                break
        text.set_position(corner)
        taken.append(box)
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
        axis.annotate("", (x, y), near, "figure pixels", "figure pixels", arrowprops=line)


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
        results = join(*(json.loads(path.read_text())["rows"] for path in (args.answers, args.speed)))
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
