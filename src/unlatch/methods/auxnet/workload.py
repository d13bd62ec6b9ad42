"""What methods with auxiliary variables cost in virtual time. The costs of their networks are estimates.

An automatic AuxNet is made of copies: the first layer, and then the first `depth` layers of every run of layers whose
outputs have one shape. So it is taken to cost what these layers cost, outputs of the same number of bytes counting as
of one shape; AuxNets from a `factory` are taken to cost the same. Synthesisers are estimated as in `local.workload`.
What is done element by element (mismatch, multipliers, stored variables) and what is only measured counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...plan.layer_costs import LayerCost
from ...schedule import Kind, Workload
from ...schedule.entries import Route
from ..costs import StageCost
from ..local.stations import ADJOINT, LEARN, LOSS_DOWN
from ..local.workload import synthesiser_costs
from . import schedule as kinds
from .partition import prediction_costs

__all__ = ["Extras", "auxnet_cost", "border_workload"]


class Extras(NamedTuple):
    """What a stage does beside forward and backward.

    **Arguments:**

    - `predict`, `correct`, `distil`: times to predict its input, to correct that, and to learn it in a serial batch.
    - `repeats`: passes over the stage, forward and back, that belong to its update.
    - `shared_bytes`: of the gradient of a shared network, up to this stage's tap.
    """

    predict: float = 0.0
    correct: float = 0.0
    distil: float = 0.0
    repeats: int = 0
    shared_bytes: float = 0.0


def auxnet_cost(layers: Sequence[LayerCost], start: int, depth: int) -> LayerCost:
    """Estimate of the AuxNet that predicts the input of layer `start`, as if it were one layer.

    >>> layers = [LayerCost(str(n), 2, 3, 4, activation_bytes=8) for n in range(5)]
    >>> auxnet_cost(layers, 3, depth=1).F, auxnet_cost(layers, 3, depth=2).F
    (4.0, 6.0)
    """
    below = layers[: start + 1]
    shapes = [layer.activation_bytes for layer in below]
    forward, down, weight, size = (
        prediction_costs([float(getattr(layer, field)) for layer in below], shapes, depth)[start]
        for field in ("F", "D", "G", "weight_bytes")
    )
    return LayerCost("auxnet", forward, down, weight, weight_bytes=size)


def border_workload(
    stages: Sequence[StageCost],
    extras: Sequence[Extras],
    *,
    data_bytes: float,
    inputs: float,
    states: float,
    frozen: bool,
    synthesiser: bool,
) -> Workload:
    """Times and bytes of `border_schedule`.

    **Arguments:**

    - `extras`: of each stage.
    - `data_bytes`: of the raw data, where they are sent on.
    - `inputs`, `states`: bytes of these messages, for each byte of the output at a border.
    - `frozen`: whether stages before the last do not go backward.
    - `synthesiser`: whether multipliers are guessed.
    """
    times: list[dict[Kind, float]] = []
    sizes: dict[Route | str, float] = {kinds.BATCH: data_bytes}
    for index, (stage, extra) in enumerate(zip(stages, extras, strict=True)):
        last = index == len(stages) - 1
        backward = stage.backward if last or not frozen else 0.0
        again = extra.repeats * (stage.forward + stage.backward)
        guess, lesson = synthesiser_costs(stage) if synthesiser and not last else (0.0, 0.0)
        times.append(
            {
                kinds.INTRODUCE: stage.forward,
                kinds.SERIAL_FORWARD: stage.forward,
                kinds.SERIAL_BACKWARD: stage.backward,
                kinds.DISTIL: extra.distil,
                kinds.PREDICT: extra.predict,
                Kind.F: stage.forward,
                kinds.SEED: guess,
                kinds.TRIAL: backward,
                Kind.B: backward,
                kinds.ECHO: stage.forward + stage.backward,
                Kind.U: again,
                kinds.CORRECT: extra.correct,
                LEARN: lesson,
                **dict.fromkeys(_FREE, 0.0),
            }
        )
        if last:
            continue
        up, down, size = (index, index + 1), (index + 1, index), stage.output_bytes
        for name in ("forward", kinds.INTRODUCED):
            sizes[name, *up] = size
        for name in ("backward", ADJOINT, kinds.MULTIPLIER):
            sizes[name, *down] = size
        sizes[kinds.STATE, *up] = states * size
        sizes[kinds.INPUT, *down] = inputs * size
        sizes[kinds.PARTIAL, *down] = sizes[kinds.TOTAL, *up] = extra.shared_bytes
    return Workload(times, sizes)


_FREE = (
    kinds.DATA,
    kinds.SERIAL_UPDATE,
    kinds.UPDATE_AUXILIARY,
    kinds.MULTIPLY,
    kinds.PROBE,
    kinds.REDUCE,
    kinds.SPREAD,
    LOSS_DOWN,
)
