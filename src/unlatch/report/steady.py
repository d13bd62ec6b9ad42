"""Which part of a run is worth a picture: a few usual rounds near its midst, after the start and between pauses."""

from __future__ import annotations

import statistics as stats
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..schedule.simulation import Span
from .spans import cost_of

__all__ = ["steady_windows"]

#: The start of a run fills the pipeline and warms caches.
_WARM_UP = 0.25
#: Where nothing tells where a round ends, so many actions of a device count as one.
_ACTIONS = 4


def steady_windows(runs: Mapping[str, Sequence[Span]], rounds: int = 3) -> dict[str, tuple[float, float]]:
    """For each run when its picture begins and ends: equally long for all, so many rounds of the slowest.

    **Arguments:** `runs`: by label, with the spans of each; those without any get no window.

    >>> slow = [Span(0, 0, "U", n, 2.0 * n, 2.0 * n + 1) for n in range(20)]
    >>> fast = [Span(0, 0, "U", n, 1.0 * n, 1.0 * n + 1) for n in range(20)]
    >>> steady_windows({"slow": slow, "fast": fast}, rounds=3)
    {'slow': (22.0, 28.0), 'fast': (9.0, 15.0)}
    """
    found = {label: sorted(spans, key=lambda span: span.start) for label, spans in runs.items() if spans}
    times = {label: _round_time(spans) for label, spans in found.items()}
    stretches = {label: _stretch(spans, times[label]) for label, spans in found.items()}
    longest = max((end - begin for begin, end in stretches.values()), default=0.0)
    length = min(longest, rounds * max(times.values(), default=0.0))
    starts = {label: _start(spans, stretches[label], length, times[label]) for label, spans in found.items()}
    return {label: (start, start + length) for label, start in starts.items()}


def _devices(spans: Sequence[Span]) -> list[list[Span]]:
    devices: dict[int, list[Span]] = {}
    for span in spans:
        devices.setdefault(span.device, []).append(span)
    return [devices[number] for number in sorted(devices)]


def _rounds(spans: Sequence[Span]) -> list[float]:
    """When a device begins what each of its rounds has once."""
    updates = [float(span.start) for span in spans if cost_of(span.kind) == "update"]
    return updates if len(updates) > 1 else [float(span.start) for span in spans[::_ACTIONS]]


def _round_time(spans: Sequence[Span]) -> float:
    """Time from update to update, on the device where that is longest; the median, since pauses are no rounds."""
    return max(map(_round_on_device, _devices(spans)))


def _round_on_device(spans: Sequence[Span]) -> float:
    rounds = _rounds(spans)
    if len(rounds) > 1:
        return stats.median(b - a for a, b in pairwise(rounds))
    return float(max(span.end for span in spans) - spans[0].start)


def _stretch(ordered: Sequence[Span], pause: float) -> tuple[float, float]:
    """The longest time without a pause: moments at which no device does anything for longer than a round."""
    found = [(float(ordered[0].start), float(ordered[0].end))]
    for span in ordered[1:]:
        begin, reached = found[-1]
        if span.start - reached > pause:
            found.append((float(span.start), float(span.end)))
        else:
            found[-1] = begin, max(reached, float(span.end))
    return max(found, key=lambda stretch: stretch[1] - stretch[0])


def _start(ordered: Sequence[Span], stretch: tuple[float, float], length: float, round_time: float) -> float:
    """Where a window begins that lies in a stretch, without the start of the run if there is room.

    Of those that begin with a forward of the first device, it is the one near the midst whose rounds are as long as
    usual: a machine that did something else for a moment is not what the method does.
    """
    begin, end = stretch
    warm = begin + _WARM_UP * (end - begin) if begin == ordered[0].start else begin
    earliest = max(begin, min(warm, end - length))
    latest = max(earliest, end - length)
    devices = _devices(ordered)
    rounds = [_rounds(spans) for spans in devices]

    def unusual(start: float) -> tuple[int, float]:
        worst = 0.0
        for begun in rounds:
            near = begun[max(0, bisect(begun, start) - 1) : bisect(begun, start + length) + 1]
            worst = max(worst, *(abs(b - a - round_time) for a, b in pairwise(near)), 0.0)
        # Differences below half a round are everyday, and the midst counts more.
        return (int(2 * worst / round_time) if round_time > 0 else 0), abs(start - (earliest + latest) / 2)

    inside = [span for span in devices[0] if earliest <= span.start <= latest]
    forwards = [span for span in inside if cost_of(span.kind) == "forward"]
    return min((float(span.start) for span in forwards or inside), key=unusual, default=earliest)
