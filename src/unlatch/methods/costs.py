"""What stages cost in virtual time, from the costs of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..plan.layer_costs import LayerCost
from ..rules.activations import Activation
from ..schedule import Kind, Workload
from ..schedule.entries import Route

__all__ = ["StageCost", "chain_workload", "stage_costs"]


class StageCost(NamedTuple):
    """A stage for one micro-batch: times of forward, input gradient and weight gradient; bytes of its output."""

    forward: float
    input_gradient: float
    weight_gradient: float
    output_bytes: float
    #: Its layers.
    layers: tuple[LayerCost, ...]

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.input_gradient + self.weight_gradient


def stage_costs(layers: Sequence[LayerCost], starts: Sequence[int]) -> list[StageCost]:
    """The layers of each stage, added up.

    >>> stage_costs([LayerCost("a", 1, 0, 2), LayerCost("b", 3, 4, 5, 8)], [0])[0].backward
    11.0
    """
    found = []
    for start, end in zip(starts, (*starts[1:], len(layers)), strict=True):
        mine = layers[start:end]
        forward, down, weight = (sum(float(getattr(layer, kind)) for layer in mine) for kind in ("F", "D", "G"))
        found.append(StageCost(forward, down, weight, float(mine[-1].activation_bytes), tuple(mine)))
    return found


def chain_workload(stages: Sequence[StageCost], activation: Activation) -> Workload:
    """Stages that hand outputs up and gradients down.

    **Arguments:** `activation`: what stages keep. It tells which of them run their forward again before they go
    backward, and to which their output comes back with its gradient.
    """
    times: list[dict[Kind, float]] = []
    sizes: dict[Route | str, float] = {}
    for index, stage in enumerate(stages):
        rule = activation.at(index, len(stages))
        again = stage.forward if rule.runs_forward_twice else 0.0
        times.append(
            {
                Kind.F: stage.forward,
                Kind.B: again + stage.backward,
                Kind.I: again + stage.input_gradient,
                Kind.W: stage.weight_gradient,
                Kind.U: 0.0,
            }
        )
        if index < len(stages) - 1:
            sizes["forward", index, index + 1] = stage.output_bytes
            sizes["backward", index + 1, index] = stage.output_bytes * (2 if rule.inverts else 1)
    return Workload(times, sizes)
