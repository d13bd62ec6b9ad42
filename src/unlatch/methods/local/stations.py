"""A stage whose backward starts from a local guess: a head of its own (DGL) or a synthesiser (DNI)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn.border_state import BorderState
from ...nn.chain import StageChain
from ...nn.tree import unflatten
from ...rules.gradients import Gradients
from ...rules.losses import measured
from ...runtime.stage import Stage
from ...runtime.station import Operation, Roundable, Station
from ...runtime.trained import Trained
from ...runtime.updating import Updater
from ...schedule import Kind
from ...transport.mail import FORWARD, Micro
from .statistics import LocalStatistics, time_by_part
from .synthesis import Synthesis
from .tied import TiedGradients

__all__ = ["GreedyStation", "HeadStation", "SynthesisStation"]

SEED = Kind("A", "auxiliary")
UPDATE_HEAD = Kind("Uh", "auxiliary")
LEARN = Kind("L", "auxiliary")
LOSS_DOWN = Kind("O")
#: The gradient found at a stage's input, to whoever learns to guess it below; the loss, on its way down.
ADJOINT, LOSS = "adjoint", "loss"
# Keeps the random numbers of a head apart from those of its stage, whose stream is (seed, stage, micro).
_STREAM = 1 << 32


class GreedyStation(Station):
    """Forward, seed, backward, update; the loss passes by later. As it is, the last stage, whose seed is the loss.

    **Arguments:** `below`: where the tensors of the stage's input are; `None` for raw data.
    """

    stage: Stage

    def __init__(self, stage: Stage, below: BorderState | None) -> None:
        super().__init__(stage.index, stage)
        assert isinstance(stage.module, StageChain)
        self._below = below
        self._tied = TiedGradients(stage.module.leaving_weights)
        self._outputs: dict[int, tuple[Any, Any]] = {}
        self._seeds: dict[int, Gradients] = {}

    def operations(self) -> Mapping[Kind, Operation]:
        return {
            Kind.F: self.forward,
            SEED: self.seed,
            Kind.B: self.backward,
            Kind.U: self.update,
            LOSS_DOWN: self.hand_loss_down,
        }

    def roundable(self, name: str) -> Roundable:
        if name == ADJOINT:
            return "all"
        return "first" if name == FORWARD else "nothing"

    def forward(self, micro: Micro, arrived: tuple[Any, Any]) -> Sequence[Any]:
        """Run the stage; output and target go up."""
        inputs, target = arrived
        out = self.run_forward(micro, inputs, target)
        if self.stage.last:
            return ()
        self._outputs[micro.id] = out, self.stage.options.device.here(target)
        return ((out, target),)

    def _kept_state(self) -> dict[str, Any]:
        return {"outputs": self._outputs, "seeds": self._seeds, "tied": self._tied.state()}

    def _load_kept(self, state: Mapping[str, Any]) -> None:
        self._outputs, self._seeds = dict(state["outputs"]), dict(state["seeds"])
        self._tied.load(state["tied"])

    def stored(self) -> dict[str, Tensor]:
        return self._tied.unapplied()

    def load_stored(self, found: dict[str, Tensor]) -> None:
        self._tied.load_unapplied(found)

    def seed(self, micro: Micro) -> Sequence[Any]:
        """Make what the backward starts from."""
        raise NotImplementedError(f"{type(self).__name__} is for the last stage, which starts from the loss")

    def backward(self, micro: Micro) -> Sequence[Any]:
        """Go back from the seed."""
        self._differentiate(micro)
        return ()

    def hand_loss_down(self, micro: Micro, *above: Any) -> Sequence[Any]:
        """The last thing about a micro-batch; what was found for weights of earlier stages goes with the loss."""
        below = self._tied.passed_down(micro, above[0] if above else None)
        return () if self.stage.first else (below,)

    def measured(self, seconds: Mapping[str, float], micros: int, batches: int) -> LocalStatistics:
        return LocalStatistics(self.index, time_by_part(seconds), micros, batches)

    def _differentiate(self, micro: Micro) -> Tensor | None:
        """**Returns:** the gradient of the main tensor of the stage's input."""
        kept = self.stage.kept[micro.id]
        found = self.stage.backward(micro, None if self.stage.last else self._seeds.pop(micro.id)).gradients
        if self._below is None:
            return None
        inputs = unflatten(kept.spec, kept.inputs)
        self._tied.found(micro, self._below.weight_gradients(inputs, found))
        return found[self._below.position(inputs)]


