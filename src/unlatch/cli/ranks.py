"""Words between the ranks of one run outside of training: one value for all, or all values for everyone."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch.distributed as dist

from ..transport.meeting import join_group

__all__ = ["agree", "gather", "join_torchrun", "rank", "under_torchrun"]

T = TypeVar("T")


def under_torchrun() -> bool:
    """Whether another launcher has started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_torchrun() -> None:
    """Meet the other processes of torchrun."""
    if not dist.is_initialized():
        join_group()


def rank() -> int:
    """The number of this process; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def agree(value: T) -> T:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    result: T = box[0]
    return result


def gather(value: T) -> list[T]:
    """The values of all ranks, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
