"""Timelines of any origin as one kind of list: simulated runs, and events that a real run recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ..runtime.events import Event
from ..schedule.entries import Kind
from ..schedule.simulation import Simulation, Span
from ..schedule.simulator import Timeline

__all__ = ["KIND_NAMES", "Source", "cost_of", "grouped", "kind_order", "kind_words", "label", "row_names", "spans_of"]

Source: TypeAlias = Simulation | Timeline | Iterable[Event] | Iterable[Span]

KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "U": "update"}


def spans_of(source: Source) -> list[Span]:
    """All spans of a timeline, ordered by device and start; an event of a real run is on the device of its stage.

    >>> spans_of([Event(1, "F", 0, 0, 2.0, 3.0, 0)])
    [Span(device=1, stage=1, kind='F', batch=0, start=2.0, end=3.0)]
    """
    if isinstance(source, Simulation):
        found = list(source.spans())
    elif isinstance(source, Timeline):
        rows = zip(source.streams, source.starts, source.ends, strict=True)
        found = [
            Span(device, stage, str(kind), batch, start, end)
            for device, (stream, starts, ends) in enumerate(rows)
            for (kind, stage, batch), start, end in zip(stream, starts, ends, strict=True)
            if end > start
        ]
    else:
        found = [_span(one) for one in source]
    return sorted(found, key=lambda span: (span.device, span.start, span.end))


def row_names(spans: Sequence[Span]) -> list[str]:
    """What each row is called: a stage where every device has one, else a device.

    >>> row_names([Span(0, 0, "F", 0, 0, 1), Span(1, 1, "F", 0, 1, 2)])
    ['stage 0', 'stage 1']
    """
    rows = 1 + max((span.device for span in spans), default=-1)
    own = all(span.device == span.stage for span in spans)
    return [f"{'stage' if own else 'device'} {row}" for row in range(rows)]


def grouped(spans: Iterable[Span]) -> dict[tuple[int, str], list[Span]]:
    """Spans by device and kind, in their order."""
    groups: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.device, span.kind), []).append(span)
    return groups


def label(span: Span) -> str:
    """What a span is, for a reader.

    >>> label(Span(0, 2, "I", 7, 0, 1))
    'input gradient of batch 7, stage 2'
    """
    return f"{kind_words(span.kind)} of batch {span.batch}, stage {span.stage}"


def cost_of(kind: str) -> str:
    """What a kind of action is akin to, for colours and legends: a class of cost, or itself if it is unknown.

    >>> cost_of("I"), cost_of("no such kind")
    ('input gradient', 'no such kind')
    """
    known = Kind.known(kind)
    if known is None:
        return kind
    return known.cost if known.cost != "none" else "other"


def kind_words(kind: str) -> str:
    """What a kind of action is called; one that methods have made, by what it is akin to and its own letters."""
    cost = cost_of(kind)
    return cost if kind in KIND_NAMES or cost == kind else f"{cost} ({kind})"


def kind_order(spans: Iterable[Span]) -> list[str]:
    """The kinds that occur, known ones first."""
    kinds = {span.kind for span in spans}
    return [kind for kind in KIND_NAMES if kind in kinds] + sorted(kinds - set(KIND_NAMES))


def _span(one: Event | Span) -> Span:
    if isinstance(one, Span):
        return one
    return Span(one.stage, one.stage, str(one.kind), one.batch, one.start, one.end)
