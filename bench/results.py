"""Writes the results in docs/results/*.json into the tables of the documents: python -m bench.results

A table stands between `<!-- table NAME -->` and `<!-- end -->`. `<!-- table NAME: ROW, ROW | COLUMN; COLUMN -->`
selects rows by their first cell and, after the first, columns by their titles. NAME.json holds `machine`, `date`,
`command`, optionally `note`, the `columns` as a map from a title to the format of its numbers, and the `rows`. An empty
cell is null; a text is written as it is.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
TABLE = re.compile(r"(<!-- table (\S+?)(?:: ?(.*?))? -->\n).*?(<!-- end -->)", re.S)


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "BENCHMARKS.md", *sorted((ROOT / "docs").glob("*.md"))]


def cell(value: str | int | float | None, form: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, form)


def table(name: str, wanted: str | None = None) -> str:
    """Where a result comes from, and its rows, in Markdown. Raises KeyError for a row or column that does not exist."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    columns, rows = result["columns"], result["rows"]
    keys, _, titles = (wanted or "").partition(" | ")
    if keys:
        named = {row[0]: [] for row in rows}
        for row in rows:
            named[row[0]].append(row)
        rows = [row for key in keys.split(", ") for row in named[key]]
    if titles:
        at = {title: i for i, title in enumerate(columns)}
        shown = [0, *(at[title] for title in titles.split("; "))]
        columns = {title: columns[title] for title in (list(columns)[i] for i in shown)}
        rows = [[row[i] for i in shown] for row in rows]
    where = ", ".join(filter(None, (result["machine"], result["date"])))
    said = f"{where}: `{result['command']}`" if result["command"] else where
    note = f" {result['note']}" if result.get("note") else ""
    return f"{said}.{note}\n\n{markdown(columns, rows)}\n"


def markdown(columns: dict[str, str], rows: list[list]) -> str:
    """The columns and rows of a result as a table in Markdown."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[cell(value, form) for value, form in zip(row, columns.values(), strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render(text: str) -> str:
    """The text of a document, with its tables made anew."""
    return TABLE.sub(lambda match: f"{match[1]}{table(match[2], match[3])}{match[4]}", text)


if __name__ == "__main__":
    for path in documents():
        path.write_text(render(path.read_text()))
