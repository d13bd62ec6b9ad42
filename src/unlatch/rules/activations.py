"""What is kept from a forward to its backward, and how the graph comes back.

| rule | kept | the backward |
|---|---|---|
| `Graph` | the autograd graph | goes through it |
| `Input` | the stage's input | runs the forward again, with a graph |
| `Reverse` | nothing | computes the input from the output, block by block, and differentiates on the way |

The last stage keeps its graph under every rule: its backward follows at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import CheckpointMismatch, ConfigError, StageFailed
from ..nn.inversion import invert_and_differentiate, is_reversible
from ..nn.split_backward import input_gradients
from ..nn.statistics import frozen_statistics
from ..nn.tree import Tree, flatten, unflatten
from .gradients import Gradients
from .kept import Kept, stamps

__all__ = ["Activation", "Computing", "Graph", "Input", "Returned", "Reverse", "activation"]


class Returned(NamedTuple):
    """What a backward hands down: one gradient per tensor of the stage's input, and that input if asked for."""

    gradients: Gradients
    inputs: Tree = None


class Computing(Protocol):
    """What a rule asks of the stage that it works for."""

    first: bool
    last: bool
    module: nn.Module
    params: list[nn.Parameter]
    #: Whether the stage below computes its input back, for which it needs this stage's.
    hands_down_input: bool
    #: Whether it is known that the module's inverse gives its input back.
    inverse_checked: bool

    def run(self, kept: Kept) -> Tree:
        """Evaluate the module and, at the last stage, the loss."""

    def passing(self, kept: Kept) -> AbstractContextManager[Any]:
        """Random numbers and precision of a pass over the module."""

    def counting(self, counts: bool) -> AbstractContextManager[Any]:
        """Whether running statistics count what runs inside."""

    def recording(self, kept: Kept) -> AbstractContextManager[None]:
        """A graph that will be used later is made inside."""

    def metering(self, tensors: list[Tensor]) -> AbstractContextManager[None]:
        """Graphs are made and freed inside, for outputs of these shapes."""

    def weighed(self, kept: Kept, nbytes: int) -> None:
        """Take note of the bytes that are kept."""

    def sampled(self, kept: Kept) -> Tree:
        """A few numbers of the input, to measure its reconstruction with."""

    def reconstructed(self, kept: Kept, inputs: Tree) -> None:
        """Measure a reconstruction."""

    def check_inverse(self, kept: Kept) -> None:
        """See whether it does."""


@dataclass(frozen=True)
class Activation(ABC):
    """A rule for one stage or, before `at`, for all of them.

    **Arguments:** `statistics`: the pass in which batch norm counts a batch, where a stage runs it twice.
    """

    statistics: Literal["forward", "backward"] = "backward"

    #: Its name in options.
    name: ClassVar[str]
    #: What stays of a batch between its forward and its backward, in words.
    kept: ClassVar[str]
    #: Whether the graph outlives the forward.
    keeps_graph: ClassVar[bool] = False
    #: Whether the input does, and the graph is made again from it.
    keeps_input: ClassVar[bool] = False
    #: Whether the output comes back with its gradient, to compute the input from it. That is approximate.
    inverts: ClassVar[bool] = False

    @property
    def runs_forward_twice(self) -> bool:
        """Whether stages below the last pass over their module once more before they go backward."""
        return not self.keeps_graph

    @property
    def stored_stages(self) -> tuple[int, ...]:
        """Stages that the user wants to keep their input although they could invert."""
        return ()

    def at(self, index: int, count: int, module: nn.Module | None = None) -> Activation:
        """The rule that a stage really follows; without a module, as if it were reversible."""
        return self if index < count - 1 else Graph()

    @abstractmethod
    def forward(self, stage: Computing, kept: Kept) -> Tree:
        """Take a micro-batch forward and keep what the backward needs. **Returns:** the output."""

    def backward(
        self, stage: Computing, kept: Kept, cotangent: Gradients | None, outputs: Tree, *, again: bool
    ) -> Returned:
        """Take it backward; gradients of the weights add up in `.grad`. With `again`, it will be done once more."""
        roots, grads, _ = self.roots(stage, kept, cotangent)
        if roots:
            torch.autograd.backward(roots, grads, retain_graph=again)
        gradients = [t.grad for t in kept.inputs]
        if again:
            for t in kept.inputs:
                t.grad = None
        return _handed_down(stage, kept, gradients)

    def backward_input(self, stage: Computing, kept: Kept, cotangent: Gradients | None) -> Returned:
        """The first half of a backward: only the gradient of the input; that of the weights is pending."""
        roots, grads, kept.starts = self.roots(stage, kept, cotangent)
        wanted = [t for t in kept.inputs if t.requires_grad]
        found, kept.pending = input_gradients(roots, grads, wanted, stage.params)
        kept.outputs = None
        results = iter(found)
        return _handed_down(stage, kept, [next(results) if t.requires_grad else None for t in kept.inputs])

    def roots(
        self, stage: Computing, kept: Kept, cotangent: Gradients | None
    ) -> tuple[list[Tensor], Gradients, tuple[int, ...]]:
        """Where the backward starts: outputs that depend on something, their gradients, and which they are."""
        assert kept.outputs is not None, f"{kept.micro} has no graph to go backward through"
        if stage.last:
            return kept.outputs, [None], (0,)
        assert cotangent is not None
        pairs = enumerate(zip(kept.outputs, cotangent, strict=True))
        found = [(n, y, g) for n, (y, g) in pairs if g is not None and y.requires_grad]
        return [y for _, y, _ in found], [g for _, _, g in found], tuple(n for n, _, _ in found)

    def rebuild(self, stage: Computing, kept: Kept, pending: dict[str, Any] | None) -> None:
        """Make the graph of a saved micro-batch again, and what was pending of it.

        The caller sees to it that the pass meets the weights of its forward, or what its graph had saved.
        """
        counted = self.keeps_graph or self.statistics == "backward"
        with frozen_statistics(stage.module, tracking=counted):
            with_graph(stage, kept)
        assert kept.outputs is not None
        if pending is None:
            return
        if kept.starts and max(kept.starts) >= len(kept.outputs):
            raise CheckpointMismatch(
                f"{kept.micro}: its backward began at output {max(kept.starts)}, but the stage has only "
                f"{len(kept.outputs)}: the state was saved from another model"
            )
        roots = [kept.outputs[n] for n in kept.starts]
        wanted = [t for t in kept.inputs if t.requires_grad]
        _, kept.pending = input_gradients(roots, [torch.zeros_like(y) for y in roots], wanted, stage.params)
        kept.pending.load(pending)
        kept.outputs = None


