"""From the streams of a schedule to a graph of tasks: stages, borders, devices of different speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ..errors import ScheduleError
from .actions import Action, Kind
from .channel import FREE, Channel
from .runs import Streams, stage_homes
from .simulate import UNIT, Costs
from .simulator_engine import Edge, Graph

__all__ = ["Machine", "StageWork", "jitter_factors", "stage_graph"]

_KINDS = tuple(Kind)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}


@dataclass(frozen=True)
class StageWork:
    """What one stage does with one micro-batch.

    **Arguments:**

    - `times`: of each kind of action.
    - `output_bytes`: sent up by every forward.
    - `returned_bytes`: sent back over the same border; as much as went up by default.
    - `kept_bytes`: kept from the forward to the end of the backward.
    """

    times: Costs = field(default_factory=lambda: UNIT)
    output_bytes: float = 0
    kept_bytes: float = 0
    returned_bytes: float | None = None

    @property
    def border_bytes(self) -> tuple[float, float]:
        """Up and down over the border above."""
        return self.output_bytes, self.output_bytes if self.returned_bytes is None else self.returned_bytes


@dataclass(frozen=True)
class Machine:
    """The devices and the links between them.

    **Arguments:**

    - `channel`: one for all links, or one for each border between stages.
    - `speeds`: how much faster than the given times each device is; by default all are as fast as given.
    - `jitter`: standard deviation of the time of each action, relative to its mean (log-normal).
    - `seed`: of the jitter.
    """

    channel: Channel | Sequence[Channel] = FREE
    speeds: Sequence[float] | None = None
    jitter: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.speeds is not None and not all(speed > 0 for speed in self.speeds):
            raise ScheduleError(f"speeds must be above 0, got {list(self.speeds)}")
        if not self.jitter >= 0:
            raise ScheduleError(f"jitter must be at least 0, got {self.jitter}")

    def channels(self, borders: int) -> list[Channel]:
        """The link of every border."""
        if isinstance(self.channel, Channel):
            return [self.channel] * borders
        if len(self.channel) != borders:
            raise ScheduleError(f"expected links for {borders} borders, got {len(self.channel)}")
        return list(self.channel)

    def time(self, time: float, device: int) -> float:
        """What `time` becomes on a device."""
        return time if self.speeds is None else time / self.speeds[device]


def stage_graph(
    streams: Streams, works: Sequence[StageWork], machine: Machine, *, local: bool = False
) -> tuple[Graph, list[list[int]]]:
    """Tasks (one per stage and kind) and edges (one per border and direction), and the streams as numbers of tasks.

    Where gradients are `local`, no backward waits for the stage above.
    """
    home = stage_homes(streams)
    if len(works) != len(home):
        raise ScheduleError(f"expected the work of {len(home)} stages, got {len(works)}")
    if machine.speeds is not None and len(machine.speeds) != len(streams):
        raise ScheduleError(f"expected the speeds of {len(streams)} devices, got {len(machine.speeds)}")
    times = [machine.time(work.times[kind], home[stage]) for stage, work in enumerate(works) for kind in _KINDS]
    # The task that sends the gradient down: whole backwards, or their first halves.
    halved = {action.stage for stream in streams for action in stream if action.kind is Kind.I}
    backward = [_task(stage, Kind.I if stage in halved else Kind.B) for stage in range(len(home))]
    edges = []
    for stage, channel in enumerate(machine.channels(len(home) - 1)):
        near = home[stage] == home[stage + 1]
        ends = ((_task(stage, Kind.F), _task(stage + 1, Kind.F)), (backward[stage + 1], backward[stage]))
        ways = zip(ends, works[stage].border_bytes, strict=True)
        for direction, ((source, target), size) in enumerate(islice(ways, 1 if local else 2)):
            wire = None if near else 2 * stage + direction
            sending = 0 if near or not size else size / channel.bandwidth
            latency = 0 if near else channel.latency
            edges.append(Edge(source, target, wire, sending, latency, not channel.overlapped))
    numbers = [[len(_KINDS) * stage + _NUMBER[kind] for kind, stage, _ in stream] for stream in streams]
    return Graph(times, edges, _describe), numbers


def jitter_factors(machine: Machine, lengths: Sequence[int]) -> list[list[float]] | None:
    """Factors on the time of every action, mean 1; the same for the same seed and device."""
    if not machine.jitter:
        return None
    sigma = float(np.sqrt(np.log1p(machine.jitter**2)))
    return [
        np.random.default_rng([machine.seed, device]).lognormal(-(sigma**2) / 2, sigma, length).tolist()
        for device, length in enumerate(lengths)
    ]


def _task(stage: int, kind: Kind) -> int:
    return len(_KINDS) * stage + _NUMBER[kind]


def _describe(task: int, number: int) -> str:
    return str(Action(_KINDS[task % len(_KINDS)], task // len(_KINDS), number))
