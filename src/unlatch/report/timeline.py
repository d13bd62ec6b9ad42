"""Timelines as pictures, pages and traces: what every device does when, simulated or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..errors import ConfigError
from ..schedule.simulation import Span
from .spans import KIND_NAMES, Source, grouped, kind_order, row_names, spans_of
from .timeline_page import timeline_html
from .trace import trace_json, write_trace

__all__ = ["COLOURS", "draw_timeline", "save_timeline", "timeline_html", "trace_json", "write_trace"]

# Distinguishable with any kind of colour vision (Okabe and Ito).
COLOURS = {"F": "#56B4E9", "B": "#E69F00", "I": "#E69F00", "W": "#009E73", "U": "#333333"}
_OTHER = "#CC79A7"
_MOST_LABELS = 1500


def draw_timeline(
    source: Source,
    *,
    window: tuple[float, float] | None = None,
    title: str = "",
    unit: str = "",
    rows: Sequence[str] | None = None,
) -> Figure:
    """Draw what each device does when; the number in a box is the batch.

    **Arguments:**

    - `source`: a simulation, or the events of a run.
    - `window`: from when to when; by default the beginning, as long as boxes are wide enough to tell apart.
    - `unit`: of the time axis.
    - `rows`: names of the devices.

    >>> figure = draw_timeline([Span(0, 0, "F", 0, 0.0, 1.0), Span(1, 1, "F", 0, 1.0, 2.0)])
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
    ['stage 0', 'stage 1']
    """
    spans = spans_of(source)
    names = list(rows) if rows is not None else row_names(spans)
    figure = Figure(figsize=(12, 1.1 + 0.34 * max(1, len(names))), layout="constrained")
    axes = figure.subplots()
    start, end = window if window is not None else _beginning(spans)
    shown = [span for span in spans if span.end > start and span.start < end]
    for (row, kind), mine in grouped(shown).items():
        bars = [(float(span.start), float(span.end - span.start)) for span in mine]
        colour = COLOURS.get(kind, _OTHER)
        axes.broken_barh(bars, (row - 0.43, 0.86), facecolor=colour, edgecolor="white", linewidth=0.5)
    _write_batches(axes, shown, end - start)
    axes.set(
        xlim=(float(start), float(end)),
        ylim=(max(1, len(names)) - 0.5, -0.5),
        xlabel=f"time ({unit})" if unit else "time",
    )
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    legend = [Patch(color=COLOURS.get(k, _OTHER), label=KIND_NAMES.get(k, k)) for k in kind_order(shown)]
    if legend:
        figure.legend(handles=legend, loc="outside lower right", ncols=len(legend), frameon=False, fontsize=8)
    return figure


def save_timeline(path: str | Path, source: Source, *, title: str = "", unit: float = 1.0) -> Path:
    """Write a timeline in the form that the suffix asks for: `.png`, `.svg`, `.pdf`, `.html`, or `.json` (a trace).

    **Arguments:** `unit`: seconds per unit of time, for traces.
    """
    path = Path(path)
    if path.suffix == ".html":
        path.write_text(timeline_html(source, title=title or path.stem), encoding="utf-8")
    elif path.suffix == ".json":
        write_trace(path, source, unit=unit)
    elif path.suffix in (".png", ".svg", ".pdf"):
        draw_timeline(source, title=title).savefig(path, dpi=150)
    else:
        raise ConfigError(f"a timeline is written as .png, .svg, .pdf, .html or .json (trace), not {path.name!r}")
    return path


def _beginning(spans: Sequence[Span], per_row: int = 40) -> tuple[float, float]:
    """From the first start to when the first device has done so many things."""
    if not spans:
        return 0.0, 1.0
    start = min(span.start for span in spans)
    first = [span for span in spans if span.device == spans[0].device]
    end = first[min(per_row, len(first)) - 1].end
    return start, end if end > start else start + 1


def _write_batches(axes: Axes, shown: Sequence[Span], width: float) -> None:
    wide = [span for span in shown if span.end - span.start > 0.012 * width]
    for span in wide[:_MOST_LABELS]:
        middle = float(span.start + span.end) / 2
        axes.text(middle, span.device, str(span.batch), ha="center", va="center", fontsize=6.5, clip_on=True)
