"""Plots of the results of `eval.py`."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from statistics import fmean

from tasks.needle import DEPTHS
from terminal.cli import Choice
from terminal.plots import logarithmic, panels

KINDS = {"score": "accuracy", "first": "accuracy, first questions", "later": "accuracy, later questions"}
BUDGET = "budget, tokens a KV head (or share of the prompt)"
OVER = {
    BUDGET: lambda row: row["budget"],
    "MB of KV cache read in a decode step": lambda row: (row["step_device_bytes"] + row["step_host_bytes"]) / 1e6,
    "MB of KV cache kept": lambda row: (row["kv_device_bytes"] + row["kv_host_bytes"]) / 1e6,
}


def draw(rows: list[dict], samples: list[dict], path: str) -> None:
    """Draws accuracy over the budget, over the bytes a step reads and over the bytes kept, first and later questions in
    separate panels; for each needle run a heatmap, length by depth; and the divergence over the forced tokens."""
    graded = [row for row in rows if row["first"] is not None]
    forced = [row for row in rows if row.get("kl_spans")]
    if not graded and not forced:
        raise ValueError("--plot: no result is an accuracy or a divergence; choose other --tasks")
    kinds = ("first", "later") if any(row["later"] is not None for row in graded) else ("score",) * bool(graded)
    parts = [partial(over, graded, kind, x, label) for kind in kinds for label, x in OVER.items()]
    parts += [partial(heat, label, grid) for label, grid in needle_grids(samples).items()]
    lengths = {row["length"]: None for row in forced}
    parts += [partial(diverging, [row for row in forced if row["length"] == length], length) for length in lengths]
    columns = min(3, len(parts))
    with panels(path, -(-len(parts) // columns), columns) as axes:
        for axis, part in zip_longest(axes.flat, parts):
            part(axis) if part else axis.remove()
        if graded:  # the others have legends of their own
            legend = axes[0, 0].get_legend_handles_labels()
            axes[0, 0].figure.legend(*legend, loc="outside upper center", ncols=9, fontsize="small")


def over(rows: list[dict], kind: str, x: Callable[[dict], float], label: str, axis) -> None:
    """Draws one line per method: the mean `kind` score over tasks at each budget's mean x; level without a budget.

    Each is thinner than the one before, which shows where they coincide; points bear their budgets.
    """
    methods: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row[kind] is not None:
            methods[Choice(row["kv"], None, row["options"]).label][row["budget"]].append(row)
    ticks = []
    for thicker, (method, budgets) in zip(range(len(methods) - 1, -1, -1), methods.items(), strict=True):
        width = {"linewidth": 1.5 + 3 * thicker / len(methods)}
        scores = {budget: fmean(row[kind] for row in own) for budget, own in budgets.items()}
        if None in budgets:
            level = {"marker": "", "label": method, "transform": axis.get_yaxis_transform()}
            axis.plot([0, 1], 2 * [scores[None]], "--", **level, **width)
            continue
        points = sorted((fmean(map(x, own)), scores[budget], budget) for budget, own in budgets.items())
        places, heights, _ = zip(*points, strict=True)
        [line] = axis.plot(places, heights, label=method, markersize=6 + 5 * thicker / len(methods), **width)
        for place, height, budget in points if label != BUDGET else ():
            where = {"xytext": (0, 7 if height < 90 else -14), "textcoords": "offset points", "ha": "center"}
            axis.annotate(f"{budget:g}", (place, height), fontsize="x-small", color=line.get_color(), **where)
        ticks += places
    logarithmic(axis, ticks)
    axis.set(xlabel=label, ylabel=KINDS[kind], ylim=(-3, 103))


def diverging(rows: list[dict], length: int, axis) -> None:
    """Draws one line per method and budget: the mean divergence in each span of the forced tokens."""
    for row in rows:
        if row["kl"] > 0:  # the full cache itself has no place on a logarithmic axis
            label, spans = Choice(row["kv"], row["budget"], row["options"]).label, row["kl_spans"]
            axis.plot([100 * (i + 0.5) / len(spans) for i in range(len(spans))], spans, label=label)
    axis.set(xlabel="% of the forced tokens", ylabel="KL from the full cache, nats", yscale="log")
    axis.set_title(f"fidelity, {length:,} tokens")
    axis.legend(fontsize="small")


def needle_grids(samples: list[dict]) -> dict[str, dict]:
    """method -> (length, depth) -> the mean score."""
    cells: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        if "depth" in s:
            cells[Choice(s["kv"], s["budget"], s["options"]).label][s["length"], s["depth"]].append(s["score"])
    return {label: {at: fmean(scores) for at, scores in grid.items()} for label, grid in cells.items()}


def heat(label: str, grid: dict, axis) -> None:
    lengths = sorted({length for length, _ in grid})
    depths = [i / (DEPTHS - 1) for i in range(DEPTHS)]
    values = [[grid.get((length, depth), float("nan")) for length in lengths] for depth in depths]
    image = axis.imshow(values, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axis.set(title=f"needle, {label}", xlabel="tokens", ylabel="depth of the needle")
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set_yticks(range(DEPTHS), [f"{100 * depth:.0f}%" for depth in depths])
    axis.grid(visible=False)
    axis.figure.colorbar(image, ax=axis, label="accuracy")
