"""What a method measures of itself over the updates (`Method.measurements`): read back from metrics, and drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Measures", "measures_figure", "measures_of"]

#: Values over updates, by measure and by stage.
Measures = dict[str, dict[int, list[tuple[int, float]]]]

_UPDATE = "measured/update"
_NAME = re.compile(r"[a-z]+(\d+)/(\w+)")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))


def measures_of(rows: Iterable[Mapping[str, Any]]) -> Measures:
    """The measurements among the rows of a run's metrics.

    >>> measures_of([{"step": 12, "measured/update": 10, "border1/jump": 1.5}])
    {'jump': {1: [(10, 1.5)]}}
    """
    found: Measures = {}
    for row in rows:
        # Files can be edited: a row without the number of an update has no place in a picture.
        for name, value in row.items() if math.isfinite(row.get(_UPDATE, math.nan)) else ():
            if match := _NAME.fullmatch(name):
                found.setdefault(match[2], {}).setdefault(int(match[1]), []).append((int(row[_UPDATE]), value))
    return found


def measures_figure(groups: Mapping[str, Measures]) -> Figure:
    """One panel per measure, one colour per stage, one kind of line per run."""
    # Whoever only reads runs does not wait for a plotting library.
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    from .picture import Picture

    named = dict.fromkeys(name for measures in groups.values() for name in measures)
    shown = [name for name in named if any(_tells(measures.get(name, {})) for measures in groups.values())]
    figure = Picture(figsize=(3.4 * max(1, len(shown)), 3.4), layout="constrained")
    stages = sorted({stage for measures in groups.values() for lines in measures.values() for stage in lines})
    colours = {stage: colormaps["viridis"](0.9 * i / max(1, len(stages) - 1)) for i, stage in enumerate(stages)}
    dashes = {label: _DASHES[i % len(_DASHES)] for i, label in enumerate(groups)}
    panels = figure.subplots(1, len(shown), squeeze=False)[0] if shown else ()
    for axes, measure in zip(panels, shown, strict=True):
        for label, measures in groups.items():
            for stage, line in measures.get(measure, {}).items():
                axes.plot(
                    *zip(*line, strict=True), color=colours[stage], linestyle=dashes[label], linewidth=1.3, marker="."
                )
        axes.set(xlabel="updates", title=measure)
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    handles = [Line2D([], [], color=colours[stage], label=f"stage {stage}") for stage in stages]
    if len(groups) > 1:
        handles += [Line2D([], [], color="#666666", linestyle=dashes[label], label=label) for label in groups]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, max(1, len(handles))), frameon=False)
    return figure


def _tells(lines: Mapping[int, Sequence[tuple[int, float]]]) -> bool:
    """Whether anything but zero was measured: a method may have no use for one of its measures."""
    return any(value for line in lines.values() for _, value in line)
