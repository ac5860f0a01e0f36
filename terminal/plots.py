"""What the tools' plots share. It does not import matplotlib until something is drawn."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from terminal.cli import load_pyplot

MARKERS = "os^Dv"


@contextmanager
def panels(path: str, down: int, across: int, width: float = 6, height: float = 4.6) -> Iterator:
    """Gives a figure's axes [down, across], of `width` x `height` inches each, and then writes the figure to `path`.

    The lines of a panel differ in color, and each ten of them in marker.
    """
    pyplot = load_pyplot()
    size = (width * across, height * down)
    figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    colors = pyplot.get_cmap("tab10").colors
    for axis in axes.flat:
        axis.set_prop_cycle(pyplot.cycler(marker=MARKERS) * pyplot.cycler(color=colors))
        axis.grid(alpha=0.3)
    yield axes
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def logarithmic(axis, values: Iterable[float] | None = None) -> None:
    """Makes the x axis logarithmic, with ticks at the values, at some of them where they are dense; else at 1, 2, 5."""
    ticks = []
    for x in sorted(values or ()):
        if not ticks or x > 1.4 * ticks[-1]:
            ticks.append(x)
    if ticks or values is None:
        axis.set_xscale("log")
        axis.minorticks_off()
    if values is None:
        axis.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.xaxis.set_major_formatter("{x:g}")
    if ticks:
        axis.set_xticks(ticks, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in ticks])
