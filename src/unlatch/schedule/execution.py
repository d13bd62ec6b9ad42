"""Virtual execution: let every stream run as far as its messages allow, and see whether all reach their end.

An action waits only for messages: a forward for the stage below, a backward for the stage above (at the last stage for
its own forward), and both for a free slot on the border they send over. Messages of a border arrive in the order they
were sent, so the newest id that passed says everything, and no table of actions is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..errors import ScheduleError
from .actions import Action, Kind
from .excerpt import excerpt
from .runs import Streams, stage_homes

__all__ = ["Progress", "interleave"]


class Progress:
    """How far every stage has come.

    **Arguments:**

    - `home`: for each stage the stream it is in.
    - `slots`: messages that a border can hold per direction; `None` is no limit. Stages of one stream share memory, so
      the border between them has no limit either.
    """

    def __init__(self, home: Sequence[int], slots: int | None = None) -> None:
        self.last = len(home) - 1
        self.forward = [-1] * len(home)
        self.backward = [-1] * len(home)
        # Per border between stage and stage + 1.
        self.slots = [slots if a != b else None for a, b in pairwise(home)]

    def blocker(self, action: Action) -> Action | None:
        """Give the action that must happen before `action` can; `None` if it is ready.

        Whether the stage above does its backward whole or in halves is not known here: either counts as `B`.
        """
        kind, stage, batch = action
        if kind is Kind.F:
            if stage and self.forward[stage - 1] < batch:
                return Action(Kind.F, stage - 1, batch)
            if stage < self.last and (slots := self.slots[stage]) is not None:
                oldest = self.forward[stage + 1] + 1
                return Action(Kind.F, stage + 1, oldest) if batch - oldest >= slots else None
        elif kind is Kind.B or kind is Kind.I:
            if stage == self.last:
                return Action(Kind.F, stage, batch) if self.forward[stage] < batch else None
            if self.backward[stage + 1] < batch:
                return Action(Kind.B, stage + 1, batch)
            if stage and (slots := self.slots[stage - 1]) is not None:
                oldest = self.backward[stage - 1] + 1
                return Action(Kind.B, stage - 1, oldest) if batch - oldest >= slots else None
        return None

    def finish(self, action: Action) -> bool:
        """Take note that `action` is done; tell whether a neighbour may have waited for it."""
        kind, stage, batch = action
        if kind is Kind.F:
            self.forward[stage] = batch
        elif kind is Kind.B or kind is Kind.I:
            self.backward[stage] = batch
        else:
            return False
        return True


def interleave(streams: Streams, slots: int | None = None) -> Iterator[Action]:
    """Yield all actions in an order in which the streams can really execute.

    Raises `ScheduleError` with the circle of waiting streams if they cannot. Forwards, and likewise backwards, of each
    stage must be in the order of their ids (`check` tells).

    >>> from .rounds import ticked
    >>> from .runs import streams
    >>> [str(a) for a in interleave(streams(ticked(2), [1]))]
    ['0F0', '1F0', '1B0', '1U0', '0B0', '0U0']
    """
    home = stage_homes(streams)
    progress = Progress(home, slots)
    blocker = progress.blocker
    neighbours = _neighbours(home)
    position = [0] * len(streams)
    ready = list(reversed(range(len(streams))))
    stopped = [False] * len(streams)
    while ready:
        number = ready.pop()
        stopped[number] = True
        stream, at = streams[number], position[number]
        while at < len(stream) and blocker(action := stream[at]) is None:
            at += 1
            yield action
            if progress.finish(action):
                for neighbour in neighbours[action.stage]:
                    if stopped[neighbour]:
                        stopped[neighbour] = False
                        ready.append(neighbour)
        position[number] = at
    if any(at < len(stream) for at, stream in zip(position, streams, strict=True)):
        raise ScheduleError(_standstill(streams, home, progress, position))


def _neighbours(home: Sequence[int]) -> list[list[int]]:
    """For each stage, the other streams that its messages may set going."""
    around = [home[max(0, stage - 1) : stage + 2] for stage in range(len(home))]
    return [sorted(set(near) - {home[stage]}) for stage, near in enumerate(around)]


def _standstill(streams: Streams, home: Sequence[int], progress: Progress, position: Sequence[int]) -> str:
    """Follow who waits for whom until a stream comes up twice, or one that will never send."""
    number = next(n for n, stream in enumerate(streams) if position[n] < len(stream))
    told: dict[int, str] = {}
    while number not in told and position[number] < len(streams[number]):
        action = streams[number][position[number]]
        needed = progress.blocker(action)
        assert needed is not None, "a stream at a standstill waits for something"
        if needed.kind is Kind.B and Action(Kind.I, needed.stage, needed.batch) in streams[home[needed.stage]]:
            needed = needed._replace(kind=Kind.I)
        why = " to make room on the border" if _receives(needed, action) else ""
        told[number] = f"  stream {number} stands before {action} and waits for {needed}{why}"
        number = home[needed.stage]
    head = "the streams wait for each other in a circle" if number in told else f"stream {number} ended too early"
    limits = {slots for slots in progress.slots if slots is not None}
    room = f" with {limits.pop()} message(s) per border and direction" if limits else ""
    return "\n".join([f"{head}{room}:", *told.values(), excerpt(streams, {n: position[n] for n in {*told, number}})])


def _receives(needed: Action, action: Action) -> bool:
    """Whether `needed` is at the stage that `action` sends to, rather than the one it hears from."""
    return needed.stage > action.stage if action.kind is Kind.F else needed.stage < action.stage
