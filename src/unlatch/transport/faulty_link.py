"""A link that damages, loses, doubles, overtakes or delays messages after they were sealed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .faults import Faults, Trigger
from .link import Link
from .wire import open_envelope

__all__ = ["FaultyLink"]

_Sealed = tuple[Tensor, list[Tensor]]


class FaultyLink(Link):
    """A link with faults on it; otherwise as `Link`, in whose arguments it is made."""

    def __init__(self, *args: Any, faults: Faults) -> None:
        self._triggers = [Trigger(fault, faults.log) for fault in faults if fault.message is not None]
        self._sent: Counter[tuple[str, int]] = Counter()
        self._overtaken: list[_Sealed] = []
        super().__init__(*args)

    def _transmit(self, header: Tensor, blocks: Sequence[Tensor]) -> None:
        message = open_envelope(header).message()
        box = (message.kind, message.stage)
        number = self._sent[box]
        self._sent[box] += 1
        leaving: list[_Sealed] = [(header, list(blocks))]
        held, self._overtaken = self._overtaken, []
        for trigger in self._triggers:
            if (trigger.fault.message, trigger.fault.stage) == box and trigger.pulled(number):
                leaving = self._struck(trigger, leaving)
        for sealed in (*leaving, *held):
            super()._transmit(*sealed)

    def _struck(self, trigger: Trigger, leaving: list[_Sealed]) -> list[_Sealed]:
        match trigger.fault.what:
            case "delay":
                trigger.linger()
            case "corrupt":
                return [_damaged(*sealed, trigger.fault.part == "payload") for sealed in leaving]
            case "drop":
                return []
            case "duplicate":
                return leaving * 2
            case "reorder":
                self._overtaken = leaving
                return []
        return leaving


def _damaged(header: Tensor, blocks: list[Tensor], in_payload: bool) -> _Sealed:
    """A copy with one bit flipped: the tensors themselves still belong to the stage that sent them."""
    part = (blocks[0] if in_payload and blocks else header).clone()
    part[part.numel() // 2] ^= 64
    return (header, [part, *blocks[1:]]) if in_payload and blocks else (part, blocks)
