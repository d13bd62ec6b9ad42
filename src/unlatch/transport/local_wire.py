"""Messages between ranks of one machine as short frames; their tensors lie in memory that both ranks see.

A frame of some 80 bytes has what changes from one message to the next of its form (`forms`): which micro-batch, the
version, numbers such as the loss, and the slots of the tensors.
"""

from __future__ import annotations

import struct

import torch

from ..errors import TransportError
from ..nn.tree import flatten
from .forms import MICRO, Description, Form, FormsHeard, FormsTold, micro_fields
from .mail import Message
from .shared_memory import Incoming, Outgoing

__all__ = ["FORM", "LETTER", "Reader", "Writer"]

#: First bytes of frames.
FORM, LETTER = b"F", b"L"
# First byte, form, sequence, version, micro-batch.
_FIXED = f"<cHQq{MICRO}"
# A tensor without elements is in no slot.
_NOWHERE = 0xFFFFFFFF


class _Form(Form):
    """A form, and how the rest of its messages is packed."""

    def __init__(self, description: Description) -> None:
        super().__init__(description)
        self.packing = struct.Struct(f"{_FIXED}{len(self.scalars)}d{len(self.tensors)}I")


class Writer:
    """Turns messages to one peer into frames.

    **Arguments:** `memory`: where their tensors go.
    """

    def __init__(self, memory: Outgoing) -> None:
        self._memory = memory
        self._forms = FormsTold(_Form)
        self._sequence = 0

    def frames(self, message: Message) -> list[bytes]:
        """The frame of a message with dense tensors, after the description of its form if the peer has not seen it."""
        tensors, structure = flatten(message.payload)
        form, description = self._forms.of(message, structure, tensors)
        frame = form.packing.pack(
            LETTER,
            form.description.number,
            self._sequence,
            message.version,
            *micro_fields(message.micro),
            *(message.scalars.values() if message.scalars else ()),
            *[self._memory.place(t) if t.numel() else _NOWHERE for t in tensors],
        )
        self._sequence += 1
        return [FORM + description, frame] if description else [frame]


class Reader:
    """Turns frames of one peer back into messages.

    **Arguments:** `memory`: where their tensors are; `peer`: the rank that sends them.
    """

    def __init__(self, memory: Incoming, peer: int) -> None:
        self._memory, self._peer = memory, peer
        self._forms = FormsHeard(_Form, peer)
        self._expected = 0

    def learn(self, frame: memoryview) -> None:
        """Take note of a form."""
        self._forms.learn(bytes(frame[1:]))

    def message(self, frame: memoryview) -> Message:
        """The message of a frame."""
        form = self._forms.get(int.from_bytes(frame[1:3], "little"))
        if form is None or len(frame) != form.packing.size:
            raise TransportError(f"{len(frame)} bytes came from rank {self._peer} that have the form of no message")
        _, _, sequence, version, *rest = form.packing.unpack(frame)
        if sequence != self._expected:
            raise TransportError(
                f"message {sequence} came from rank {self._peer} where {self._expected} was due: one was lost, doubled "
                "or overtaken"
            )
        self._expected += 1
        after = 9 + len(form.scalars)
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype)
            if slot == _NOWHERE
            else self._memory.tensor(slot, nbytes, dtype, shape, strides)
            for slot, nbytes, (dtype, shape, strides) in zip(rest[after:], form.sizes, form.tensors, strict=True)
        ]
        return form.message(version, rest[:9], rest[9:after], tensors)
