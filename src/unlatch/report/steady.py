"""Which part of a run is worth a picture: a few rounds in its midst, after the start and between pauses."""

from __future__ import annotations

import statistics as stats
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..schedule.simulation import Span
from .spans import cost_of

__all__ = ["round_time", "steady_start", "steady_windows"]

#: The start of a run fills the pipeline and warms caches.
_WARM_UP = 0.25
#: Where nothing tells where a round ends, so many actions of a device count as one.
_ACTIONS = 4


def steady_windows(runs: Mapping[str, Sequence[Span]], rounds: int = 4) -> dict[str, tuple[float, float]]:
    """For each run when its picture begins and ends: equally long for all, so many rounds of the slowest.

    **Arguments:** `runs`: by label, with the spans of each; those without any get no window.

    >>> slow = [Span(0, 0, "U", n, 2.0 * n, 2.0 * n + 1) for n in range(20)]
    >>> fast = [Span(0, 0, "U", n, 1.0 * n, 1.0 * n + 1) for n in range(20)]
    >>> steady_windows({"slow": slow, "fast": fast}, rounds=3)
    {'slow': (22.0, 28.0), 'fast': (10.0, 16.0)}
    """
    found = {label: spans for label, spans in runs.items() if spans}
    length = rounds * max((round_time(spans) for spans in found.values()), default=0.0)
    starts = {label: steady_start(spans, length) for label, spans in found.items()}
    return {label: (start, start + length) for label, start in starts.items()}


def round_time(spans: Sequence[Span]) -> float:
    """Time from update to update, of the device where that is longest; the median, since pauses are no rounds."""
    devices: dict[int, list[Span]] = {}
    for span in spans:
        devices.setdefault(span.device, []).append(span)
    return max(map(_round_on_device, devices.values()))


def _round_on_device(spans: Sequence[Span]) -> float:
    starts = sorted(float(span.start) for span in spans)
    updates = sorted(float(span.start) for span in spans if cost_of(span.kind) == "update")
    if len(updates) > 1:
        return stats.median(b - a for a, b in pairwise(updates))
    if len(starts) > _ACTIONS:
        return stats.median(b - a for a, b in zip(starts, starts[_ACTIONS:], strict=False))
    return max(float(span.end) for span in spans) - starts[0]


def steady_start(spans: Sequence[Span], length: float) -> float:
    """Where a window of some length begins, so that it lies in the midst of the longest stretch without a pause."""
    ordered = sorted(spans, key=lambda span: span.start)
    begin, end = max(_stretches(ordered, round_time(ordered)), key=lambda stretch: stretch[1] - stretch[0])
    if begin == ordered[0].start:
        begin += _WARM_UP * (end - begin)
    wanted = max(begin, (begin + end - length) / 2)
    # A picture that begins with the beginning of something is easier to read.
    first = [float(span.start) for span in ordered if span.device == ordered[0].device]
    return next((start for start in first if wanted <= start < wanted + length), wanted)


def _stretches(ordered: Sequence[Span], pause: float) -> list[tuple[float, float]]:
    """Begin and end of what lies between pauses: moments at which no device does anything for longer than a round."""
    found = [(float(ordered[0].start), float(ordered[0].end))]
    for span in ordered[1:]:
        begin, reached = found[-1]
        if span.start - reached > pause:
            found.append((float(span.start), float(span.end)))
        else:
            found[-1] = begin, max(reached, float(span.end))
    return found
