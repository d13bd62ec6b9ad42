"""Timelines as pictures and pages: what every device does when, simulated or measured. Traces are in `trace`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..errors import ConfigError
from ..schedule.simulation import Span
from .board import in_milliseconds, timeline_of
from .picture import Picture
from .spans import Source, cost_of, grouped, kind_order, row_names, spans_of
from .steady import steady_windows
from .trace import write_trace
from .web import render

__all__ = ["COLOURS", "draw_timeline", "draw_timelines", "save_timeline", "timeline_html"]

# Distinguishable with any kind of colour vision (Okabe and Ito).
COLOURS = {
    **{"forward": "#56B4E9", "backward": "#E69F00", "input gradient": "#F5CB74", "weight gradient": "#2FAE88"},
    **{"update": "#4A5058", "auxiliary": "#CC79A7"},
}
_OTHER = "#B9A7D6"
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
    figure = Picture(figsize=(12, 1.1 + 0.34 * max(1, len(names))), layout="constrained")
    axes = figure.subplots()
    shown = _draw_rows(axes, spans, names, window if window is not None else _beginning(spans))
    axes.set_xlabel(f"time ({unit})" if unit else "time")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    _add_legend(figure, shown)
    return figure


def draw_timelines(sources: Mapping[str, Source]) -> Figure:
    """A few steady rounds of several measured runs, one panel each, all to the same scale.

    **Arguments:** `sources`: by label, with times in seconds; empty ones are left out.
    """
    found = {label: spans_of(source) for label, source in sources.items()}
    windows = steady_windows(found)
    runs = {label: in_milliseconds(found[label], start) for label, (start, _) in windows.items()}
    names = {label: row_names(spans) for label, spans in runs.items()}
    heights = [len(rows) for rows in names.values()]
    figure = Picture(figsize=(11, 0.6 + sum(0.42 * rows + 0.34 for rows in heights)), layout="constrained")
    if not runs:
        return figure
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    shown: list[Span] = []
    for axes, (label, (start, end)) in zip(panels, windows.items(), strict=True):
        shown += _draw_rows(axes, runs[label], names[label], (0.0, 1e3 * (end - start)))
        axes.set_title(label, loc="left", fontsize=9, fontweight="bold", pad=2)
    panels[-1].set_xlabel("milliseconds, from the midst of each run (the number is the micro-batch)")
    _add_legend(figure, shown)
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


def timeline_html(source: Source, *, title: str = "Timeline", unit: str = "") -> str:
    """A page as text that needs nothing else: zoom, drag, hover for details.

    **Arguments:**

    - `source`: a simulation, or the events of a run.
    - `unit`: of time, for the details.

    >>> timeline_html([Span(0, 0, "F", 0, 0.0, 1.0)]).startswith("<!DOCTYPE html>")
    True
    """
    spans = spans_of(source)
    timeline = timeline_of(spans, unit=unit, window=_beginning(spans))
    return render({"title": title, "runs": [{"label": "", "timeline": timeline}]})


def _draw_rows(axes: Axes, spans: Sequence[Span], names: Sequence[str], window: tuple[float, float]) -> list[Span]:
    """A row of boxes per device. **Returns:** the spans that lie in the window."""
    start, end = window
    shown = [span for span in spans if span.end > start and span.start < end]
    for (row, kind), mine in grouped(shown).items():
        bars = [(float(span.start), float(span.end - span.start)) for span in mine]
        colour = COLOURS.get(cost_of(kind), _OTHER)
        axes.broken_barh(bars, (row - 0.43, 0.86), facecolor=colour, edgecolor="white", linewidth=0.5)
    wide = [span for span in shown if span.end - span.start > 0.012 * (end - start)]
    for span in wide[:_MOST_LABELS]:
        middle, ink = float(span.start + span.end) / 2, "white" if cost_of(span.kind) == "update" else "black"
        axes.text(middle, span.device, str(span.batch), ha="center", va="center", fontsize=6.5, clip_on=True, color=ink)
    axes.set(xlim=(float(start), float(end)), ylim=(max(1, len(names)) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return shown


def _add_legend(figure: Figure, shown: Iterable[Span]) -> None:
    costs = dict.fromkeys(map(cost_of, kind_order(shown)))
    legend = [Patch(color=COLOURS.get(cost, _OTHER), label=cost) for cost in costs]
    if legend:
        figure.legend(handles=legend, loc="outside lower right", ncols=len(legend), frameon=False, fontsize=8)


def _beginning(spans: Sequence[Span], per_row: int = 40) -> tuple[float, float]:
    """From the first start to when the first device has done so many things."""
    if not spans:
        return 0.0, 1.0
    start = min(span.start for span in spans)
    first = [span for span in spans if span.device == spans[0].device]
    end = first[min(per_row, len(first)) - 1].end
    return start, end if end > start else start + 1
