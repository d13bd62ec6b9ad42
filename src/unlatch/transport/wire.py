"""Messages as bytes: a header of fixed size, then one block of bytes per large tensor.

The header is JSON (no pickle) with a checksum. It names the message, gives dtype, shape and strides of every tensor,
carries small tensors itself, and the checksums of all blocks. The receiver reads it before it makes room for anything
else, so a payload never meets a buffer of another size, and any dtype and any dense memory order arrive as they left.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..errors import TransportError
from ..io.space import bytes_text
from ..nn.tree import Tree, flatten, leaves, map_tensors, unflatten
from .mail import Message, Micro
from .memory import TAKES_LESS, is_out_of_memory, most_held

__all__ = [
    "HEADER_BYTES",
    "Envelope",
    "close_notice",
    "dense",
    "dense_tree",
    "dtype_named",
    "open_envelope",
    "room",
    "seal",
]

HEADER_BYTES = 16384
# A tensor of at most so many bytes travels in the header, while all such tensors together take no more than the second.
_INLINE_BYTES, _ALL_INLINE_BYTES = 4096, 8192
# Length of the text and checksum of everything else.
_PREFIX = 16
# No message is larger than the machine: room for one that claims to be is not even asked for.
_MOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def dense(t: Tensor) -> Tensor:
    """The same values in one gap-free block of memory, copied only if they are not in one already.

    >>> dense(torch.zeros(2, 3)[:, :2]).is_contiguous()
    True
    """
    t = t.resolve_conj().resolve_neg()
    if t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)):
        return t
    step = 1
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != step:
            return t.contiguous()
        step *= size
    return t


def dense_tree(tree: Tree) -> Tree:
    """The same for all tensors of a tree."""
    for t in leaves(tree):
        if not t.is_contiguous() or t.is_conj() or t.is_neg():
            return map_tensors(dense, tree)
    return tree


def _flat(t: Tensor) -> Tensor:
    """The bytes of a dense tensor in memory order, without a copy."""
    return t.detach().as_strided((t.numel(),), (1,), t.storage_offset()).view(torch.uint8)


Count = Annotated[int, Field(ge=0)]


class _Head(BaseModel):
    """The text of a header. What it says is believed only as far as its types go: the rest is checked by `Envelope`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    sequence: Count
    closes: bool = False
    kind: str = ""
    stage: int = 0
    micro: Micro | None = None
    version: int = 0
    scalars: dict[str, float] | None = None
    control: str | None = None
    structure: str | list[Any] = ""
    tensors: list[tuple[str, list[Count], list[Count]]] = []
    checksums: list[int] = []


class Envelope:
    """A header that was read: the message without its large tensors, and the room they need."""

    def __init__(self, head: _Head, inline: Tensor, make_room: Callable[[int], Tensor]) -> None:
        self.sequence = head.sequence
        self.closes = head.closes
        self._head = head
        self._tensors: list[Tensor] = []
        self.blocks: list[Tensor] = []
        described = [(dtype_named(name), shape, strides) for name, shape, strides in head.tensors]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape, _ in described]
        if sum(sizes) > _MOST_BYTES:
            raise TransportError(
                f"a message announces {sum(sizes)} bytes, more than this machine has: the stream of messages is damaged"
            )
        offset = 0
        for (dtype, shape, strides), nbytes, small in zip(described, sizes, _travel_inline(sizes), strict=True):
            if small:
                block = inline[offset : offset + nbytes].clone()
                offset += _aligned(nbytes)
            else:
                block = make_room(nbytes)
                self.blocks.append(block)
            try:
                self._tensors.append(block.view(dtype).as_strided(shape, strides))
            except (RuntimeError, TypeError) as error:
                raise TransportError(
                    f"a message announces a tensor of {dtype} with shape {shape} and strides {strides}, which its "
                    f"{nbytes} bytes do not hold"
                ) from error
        if len(head.checksums) != len(self.blocks):
            raise TransportError(
                f"a message announces {len(self.blocks)} block(s), and {len(head.checksums)} checksums"
            )

    def verify(self, sender: int) -> None:
        """Refuse `blocks` that are not what rank `sender` sent."""
        head = self._head
        for number, (block, sent) in enumerate(zip(self.blocks, head.checksums, strict=True)):
            if _checksum(block) != sent:
                raise TransportError(
                    f"the {head.kind} message{f' of {head.micro}' if head.micro else ''} for stage {head.stage} was "
                    f"damaged on its way from rank {sender}: block {number} of {len(self.blocks)} ({block.nbytes} "
                    "bytes) does not match its checksum. If it happens again, look for faulty memory or a faulty "
                    "network on both hosts."
                )

    def message(self) -> Message:
        """The message, once all `blocks` are filled."""
        head = self._head
        return Message(
            kind=head.kind,
            stage=head.stage,
            micro=head.micro,
            payload=unflatten(head.structure, self._tensors),
            version=head.version,
            scalars=head.scalars,
            control=head.control,
        )


