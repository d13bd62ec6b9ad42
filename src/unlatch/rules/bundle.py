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
      and computes the graph again, at the weights current then. The last stage always keeps the graph.
    - `weights`: what the products of a kept graph see at backward: `"stash"` (those of the forward), `"latest"`, or
      `"current"` where no update can come between.
    - `lag`: run each forward at the weights `lag` versions before the one its gradient will meet (0: newest weights).
    - `predictor`: run each forward at weights predicted for the time of its backward.
    - `shrink`: factor on every cotangent received from above.
    - `step_decay`: learning rate of stage k of K is multiplied by `step_decay ** (K - k)`.
    - `average`: whether gradients accumulated over several batches are averaged (else summed).
    """

    activations: Literal["graph", "input"] = "graph"
    weights: Literal["current", "stash", "latest"] = "current"
    lag: int = 0
    predictor: Predictor | None = None
    shrink: float = 1.0
    step_decay: float = 1.0
    average: bool = True
