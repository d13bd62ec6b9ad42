"""Figures of runs: how they learn, how fast and how large they are. What their stages do when is in `timeline`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .board import curves_of
from .comparison import Row
from .picture import Picture
from .record import Record

__all__ = ["costs", "curves"]

# Distinguishable with any kind of colour vision (Okabe and Ito).
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
_PALE = ("#BBBBBB", "#D6C7A5")
_GREY = "#666666"


def curves(groups: Mapping[str, Sequence[Record]], baselines: Collection[str] = ()) -> Figure:
    """Training loss by step and test accuracy by epoch, each line the mean over the runs of one group.

    **Arguments:** `baselines`: labels of those that others are compared with.
    """
    figure = Picture(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines, pale = cycle(_LINES), cycle(_PALE)
    for label, records in groups.items():
        # A baseline is broad and pale, so that a line that coincides with it (as exact methods do) shows on top of it.
        broad = label in baselines
        wide, level = (5, 1.5) if broad else (1.6, 2)
        style = {"color": next(pale if broad else lines), "linewidth": wide, "zorder": level}
        found = curves_of(records)
        for axes, name, factor in ((left, "training loss", 1), (right, "test accuracy", 100)):
            points = found[name]["points"] if name in found else []
            axes.plot([p[0] for p in points], [factor * p[1] for p in points], label=label, **style)
    left.set(xlabel="batches", ylabel="training loss", yscale="log")
    right.set(xlabel="epochs", ylabel="test accuracy (%)")
    for axes in (left, right):
        _plain(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def costs(rows: Sequence[Row]) -> Figure:
    """Samples per second, and the bytes that each stage keeps, as bars."""
    figure = Picture(figsize=(11, 0.9 + 0.34 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(rows):
        left.barh(place, row.speed or 0.0, color=_LINES[0], height=0.7)
        ratio = f"  {row.ratio:.2f}x" if row.ratio is not None else ""
        left.text(row.speed or 0.0, place, ratio, va="center", fontsize=8, color=_GREY)
        reached = 0.0
        for stage, count in enumerate(row.peak_bytes):
            shade = 1.0 - 0.65 * stage / max(1, len(row.peak_bytes) - 1)
            right.barh(place, count / 1e6, left=reached, color=_LINES[2], alpha=shade, height=0.7, edgecolor="white")
            reached += count / 1e6
    left.set_yticks(range(len(rows)), [row.label for row in rows])
    left.invert_yaxis()
    left.set_xlabel("samples per second")
    left.margins(x=0.12)
    right.set_xlabel("peak MB kept for batches under way (stage 0 darkest)")
    for axes in (left, right):
        _plain(axes, grid="x")
    return figure


def _plain(axes: Axes, grid: str = "both") -> None:
    """Less ink: no box, a faint grid behind the data."""
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)  # type: ignore[arg-type]
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
