"""What a page of runs shows, as one document that can be written as JSON: the page embeds it or asks a server for it.

    {"title": "...", "introduction": ["..."], "closing": ["..."], "footer": ["..."],
     "captions": {"timelines": "...", "curves": "...", "costs": "...", "measures": "..."},
     "table": {"heads": [...], "rows": [[...]], "left": [0], "notes": ["..." or null, one per row]},
     "runs": [{
       "label": "dtr", "baseline": false, "status": "running" | "finished" | "interrupted",
       "progress": {"share": 0.4 or null, "text": "epoch 2 of 5"}, "facts": [["loss", "0.13"]], "warnings": ["..."],
       "speed": 1234.5, "ratio": 1.6, "accuracy": 0.97, "bubble": 0.1,
       "stages": [{"stage": 0, "staleness": 1.0, "predicted": 1.0, "bubble": 0.1, "peak_bytes": 100, ...}],
       "curves": {"training loss": {"x": "step", "log": true, "share": false, "points": [[x, mean, least, most]]}},
       "measures": {"jump": {"words": "what it is", "series": {"stage 1": [[update, value]]}}},
       "timeline": {"rows": ["stage 0"], "kinds": [{"kind": "F", "words": "forward", "cost": "forward"}],
                    "spans": [[row, kind, stage, batch, start, end]], "unit": "ms", "window": [0, 80]}}]}

Everything but `title` and `runs`, and in a run everything but `label`, may be missing. A number that is not finite is
`null`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime.events import Event
from ..schedule.simulation import Span
from ..table import Table
from .comparison import Row
from .measures import Measures
from .record import Record
from .spans import cost_of, kind_order, kind_words, row_names, spans_of
from .steady import steady_windows

__all__ = ["CAPTIONS", "board", "board_json", "curves_of", "in_milliseconds", "run_of", "timeline_of", "timelines_of"]

#: More points than this no screen tells apart.
_POINTS = 400
#: Batches that the shown loss is a mean of.
_SMOOTH = 5

Point = list[float]

#: What the parts of a page show.
CAPTIONS = {
    "timelines": (
        "Measured: a few usual rounds near the midst of each run, after its start and between pauses, all on one time "
        "scale. Where a row is empty, the stage waits for another one or for data."
    ),
    "curves": (
        f"Training loss is a running mean of {_SMOOTH} batches. Of several runs the mean is drawn, and the range from "
        "the lowest to the highest as a band."
    ),
    "costs": "Speed is the median over epochs, the first left out. Memory counts activations, kept inputs and graphs.",
}


def board(
    title: str,
    runs: Sequence[Mapping[str, Any]],
    *,
    introduction: Sequence[str] = (),
    table: Table | None = None,
    notes: Sequence[str | None] = (),
    closing: Sequence[str] = (),
    footer: Sequence[str] = (),
    captions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A document as the page draws it.

    **Arguments:**

    - `runs`: from `run_of`.
    - `notes`: a sentence on each row of the table, or none.
    - `closing`: what is said at the end.
    - `captions`: what parts of the page show, where that is not what `CAPTIONS` says.

    >>> board("Nothing yet", [])["runs"]
    []
    """
    document: dict[str, Any] = {"title": title, "introduction": [*introduction], "runs": [dict(run) for run in runs]}
    if table is not None:
        document["table"] = {"heads": table.heads, "rows": table.rows, "left": table.left, "notes": [*notes]}
    explained = {**CAPTIONS, "measures": _explained(runs), **(captions or {})}
    return document | {"captions": explained, "closing": [*closing], "footer": [*footer]}


def _explained(runs: Sequence[Mapping[str, Any]]) -> str:
    words = {name: one["words"] for run in runs for name, one in run.get("measures", {}).items()}
    explained = "".join(f" {name}: {text}." for name, text in words.items() if text)
    return f"Measurements of the methods themselves, the first run of each kind.{explained}"


