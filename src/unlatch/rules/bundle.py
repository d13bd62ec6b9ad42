"""The rules of one method, in one place: what a stage keeps, which weights it sees, how it updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .predict import Predictor

__all__ = ["Rules"]


@dataclass(frozen=True)
class Rules:
    """How a stage behaves, whatever the schedule.

    **Arguments:**

    - `activations`: `"graph"` keeps the autograd graph from forward to backward; `"input"` keeps only the stage's input
      and computes the graph again; `"reverse"` keeps nothing where all blocks of a stage are reversible (the input is
      computed from the output, which comes with the gradient) and the input elsewhere. The last stage keeps its graph.
    - `weights`: what a backward sees: `"current"` weights, a `"stash"` of those of the forward, `"average"` (a
      reconstruction of those from a moving average of updates), or `"latest"` (a kept graph with newest weights).
    - `statistics`: the pass in which batch norm counts a batch, where a stage runs it twice.
    - `store`: stages that keep their input although they are reversible.
    - `lag`: run each forward at the weights `lag` versions before the one its gradient will meet (0: newest weights).
    - `predictor`: run each forward at weights predicted for the time of its backward.
    - `shrink`: factor on every cotangent received from above.
    - `step_decay`: learning rate of stage k of K is multiplied by `step_decay ** (K - k)`.
    - `average`: whether gradients accumulated over several batches are averaged (else summed).
    """

    activations: Literal["graph", "input", "reverse"] = "graph"
    weights: Literal["current", "stash", "latest", "average"] = "current"
    statistics: Literal["forward", "backward"] = "backward"
    store: tuple[int, ...] = ()
    lag: int = 0
    predictor: Predictor | None = None
    shrink: float = 1.0
    step_decay: float = 1.0
    average: bool = True
