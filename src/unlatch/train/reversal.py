"""Methods that reconstruct inputs: their models are checked before training, and their errors watched during it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError, PlanError
from ..nn.chain import Block, StageChain, cut
from ..nn.inverse_check import check_inverse
from ..nn.inversion import is_reversible
from ..nn.randomness import replayable
from ..nn.statistics import frozen_statistics
from ..nn.tree import Tree, map_tensors
from ..rules.bundle import Rules
from ..runtime.stage import Stage

__all__ = ["ReconstructionWatch", "check_reversal"]

log = logging.getLogger("unlatch")


def check_reversal(blocks: Sequence[Block], starts: Sequence[int], rules: Rules, sample: Tree = None) -> str | None:
    """Invert every block that the method will invert, on a sample; the first that fails raises `PlanError`.

    So does a model in which nothing can be inverted below the last stage, unless those stages are all listed as stored.

    **Returns:** a note on stages that store inputs where the user may not expect it, or `None`.
    """
    rule = rules.activation
    if not rule.inverts or len(starts) == 1:
        return None
    if beyond := [stage for stage in rule.stored_stages if stage >= len(starts)]:
        raise ConfigError(
            f"store names stage {beyond[0]}, but the model is cut into {len(starts)}: expected numbers from 0 to "
            f"{len(starts) - 1}"
        )
    stages = cut(blocks, starts)
    _refuse_if_nothing_reverses(stages, rule.stored_stages)
    reversing = [rule.at(i, len(stages), StageChain(stage)).inverts for i, stage in enumerate(stages)]
    if sample is not None:
        _check(stages, reversing, sample)
    return _note(stages, reversing, rule.stored_stages)


def _refuse_if_nothing_reverses(stages: Sequence[Sequence[Block]], stored: Sequence[int]) -> None:
    """Refuse to reconstruct inputs where no block below the last stage could, and the user has not said to store."""
    *below, last = stages
    if any(is_reversible(block.module) for stage in below for block in stage) or {*range(len(below))} <= {*stored}:
        return
    named = ", ".join(f"{_listed(_not_reversible(stage))} of stage {index}" for index, stage in enumerate(below))
    cure = (
        "cut the model so that its reversible blocks come below the last stage"
        if len(_not_reversible(last)) < len(last)
        else "take a reversible model (unlatch.models has RevNets, i-RevNet and reversible transformers), make blocks "
        "of couplings (unlatch.nn.Coupling, unlatch.nn.RevBlock; unlatch.nn.reversible tries them without stages), "
        "or give each an inverse()"
    )
    raise PlanError(
        "inputs are to be computed back from outputs, but no block below the last stage is reversible "
        f"({named}): {cure}; or, to keep the inputs of these stages knowingly, set store={tuple(range(len(below)))!r}"
    )


def _not_reversible(stage: Sequence[Block]) -> list[str]:
    return [block.name for block in stage if not is_reversible(block.module)]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"block{'s'[: len(names) > 1]} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@torch.no_grad()
def _check(stages: Sequence[Sequence[Block]], reversing: Sequence[bool], x: Tree) -> None:
    for stage, inverted in zip(stages, reversing, strict=True):
        for name, block in stage:
            if inverted:
                check_inverse(block, x, name=name)
            with frozen_statistics(block), replayable(0, 0, 0):
                x = block(map_tensors(Tensor.clone, x))


def _note(stages: Sequence[Sequence[Block]], reversing: Sequence[bool], stored: Sequence[int]) -> str | None:
    # Where others reverse, the stage that takes in the data is not expected to.
    first = 1 if any(reversing) else 0
    storing = [index for index in range(first, len(stages) - 1) if not reversing[index] and index not in stored]
    if not storing:
        return None
    obstacles = {index: _not_reversible(stages[index]) for index in storing}
    named = ", ".join(f"stage {index} ({_listed(found)})" for index, found in obstacles.items())
    text = f"inputs are stored at {named}, which cannot be computed back"
    if not any(reversing):
        text += "; so they are at every stage, and nothing is reconstructed: this is DSP"
    if any(len(found) < len(stages[index]) for index, found in obstacles.items()):
        text += ". Start a stage before and after these blocks to reconstruct the inputs of the others"
    return text


class ReconstructionWatch:
    """Names each stage once when its reconstruction error exceeds a tolerance."""

    def __init__(self, stages: Iterable[Stage], tolerance: float) -> None:
        self._stages = [stage for stage in stages if stage.reverses]
        self._tolerance = tolerance

    def news(self) -> list[str]:
        """What is to be told since the last call."""
        loud = [stage for stage in self._stages if stage.reconstruction.worst > self._tolerance]
        self._stages = [stage for stage in self._stages if stage not in loud]
        told = [self._describe(stage) for stage in loud]
        for warning in told:
            log.warning("%s", warning)
        return told

    def _describe(self, stage: Stage) -> str:
        store = (*stage.rules.activation.stored_stages, stage.index)
        return (
            f"stage {stage.index} reconstructs its input with a relative error of {stage.reconstruction.worst:.2g}, "
            f"above {self._tolerance:g}: its weights move far between forward and backward. Let it keep its input "
            f"(store={store}), raise microbatches, or lower the learning rate"
        )
