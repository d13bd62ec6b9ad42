"""Messages between ranks of one machine as short frames; their tensors lie in memory that both ranks see.

Nearly all of a message is the same as in the one before it: its name, where it goes, shapes and dtypes. That is its
*form*, which is described once, in JSON, and from then on has a number. What changes has a fixed place in a frame of
some 80 bytes: which micro-batch, the version, numbers such as the loss, and the slots of the tensors.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..errors import TransportError
from ..nn.tree import Structure, flatten, unflatten
from .mail import Message, Micro
from .shared_memory import Incoming, Outgoing
from .wire import dtype_named

__all__ = ["FORM", "LETTER", "Reader", "Writer"]

#: First bytes of frames.
FORM, LETTER = b"F", b"L"
# Forms that are kept for messages of one name to one station. More of them come from structures with numbers in them
# that never come again.
_KEPT = 8
_ONCE = 0xFFFF
# First byte, form, sequence, version; then the fields of a micro-batch, in their order.
_FIXED = "<cHQq" + "qqIIqdq??"
_NO_MICRO = (0, 0, 0, 0, 0, 0.0, 0, False, False)
# A tensor without elements is in no slot.
_NOWHERE = 0xFFFFFFFF

Count = Annotated[int, Field(ge=0)]


class _Description(BaseModel):
    """A form as it travels."""

    model_config = ConfigDict(strict=True, extra="forbid")

    number: Annotated[int, Field(ge=0, le=_ONCE)]
    kind: str
    stage: int
    control: str | None
    about_micro: bool
    scalars: list[str] | None
    structure: str | list[Any]
    tensors: list[tuple[str, list[Count], list[Count]]]


class _Form:
    """What messages have in common, and how the rest of them is packed."""

    def __init__(self, description: _Description) -> None:
        self.description = description
        self.structure: Structure = description.structure
        # 1, 1.0 and True are equal, but not the same.
        self._text = json.dumps(self.structure) if _has_numbers(self.structure) else None
        self.scalars = description.scalars or []
        self.tensors = [(dtype_named(name), tuple(shape), tuple(step)) for name, shape, step in description.tensors]
        self.sizes = [dtype.itemsize * math.prod(shape) for dtype, shape, _ in self.tensors]
        self.packing = struct.Struct(f"{_FIXED}{len(self.scalars)}d{len(self.tensors)}I")

    def fits(self, message: Message, structure: Structure, tensors: list[Tensor]) -> bool:
        """Whether a message has this form."""
        own = self.description
        return (
            (self.structure == structure if self._text is None else self._text == json.dumps(structure))
            and len(self.tensors) == len(tensors)
            and all(
                t.shape == shape and t.dtype == dtype and t.stride() == strides
                for t, (dtype, shape, strides) in zip(tensors, self.tensors, strict=True)
            )
            and own.control == message.control
            and own.about_micro == (message.micro is not None)
            and (None if message.scalars is None else list(message.scalars)) == own.scalars
        )


class Writer:
    """Turns messages to one peer into frames.

    **Arguments:** `memory`: where their tensors go.
    """

    def __init__(self, memory: Outgoing) -> None:
        self._memory = memory
        self._forms: dict[tuple[str, int], list[_Form]] = {}
        self._count = 0
        self._sequence = 0

    def frames(self, message: Message) -> list[bytes]:
        """The frame of a message with dense tensors, after the description of its form if the peer has not seen it."""
        tensors, structure = flatten(message.payload)
        known = self._forms.setdefault((message.kind, message.stage), [])
        found: list[bytes] = []
        for form in known:
            if form.fits(message, structure, tensors):
                break
        else:
            form = self._described(message, structure, tensors, once=len(known) >= _KEPT)
            if form.description.number != _ONCE:
                known.append(form)
            # Not pydantic's own text, in which NaN becomes null.
            found.append(FORM + json.dumps(form.description.model_dump()).encode())
        micro = message.micro
        found.append(
            form.packing.pack(
                LETTER,
                form.description.number,
                self._sequence,
                message.version,
                *(_NO_MICRO if micro is None else _fields(micro)),
                *(message.scalars.values() if message.scalars else ()),
                *[self._memory.place(t) if t.numel() else _NOWHERE for t in tensors],
            )
        )
        self._sequence += 1
        return found

    def _described(self, message: Message, structure: Structure, tensors: list[Tensor], *, once: bool) -> _Form:
        number = _ONCE if once or self._count >= _ONCE else self._count
        self._count += number != _ONCE
        return _Form(
            _Description(
                number=number,
                kind=message.kind,
                stage=message.stage,
                control=message.control,
                about_micro=message.micro is not None,
                scalars=None if message.scalars is None else list(message.scalars),
                structure=structure,
                tensors=[(str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride())) for t in tensors],
            )
        )


def _has_numbers(structure: Any) -> bool:
    if isinstance(structure, list):
        return any(map(_has_numbers, structure))
    return isinstance(structure, int | float)


def _fields(micro: Micro) -> tuple[int, int, int, int, int, float, int, bool, bool]:
    return (
        micro.id,
        micro.batch,
        micro.index,
        micro.count,
        micro.size,
        micro.scale,
        micro.update,
        micro.ends,
        micro.fresh,
    )


class Reader:
    """Turns frames of one peer back into messages.

    **Arguments:** `memory`: where their tensors are; `peer`: the rank that sends them.
    """

    def __init__(self, memory: Incoming, peer: int) -> None:
        self._memory, self._peer = memory, peer
        self._forms: dict[int, _Form] = {}
        self._expected = 0

    def learn(self, frame: memoryview) -> None:
        """Take note of a form."""
        try:
            description = _Description.model_validate_json(bytes(frame[1:]))
        except ValidationError as error:
            raise TransportError(f"a form of rank {self._peer} cannot be read: {error.errors()[0]['msg']}") from error
        self._forms[description.number] = _Form(description)

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
        own, after = form.description, 9 + len(form.scalars)
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype)
            if slot == _NOWHERE
            else self._memory.tensor(slot, nbytes, dtype, shape, strides)
            for slot, nbytes, (dtype, shape, strides) in zip(rest[after:], form.sizes, form.tensors, strict=True)
        ]
        return Message(
            own.kind,
            own.stage,
            Micro(*rest[:9]) if own.about_micro else None,
            unflatten(form.structure, tensors),
            version,
            None if own.scalars is None else dict(zip(form.scalars, rest[9:after], strict=True)),
            own.control,
        )
