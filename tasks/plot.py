"""Pictures of what `eval.py` measured."""

from collections import defaultdict
from pathlib import Path

from cli import Choice
from tasks.needle import DEPTHS

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:
    raise ValueError("--plot needs matplotlib: pip install matplotlib") from None


def draw(rows: list[dict], samples: list[dict], path: str | Path) -> None:
    """Accuracy over the budget and over the bytes that a step reads; a heatmap, length by depth, of each needle run."""
    graded = [row for row in rows if row["first"] is not None]
    grids = needle_grids([s for s in samples if "depth" in s])
    if not graded:
        raise ValueError("--plot: nothing that was measured is an accuracy")
    panels = 2 + len(grids)
    across = min(panels, 2 if panels < 5 else 3)
    down = -(-panels // across)
    size = (6.4 * across, 4.4 * down)
    figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    axes = list(axes.flat)
    for axis in axes[panels:]:
        axis.remove()
    over(axes[0], graded, "budget", "budget, tokens a KV head (or share of the prompt)")
    over(axes[1], graded, "read", "MB of KV cache read in a decode step")
    for axis, (label, grid) in zip(axes[2:], grids.items(), strict=False):
        heat(axis, label, grid)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def over(axis, rows: list[dict], what: str, label: str) -> None:
    """A line a method, its mean score over all tasks at each budget; level where there is no budget."""
    lines: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        lines[Choice(row["kv"], None, row["options"]).label][row["budget"]].append(row)
    ticks = set()
    for i, (method, budgets) in enumerate(lines.items()):
        points = []
        for budget, own in budgets.items():
            read = sum(r["step_device_bytes"] + r["step_host_bytes"] for r in own) / len(own) / 1e6
            points.append((budget if what == "budget" else read, sum(r["score"] for r in own) / len(own)))
        if points[0][0] is None:
            axis.axhline(points[0][1], linestyle="--", color=f"C{i}", label=method)
        else:
            axis.plot(*zip(*sorted(points), strict=True), marker="o", color=f"C{i}", label=method)
            ticks |= {x for x, _ in points}
    axis.set(xlabel=label, ylabel="accuracy, mean of the tasks", ylim=(-3, 103))
    if ticks:
        axis.set_xscale("log")
        axis.minorticks_off()
        apart = [x for i, x in enumerate(sorted(ticks)) if not i or x / sorted(ticks)[i - 1] > 1.15]
        axis.set_xticks(apart, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in apart])
    axis.grid(alpha=0.3)
    axis.legend()


def needle_grids(samples: list[dict]) -> dict[str, dict]:
    """Per method, (length, depth) -> the mean score."""
    cells: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        label = s["kv"] + (f" {s['budget']}" if s["budget"] is not None else "")
        cells[label][s["length"], s["depth"]].append(s["score"])
    return {label: {at: sum(v) / len(v) for at, v in grid.items()} for label, grid in cells.items()}


def heat(axis, label: str, grid: dict) -> None:
    lengths = sorted({length for length, _ in grid})
    depths = [i / (DEPTHS - 1) for i in range(DEPTHS)]
    values = [[grid.get((length, depth), float("nan")) for length in lengths] for depth in depths]
    image = axis.imshow(values, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axis.set(title=f"needle, {label}", xlabel="tokens", ylabel="depth of the needle")
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set_yticks(range(DEPTHS), [f"{100 * depth:.0f}%" for depth in depths])
    axis.figure.colorbar(image, ax=axis, label="accuracy")
