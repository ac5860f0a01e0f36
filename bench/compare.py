"""Joins what eval.py and bench measured of the same methods: python -m bench.compare FILE.json ...

Prints a Markdown table for each length, one line per method and budget, with the columns for which there are results:

- KL, same token, perplexity: eval.py's fidelity, or its perplexity alone; means over texts.
- answers, blind: eval.py's questions, the mean over tasks in percent, of first / later ones; without and with --blind;
  with --fork, of all.
- next line: eval.py's code_line, how many lines are right, and the mean similarity, in percent.
- KV, host, read a step: a row's cache on the device and on the host, and what a step reads of both: bench's or, where
  it timed nothing, those of the questions, whose dtype may differ.
- ms/token, and the seconds of a prompt: bench's. A context belongs to the next length that eval.py measured: a length
  counts the answer too.

--plot draws KL, or answers where no KL was measured, over the bytes read and over the bytes kept. --results writes
NAME.json for bench.results, or NAME_LENGTH.json for each of several lengths. Results of several checkpoints become one
table and one plot: KL, answers, and the bytes kept. `bash bench.sh long` and `bits` make the files and call this.
"""

import runtime.startup  # noqa: F401

import argparse
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from bench.results import markdown
from terminal.cli import Choice, Parser, check_output, run
from terminal.plots import MARKERS, logarithmic, panels
from text.files import parse_json, replacing

COLUMNS = {  # title -> its key in a result, and its format
    "KL": ("kl", ".4f"),
    "same token, %": ("same", ".1f"),
    "perplexity": ("perplexity", ".2f"),
    "answers, %": ("answers", ""),
    "blind, %": ("blind", ""),
    "next line, %": ("line", ""),
    "KV, MB": ("kv", ".2f"),
    "host, MB": ("host", ".2f"),
    "read a step, MB": ("read", ".2f"),
    "ms/token": ("ms", ".1f"),
    "prefill, s": ("prefill", ".0f"),
}
Results = dict[tuple, dict]  # (method, budget) -> what was measured, by the keys of COLUMNS


def join(files: list[dict]) -> dict[int, Results]:
    """The JSON objects that eval.py and bench wrote -> length -> results."""
    measured, timed = defaultdict(lambda: defaultdict(lambda: defaultdict(list))), []
    for file in files:
        args = file.get("args", {})
        asked = "blind" if args.get("blind") else "answers"
        for sample in file.get("samples", ()):
            if sample["task"] == "code_line":
                measured[sample["length"]][method_of(sample)]["right"].append(100 * (sample["score"] == 100))
        for row in file["rows"]:
            if "task" not in row:
                timed.append(row)
            elif row["score"] is not None:  # else: refused
                own = measured[row["length"]][method_of(row)]
                if row["task"] == "fidelity":
                    own["same"].append(row["score"])
                for key in {"kl", "perplexity"} & row.keys():
                    own["alone" if row["task"] == "perplexity" else key].append(row[key])
                if row["task"] == "code_line":
                    own["similar"].append(row["score"])
                else:
                    graded = {"first": row["score"]} if args.get("fork") else row
                    for when in ("first", "later"):
                        if graded.get(when) is not None:
                            own[asked, when].append(graded[when])
                if row["first"] is not None:
                    own |= {key: [value] for key, value in megabytes(row).items()}
    results = {
        length: {method: {key: fmean(values) for key, values in own.items()} for method, own in by_method.items()}
        for length, by_method in sorted(measured.items())
    }
    for own in (own for by_method in results.values() for own in by_method.values()):
        if "alone" in own:
            own.setdefault("perplexity", own.pop("alone"))
        for asked in ("answers", "blind"):
            scores = [own[asked, when] for when in ("first", "later") if (asked, when) in own]
            own |= {asked: " / ".join(f"{score:.0f}" for score in scores)} if scores else {}
        if "similar" in own:
            own["line"] = f"{own.pop('right'):.0f} / {own.pop('similar'):.0f}"
    for row in timed:
        length = min((length for length in results if length >= row["context"]), default=None)
        if (own := results.get(length, {}).get(method_of(row))) is None:
            continue
        if "ms" in own:
            raise ValueError(f"{' '.join(map(str, method_of(row)))} was timed more than once")
        own |= megabytes(row) | {"ms": row["ms_per_token"]}
        own |= {"prefill": row["prefill_s"]} if row.get("prefill_s") else {}
    return results


