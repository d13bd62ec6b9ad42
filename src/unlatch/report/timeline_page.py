"""A timeline as one HTML file that needs nothing else: wheel to zoom, drag to move, hover for details."""

from __future__ import annotations

import html
import json
from pathlib import Path

from .spans import KIND_NAMES, Source, kind_order, row_names, spans_of

__all__ = ["timeline_html"]


def timeline_html(source: Source, *, title: str = "Timeline", unit: str = "") -> str:
    """The page as text.

    **Arguments:**

    - `source`: a simulation, or the events of a run.
    - `unit`: of time, for the details.

    >>> from ..schedule.simulation import Span
    >>> "<canvas" in timeline_html([Span(0, 0, "F", 0, 0.0, 1.0)])
    True
    """
    spans = spans_of(source)
    kinds = kind_order(spans)
    data = {
        "rows": row_names(spans),
        "kinds": [[kind, KIND_NAMES.get(kind, kind)] for kind in kinds],
        "unit": unit,
        "spans": [[s.device, kinds.index(s.kind), s.stage, s.batch, float(s.start), float(s.end)] for s in spans],
    }
    # A "<" in a name must not end the script.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = Path(__file__).with_name("timeline_page.html").read_text(encoding="utf-8")
    return page.replace("{{title}}", html.escape(title)).replace("{{data}}", text)
