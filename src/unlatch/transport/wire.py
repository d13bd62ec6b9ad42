"""Messages as bytes: a short header of fixed size, then one block of bytes per large tensor.

    header     always              checksum, number, form, version, micro-batch; and the body, if it fits     1
    body       where it does not   description of a new form, losses, checksums of blocks, small tensors      2
    blocks     of large tensors    bytes in memory order                                                      3

A receiver has to know how much will come before it comes. So headers all have one size and say how long the body is,
and the body tells of the blocks, by the description of its form (`forms`) or by the number of one that was described
before: a payload never meets a buffer of another size, and any dtype and any dense memory order arrive as they left.
Nothing is pickled, and everything has a checksum.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from ..errors import TransportError
from ..io.space import bytes_text
from ..nn.tree import Tree, flatten, leaves, map_tensors
from .forms import MICRO, NO_MICRO, Description, Form, FormsHeard, FormsTold, micro_fields, shaped
from .mail import Message, Micro
from .memory import TAKES_LESS, is_out_of_memory, most_held

__all__ = ["HEADER_BYTES", "Envelope", "Head", "Reader", "Sealed", "Writer", "dense", "dense_tree", "flat", "room"]

HEADER_BYTES = 256
# A tensor of at most so many bytes travels in the body, while all such tensors together take no more than the second.
_INLINE_BYTES, _ALL_INLINE_BYTES = 4096, 8192
# No body is longer.
_MOST_BODY = 32768
# Checksum of what follows; whether it takes leave; form, sequence, version; bytes of a description at the beginning of
# the body; bytes of a body that follows by itself, and their checksum; the micro-batch.
_FIXED = struct.Struct(f"<q?HQqIIq{MICRO}")
_CHECKSUM = struct.Struct("<q")
# Where a body begins that fits into the header.
_BODY_AT = (_FIXED.size + 15) // 16 * 16
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


def flat(t: Tensor) -> Tensor:
    """The bytes of a dense tensor in memory order, without a copy.

    >>> flat(torch.zeros(3)).shape
    torch.Size([12])
    """
    return t.detach().as_strided((t.numel(),), (1,), t.storage_offset()).view(torch.uint8)


class _Form(Form):
    """A form, and how the bodies of its messages are laid out: numbers, then small tensors."""

    def __init__(self, description: Description) -> None:
        super().__init__(description)
        if sum(self.sizes) > _MOST_BYTES:
            raise TransportError(
                f"a message announces {sum(self.sizes)} bytes, more than this machine has: the stream of messages is "
                "damaged"
            )
        self.inline = _travel_inline(self.sizes)
        # Losses and the like; the checksum of every block.
        self.numbers = struct.Struct(f"<{len(self.scalars)}d{self.inline.count(False)}q")
        small = (nbytes for nbytes, fits in zip(self.sizes, self.inline, strict=True) if fits)
        self.length = _aligned(self.numbers.size) + sum(map(_aligned, small))


def _travel_inline(sizes: Iterable[int]) -> list[bool]:
    """Which of the tensors of these sizes travel in the body: both sides of the wire decide by this rule."""
    found, room = [], _ALL_INLINE_BYTES
    for nbytes in sizes:
        fits = nbytes <= min(_INLINE_BYTES, room)
        found.append(fits)
        room -= _aligned(nbytes) if fits else 0
    return found


def _aligned(nbytes: int) -> int:
    return (nbytes + 15) // 16 * 16


# ----------------------------------------------------------------------------------------------------------- sending


class Sealed(NamedTuple):
    """A message as it goes out. **Arguments:** `body`: where it did not fit into the header."""

    header: Tensor
    body: Tensor | None
    blocks: list[Tensor]

    @property
    def parts(self) -> list[Tensor]:
        """All of it, in the order in which it is sent."""
        return [self.header, *([self.body] if self.body is not None else []), *self.blocks]


class Writer:
    """Seals messages to one peer."""

    def __init__(self) -> None:
        self._forms = FormsTold(_Form)
        self._sequence = 0

    def seal(self, message: Message) -> Sealed:
        """A message as bytes. Its large tensors are not copied."""
        tensors, structure = flatten(message.payload)
        tensors = [dense(t) for t in tensors]
        form, description = self._forms.of(message, structure, tensors)
        blocks = [flat(t) for t, fits in zip(tensors, form.inline, strict=True) if not fits]
        losses = message.scalars.values() if message.scalars else ()
        at = _aligned(len(description))
        body = bytearray(at + form.length)
        body[: len(description)] = description
        form.numbers.pack_into(body, at, *losses, *(_checksum(block) for block in blocks))
        at += _aligned(form.numbers.size)
        for t, fits in zip(tensors, form.inline, strict=True):
            if fits:
                body[at : at + t.nbytes] = flat(t).numpy().data
                at += _aligned(t.nbytes)
        if len(body) > _MOST_BODY:
            raise TransportError(
                f"the description of a message for stage {message.stage} takes {len(body)} bytes, more than the "
                f"{_MOST_BODY} that it may: pass fewer separate tensors between blocks (stack them)"
            )
        changing = (form.description.number, message.version, len(description), micro_fields(message.micro))
        return Sealed(*self._packed(*changing, body), blocks)

    def close_notice(self) -> Sealed:
        """What tells the peer that nothing more will come."""
        return Sealed(*self._packed(0, 0, 0, NO_MICRO, b"", closes=True), [])

    def _packed(
        self,
        form: int,
        version: int,
        described: int,
        micro: tuple[Any, ...],
        body: bytearray | bytes,
        *,
        closes: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The header, and the body if it did not fit into it."""
        header = bytearray(HEADER_BYTES)
        beside = torch.frombuffer(body, dtype=torch.uint8) if len(body) > HEADER_BYTES - _BODY_AT else None
        if beside is None:
            header[_BODY_AT : _BODY_AT + len(body)] = body
            sizes = described, 0, 0
        else:
            sizes = described, len(body), _checksum(beside)
        _FIXED.pack_into(header, 0, 0, closes, form, self._sequence, version, *sizes, *micro)
        _CHECKSUM.pack_into(header, 0, _sum_of(memoryview(header)[_CHECKSUM.size :]))
        self._sequence += 1
        return torch.frombuffer(header, dtype=torch.uint8), beside