def by_checkpoint(files: list[dict]) -> dict[str, dict[int, Results]]:
    """`join` for each checkpoint that eval.py asked, by its folder's name; where it was one, all files are of it."""
    names = [Path(file["args"]["checkpoint"]).name if "checkpoint" in file.get("args", {}) else None for file in files]
    asked = list(dict.fromkeys(filter(None, names)))
    if len(asked) < 2:
        return {"": join(files)}
    shapes = (next((row["shape"] for row in file["rows"] if "shape" in row), "") for file in files)  # bench's
    names = [name or Path(shape).parent.name for name, shape in zip(names, shapes, strict=True)]
    return {name: join([file for file, own in zip(files, names, strict=True) if own == name]) for name in asked}


def megabytes(row: dict) -> dict[str, float]:
    """Of one sequence: bench counts its whole batch."""
    read, mega = row["step_device_bytes"] + row["step_host_bytes"], 1e6 * row.get("batch", 1)
    return {"kv": row["kv_device_bytes"] / mega, "host": row["kv_host_bytes"] / mega, "read": read / mega}


def method_of(row: dict) -> tuple[str, int | float | None]:
    return Choice(row["kv"], None, row["options"]).label, row["budget"]


def table(results: Results) -> tuple[dict[str, str], list[list]]:
    """(title -> format, rows) of a result file; a column that no method has is left out."""
    used = {title: entry for title, entry in COLUMNS.items() if any(entry[0] in own for own in results.values())}
    rows = []
    for method, own in results.items():
        rows.append([name_of(*method), *(own.get(key) for key, _ in used.values())])
    return {"method": ""} | {title: form for title, (_, form) in used.items()}, rows


def name_of(method: str, budget: int | float | None) -> str:
    return method if budget is None else f"{method} {budget}"


def across(models: dict[str, dict[int, Results]]) -> tuple[dict[str, str], list[list]]:
    """(title -> format, rows) of a result file on several checkpoints, by name: one row per method and budget.

    The bytes are those of the longest texts; of those with a KL, if there are any: questions may have another dtype.
    """
    columns, cells = {"method": ""}, defaultdict(dict)
    for title, key, form in (("KL", "kl", ".4f"), ("answers, %", "answers", ""), ("KV, MB", "kv", ".1f")):
        for name, results in models.items():
            diverging = [length for length, own in results.items() if any("kl" in x for x in own.values())]
            for length in [max(diverging or results)] if key == "kv" else results:
                if any(key in own for own in results[length].values()):
                    columns[column := f"{title}: {name} {length}"] = form
                    for method, own in results[length].items():
                        cells[method][column] = own.get(key)
    return columns, [[name_of(*method), *map(own.get, list(columns)[1:])] for method, own in cells.items()]


READ = "MB of cache read a step", ("read",)
KEPT = "MB of cache kept, on the device and the host", ("kv", "host")


