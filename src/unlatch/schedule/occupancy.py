"""How much is under way: micro-batches that a stage has begun and not ended, and messages that a border must hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .actions import Action, Kind
from .runs import Streams, by_stage

__all__ = ["Buffers", "buffers"]

_UP = (Kind.F,)
_DOWN = (Kind.B, Kind.I)


@dataclass(frozen=True)
class Buffers:
    """Largest numbers under way at any moment.

    **Arguments:**

    - `in_flight`: per stage, micro-batches between the start of their forward and the end of their backward (of their
      weight gradient, where it is split).
    - `forward`, `backward`: per border (`b` lies between stages `b` and `b + 1`), messages sent and not yet taken up,
      if the receiver is as slow as the schedule lets it be. A transport with that many slots never makes a sender wait.
    """

    in_flight: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def buffers(streams: Streams) -> Buffers:
    """Count what is under way, whatever the timing. The streams must pass `check`.

    >>> from .rounds import ticked
    >>> from .runs import streams
    >>> buffers(streams(ticked(3), [1] * 9))
    Buffers(in_flight=(5, 3, 1), forward=(5, 3), backward=(5, 3))
    """
    stages = by_stage(streams)
    borders = list(pairwise(stages))
    return Buffers(
        in_flight=tuple(_in_flight(stream) for stream in stages),
        forward=tuple(_undelivered(below, above, _UP, _DOWN) for below, above in borders),
        backward=tuple(_undelivered(above, below, _DOWN, _UP) for below, above in borders),
    )


def _in_flight(stream: list[Action]) -> int:
    now = most = 0
    for action in stream:
        if action.kind is Kind.F:
            now += 1
            most = max(most, now)
        elif action.kind is not Kind.I and action.kind is not Kind.U:
            now -= 1
    return most


def _undelivered(
    sender: list[Action], receiver: list[Action], sends: tuple[Kind, ...], replies: tuple[Kind, ...]
) -> int:
    """Count messages that can pile up between two stages.

    All that the sender can know of the receiver is in the newest reply it has used: at least what the receiver did
    before that reply is done. Nothing else holds the receiver to anything, so the rest may still lie in the buffer.
    """
    taken = 0
    taken_before_reply: list[int] = []
    for action in receiver:
        if action.kind in sends:
            taken += 1
        elif action.kind in replies:
            taken_before_reply.append(taken)
    sent = known = most = used = 0
    for action in sender:
        if action.kind in replies:
            known = taken_before_reply[used]
            used += 1
        elif action.kind in sends:
            sent += 1
            most = max(most, sent - known)
    return most
