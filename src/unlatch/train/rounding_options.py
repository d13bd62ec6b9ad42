"""What the user says about slow links: which messages are rounded, and what a method has to say about it."""

from __future__ import annotations

from collections.abc import Sequence

from ..methods import Method
from ..nn.carry import carried_shapes
from ..nn.chain import StageChain, cut
from ..runtime.blueprint import Blueprint
from ..runtime.compression import Compression

__all__ = ["compression_for", "rounding_note"]


def compression_for(blueprint: Blueprint, placed: Sequence[int]) -> Compression | None:
    """What rounds the messages of this rank, if any are rounded.

    **Arguments:** `placed`: for each station its device in the plan.
    """
    if blueprint.messages == "exact":
        return None
    return Compression(blueprint.messages, placed, carried_shapes([block.module for block in blueprint.blocks]))


def rounding_note(blueprint: Blueprint, method: Method) -> str | None:
    """What stays exact although the user may not expect it, or `None`."""
    messages, rule, parts = blueprint.messages, method.rules().activation, cut(blueprint.blocks, blueprint.plan.starts)
    if messages == "exact":
        return None
    modules = [StageChain(part, blueprint.model) for part in parts]
    if not any(rule.at(i, len(modules), module).inverts for i, module in enumerate(modules)):
        return None
    return (
        f'messages="{messages}": {method.name} computes inputs back from outputs, which rounding would spoil: stages '
        f"that do so send their outputs as they are, and only gradients travel as {messages}"
    )
