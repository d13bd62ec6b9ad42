"""What local methods cost in virtual time. The costs of the networks beside the stages are estimates.

Costs of layers say nothing about networks that do not exist yet, so these are taken to cost what similar layers cost:

- a head (DGL) turns the output of a stage into outputs of the network: as the last layer of the network does; one of
  AugLocal is made of copies of later layers;
- a synthesiser (DNI, AuxNet) is three layers from a stage's output to the same shape: as three times the layer that
  made this output.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...schedule import Kind, Workload
from ...schedule.entries import Route
from ..costs import StageCost
from .stations import ADJOINT, LEARN, LOSS_DOWN, SEED, UPDATE_HEAD

__all__ = ["greedy_workload", "synthesiser_costs"]

_SYNTHESISER_LAYERS = 3


def synthesiser_costs(stage: StageCost) -> tuple[float, float]:
    """Estimates of a guess of the gradient at a stage's output, and of learning from the true one."""
    like = stage.layers[-1]
    return _SYNTHESISER_LAYERS * float(like.F), _SYNTHESISER_LAYERS * float(like.work)


def greedy_workload(stages: Sequence[StageCost], seeds: Sequence[float], lessons: Sequence[float]) -> Workload:
    """Stages that hand outputs up and go backward from a seed of their own.

    **Arguments:** `seeds`, `lessons`: times, per stage, to make the seed and to learn from the next stage's gradient.
    """
    times: list[dict[Kind, float]] = []
    sizes: dict[Route | str, float] = {}
    for index, (stage, seed, lesson) in enumerate(zip(stages, seeds, lessons, strict=True)):
        # Nothing else counts: updates, and the loss on its way down.
        none = dict.fromkeys((UPDATE_HEAD, Kind.U, LOSS_DOWN), 0.0)
        times.append({Kind.F: stage.forward, SEED: seed, Kind.B: stage.backward, LEARN: lesson, **none})
        sizes["forward", index, index + 1] = sizes[ADJOINT, index + 1, index] = stage.output_bytes
    return Workload(times, sizes)