class HeadStation(GreedyStation):
    """A stage with a head of its own.

    **Arguments:**

    - `above`: where the tensors of the stage's output are.
    - `head`: turns this output into outputs of the network.
    - `sees_state`: whether it is given all of the output instead of the main tensor.
    """

    def __init__(
        self, stage: Stage, below: BorderState | None, above: BorderState, head: Trained, *, sees_state: bool = False
    ) -> None:
        super().__init__(stage, below)
        self.head = head
        self._above, self._sees_state = above, sees_state
        self._batches = 0

    def operations(self) -> Mapping[Kind, Operation]:
        return {**super().operations(), UPDATE_HEAD: self.update_head}

    def seed(self, micro: Micro) -> Sequence[Any]:
        out, target = self._outputs.pop(micro.id)
        options, leaf = self.stage.options, self._above.tensor(out).detach().requires_grad_()
        seen = self._above.replaced(out, leaf) if self._sees_state else leaf
        with options.random(self.index + _STREAM, micro.id), options.autocast():
            loss, _ = measured(options.loss_fn(self.head.module(seen), target))
        torch.autograd.backward(loss * micro.scale)
        self._batches += micro.index == micro.count - 1
        assert leaf.grad is not None
        self._seeds[micro.id] = self._above.cotangent(out, leaf.grad)
        return ()

    def _kept_state(self) -> dict[str, Any]:
        return {**super()._kept_state(), "batches": self._batches}

    def _load_kept(self, state: Mapping[str, Any]) -> None:
        super()._load_kept(state)
        self._batches = state["batches"]

    def update_head(self, micro: Micro) -> Sequence[Any]:
        """Apply the gradients of the head."""
        self.head.update(self._batches)
        self._batches = 0
        return ()

    def applied(self, kind: Kind) -> Sequence[Updater] | None:
        return [self.head.updater] if kind is UPDATE_HEAD else super().applied(kind)

    def trained(self) -> dict[str, Trained]:
        return {"head": self.head}


class SynthesisStation(GreedyStation):
    """A stage that guesses the gradient from above and learns from the one that the next stage finds.

    **Arguments:**

    - `above`: where the tensors of the stage's output are.
    - `synthesis`: guesses. The last stage has neither.
    """

    def __init__(
        self,
        stage: Stage,
        below: BorderState | None,
        above: BorderState | None = None,
        synthesis: Synthesis | None = None,
    ) -> None:
        super().__init__(stage, below)
        self._above, self.synthesis = above, synthesis

    def operations(self) -> Mapping[Kind, Operation]:
        return {**super().operations(), LEARN: self.learn}

    def seed(self, micro: Micro) -> Sequence[Any]:
        assert self.synthesis is not None
        assert self._above is not None
        out, target = self._outputs[micro.id]
        main = self._above.tensor(out)
        self._outputs[micro.id] = main, target
        self._seeds[micro.id] = self._above.cotangent(out, self.synthesis.guess(main, target))
        return ()

    def backward(self, micro: Micro) -> Sequence[Any]:
        gradient = self._differentiate(micro)
        return () if self.stage.first else (gradient,)

    def learn(self, micro: Micro, gradient: Tensor) -> Sequence[Any]:
        """Learn from what came back about an earlier micro-batch."""
        assert self.synthesis is not None
        self.synthesis.learn(*self._outputs.pop(micro.id), gradient)
        return ()

    def trained(self) -> dict[str, Trained]:
        return {"synthesiser": self.synthesis.net} if self.synthesis is not None else {}
