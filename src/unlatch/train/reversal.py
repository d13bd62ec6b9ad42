"""Methods that reconstruct inputs: their models are checked before training, and their errors watched during it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
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

    **Returns:** a note on stages that store inputs where the user may not expect it, or `None`.
    """
    rule = rules.activation
    if not rule.inverts:
        return None
    if beyond := [stage for stage in rule.stored_stages if stage >= len(starts)]:
        raise ConfigError(
            f"store names stage {beyond[0]}, but the model is cut into {len(starts)}: expected numbers from 0 to "
            f"{len(starts) - 1}"
        )
    if len(starts) == 1:
        return None
    stages = cut(blocks, starts)
    reversing = [rule.at(i, len(stages), StageChain(stage)).inverts for i, stage in enumerate(stages)]
    if sample is not None:
        _check(stages, reversing, sample)
    return _note(stages, reversing)


@torch.no_grad()
def _check(stages: Sequence[Sequence[Block]], reversing: Sequence[bool], x: Tree) -> None:
    for stage, inverted in zip(stages, reversing, strict=True):
        for name, block in stage:
            if inverted:
                check_inverse(block, x, name=name)
            with frozen_statistics(block), replayable(0, 0, 0):
                x = block(map_tensors(Tensor.clone, x))


def _note(stages: Sequence[Sequence[Block]], reversing: Sequence[bool]) -> str | None:
    mixed = []
    for index, (stage, inverted) in enumerate(zip(stages[:-1], reversing, strict=False)):
        others = [block.name for block in stage if not is_reversible(block.module)]
        if not inverted and others and len(others) < len(stage) and index > 0:
            mixed.append(f"stage {index} (block '{others[0]}' is not reversible)")
    if not any(reversing):
        return (
            "no stage below the last consists of reversible blocks only (Coupling, RevBlock, modules with inverse()), "
            "so every stage keeps a queue of its inputs: this is DSP"
            + (f". Reversible blocks were found in {', '.join(mixed)}" if mixed else "")
        )
    if mixed:
        return (
            f"inputs are stored at {', '.join(mixed)}: start a stage before and after that block to reconstruct those "
            "of the other blocks"
        )
    return None


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