def with_graph(stage: Computing, kept: Kept) -> Tree:
    """Run a forward that can be differentiated with respect to its inputs."""
    if not stage.first:
        for t in kept.inputs:
            if t.is_floating_point() or t.is_complex():
                t.requires_grad_()
    outputs = stage.run(kept)
    kept.outputs = flatten(outputs)[0]
    return outputs


def _handed_down(stage: Computing, kept: Kept, gradients: Gradients) -> Returned:
    if stage.first:
        return Returned([])
    inputs = None
    if stage.hands_down_input:
        inputs = unflatten(kept.spec, [t.detach() for t in kept.inputs])
    return Returned(gradients, inputs)


@dataclass(frozen=True)
class Graph(Activation):
    """The autograd graph waits for its backward."""

    name: ClassVar[str] = "graph"
    kept: ClassVar[str] = "graphs"
    keeps_graph: ClassVar[bool] = True

    def forward(self, stage: Computing, kept: Kept) -> Tree:
        with stage.recording(kept):
            return with_graph(stage, kept)


@dataclass(frozen=True)
class Input(Activation):
    """Only the stage's input waits; the forward runs again, at the weights that its backward is to see."""

    name: ClassVar[str] = "input"
    kept: ClassVar[str] = "inputs, computed again"
    keeps_input: ClassVar[bool] = True

    def forward(self, stage: Computing, kept: Kept) -> Tree:
        with torch.no_grad(), stage.counting(self.statistics == "forward"):
            outputs = stage.run(kept)
        kept.stamps = stamps(kept.inputs)
        stage.weighed(kept, sum(t.nbytes for t in kept.inputs))
        return outputs

    def roots(
        self, stage: Computing, kept: Kept, cotangent: Gradients | None
    ) -> tuple[list[Tensor], Gradients, tuple[int, ...]]:
        if kept.stamps != stamps(kept.inputs):
            raise StageFailed(
                f"the input of {kept.micro} was changed in place while the batch was under way: pass a fresh tensor, "
                "or a copy, to every step()"
            )
        with stage.recording(kept), stage.counting(self.statistics == "backward"):
            with_graph(stage, kept)
        return super().roots(stage, kept, cotangent)


@dataclass(frozen=True)
class Reverse(Activation):
    """Nothing waits where all blocks of a stage are reversible; other stages keep their input.

    **Arguments:** `store`: stages that keep their input although they are reversible.
    """

    store: tuple[int, ...] = ()

    name: ClassVar[str] = "reverse"
    kept: ClassVar[str] = "nothing where reversible, else inputs"
    inverts: ClassVar[bool] = True

    @property
    def stored_stages(self) -> tuple[int, ...]:
        return self.store

    def at(self, index: int, count: int, module: nn.Module | None = None) -> Activation:
        if index == count - 1:
            return Graph()
        stores = index in self.store or (module is not None and not is_reversible(module))
        return Input(self.statistics) if stores else self

    def forward(self, stage: Computing, kept: Kept) -> Tree:
        if stage.first:
            # A coupling hands its input on as it is, and the caller may use the memory for the next batch.
            kept.inputs = [t.clone() for t in kept.inputs]
        with torch.no_grad(), stage.counting(self.statistics == "forward"):
            if not stage.inverse_checked:
                with stage.passing(kept):
                    stage.check_inverse(kept)
            outputs = stage.run(kept)
        kept.probe = stage.sampled(kept)
        kept.inputs = []
        return outputs

    def backward(
        self, stage: Computing, kept: Kept, cotangent: Gradients | None, outputs: Tree, *, again: bool
    ) -> Returned:
        tensors, structure = flatten(outputs)
        assert cotangent is not None
        pairs = zip(tensors, cotangent, strict=True)
        gradient = unflatten(structure, [torch.zeros_like(t) if g is None else g for t, g in pairs])
        with stage.passing(kept), stage.metering(tensors):
            inputs, found = invert_and_differentiate(stage.module, outputs, gradient, bn=self.statistics)
        stage.reconstructed(kept, inputs)
        return Returned([*flatten(found)[0]], inputs if stage.hands_down_input else None)

    def backward_input(self, stage: Computing, kept: Kept, cotangent: Gradients | None) -> Returned:
        raise StageFailed(
            f"{kept.micro}: a stage that computes its input back from its output goes backward as a whole; take a "
            "schedule without halves, or let the stage keep its input"
        )


_BY_NAME: dict[str, type[Activation]] = {kind.name: kind for kind in (Graph, Input, Reverse)}


def activation(name: str) -> Activation:
    """The rule that an option calls so.

    >>> activation("input")
    Input(statistics='backward')
    """
    if name not in _BY_NAME:
        raise ConfigError(f"no rule for activations is called {name!r}: expected one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]()