def room(nbytes: int) -> Tensor:
    """Memory of the host for so many bytes that will come."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TransportError(
            f"out of memory: there is no room for a message of {bytes_text(nbytes)}, this process held "
            f"{bytes_text(most_held())} at most; {TAKES_LESS}"
        ) from error


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    # Of quantized dtypes torch does not know how many bytes a view of them takes.
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):
        raise TransportError(f"a message announces a tensor of unknown dtype {name!r}")
    return dtype


def _travel_inline(sizes: Iterable[int]) -> list[bool]:
    """Which of the tensors of these sizes the header carries itself: both sides of the wire decide by this rule."""
    found, room = [], _ALL_INLINE_BYTES
    for nbytes in sizes:
        fits = nbytes <= min(_INLINE_BYTES, room)
        found.append(fits)
        room -= _aligned(nbytes) if fits else 0
    return found


def _aligned(nbytes: int) -> int:
    return (nbytes + 15) // 16 * 16


def seal(message: Message, sequence: int) -> tuple[Tensor, list[Tensor]]:
    """**Returns:** the header and the blocks of bytes to send after it."""
    tensors, structure = flatten(message.payload)
    tensors = [dense(t) for t in tensors]
    head = {
        "sequence": sequence,
        "kind": message.kind,
        "stage": message.stage,
        "micro": asdict(message.micro) if message.micro else None,
        "version": message.version,
        "scalars": message.scalars,
        "control": message.control,
        "structure": structure,
        "tensors": [(str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride())) for t in tensors],
    }
    inline = _travel_inline(t.nbytes for t in tensors)
    small = [t for t, fits in zip(tensors, inline, strict=True) if fits]
    blocks = [_flat(t) for t, fits in zip(tensors, inline, strict=True) if not fits]
    head["checksums"] = [_checksum(block) for block in blocks]
    return _header(head, small), blocks


def close_notice(sequence: int) -> Tensor:
    """The header that tells the peer that nothing more will come."""
    return _header({"sequence": sequence, "closes": True}, [])


def _header(head: dict[str, Any], small: Sequence[Tensor]) -> Tensor:
    text = json.dumps(head, separators=(",", ":")).encode()
    room = _PREFIX + _aligned(len(text)) + sum(_aligned(t.nbytes) for t in small)
    if room > HEADER_BYTES:
        raise TransportError(
            f"the description of a message for stage {head.get('stage')} takes {room} bytes, more than the "
            f"{HEADER_BYTES} of a header: pass fewer separate tensors between blocks (stack them)"
        )
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    prefix = header[:_PREFIX].view(torch.int64)
    prefix[0] = len(text)
    header[_PREFIX : _PREFIX + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    offset = _PREFIX + _aligned(len(text))
    for t in small:
        header[offset : offset + t.nbytes] = _flat(t)
        offset += _aligned(t.nbytes)
    prefix[1] = _header_checksum(header)
    return header


def _checksum(*blocks: Tensor) -> int:
    """Of bytes, as a number that fits an int64. Chosen by benchmarks/checksum_cost.py."""
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(block.numpy().data)
    return digest.intdigest() - 2**63


def _header_checksum(header: Tensor) -> int:
    return _checksum(header[: _PREFIX // 2], header[_PREFIX:])


def open_envelope(header: Tensor, make_room: Callable[[int], Tensor] = room) -> Envelope:
    """Read a header; a damaged one is refused. **Arguments:** `make_room`: for so many bytes."""
    length, checksum = (int(number) for number in header[:_PREFIX].view(torch.int64))
    if not 0 < length <= HEADER_BYTES - _PREFIX or checksum != _header_checksum(header):
        raise TransportError("a header does not match its checksum: the stream of messages is damaged")
    try:
        head = _Head.model_validate_json(header[_PREFIX : _PREFIX + length].numpy().tobytes())
    except ValidationError as error:
        raise TransportError(f"a header cannot be read: {error.errors()[0]['msg']}") from error
    return Envelope(head, header[_PREFIX + _aligned(length) :], make_room)
