"""A link that damages, loses, doubles, overtakes or delays messages after they were sealed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .faults import Faults, Trigger
from .link import Departure, Link
from .mail import Message
from .wire import Sealed

__all__ = ["FaultyLink"]

# A message, and what goes another way with it.
_Leaving = tuple[Sealed, Departure | None]


class FaultyLink(Link):
    """A link with faults on it; otherwise as `Link`, in whose arguments it is made."""

    def __init__(self, *args: Any, faults: Faults) -> None:
        self._triggers = [Trigger(fault, faults.log) for fault in faults if fault.message is not None]
        self._sent: Counter[tuple[str, int]] = Counter()
        self._overtaken: list[_Leaving] = []
        super().__init__(*args)

    def _transmit(self, message: Message, sealed: Sealed, departure: Departure | None) -> None:
        box = (message.kind, message.stage)
        number = self._sent[box]
        self._sent[box] += 1
        leaving: list[_Leaving] = [(sealed, departure)]
        held, self._overtaken = self._overtaken, []
        for trigger in self._triggers:
            if (trigger.fault.message, trigger.fault.stage) == box and trigger.pulled(number):
                leaving = self._struck(trigger, leaving)
        for one in (*leaving, *held):
            super()._transmit(message, *one)

    def _struck(self, trigger: Trigger, leaving: list[_Leaving]) -> list[_Leaving]:
        match trigger.fault.what:
            case "delay":
                trigger.linger()
            case "corrupt":
                return [(_damaged(sealed, trigger.fault.part == "payload"), rest) for sealed, rest in leaving]
            case "drop":
                return []
            case "duplicate":
                return leaving * 2
            case "reorder":
                self._overtaken = leaving
                return []
        return leaving


def _damaged(sealed: Sealed, in_payload: bool) -> Sealed:
    """A copy with one bit flipped: the tensors themselves still belong to the stage that sent them."""
    part = (sealed.blocks[0] if in_payload and sealed.blocks else sealed.header).clone()
    part[part.numel() // 2] ^= 64
    if in_payload and sealed.blocks:
        return sealed._replace(blocks=[part, *sealed.blocks[1:]])
    return sealed._replace(header=part)
