"""Figures of how exact a run was: gradients beside backpropagation, and reconstructed inputs beside true ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..io.metrics import read
from ..train.probe import Comparison, Reference
from ..train.statistics import StageStatistics
from .picture import Picture

__all__ = ["probe_figure", "read_probe", "reconstruction_figure"]

_NAME = re.compile(r"probe/stage(\d+)/(\w+)/(\w+)")
_STYLES: dict[str, Any] = {"forward": "-", "current": (0, (4, 2))}
_WORDS = {"forward": "exact at the weights of the forward", "current": "exact at the current weights"}
_MEASURES = (("cosine", "cosine"), ("norm_ratio", "ratio of norms"), ("relative_error", "relative error"))


def read_probe(folder: str | Path) -> list[Comparison]:
    """The comparisons that a run wrote into its metrics.

    >>> read_probe("nowhere")
    []
    """
    return [comparison for row in read(folder) for comparison in _from_row(row)]


def _from_row(row: Mapping[str, Any]) -> list[Comparison]:
    found: dict[tuple[int, str], dict[str, float]] = {}
    for name, value in row.items():
        if match := _NAME.fullmatch(name):
            stage, reference, measure = match.groups()
            found.setdefault((int(stage), reference), {})[measure] = value
    return [
        Comparison(int(row["probe/update"]), stage, reference, **values)  # type: ignore[arg-type]
        for (stage, reference), values in found.items()
        if math.isfinite(row.get("probe/update", math.nan)) and values.keys() == dict(_MEASURES).keys()
    ]


def probe_figure(found: Sequence[Comparison], title: str = "") -> Figure:
    """Cosine, ratio of norms and relative error of every stage's gradient over the updates.

    **Arguments:** `found`: from `GradientProbe.found` or `read_probe`.
    """
    figure = Picture(figsize=(11, 3.6), layout="constrained")
    stages = sorted({c.stage for c in found})
    colours = _colours(stages)
    for axes, (measure, words) in zip(figure.subplots(1, 3), _MEASURES, strict=True):
        for stage in stages:
            for reference in get_args(Reference):
                line = sorted(
                    (c.update, getattr(c, measure)) for c in found if (c.stage, c.reference) == (stage, reference)
                )
                style = _STYLES[reference]
                axes.plot(*zip(*line, strict=True), color=colours[stage], linestyle=style, linewidth=1.4, marker=".")
        axes.set(xlabel="updates", ylabel=words)
        _plain(axes)
    handles = [Line2D([], [], color=colours[s], label=f"stage {s}") for s in stages]
    handles += [Line2D([], [], color="#666666", linestyle=_STYLES[r], label=_WORDS[r]) for r in get_args(Reference)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def reconstruction_figure(statistics: Iterable[StageStatistics], title: str = "", per_update: int = 1) -> Figure:
    """The relative error of reconstructed inputs over the updates, one line per stage that reconstructs.

    **Arguments:** `per_update`: micro-batches per update.
    """
    figure = Picture(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    rows = [s for s in statistics if s.reconstruction_error is not None]
    colours = _colours([s.stage for s in rows])
    for row in rows:
        steady = [(micro / per_update, error) for micro, error in row.reconstruction if error > 0]
        if steady:
            label = f"stage {row.stage}"
            axes.plot(*zip(*steady, strict=True), color=colours[row.stage], label=label, linewidth=1.4, marker=".")
    axes.set(xlabel="updates", ylabel="relative error of the input", yscale="log")
    _plain(axes)
    if rows:
        axes.legend(frameon=False, fontsize=8, ncols=2)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    return figure


def _colours(stages: Sequence[int]) -> dict[int, Any]:
    """From the input (dark) to the output (light)."""
    scale = colormaps["viridis"]
    return {stage: scale(0.9 * index / max(1, len(stages) - 1)) for index, stage in enumerate(stages)}


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
