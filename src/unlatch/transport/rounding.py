"""Tensors in fewer bytes, for slow links: `bf16` halves what float32 takes, `int8` quarters it.

A rounded tensor is a small dict of plain values and tensors, so that a tree with rounded tensors is a tree as well: the
wire, the mail and checkpoints carry it as they carry all others. It says itself what it was.

`int8` has one scale per channel. Channels are dimension 1 of tensors with four and more dimensions (images as
convolutions see them), the last dimension of those with two or three (`(batch, width)`, `(batch, tokens, width)`). A
scale that would serve fewer than 16 numbers is not worth its bytes; such a tensor, and one of a single dimension, has
one scale for all.

The error of `int8` is not lost: a `Residue` keeps it, and adds it to what is rounded next. So errors do not add up over
messages. `bf16` rounds to the nearest number, relative to each number itself, and keeps nothing.

What is not finite stays so: with `int8` it takes its channel with it, so whoever looks for NaN finds some.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..errors import ConfigError, TransportError
from ..nn.tree import Tree

__all__ = ["FORMATS", "Format", "Residue", "check_format", "in_bf16", "in_int8", "is_rounded", "restored"]

Format: TypeAlias = Literal["exact", "bf16", "int8"]
FORMATS: tuple[Format, ...] = ("exact", "bf16", "int8")

#: The key of a rounded tensor in a tree. It holds the numbers, their scales if there are any, and the dtype they had.
_ROUNDED = "unlatch.rounded"
_LEVELS = 127
_SERVED_BY_A_SCALE = 16


def check_format(messages: str) -> None:
    """Refuse a format that there is not.

    >>> check_format("int4")
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: messages must be "exact", "bf16" or "int8", got 'int4'
    """
    if messages not in FORMATS:
        raise ConfigError(f'messages must be "exact", "bf16" or "int8", got {messages!r}')


class Residue:
    """What rounding took from the messages of one edge and has not given back: one row for each of a batch.

    A smaller batch uses the first rows; the others wait. A batch of another shape otherwise begins anew.
    """

    def __init__(self, rows: Tensor | None = None) -> None:
        self.rows = rows

    def joined(self, t: Tensor) -> Tensor:
        """The sum of `t` and what was kept, in the memory of what was kept: the caller leaves its own error there."""
        dtype = _working(t)
        if self.rows is None or self.rows.shape[1:] != t.shape[1:] or self.rows.dtype != dtype:
            # As `t` lies in memory, whatever its dtype: so will be what the receiver gets.
            self.rows = torch.zeros_like(t, dtype=dtype)
        elif self.rows.shape[0] < t.shape[0]:
            self.rows, shorter = torch.zeros_like(t, dtype=dtype), self.rows
            self.rows[: shorter.shape[0]] = shorter
        return self.rows[: t.shape[0]].add_(t)

    def forget(self) -> None:
        """Begin anew."""
        self.rows = None


def in_bf16(t: Tensor) -> Tree:
    """A tensor in half of float32's bytes.

    >>> restored(in_bf16(torch.tensor([1.0, 1.001])))
    tensor([1., 1.])
    """
    return {_ROUNDED: [t.detach().to(torch.bfloat16), None, _name(t.dtype)]}


@torch.no_grad()
def in_int8(t: Tensor, residue: Residue) -> Tree:
    """A tensor in a quarter of float32's bytes. The residue is added to it, and becomes what is lost now.

    >>> residue = Residue()
    >>> [round(float(restored(in_int8(torch.tensor([127.0, 0.4]), residue))[1]), 3) for _ in range(5)]
    [0.0, 1.0, 0.0, 1.0, 0.0]
    """
    total = residue.joined(t)
    dims = _shared_dims(t)
    # Two passes without a copy; both hand NaN on.
    scale = torch.maximum(total.amax(dims, keepdim=True), total.amin(dims, keepdim=True).neg_())
    # Too small a scale has no finite inverse; all numbers under it are as good as zero.
    scale.div_(_LEVELS).clamp_(min=torch.finfo(scale.dtype).tiny)
    levels = (total / scale).round_()
    numbers = levels.to(torch.int8)
    total.sub_(_as_received(levels.mul_(scale), t.dtype))
    if not scale.isfinite().all():
        residue.forget()
    return {_ROUNDED: [numbers, scale, _name(t.dtype)]}


def is_rounded(tree: Tree) -> bool:
    """Whether a node of a tree stands for a tensor."""
    return type(tree) is dict and len(tree) == 1 and _ROUNDED in tree


def restored(tree: Tree) -> Tree:
    """The tree with every rounded tensor as the receiver sees it; all others are left as they are.

    >>> restored((in_bf16(torch.ones(2)), torch.tensor([3]), None))
    (tensor([1., 1.]), tensor([3]), None)
    """
    if is_rounded(tree):
        return _restored(tree[_ROUNDED])
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(restored(child) for child in tree)
    if kind is dict:
        return {key: restored(child) for key, child in tree.items()}
    return tree


def _restored(rounded: Any) -> Tensor:
    numbers, scale, name = rounded
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"a rounded tensor was {name!r}, which is no dtype: the stream of messages is damaged")
    # Not `numbers * scale`: torch is many times slower where dtypes are mixed.
    found: Tensor = numbers if scale is None else numbers.to(scale.dtype).mul_(scale)
    return found.to(dtype)


def _as_received(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else values.to(dtype).to(values.dtype)


def _shared_dims(t: Tensor) -> list[int]:
    """The dimensions over which numbers share a scale."""
    channel = 1 if t.dim() > 3 else t.dim() - 1
    if t.dim() < 2 or t.numel() < _SERVED_BY_A_SCALE * t.shape[channel]:
        return list(range(t.dim()))
    return [d for d in range(t.dim()) if d != channel]


def _working(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
