"""PETRA: asynchronous pipelines of reversible stages, without stored activations or weights (Rivaud et al. 2025)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError
from ..rules.activations import Input, Reverse
from ..rules.bundle import Rules
from ..rules.weights import backward_weights
from ..schedule import Schedule, one_f_one_b_async, ticked
from .base import Delayed, register
from .options import Positive

__all__ = ["PETRA", "buffer_settings"]


@register
@dataclass(frozen=True)
class PETRA(Delayed):
    """Reversible stages invert their output with their current weights; other stages keep a queue of inputs.

    The inverse is approximate, since the weights have moved on since the forward; how far off it is, is measured.

    **Arguments:**

    - `inputs`: `"reverse"` computes a reversible stage's input from its output; `"store"` keeps it (then this is DSP).
    - `weights`: `"current"` weights in the backward, a `"stash"` of the forward's, or a moving-`"average"`
      reconstruction of those.
    - `order`: `"ticked"` with delay 2(J-j), or `"1f1b"` with half of it.
    - `bn`: the pass that updates running statistics; `"backward"` as in the paper.
    - `store`: stages that keep their input although they are reversible.
    - `tolerance`: relative error of a reconstructed input above which a warning names the stage.

    >>> PETRA().lateness(3), PETRA(order="1f1b").lateness(3)
    ((4, 2, 0), (2, 1, 0))
    """

    inputs: Literal["reverse", "store"] = "reverse"
    weights: Literal["current", "stash", "average"] = "current"
    order: Literal["ticked", "1f1b"] = "ticked"
    bn: Literal["forward", "backward"] = "backward"
    store: tuple[int, ...] = ()
    tolerance: Positive = 0.5

    name = "petra"
    summary = "ticked, delay 2(K-k), reversible stages keep nothing"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "store", _stage_numbers(self.store))
        self.rules()

    @property
    def reconstruction_tolerance(self) -> float:
        return self.tolerance

    def schedule(self, stages: int) -> Schedule:
        return ticked(stages) if self.order == "ticked" else one_f_one_b_async(stages)

    def rules(self) -> Rules:
        activation = Reverse(self.bn, self.store) if self.inputs == "reverse" else Input(self.bn)
        return self._rules(activation, backward_weights(self.weights))


def _stage_numbers(store: Any) -> tuple[int, ...]:
    listed = isinstance(store, Collection) and not isinstance(store, str)
    if not listed or not all(isinstance(stage, int) and stage >= 0 for stage in store):
        raise ConfigError(f"petra: store lists numbers of stages, counted from 0, such as store=(1, 2); got {store!r}")
    return tuple(store)


def buffer_settings() -> dict[str, PETRA]:
    """The four settings of the paper's ablation: what is stored per batch under way, inputs, weights, both or neither.

    >>> list(buffer_settings())
    ['inputs+weights', 'inputs', 'weights', 'nothing']
    """
    return {
        "inputs+weights": PETRA(inputs="store", weights="stash"),
        "inputs": PETRA(inputs="store"),
        "weights": PETRA(weights="stash"),
        "nothing": PETRA(),
    }
