"""Figures of runs: how they learn, what their stages do when, how fast and how large they are."""

from __future__ import annotations

import statistics as stats
from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..runtime.events import Event
from .comparison import Row
from .record import Record

__all__ = ["costs", "curves", "timeline"]

# Distinguishable with any kind of colour vision (Okabe and Ito).
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
_KINDS = {"F": "#56B4E9", "B": "#E69F00", "I": "#E69F00", "W": "#F0D58C", "A": "#CC79A7", "U": "#333333"}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "A": "local", "U": "update"}
_GREY = "#666666"


def curves(groups: Mapping[str, Sequence[Record]]) -> Figure:
    """Training loss by step and test accuracy by epoch, each line the mean over the runs of one group."""
    figure = Figure(figsize=(11, 4), layout="constrained")
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


def timeline(groups: Mapping[str, Sequence[Event]], seconds: float | None = None) -> Figure:
    """What every stage does when, one panel per run, all to the same scale.

    **Arguments:**

    - `groups`: events by label.
    - `seconds`: how much of the beginning; by default as much as shows about 60 actions of the first run.
    """
    groups = {label: events for label, events in groups.items() if events}
    lanes = [1 + max(e.stage for e in events) for events in groups.values()]
    figure = Figure(figsize=(11, 0.6 + sum(0.42 * n + 0.34 for n in lanes)), layout="constrained")
    if not groups:
        return figure
    span = seconds or min(_reach(events) for events in groups.values())
    panels: Any = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=lanes)
    shown: set[str] = set()
    for axes, (label, events) in zip(panels[:, 0], groups.items(), strict=True):
        shown |= _lanes(axes, label, events, span)
    panels[-1, 0].set_xlabel("milliseconds since the first action (the number is the micro-batch)")
    legend = [Patch(color=_KINDS[kind], label=_NAMES[kind]) for kind in _KINDS if kind in shown and kind != "I"]
    figure.legend(handles=legend, loc="outside upper right", ncols=len(legend), frameon=False)
    return figure


def _reach(events: Sequence[Event], actions: int = 60) -> float:
    return events[min(actions, len(events)) - 1].end - events[0].start


def _lanes(axes: Axes, label: str, events: Sequence[Event], span: float) -> set[str]:
    origin, stages = events[0].start, 1 + max(e.stage for e in events)
    shown = set()
    for event in events:
        start, width = event.start - origin, event.end - event.start
        if start > span:
            break
        shown.add(event.kind)
        axes.barh(
            event.stage,
            1e3 * width,
            left=1e3 * start,
            height=0.86,
            color=_KINDS[event.kind],
            edgecolor="white",
            linewidth=0.5,
        )
        if event.kind != "U" and width > 0.018 * span:
            middle = 1e3 * min(start + width / 2, (start + span) / 2)
            axes.text(middle, event.stage, str(event.batch), ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_xlim(0, 1e3 * span)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"stage {s}" for s in range(stages)], fontsize=8)
    axes.set_title(label, loc="left", fontsize=9, fontweight="bold", pad=2)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return shown


def costs(rows: Sequence[Row]) -> Figure:
    """Samples per second, and the bytes that each stage keeps, as bars."""
    figure = Figure(figsize=(11, 0.9 + 0.34 * len(rows)), layout="constrained")
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
