"""The methods on a real model: joins what `bash bench.sh real` measured, python -m bench.real FOLDER [--results DIR]

Reads those of its files that are there: prose.json, code.json and dialogue.json (eval.py's fidelity, in fp32, whose
divergences bf16 would blur), answers.json and blind.json (its questions) and speed.json (bench, whose bytes and times
are those of the checkpoint's dtype). Prints a Markdown table for each length. --results writes the same as
real_LENGTH.json for bench.results; --plot draws KL over the bytes that a step reads and over the bytes kept.
"""

import runtime.startup  # noqa: F401

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from bench.compare import method_of, name_marks
from bench.results import cell, markdown
from runtime.device import replacing
from terminal.cli import check_output, run
from terminal.plots import logarithmic, panels
from text.files import parse_json

TEXTS, QUESTIONS = ("prose", "code", "dialogue"), ("answers", "blind")
COLUMNS = {  # title -> its key in a result, and its format
    "KL": ("kl", ".4f"),
    "same token, %": ("score", ".1f"),
    "perplexity": ("perplexity", ".2f"),
    "answers, %": ("answers", ""),
    "blind, %": ("blind", ""),
    "KV, MB": ("kv", ".2f"),
    "host, MB": ("host", ".2f"),
    "read a step, MB": ("read", ".2f"),
    "ms/token": ("ms", ".1f"),
}


def read(folder: Path) -> dict[str, dict]:
    """The JSON objects of a run, by the names of their files."""
    found = {}
    for name in (*TEXTS, *QUESTIONS, "speed"):
        file = folder / f"{name}.json"
        if file.exists():
            found[name] = parse_json(file.read_bytes(), file)
    return found


def join(found: dict[str, dict]) -> dict[int, dict[tuple, dict]]:
    """length -> (method, budget) -> its results: means over texts and over tasks."""
    results, means = defaultdict(lambda: defaultdict(dict)), defaultdict(list)
    for name in (*TEXTS, *QUESTIONS):
        for row in found.get(name, {"rows": []})["rows"]:
            if row["score"] is None:  # refused
                continue
            if name in TEXTS:
                parts = {key: row[key] for key in ("kl", "score", "perplexity")}
            else:
                parts = {(name, when): row[when] for when in ("first", "later") if row[when] is not None}
            for key, value in parts.items():
                means[row["length"], method_of(row), key].append(value)
    for (length, method, key), values in means.items():
        results[length][method][key] = fmean(values)
    for by_method in results.values():
        for own in by_method.values():
            for name in QUESTIONS:
                scores = [own.pop((name, when)) for when in ("first", "later") if (name, when) in own]
                own |= {name: " / ".join(f"{score:.0f}" for score in scores)} if scores else {}
    for row in found.get("speed", {"rows": []})["rows"]:
        if own := results.get(row["context"], {}).get(method_of(row)):
            own |= {"kv": row["kv_device_bytes"] / 1e6, "host": row["kv_host_bytes"] / 1e6, "ms": row["ms_per_token"]}
            own["read"] = (row["step_device_bytes"] + row["step_host_bytes"]) / 1e6
    return dict(sorted(results.items()))


def table(results: dict[tuple, dict]) -> tuple[dict[str, str], list[list]]:
    """(title -> format, rows) of a result file; a column that no method has is left out."""
    used = {title: entry for title, entry in COLUMNS.items() if any(entry[0] in own for own in results.values())}
    rows = []
    for (method, budget), own in results.items():
        name = method if budget is None else f"{method} {budget}"
        rows.append([name, *(own.get(key) for key, _ in used.values())])
    return {"method": ""} | {title: form for title, (_, form) in used.items()}, rows


def draw(results: dict[int, dict[tuple, dict]], path: str) -> None:
    """Draws KL over bytes read and over bytes kept, a row of panels per length, a line per method over its budgets."""
    drawn = lambda own: own.get("kl", 0) > 0 and "read" in own  # noqa: E731
    lengths = [length for length, by_method in results.items() if any(map(drawn, by_method.values()))]
    if not lengths:
        raise ValueError("--plot: no method has both a divergence and bytes: fidelity and speed must be measured")
    with panels(path, len(lengths), 2, 9, 6.5) as axes:
        named = []
        for (read_axis, kept_axis), length in zip(axes, lengths, strict=True):
            for axis, label, x in (
                (read_axis, "MB of cache read a step", lambda own: own["read"]),
                (kept_axis, "MB of cache kept, on the device and the host", lambda own: own["kv"] + own["host"]),
            ):
                lines = defaultdict(list)
                for (method, _), own in results[length].items():
                    if drawn(own):
                        lines[method].append((x(own), own["kl"]))
                for points in lines.values():
                    axis.plot(*zip(*sorted(points), strict=True))
                axis.set(xlabel=label, ylabel="KL to the full cache, nats", yscale="log", title=f"{length} tokens")
                axis.margins(x=0.15, y=0.08)
                logarithmic(axis, [px for points in lines.values() for px, _ in points])
                named.append((axis, [(method, *max(points)) for method, points in lines.items()]))
        axes[0, 0].figure.draw_without_rendering()  # settles the layout, since names are placed in pixels
        for axis, points in named:
            name_marks(axis, points)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        prog="python -m bench.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path, metavar="FOLDER")
    p.add_argument("--results", type=Path, metavar="DIR", help="write real_LENGTH.json files here")
    p.add_argument("--note", default="", help="what a reader of these files must know")
    p.add_argument("--plot", metavar="FILE", help="draw KL over bytes")
    args = p.parse_args(argv)
    check_output(args.plot, "--plot")
    found = read(args.folder)
    if not found:
        raise ValueError(f"{args.folder} holds none of the files that bash bench.sh real writes")
    try:
        results = join(found)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the files in {args.folder} are not what eval.py and bench wrote ({error!r})") from None
    about = {key: found.get("speed", {}).get(key, "") for key in ("machine", "date")}
    for length, by_method in results.items():
        columns, rows = table(by_method)
        lines = [[cell(value, form) for value, form in zip(row, columns.values(), strict=True)] for row in rows]
        print(f"\n{length} tokens\n\n{markdown([list(columns), *lines])}")
        if args.results:
            content = about | {"command": "bash bench.sh real", "note": args.note, "columns": columns, "rows": rows}
            with replacing(args.results / f"real_{length}.json") as file:
                file.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    run(main)