# --------------------------------------------------------------------------------------------------------- receiving


class Head(NamedTuple):
    """What a header says. **Arguments:** `beside`: bytes of a body that comes by itself; `inside`: where it is else."""

    closes: bool
    form: int
    version: int
    described: int
    beside: int
    checksum: int
    micro: tuple[Any, ...]
    inside: Tensor


class Reader:
    """Reads what one peer has sealed. **Arguments:** `peer`: its rank."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._forms = FormsHeard(_Form, peer)
        self._expected = 0

    def head(self, header: Tensor) -> Head:
        """Read a header; one that is damaged, or not the next one, is refused."""
        checksum, closes, form, sequence, version, *rest = _FIXED.unpack_from(header.numpy().data)
        if checksum != _checksum(header[_CHECKSUM.size :]):
            raise TransportError(
                f"a header from rank {self._peer} does not match its checksum: the stream of messages is damaged"
            )
        if sequence != self._expected:
            raise TransportError(
                f"message {sequence} came from rank {self._peer} where {self._expected} was due: one was lost, doubled "
                "or overtaken"
            )
        self._expected += 1
        described, beside, body_checksum, *micro = rest
        if beside > _MOST_BODY:
            raise TransportError(f"a header from rank {self._peer} announces a body of {beside} bytes")
        return Head(closes, form, version, described, beside, body_checksum, tuple(micro), header[_BODY_AT:])

    def envelope(
        self, head: Head, beside: Tensor | None = None, make_room: Callable[[int], Tensor] | None = None
    ) -> Envelope:
        """What a header and its body announce.

        **Arguments:** `beside`: the body, if it came by itself; `make_room`: for so many bytes.
        """
        if beside is not None and head.checksum != _checksum(beside):
            raise TransportError(
                f"the body of a message from rank {self._peer} does not match its checksum: the stream of messages is "
                "damaged"
            )
        body = head.inside if beside is None else beside
        at = _aligned(head.described)
        if head.described:
            if at > len(body):
                raise TransportError(f"a description of {head.described} bytes came in a body of {len(body)}")
            self._forms.learn(body[: head.described].numpy().tobytes())
        form = self._forms.get(head.form)
        if form is None or at + form.length > len(body):
            raise TransportError(
                f"a body of {len(body)} bytes came from rank {self._peer} that has the form of no message"
            )
        return Envelope(form, head, body[at:], self._peer, make_room or room)


class Envelope:
    """A message without its large tensors, and the room they need: `blocks`, to be filled in their order."""

    def __init__(self, form: _Form, head: Head, body: Tensor, sender: int, make_room: Callable[[int], Tensor]) -> None:
        self._form, self._head, self._sender = form, head, sender
        found = form.numbers.unpack_from(body.numpy().data)
        self._scalars, self._checksums = found[: len(form.scalars)], found[len(form.scalars) :]
        self._tensors: list[Tensor] = []
        self.blocks: list[Tensor] = []
        at = _aligned(form.numbers.size)
        for announced, nbytes, small in zip(form.tensors, form.sizes, form.inline, strict=True):
            if small:
                # The header is read into the same memory again.
                block = body[at : at + nbytes].clone()
                at += _aligned(nbytes)
            else:
                block = make_room(nbytes)
                self.blocks.append(block)
            self._tensors.append(shaped(block, *announced))

    def verify(self) -> None:
        """Refuse `blocks` that are not what was sent."""
        for number, (block, sent) in enumerate(zip(self.blocks, self._checksums, strict=True)):
            if _checksum(block) != sent:
                own = self._form.description
                of = f" of {Micro(*self._head.micro)}" if own.about_micro else ""
                raise TransportError(
                    f"the {own.kind} message{of} for stage {own.stage} was damaged on its way from rank "
                    f"{self._sender}: block {number} of {len(self.blocks)} ({block.nbytes} bytes) does not match its "
                    "checksum. If it happens again, look for faulty memory or a faulty network on both hosts."
                )

    def message(self) -> Message:
        """The message, once all `blocks` are filled."""
        return self._form.message(self._head.version, self._head.micro, self._scalars, self._tensors)


def room(nbytes: int, where: torch.device | None = None) -> Tensor:
    """Memory for so many bytes that will come. **Arguments:** `where`: of a device; else of the host."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=where)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TransportError(
            f"out of memory: there is no room for a message of {bytes_text(nbytes)}, this process held "
            f"{bytes_text(most_held())} at most; {TAKES_LESS}"
        ) from error


def _checksum(block: Tensor) -> int:
    return _sum_of(block.numpy().data)


def _sum_of(data: Any) -> int:
    """Of bytes, as a number that fits an int64. Chosen by benchmarks/checksum_cost.py."""
    return xxhash.xxh3_64_intdigest(data) - 2**63