def draw(models: dict[str, dict[int, Results]], path: str) -> None:
    """Draws KL, or answers, a row of panels per length, a line per method.

    Of one checkpoint, over bytes read and over bytes kept; of several, over bytes kept, a column for each. A method has
    one color in all panels, and its options differ in marker. A dashed line stands at the full cache's bytes.
    """
    several = len(models) > 1
    columns = [(name, x) for name in models for x in (READ, KEPT)[several:]]
    drawn = defaultdict(dict)  # length -> column -> whether KL is drawn, and (method, results, height) for each mark
    for at, (name, _) in enumerate(columns):
        for length, by_method in models[name].items():
            diverges, marks = any("kl" in own for own in by_method.values()), []
            asked = "answers" if any("answers" in own for own in by_method.values()) else "blind"
            for (method, _), own in by_method.items():
                scores = [own[asked, when] for when in ("first", "later") if (asked, when) in own]
                divergence = [own["kl"]] if own.get("kl") else []  # a logarithmic axis has no 0
                heights = divergence if diverges else scores
                if heights and "read" in own:
                    marks.append((method, own, fmean(heights)))
            if marks:
                drawn[length][at] = diverges, marks
    if not drawn:
        raise ValueError("--plot: no method has both bytes and a divergence or answers")
    labels = {label for by_column in drawn.values() for _, marks in by_column.values() for label, *_ in marks}
    how = styles(sorted(labels))
    with panels(path, len(drawn), len(columns), *((7, 5.5) if several else (9, 6.5))) as axes:
        named = []
        for row, (length, found) in zip(axes, sorted(drawn.items()), strict=True):
            for at, (axis, (name, (label, x))) in enumerate(zip(row, columns, strict=True)):
                if at not in found:
                    axis.remove()
                    continue
                diverges, marks = found[at]
                lines = defaultdict(list)
                for method, own, y in marks:
                    lines[method].append((sum(own[key] for key in x), y))
                for method, points in lines.items():
                    axis.plot(*zip(*points, strict=True), **how[method])
                if "read" in (full := models[name][length].get(("full", None), {})):
                    axis.axvline(sum(full[key] for key in x), color="0.6", linestyle="--", zorder=0)
                title = f"{name}, {length} tokens" if several else f"{length} tokens"
                axis.set(xlabel=label, title=title, yscale="log" if diverges else "linear")
                axis.set_ylabel("KL to the full cache, nats" if diverges else "answers right, %")
                axis.margins(x=0.15, y=0.08)
                logarithmic(axis)
                named.append((axis, [(method, *points[-1]) for method, points in lines.items()]))
        axes[0, 0].figure.draw_without_rendering()  # settles the layout, since names are placed in pixels
        for axis, points in named:
            name_marks(axis, points)


def styles(labels: list[str]) -> dict[str, dict]:
    """A color for each method, and a marker for each of its options."""
    variants = defaultdict(list)
    for label in labels:
        variants[label.partition(":")[0]].append(label)
    colors = {method: f"C{i}" for i, method in enumerate(variants)}
    return {
        label: {"color": colors[method], "marker": MARKERS[i % len(MARKERS)]}
        for method, own in variants.items()
        for i, label in enumerate(own)
    }


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
    p = Parser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="what eval.py and bench wrote with --json")
    p.add_argument("--results", type=Path, metavar="NAME.json", help="write a result file for each length")
    p.add_argument("--command", default="", help="the command that a result file names")
    p.add_argument("--note", default="", help="what a reader of a result file must know")
    p.add_argument("--plot", metavar="FILE", help="draw KL or answers over bytes")
    args = p.parse_args(argv)
    for flag in ("results", "plot"):
        check_output(getattr(args, flag), f"--{flag}")
    try:
        files = [parse_json(path.read_bytes(), path) for path in args.files]
        models = by_checkpoint(files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{' and '.join(map(str, args.files))} must be the files that eval.py and bench wrote with --json "
            f"({type(error).__name__}: {error})"
        ) from None
    about = {key: next((file[key] for file in files if key in file), "") for key in ("machine", "date")}
    tables = {"": across(models)} if len(models) > 1 else {length: table(own) for length, own in models[""].items()}
    for length, (columns, rows) in tables.items():
        print(f"\n{length} tokens\n" if length else "", f"\n{markdown(columns, rows)}", sep="")
        if args.results:
            path = args.results.with_stem(f"{args.results.stem}_{length}") if len(tables) > 1 else args.results
            with replacing(path) as file:
                content = about | {"command": args.command, "note": args.note, "columns": columns, "rows": rows}
                file.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot:
        draw(models, args.plot)


if __name__ == "__main__":
    run(main)
