"""What happens at the borders of a method with auxiliary variables, over the updates: numbers for metrics, a figure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..methods.local.statistics import LocalStatistics

__all__ = ["Borders", "border_figure", "border_metrics", "borders_of"]

#: Values over updates, by measure and by border (or stage, for the cosine).
Borders = dict[str, dict[int, list[tuple[int, float]]]]

_UPDATE = "border/update"
_NAME = re.compile(r"(?:border|stage)(\d+)/(violation|jump|multiplier|loss|cosine)")
_WORDS = {
    "violation": "violation |lam - x| / |x|",
    "jump": "jump |p - g| / |p|",
    "multiplier": "norm of the multiplier",
    "loss": "loss of the AuxNet (psi)",
    "cosine": "cosine with backpropagation",
}
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))


def border_metrics(measured: Sequence[LocalStatistics], after: int = -1) -> list[dict[str, float]]:
    """One row of numbers per update after `after` at which something was measured, oldest first.

    >>> from unlatch.methods.local.statistics import BorderRecord
    >>> stage = LocalStatistics(1, records=[BorderRecord(10, 0.5, 1.0, 0.0, 0.1)], cosines=[(10, 0.9, 1.0)])
    >>> border_metrics([stage])[0]["border1/violation"], border_metrics([stage], after=10)
    (0.5, [])
    """
    rows: dict[int, dict[str, float]] = {}
    for part in measured:
        for record in part.records:
            rows.setdefault(record.update, {}).update(record.metrics(part.stage))
        for update, cosine, _ in part.cosines:
            rows.setdefault(update, {})[f"stage{part.stage}/cosine"] = cosine
    return [{_UPDATE: update, **rows[update]} for update in sorted(rows) if update > after]


def borders_of(rows: Iterable[Mapping[str, Any]]) -> Borders:
    """The measurements among the rows of a run's metrics, as `border_metrics` made them.

    >>> borders_of([{"step": 12, "border/update": 10, "border1/jump": 1.5}])
    {'jump': {1: [(10, 1.5)]}}
    """
    found: Borders = {}
    for row in rows:
        for name, value in row.items() if _UPDATE in row else ():
            if match := _NAME.fullmatch(name):
                found.setdefault(match[2], {}).setdefault(int(match[1]), []).append((int(row[_UPDATE]), value))
    return found


def border_figure(groups: Mapping[str, Borders]) -> Figure:
    """One panel per measure, one colour per border, one kind of line per run."""
    measures = [name for name in _WORDS if any(_tells(borders.get(name, {})) for borders in groups.values())]
    figure = Figure(figsize=(3.4 * max(1, len(measures)), 3.4), layout="constrained")
    places = sorted({place for borders in groups.values() for lines in borders.values() for place in lines})
    colours = {place: colormaps["viridis"](0.9 * i / max(1, len(places) - 1)) for i, place in enumerate(places)}
    dashes = {label: _DASHES[i % len(_DASHES)] for i, label in enumerate(groups)}
    panels = figure.subplots(1, len(measures), squeeze=False)[0] if measures else ()
    for axes, measure in zip(panels, measures, strict=True):
        for label, borders in groups.items():
            for place, line in borders.get(measure, {}).items():
                axes.plot(
                    *zip(*line, strict=True), color=colours[place], linestyle=dashes[label], linewidth=1.3, marker="."
                )
        axes.set(xlabel="updates", title=_WORDS[measure])
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    handles = [
        Line2D([], [], color=colours[p], label=f"stage {p}" if p == 0 else f"border of stage {p}") for p in places
    ]
    if len(groups) > 1:
        handles += [Line2D([], [], color="#666666", linestyle=dashes[label], label=label) for label in groups]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, max(1, len(handles))), frameon=False)
    return figure


def _tells(lines: Mapping[int, Sequence[tuple[int, float]]]) -> bool:
    """Whether anything but zero was measured; the multiplier of the penalty form is always zero."""
    return any(value for line in lines.values() for _, value in line)
