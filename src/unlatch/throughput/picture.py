"""Rows of a comparison as bars."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..report.picture import Picture
from .session import Row

__all__ = ["draw"]

# Distinguishable with any kind of colour vision (Okabe and Ito).
_COLOURS = {"pytorch": "#56B4E9", "torch pipelining": "#E69F00", "unlatch": "#0072B2", "limit": "#999999"}


def draw(rows: Sequence[Row], title: str = "") -> Figure:
    """A bar per system that was measured: its ratio to one thread of plain PyTorch, with the spread of the rounds.

    >>> rows = [Row("unlatch", "fdg", 2, 1, "fp32", 100.0, 1.8, 0.97, None, 3, (1.7, 1.9))]
    >>> draw(rows).axes[0].get_yticklabels()[0].get_text()
    'unlatch: fdg'
    """
    shown = [row for row in rows if row.ratio is not None and row.spread is not None]
    figure = Picture(figsize=(8, 1.2 + 0.28 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(shown):
        assert row.ratio is not None
        assert row.spread is not None
        low, high = row.spread
        colour = _COLOURS.get(row.system, "#009E73")
        axes.barh(place, row.ratio, color=colour, height=0.7, label=row.system)
        axes.plot([low, high], [place, place], color="#333333", linewidth=1.2)
        axes.text(max(high, row.ratio), place, f"  {row.ratio:.2f}", va="center", fontsize=8, color="#444444")
        if row.system == "limit":
            axes.axvline(row.ratio, color=colour, linewidth=1.0, linestyle="--", zorder=0)
    axes.set_yticks(range(len(shown)), [f"{row.system}: {row.method}" for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("samples per second, times one thread of plain PyTorch (line: slowest to fastest round)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.margins(x=0.1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
