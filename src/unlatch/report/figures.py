"""Figures of runs: how they learn, how fast and how large they are. What their stages do when is in `timeline`."""

from __future__ import annotations

import statistics as stats
from collections.abc import Mapping, Sequence
from itertools import chain, cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .comparison import Row
from .picture import Picture
from .record import Record

__all__ = ["costs", "curves"]

# Distinguishable with any kind of colour vision (Okabe and Ito).
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
_GREY = "#666666"


def curves(groups: Mapping[str, Sequence[Record]]) -> Figure:
    """Training loss by step and test accuracy by epoch, each line the mean over the runs of one group."""
    figure = Picture(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    # The first line is broad and pale, so that one that coincides with it (as exact methods do) shows on top of it.
    styles = chain([{"color": "#BBBBBB", "linewidth": 5}], ({"color": c, "linewidth": 1.6} for c in cycle(_LINES)))
    for (label, records), style in zip(groups.items(), styles, strict=False):
        losses = _mean_by([dict(r.losses) for r in records])
        left.plot(list(losses), _smooth(list(losses.values())), label=label, **style)
        accuracy = _mean_by([_accuracies(r) for r in records])
        if accuracy:
            right.plot(list(accuracy), [100 * a for a in accuracy.values()], label=label, **style)
    left.set(xlabel="batches", ylabel="training loss", yscale="log")
    right.set(xlabel="epochs", ylabel="test accuracy (%)")
    for axes in (left, right):
        _plain(axes)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def _accuracies(record: Record) -> dict[int, float]:
    return {row["epoch/number"]: row["eval/accuracy"] for row in record.epochs if "eval/accuracy" in row}


def _mean_by(tables: Sequence[Mapping[int, float]]) -> dict[int, float]:
    keys = sorted({key for table in tables for key in table})
    return {key: stats.mean(table[key] for table in tables if key in table) for key in keys}


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """A running mean, short enough to keep the shape."""
    return [stats.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


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
