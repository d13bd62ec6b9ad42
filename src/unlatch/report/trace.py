"""Timelines as trace files for Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..schedule.simulation import Span
from .spans import Source, grouped, kind_order, label, row_names, spans_of

__all__ = ["trace_json", "write_trace"]


def trace_json(source: Source, *, unit: float = 1.0) -> dict[str, Any]:
    """A trace: one process per device, in it one track per kind of action.

    Spans of one track never overlap; should two do so in the source, the second goes to a further track.

    **Arguments:**

    - `unit`: seconds per unit of time. The first span begins at zero.

    >>> trace = trace_json([Span(0, 0, "F", 3, 1.0, 1.5)])
    >>> [event for event in trace["traceEvents"] if event["ph"] == "X"]  # doctest: +NORMALIZE_WHITESPACE
    [{'name': 'F3', 'cat': 'F', 'ph': 'X', 'pid': 0, 'tid': 0, 'ts': 0.0, 'dur': 500000.0,
      'args': {'stage': 0, 'batch': 3, 'what': 'forward of batch 3, stage 0'}}]
    """
    spans = spans_of(source)
    origin = min((span.start for span in spans), default=0)
    kinds = kind_order(spans)
    events: list[dict[str, Any]] = []
    names = row_names(spans)
    for device, name in enumerate(names):
        events.append({"name": "process_name", "ph": "M", "pid": device, "args": {"name": name}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": device, "args": {"sort_index": device}})
    for (device, kind), mine in grouped(spans).items():
        for depth, track in enumerate(_tracks(mine)):
            thread = kinds.index(kind) + len(kinds) * depth
            title = kind if depth == 0 else f"{kind} ({depth + 1})"
            events.append({"name": "thread_name", "ph": "M", "pid": device, "tid": thread, "args": {"name": title}})
            events += _complete(track, device, thread, origin, unit)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, source: Source, *, unit: float = 1.0) -> None:
    """Write a trace file; arguments as in `trace_json`."""
    Path(path).write_text(json.dumps(trace_json(source, unit=unit)), encoding="utf-8")


def _tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """As few tracks as keep spans apart."""
    tracks: list[list[Span]] = []
    for span in spans:
        for track in tracks:
            if track[-1].end <= span.start:
                track.append(span)
                break
        else:
            tracks.append([span])
    return tracks


def _complete(track: Sequence[Span], device: int, thread: int, origin: float, unit: float) -> list[dict[str, Any]]:
    events = []
    limits = [_micro(span.start, origin, unit) for span in track[1:]] + [math.inf]
    for span, limit in zip(track, limits, strict=True):
        start, end = _micro(span.start, origin, unit), min(_micro(span.end, origin, unit), limit)
        duration = end - start
        # A reader adds them up again, and must not land beyond the next span by a rounding error.
        while start + duration > end:
            duration = math.nextafter(duration, 0.0)
        events.append(
            {
                "name": f"{span.kind}{span.batch}",
                "cat": span.kind,
                "ph": "X",
                "pid": device,
                "tid": thread,
                "ts": start,
                "dur": duration,
                "args": {"stage": span.stage, "batch": span.batch, "what": label(span)},
            }
        )
    return events


def _micro(time: float, origin: float, unit: float) -> float:
    return float((time - origin) * unit * 1e6)
