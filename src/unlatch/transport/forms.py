"""What messages of one name to one station have in common, so that it travels once.

Nearly all of a message is the same as in the one before it: its name, where it goes, shapes and dtypes. That is its
*form*. It is described once, in JSON, and from then on has a number. What changes has a fixed place in a short binary
record, which each kind of wire lays out for itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..errors import TransportError
from ..nn.tree import Structure, unflatten
from .mail import Message, Micro

__all__ = [
    "MICRO",
    "NO_MICRO",
    "Count",
    "Description",
    "Form",
    "FormsHeard",
    "FormsTold",
    "dtype_named",
    "micro_fields",
    "shaped",
]

# Forms that are kept for messages of one name to one station: the first ones. More of them come from structures with
# numbers in them that never come again, or from more shapes than that; if those come in turn, whoever made room for
# each of them would forget every one just before it comes again.
_KEPT = 8
_ONCE = 0xFFFF
#: How `struct` packs a micro-batch, and what stands there for none.
MICRO = "qqIIqdq??"
NO_MICRO = (0, 0, 0, 0, 0, 0.0, 0, False, False)

#: In what came over a wire.
Count = Annotated[int, Field(ge=0)]


class Description(BaseModel):
    """A form as it travels. It is believed only as far as its types go: the rest is checked by who makes room."""

    model_config = ConfigDict(strict=True, extra="forbid")

    number: Annotated[int, Field(ge=0, le=_ONCE)]
    kind: str
    stage: int
    control: str | None
    about_micro: bool
    scalars: list[str] | None
    structure: str | list[Any]
    tensors: list[tuple[str, list[Count], list[Count]]]


class Form:
    """What messages have in common."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.structure: Structure = description.structure
        # 1, 1.0 and True are equal, but not the same.
        self._text = json.dumps(self.structure) if _has_numbers(self.structure) else None
        self.scalars = description.scalars or []
        self.tensors = [(dtype_named(name), tuple(shape), tuple(step)) for name, shape, step in description.tensors]
        self.sizes = [dtype.itemsize * math.prod(shape) for dtype, shape, _ in self.tensors]

    def fits(self, message: Message, structure: Structure, tensors: Sequence[Tensor]) -> bool:
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

    def message(
        self, version: int, micro: Sequence[Any], scalars: Sequence[float], tensors: Sequence[Tensor]
    ) -> Message:
        """The message of this form with these values in it. **Arguments:** `micro`: as `micro_fields` gives them."""
        own = self.description
        return Message(
            own.kind,
            own.stage,
            Micro(*micro) if own.about_micro else None,
            unflatten(self.structure, tensors),
            version,
            None if own.scalars is None else dict(zip(self.scalars, scalars, strict=True)),
            own.control,
        )


F = TypeVar("F", bound=Form)


class FormsTold(Generic[F]):
    """The forms that a sender has described to one peer. **Arguments:** `make`: a form as this wire needs it."""

    def __init__(self, make: Callable[[Description], F]) -> None:
        self._make = make
        self._known: dict[tuple[str, int], list[F]] = {}
        self._count = 0

    def of(self, message: Message, structure: Structure, tensors: Sequence[Tensor]) -> tuple[F, bytes]:
        """The form of a message with dense tensors, and its description if the peer has not seen it, else nothing."""
        known = self._known.setdefault((message.kind, message.stage), [])
        for form in known:
            if form.fits(message, structure, tensors):
                return form, b""
        form = self._make(self._described(message, structure, tensors, once=len(known) >= _KEPT))
        if form.description.number != _ONCE:
            known.append(form)
        # Not pydantic's own text, in which NaN becomes null.
        return form, json.dumps(form.description.model_dump()).encode()

    def _described(
        self, message: Message, structure: Structure, tensors: Sequence[Tensor], *, once: bool
    ) -> Description:
        number = _ONCE if once or self._count >= _ONCE else self._count
        self._count += number != _ONCE
        return Description(
            number=number,
            kind=message.kind,
            stage=message.stage,
            control=message.control,
            about_micro=message.micro is not None,
            scalars=None if message.scalars is None else list(message.scalars),
            structure=structure,
            tensors=[(str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride())) for t in tensors],
        )


class FormsHeard(Generic[F]):
    """The forms that one peer has described here.

    **Arguments:** `make`: a form as this wire needs it; `peer`: the rank that describes them.
    """

    def __init__(self, make: Callable[[Description], F], peer: int) -> None:
        self._make, self._peer = make, peer
        self._known: dict[int, F] = {}

    def learn(self, text: bytes) -> None:
        """Take note of a form."""
        try:
            description = Description.model_validate_json(text)
        except ValidationError as error:
            raise TransportError(f"a form of rank {self._peer} cannot be read: {error.errors()[0]['msg']}") from error
        self._known[description.number] = self._make(description)

    def get(self, number: int) -> F | None:
        """The form of this number, if it was described."""
        return self._known.get(number)


def micro_fields(micro: Micro | None) -> tuple[int, int, int, int, int, float, int, bool, bool]:
    """A micro-batch as `MICRO` packs it.

    >>> micro_fields(Micro(7, 3, 1, 2, 4, 0.5, 3, True))
    (7, 3, 1, 2, 4, 0.5, 3, True, False)
    """
    if micro is None:
        return NO_MICRO
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


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a message announces by its name.

    >>> dtype_named("float32")
    torch.float32
    """
    dtype = getattr(torch, name, None)
    # Of quantized dtypes torch does not know how many bytes a view of them takes.
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):
        raise TransportError(f"a message announces a tensor of unknown dtype {name!r}")
    return dtype


def shaped(block: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Bytes as the tensor that a message announces.

    >>> shaped(torch.zeros(8, dtype=torch.uint8), torch.float32, (2, 1), (1, 1)).shape
    torch.Size([2, 1])
    """
    try:
        return block.view(dtype).as_strided(shape, strides)
    except (RuntimeError, TypeError) as error:
        raise TransportError(
            f"a message announces a tensor of {dtype} with shape {list(shape)} and strides {list(strides)}, which its "
            f"{block.nbytes} bytes do not hold"
        ) from error


def _has_numbers(structure: Any) -> bool:
    if isinstance(structure, list):
        return any(map(_has_numbers, structure))
    return isinstance(structure, int | float)
