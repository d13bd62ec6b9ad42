"""Messages as bytes: a header of fixed size, then one block of bytes per large tensor.

The header is JSON (no pickle). It names the message, gives dtype, shape and strides of every tensor, and carries small
tensors itself. The receiver reads it before it makes room for anything else, so a payload never meets a buffer of
another size, and any dtype and any dense memory order arrive as they left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..errors import TransportError
from ..nn.tree import flatten, unflatten
from .mail import Message
from .micro import Micro

__all__ = ["HEADER_BYTES", "Envelope", "close_notice", "dense", "open_envelope", "seal"]

HEADER_BYTES = 16384
_INLINE_BYTES = 4096
_PREFIX = 8


def dense(t: Tensor) -> Tensor:
    """The same values in one gap-free block of memory, copied only if they are not in one already.

    >>> dense(torch.zeros(2, 3)[:, :2]).is_contiguous()
    True
    """
    if t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)):
        return t
    step = 1
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != step:
            return t.contiguous()
        step *= size
    return t


def _flat(t: Tensor) -> Tensor:
    """The bytes of a dense tensor in memory order, without a copy."""
    return t.detach().as_strided((t.numel(),), (1,), t.storage_offset()).view(torch.uint8)


class Envelope:
    """A header that was read: the message without its large tensors, and the room they need."""

    def __init__(self, head: dict[str, Any], inline: Tensor) -> None:
        self.sequence: int = head["sequence"]
        self.closes: bool = head.get("closes", False)
        self._head = head
        self._tensors: list[Tensor] = []
        self.blocks: list[Tensor] = []
        offset = 0
        for name, shape, strides in head.get("tensors", ()):
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise TransportError(f"a message announces a tensor of unknown dtype {name!r}")
            count = 1
            for size in shape:
                count *= size
            nbytes = count * dtype.itemsize
            if nbytes <= _INLINE_BYTES:
                block = inline[offset : offset + nbytes].clone()
                offset += _aligned(nbytes)
            else:
                block = torch.empty(nbytes, dtype=torch.uint8)
                self.blocks.append(block)
            self._tensors.append(block.view(dtype).as_strided(shape, strides))

    def message(self) -> Message:
        """The message, once all `blocks` are filled."""
        head = self._head
        return Message(
            kind=head["kind"],
            stage=head["stage"],
            micro=Micro(**head["micro"]) if head["micro"] else None,
            payload=unflatten(head["structure"], self._tensors),
            version=head["version"],
            scalars=head["scalars"],
        )


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
        "structure": structure,
        "tensors": [(str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride())) for t in tensors],
    }
    small = [t for t in tensors if t.nbytes <= _INLINE_BYTES]
    return _header(head, small), [_flat(t) for t in tensors if t.nbytes > _INLINE_BYTES]


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
    header[:_PREFIX].view(torch.int64)[0] = len(text)
    header[_PREFIX : _PREFIX + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    offset = _PREFIX + _aligned(len(text))
    for t in small:
        header[offset : offset + t.nbytes] = _flat(t)
        offset += _aligned(t.nbytes)
    return header


def open_envelope(header: Tensor) -> Envelope:
    """Read a header."""
    length = int(header[:_PREFIX].view(torch.int64)[0])
    if not 0 < length <= HEADER_BYTES - _PREFIX:
        raise TransportError(f"a header announces {length} bytes of text: the stream of messages is damaged")
    try:
        head = json.loads(bytes(header[_PREFIX : _PREFIX + length].tolist()))
    except ValueError as error:
        raise TransportError(f"a header is not readable ({error}): the stream of messages is damaged") from error
    return Envelope(head, header[_PREFIX + _aligned(length) :])