def board_json(document: Mapping[str, Any]) -> str:
    """The document as text, for a page and for a server; numbers that JSON does not have are `null`.

    >>> board_json({"title": "</script>", "loss": float("nan")})
    '{"title":"\\\\u003c/script>","loss":null}'
    """
    # A "<" in a name must not end the script that the page keeps it in.
    return json.dumps(_finite(document), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def run_of(
    label: str,
    records: Sequence[Record],
    *,
    row: Row | None = None,
    timeline: Mapping[str, Any] | None = None,
    baseline: bool = False,
    status: str | None = None,
    progress: Mapping[str, Any] | None = None,
    facts: Sequence[tuple[str, str]] = (),
    warnings: Sequence[str] = (),
    by_epoch: bool = False,
) -> dict[str, Any]:
    """One line of every picture: a run, or several that differ only by chance.

    **Arguments:**

    - `records`: at least one; of a run under way the summary says what is known, nothing is asked for.
    - `row`: what the table says, for bars.
    - `timeline`: from `timelines_of`.
    - `baseline`: whether others are measured by it.
    - `status`, `progress`: of a run under way; by default the summary's last word.
    - `facts`: numbers worth showing by themselves, as text.
    - `by_epoch`: whether bubble and staleness are curves as well.

    >>> from pathlib import Path
    >>> run = run_of("dtr", [Record(Path("runs/dtr-1"), {}, losses=((1, 2.5), (2, 1.5)))])
    >>> run["curves"]["training loss"]["points"]
    [[1, 2.5], [2, 2.0]]
    """
    summary = records[0].summary
    return {
        "label": label,
        "baseline": baseline,
        "status": status or summary.get("status", "finished"),
        "progress": dict(progress) if progress is not None else None,
        "facts": [list(fact) for fact in facts],
        "warnings": list(warnings),
        "speed": row.speed if row is not None else summary.get("samples_per_second"),
        "ratio": row.ratio if row is not None else None,
        "accuracy": row.accuracy if row is not None else summary.get("accuracy"),
        "bubble": row.bubble if row is not None else summary.get("bubble"),
        "stages": [_stage(number, stage) for number, stage in enumerate(summary.get("stages", ()))],
        "curves": curves_of(records, by_epoch=by_epoch),
        "measures": _measures(records[0].measures, summary.get("measures", {})),
        "timeline": dict(timeline) if timeline is not None else None,
    }


def _stage(number: int, stage: Mapping[str, Any]) -> dict[str, Any]:
    known = ("staleness", "bubble", "peak_bytes", "weight_copies", "reconstruction_error", "replica")
    found = {name: stage[name] for name in known if stage.get(name) is not None}
    return {"stage": stage.get("stage", number), "predicted": stage.get("predicted_staleness"), **found}


def _measures(measures: Measures, words: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: {
            "words": words.get(name, ""),
            "series": {f"stage {stage}": _thinned([list(point) for point in line]) for stage, line in lines.items()},
        }
        for name, lines in measures.items()
        # A method may have no use for one of its measures.
        if any(value for line in lines.values() for _, value in line)
    }


# ------------------------------------------------------------------ curves


def curves_of(records: Sequence[Record], *, by_epoch: bool = False) -> dict[str, dict[str, Any]]:
    """How runs went, by what is measured: means over the runs, with the least and the most of several."""
    found = {"training loss": _curve([_smooth(r.losses) for r in records], "step", log=True)}
    names = dict.fromkeys(name for record in records for row in record.epochs for name in row)
    for name in sorted((name for name in names if name.startswith("eval/")), key=lambda name: name != "eval/accuracy"):
        if name != "eval/samples":
            what = name.removeprefix("eval/")
            by_number = [_by_epoch(record, [name]) for record in records]
            found[f"test {what}"] = _curve(by_number, "epoch", share=what == "accuracy", log=what == "loss")
    for what, title in (("bubble", "bubble"), ("staleness", "staleness of the latest stage")) if by_epoch else ():
        staged = [name for name in names if name.startswith("stage") and name.endswith(f"/{what}")]
        tables = [_by_epoch(record, staged, max if what == "staleness" else _mean) for record in records]
        found[title] = _curve(tables, "epoch", share=what == "bubble")
    return {name: curve for name, curve in found.items() if curve["points"]}


def _curve(tables: Sequence[Mapping[int, float]], x: str, *, log: bool = False, share: bool = False) -> dict[str, Any]:
    points: list[Point] = []
    for place in sorted({place for table in tables for place in table}):
        values = [table[place] for table in tables if place in table]
        spread = [min(values), max(values)] if len(values) > 1 else []
        points.append([place, _mean(values), *spread])
    return {"x": x, "log": log, "share": share, "points": _thinned(points)}


def _mean(values: Sequence[float]) -> float:
    """As `statistics.fmean`, which refuses sums of infinities and too large ones; runs that diverge have both."""
    return sum(values) / len(values)


def _by_epoch(
    record: Record, names: Sequence[str], summary: Callable[[Sequence[float]], float] = _mean
) -> dict[int, float]:
    """What some numbers were at the end of each epoch, taken together."""
    found = {}
    for row in record.epochs:
        if known := [row[name] for name in names if name in row]:
            found[int(row["epoch/number"])] = summary(known)
    return found


def _smooth(losses: Sequence[tuple[int, float]]) -> dict[int, float]:
    """A running mean, short enough to keep the shape."""
    values = [value for _, value in losses]
    return {step: _mean(values[max(0, n - _SMOOTH + 1) : n + 1]) for n, (step, _) in enumerate(losses)}


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most as many points as a screen shows, each the mean of those it stands for."""
    every = math.ceil(len(points) / _POINTS)
    if every <= 1:
        return list(points)
    groups = [points[n : n + every] for n in range(0, len(points), every)]
    # Where some points have no spread, theirs together has none.
    return [[group[-1][0], *map(_mean, zip(*(point[1:] for point in group), strict=False))] for group in groups]


# --------------------------------------------------------------- timelines


def timelines_of(runs: Mapping[str, Sequence[Event]]) -> dict[str, dict[str, Any]]:
    """A few steady rounds of each run, in milliseconds since they begin; as long for all, with as much around them.

    **Arguments:** `runs`: events by label; a run without any is left out.
    """
    found = {label: spans_of(events) for label, events in runs.items()}
    timelines = {}
    for label, (start, end) in steady_windows(found).items():
        around = end - start
        near = [span for span in found[label] if span.end > start - around and span.start < end + around]
        timelines[label] = timeline_of(in_milliseconds(near, start), unit="ms", window=(0.0, 1e3 * (end - start)))
    return timelines


def in_milliseconds(spans: Sequence[Span], origin: float) -> list[Span]:
    """Spans whose times were seconds, since a moment of theirs."""
    return [
        span._replace(start=round(1e3 * (span.start - origin), 3), end=round(1e3 * (span.end - origin), 3))
        for span in spans
    ]


def timeline_of(
    spans: Sequence[Span],
    *,
    unit: str = "",
    window: tuple[float, float] | None = None,
    rows: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Spans as the page draws them.

    **Arguments:**

    - `unit`: of time.
    - `window`: what is seen first; by default everything.
    - `rows`: names of the devices.

    >>> timeline_of([Span(0, 0, "F", 7, 0.0, 1.0)])["spans"]
    [[0, 0, 0, 7, 0.0, 1.0]]
    """
    kinds = kind_order(spans)
    numbers = {kind: number for number, kind in enumerate(kinds)}
    return {
        "rows": list(rows) if rows is not None else row_names(spans),
        "kinds": [{"kind": kind, "words": kind_words(kind), "cost": cost_of(kind)} for kind in kinds],
        "spans": [[s.device, numbers[s.kind], s.stage, s.batch, float(s.start), float(s.end)] for s in spans],
        "unit": unit,
        "window": [float(moment) for moment in window] if window is not None else None,
    }
