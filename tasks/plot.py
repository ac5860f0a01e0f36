"""Plots of the results of `eval.py`."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tasks.needle import DEPTHS
from terminal.cli import Choice, load_pyplot

pyplot = load_pyplot()
COLOURS = pyplot.get_cmap("tab10")
KINDS = {"score": "accuracy", "first": "accuracy, first questions", "later": "accuracy, later questions"}


def draw(rows: list[dict], samples: list[dict], path: str | Path) -> None:
    """Draws accuracy over the budget, over the bytes a step reads and over the bytes kept, first and later questions in
    separate panels; and for each needle run a heatmap, length by depth."""
    graded = [row for row in rows if row["first"] is not None]
    grids = needle_grids([s for s in samples if "depth" in s])
    if not graded:
        raise ValueError("--plot: no result is an accuracy; choose other --tasks")
    kinds = ("first", "later") if any(row["later"] is not None for row in graded) else ("score",)
    axes_of_x = {
        "budget, tokens a KV head (or share of the prompt)": lambda row: row["budget"],
        "MB of KV cache read in a decode step": lambda row: (row["step_device_bytes"] + row["step_host_bytes"]) / 1e6,
        "MB of KV cache kept": lambda row: (row["kv_device_bytes"] + row["kv_host_bytes"]) / 1e6,
    }
    panels = [partial(over, graded, kind, x, label) for kind in kinds for label, x in axes_of_x.items()]
    panels += [partial(heat, label, grid) for label, grid in grids.items()]
    down = -(-len(panels) // 3)
    figure, axes = pyplot.subplots(down, 3, figsize=(19.2, 4.8 * down), squeeze=False, layout="constrained")
    for axis, panel in itertools.zip_longest(axes.flat, panels):
        panel(axis) if panel else axis.remove()
    legend = axes[0, 0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside upper center", ncols=9, fontsize="small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def over(rows: list[dict], kind: str, x: Callable[[dict], float], label: str, axis) -> None:
    """Draws one line per method: the mean `kind` score over tasks at each budget's mean x; level without a budget."""
    lines: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        lines[Choice(row["kv"], None, row["options"]).label][row["budget"]].append(row)
    ticks = set()
    for i, (method, budgets) in enumerate(lines.items()):
        style = {"color": COLOURS(i % COLOURS.N), "marker": "os^Dv"[i // COLOURS.N % 5], "label": method}
        points = []
        for own in budgets.values():
            scores = [row[kind] for row in own if row[kind] is not None]
            place = None if own[0]["budget"] is None else sum(map(x, own)) / len(own)
            points += [(place, sum(scores) / len(scores))] if scores else []
        if points and points[0][0] is None:
            axis.axhline(points[0][1], linestyle="--", color=style["color"], label=method)
        elif points:
            axis.plot(*zip(*sorted(points), strict=True), **style)
            ticks |= {x for x, _ in points}
    if ticks:
        axis.set_xscale("log")
        axis.minorticks_off()
        apart = []
        for tick in sorted(ticks):
            if not apart or tick / apart[-1] > 1.4:
                apart.append(tick)
        axis.set_xticks(apart, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in apart])
    axis.set(xlabel=label, ylabel=KINDS[kind], ylim=(-3, 103))
    axis.grid(alpha=0.3)


def needle_grids(samples: list[dict]) -> dict[str, dict]:
    """method -> (length, depth) -> the mean score."""
    cells: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        label = Choice(s["kv"], s["budget"], s["options"]).label
        cells[label][s["length"], s["depth"]].append(s["score"])
    return {label: {at: sum(v) / len(v) for at, v in grid.items()} for label, grid in cells.items()}


def heat(label: str, grid: dict, axis) -> None:
    lengths = sorted({length for length, _ in grid})
    depths = [i / (DEPTHS - 1) for i in range(DEPTHS)]
    values = [[grid.get((length, depth), float("nan")) for length in lengths] for depth in depths]
    image = axis.imshow(values, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axis.set(title=f"needle, {label}", xlabel="tokens", ylabel="depth of the needle")
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set_yticks(range(DEPTHS), [f"{100 * depth:.0f}%" for depth in depths])
    axis.figure.colorbar(image, ax=axis, label="accuracy")
