"""What one stage can do: forward, backward, its two halves, update. It knows nothing of who calls, or when.

Both executors drive this class, so whatever it computes is the same inline and distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import NonFiniteLoss, ShapeMismatch, StageFailed
from ..nn.chain import Block, StageChain
from ..nn.inverse_check import check_blocks
from ..nn.inversion import invert_and_differentiate, is_reversible
from ..nn.randomness import replayable
from ..nn.split_backward import Pending, input_gradients
from ..nn.statistics import frozen_statistics
from ..nn.tree import Structure, Tree, flatten, map_tensors, unflatten
from ..rules.bundle import Rules
from ..rules.weights import GivenWeights, weight_rule, weights_at
from .metering import PeakMeter, Scale
from .micro import Micro
from .observer import Observer
from .reconstruction import Reconstruction
from .updating import Optimizer, Updater

__all__ = ["Returned", "Stage", "StageOptions"]

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class StageOptions:
    """What the user chose, the same for every stage."""

    loss_fn: Callable[[Any, Any], Tensor]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    lr_scheduler: Callable[[Optimizer], Any] | None = None
    lr_scale: Callable[[int], float] | None = None
    clip_grad_norm: float | None = None
    precision: str = "fp32"
    seed: int = 0


class Returned(NamedTuple):
    """What a backward hands down: one gradient per tensor of the stage's input, and that input if asked for."""

    gradients: Gradients
    inputs: Tree = None


@dataclass(slots=True)
class _Kept:
    """What a forward leaves behind for its backward."""

    micro: Micro
    version: int
    inputs: list[Tensor]
    spec: Structure
    nbytes: int = 0
    outputs: list[Tensor] | None = None
    pending: Pending | None = None
    weights: list[Tensor] | None = None
    probe: Tree = None
    stamps: tuple[int, ...] = ()

    @property
    def needs_old_weights(self) -> bool:
        return self.outputs is not None or self.pending is not None or self.weights is not None


class Stage:
    """One stage of the network with its optimizer, its rules, and what it keeps for batches under way.

    **Arguments:**

    - `index`, `stages`: its place.
    - `delay`: most updates that pass between its forward and its backward.
    - `hands_down_input`: whether the stage below reconstructs its input and needs this stage's to do so.
    """

    def __init__(
        self,
        index: int,
        stages: int,
        module: nn.Module,
        rules: Rules,
        options: StageOptions,
        *,
        delay: int = 0,
        hands_down_input: bool = False,
    ) -> None:
        self.index = index
        self.first = index == 0
        self.last = index == stages - 1
        self.module = module
        self.rules = rules
        self.options = options
        self.reverses = reverses(rules, index, stages, module)
        self.recomputes = rules.activations != "graph" and not self.last and not self.reverses
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.updater = Updater(
            self.params,
            rules,
            options.optimizer,
            options.lr_scheduler,
            delay=delay,
            factor=rules.step_decay ** (stages - 1 - index),
            lr_scale=options.lr_scale,
            clip_grad_norm=options.clip_grad_norm,
        )
        self.weights = weight_rule(rules.weights, self.params)
        # A single stage waits for nobody, so it has no reason to be behind.
        self.lag = rules.lag if stages > 1 else 0
        self.loss: float | None = None
        self.seen = 0
        self.kept_bytes = self.peak_bytes = self.peak_versions = 0
        self.stored_bytes = self.most_in_flight = 0
        self.reconstruction = Reconstruction()
        self.observer: Observer | None = None
        self._hands_down_input = hands_down_input
        self._kept: dict[int, _Kept] = {}
        self._statistics = frozen_statistics(module)
        self._weighed: dict[tuple[Any, ...], int] = {}
        self._batches = 0
        self._inverse_checked = False

    @property
    def version(self) -> int:
        """Updates made so far."""
        return self.updater.version

    # ---------------------------------------------------------------- forward

    def forward(self, micro: Micro, inputs: Tree, target: Tree = None) -> Tree:
        """Take one micro-batch forward and keep what its backward will need.

        **Returns:** the detached output, or at the last stage `None` (the loss is in `self.loss`).
        """
        leaves, spec = flatten(inputs)
        kept = _Kept(micro, self.version, [t.detach() for t in leaves], spec)
        if self.first and self.reverses:
            # A coupling hands its input on as it is, and the caller may use the memory for the next batch.
            kept.inputs = [t.clone() for t in kept.inputs]
        if self.recomputes or self.reverses:
            with torch.no_grad(), self._forward_weights(kept), self._uncounted("forward"):
                self._check_inverse(kept)
                self._observe(kept, target)
                outputs = self._run(kept)
            self._keep_little(kept)
        else:
            with self._forward_weights(kept), self._recording(kept):
                self._observe(kept, target)
                outputs = self._run_with_graph(kept, target)
        self._kept[micro.id] = kept
        self._count(kept.nbytes)
        self.stored_bytes = max(self.stored_bytes, self.kept_bytes)
        self.most_in_flight = max(self.most_in_flight, len(self._kept))
        return None if self.last else map_tensors(Tensor.detach, outputs)

    def _observe(self, kept: _Kept, target: Tree) -> None:
        if self.observer is not None:
            self.observer.forward(self, kept.micro, unflatten(kept.spec, kept.inputs), target)

    def _check_inverse(self, kept: _Kept) -> None:
        """Once, before any update: with a wrong inverse a stage would learn, but from inputs that never were."""
        if not self.reverses or self._inverse_checked:
            return
        self._inverse_checked = True
        if all(bool(t.isfinite().all()) for t in kept.inputs):
            with self._autocast():
                check_blocks(self._blocks(), unflatten(kept.spec, kept.inputs), self._inverse_tolerance)

    def _blocks(self) -> list[Block]:
        if isinstance(self.module, StageChain):
            return [Block(name, block) for name, block in zip(self.module.names, self.module.blocks, strict=True)]
        return [Block(type(self.module).__name__, self.module)]

    @property
    def _inverse_tolerance(self) -> float | None:
        """Wider under autocast, where an inverse written by the user may compute in half precision."""
        return 5e-2 if self.options.precision == "bf16" else None

    def _keep_little(self, kept: _Kept) -> None:
        if self.recomputes:
            kept.nbytes = sum(t.nbytes for t in kept.inputs)
            kept.stamps = _stamps(kept.inputs)
            return
        kept.probe = self.reconstruction.sample(kept.micro.id, unflatten(kept.spec, kept.inputs))
        kept.inputs = []

    def _run(self, kept: _Kept, target: Tree = None) -> Tree:
        """Evaluate the module, and at the last stage the loss."""
        with replayable(self.options.seed, self.index, kept.micro.id), self._autocast():
            outputs = self.module(unflatten(kept.spec, kept.inputs))
            return self.options.loss_fn(outputs, target) if self.last else outputs

    def _run_with_graph(self, kept: _Kept, target: Tree = None) -> Tree:
        if not self.first:
            for t in kept.inputs:
                if t.is_floating_point() or t.is_complex():
                    t.requires_grad_()
        outputs = self._run(kept, target)
        if self.last:
            outputs = self._checked_loss(outputs, kept.micro)
        kept.outputs = flatten(outputs)[0]
        return outputs

    def _checked_loss(self, loss: Tensor, micro: Micro) -> Tensor:
        if loss.numel() != 1:
            raise ShapeMismatch(
                f"the loss must be one number, got a tensor of shape {tuple(loss.shape)} for {micro}: let loss_fn take "
                "the mean (and say loss_reduction='sum' if it adds instead)"
            )
        self.loss = value = float(loss.detach())
        if not math.isfinite(value):
            optimizer = self.updater.optimizer
            lr = optimizer.param_groups[0]["lr"] if optimizer else 0.0
            raise NonFiniteLoss(
                f"the loss of {micro} is {value} (stage {self.index}, after {self.version} updates, lr {lr:g}). Lower "
                "the learning rate, clip gradients (clip_grad_norm=1.0) or, if the method delays, raise microbatches."
            )
        return loss if micro.scale == 1.0 else loss * micro.scale

    @contextmanager
    def _forward_weights(self, kept: _Kept) -> Iterator[None]:
        """Show the forward the weights its method wants: current, older by `lag`, or predicted."""
        ahead = kept.micro.update - self.version
        stashes = self.rules.weights == "stash" and (self.recomputes or self.reverses)
        values: list[Tensor] | None
        self.seen = self.version
        if ahead < self.lag and self.updater.previous:
            values = self.updater.previous
            self.seen -= 1
        else:
            values = self.updater.predicted(ahead, reuse=self.recomputes and not stashes)
        if stashes:
            kept.weights = values or [p.data for p in self.params]
        with weights_at(self.params, values) if values is not None else nullcontext():
            yield

    @contextmanager
    def _recording(self, kept: _Kept) -> Iterator[None]:
        """Keep the graph under the weight rule; the first graph of each input shape is weighed."""
        shapes = tuple((t.shape, t.dtype) for t in kept.inputs)
        known = self._weighed.get(shapes)
        scale = Scale([*self.module.parameters(), *self.module.buffers()]) if known is None else None
        with self.weights.recording(scale):
            yield
        if scale is not None:
            for t in [*kept.inputs, *(kept.outputs or [])]:
                scale(t)
            known = self._weighed[shapes] = scale.total
        kept.nbytes = known or 0

    # --------------------------------------------------------------- backward

    def backward(
        self, micro: Micro, cotangent: Gradients | None = None, outputs: Tree = None, *, again: bool = False
    ) -> Returned:
        """Take one micro-batch backward; gradients of the weights add up in `.grad`.

        **Arguments:**

        - `cotangent`: one gradient (or `None`) per tensor of the stage's output.
        - `outputs`: the output itself, which a reversible stage starts from.
        - `again`: whether the same micro-batch will go backward once more; its graph is kept.
        """
        kept = self._kept[micro.id]
        with self._backward_weights(kept):
            if self.reverses:
                returned = self._reverse(kept, outputs, cotangent or [])
            else:
                roots, grads = self._roots(kept, cotangent)
                if roots:
                    torch.autograd.backward(roots, grads, retain_graph=again)
                returned = self._hand_down(kept, [t.grad for t in kept.inputs])
        if again:
            for t in kept.inputs:
                t.grad = None
        else:
            self._forget(kept)
        return returned

    def backward_input(self, micro: Micro, cotangent: Gradients | None = None, outputs: Tree = None) -> Returned:
        """First half of a backward: only the gradient of the stage's input; the weights' half can wait."""
        kept = self._kept[micro.id]
        with self._backward_weights(kept):
            roots, grads = self._roots(kept, cotangent)
            wanted = [t for t in kept.inputs if t.requires_grad]
            found, kept.pending = input_gradients(roots, grads, wanted, self.params)
            kept.outputs = None
        results = iter(found)
        return self._hand_down(kept, [next(results) if t.requires_grad else None for t in kept.inputs])

    def backward_weights(self, micro: Micro) -> None:
        """Second half of a backward: add the gradients of the weights."""
        kept = self._kept[micro.id]
        assert kept.pending is not None
        with self._backward_weights(kept):
            kept.pending.weight_gradients()
        self._forget(kept)

    def _roots(self, kept: _Kept, cotangent: Gradients | None) -> tuple[list[Tensor], Gradients]:
        """Where the backward starts: outputs that depend on something, with their gradients."""
        if self.recomputes:
            _check_unchanged(kept)
            self.kept_bytes -= kept.nbytes
            with self._recording(kept), self._uncounted("backward"):
                self._run_with_graph(kept)
            self._count(kept.nbytes)
        assert kept.outputs is not None
        if self.last:
            return kept.outputs, [None]
        assert cotangent is not None
        pairs = [(y, g) for y, g in zip(kept.outputs, cotangent, strict=True) if g is not None and y.requires_grad]
        return [y for y, _ in pairs], [self._shrunk(g) for _, g in pairs]

    def _shrunk(self, gradient: Tensor) -> Tensor:
        return gradient if self.rules.shrink == 1.0 else gradient * self.rules.shrink

    def _reverse(self, kept: _Kept, outputs: Tree, cotangent: Gradients) -> Returned:
        """Compute the input from the output and differentiate on the way, block by block."""
        tensors, structure = flatten(outputs)
        gradient = unflatten(
            structure,
            [torch.zeros_like(t) if g is None else self._shrunk(g) for t, g in zip(tensors, cotangent, strict=True)],
        )
        shapes = tuple((t.shape, t.dtype) for t in tensors)
        known = self._weighed.get(shapes)
        meter = PeakMeter([*self.module.parameters(), *self.module.buffers()]) if known is None else None
        with (
            replayable(self.options.seed, self.index, kept.micro.id),
            self._autocast(),
            meter.measuring() if meter is not None else nullcontext(),
        ):
            inputs, gradients = invert_and_differentiate(self.module, outputs, gradient, bn=self.rules.statistics)
        if meter is not None:
            known = self._weighed[shapes] = meter.peak
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes + (known or 0))
        self.reconstruction.compare(kept.micro.id, kept.probe, inputs)
        return Returned([*flatten(gradients)[0]], inputs if self._hands_down_input else None)

    def _hand_down(self, kept: _Kept, gradients: Gradients) -> Returned:
        if self.first:
            return Returned([])
        inputs = None
        if self._hands_down_input:
            inputs = unflatten(kept.spec, [t.detach() for t in kept.inputs])
        return Returned(gradients, inputs)

    @contextmanager
    def _backward_weights(self, kept: _Kept) -> Iterator[None]:
        """Show the backward the weights its method wants; without a kept graph, by moving pointers around it."""
        values = kept.weights
        if self.rules.weights == "average":
            past = self.updater.past(self.version - kept.version)
            if isinstance(self.weights, GivenWeights):
                self.weights.given = past
            values = past if self.recomputes or self.reverses else None
        with weights_at(self.params, values) if values is not None else nullcontext():
            yield

    def _forget(self, kept: _Kept) -> None:
        del self._kept[kept.micro.id]
        self.kept_bytes -= kept.nbytes
        if kept.micro.index == kept.micro.count - 1:
            self._batches += 1

    def _count(self, nbytes: int) -> None:
        self.kept_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes)

    def _uncounted(self, now: str) -> AbstractContextManager[Any]:
        """Two passes see each micro-batch; batch norm counts it in one of them."""
        return nullcontext() if self.rules.statistics == now else self._statistics

    # ----------------------------------------------------------------- update

    def update(self) -> None:
        """Apply the gradients collected since the last update."""
        batches, self._batches = self._batches, 0
        if self.observer is not None:
            self.observer.update(self, batches)
        waiting = [kept for kept in self._kept.values() if kept.needs_old_weights]
        previous = [p.data for p in self.params] if self.lag else []
        if waiting or self.lag:
            self.weights.release()
        self.updater.step(batches, previous)
        if self.rules.weights == "stash":
            self.peak_versions = max(self.peak_versions, len({kept.version for kept in waiting}))

    @property
    def unapplied(self) -> bool:
        """Whether gradients of complete batches wait for an update."""
        return self._batches > 0

    # ------------------------------------------------------------- evaluation

    def evaluate(self, inputs: Tree) -> Tree:
        """Evaluation-mode output at the newest weights; training state is left as it was."""
        modes = [(m, m.training) for m in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad(), self._autocast():
                return self.module(inputs)
        finally:
            for module, training in modes:
                module.training = training

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.options.precision == "bf16" else nullcontext()


def _stamps(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Torch's counters of in-place changes, which a tensor shares with all its views."""
    return tuple(0 if t.is_inference() else t._version for t in tensors)


def _check_unchanged(kept: _Kept) -> None:
    if kept.stamps != _stamps(kept.inputs):
        raise StageFailed(
            f"the input of {kept.micro} was changed in place while the batch was under way: pass a fresh tensor, or a "
            "copy, to every step()"
        )


def reverses(rules: Rules, index: int, stages: int, module: nn.Module) -> bool:
    """Whether this stage computes its input back from its output instead of keeping it."""
    return rules.activations == "reverse" and index < stages - 1 and index not in rules.store and is_reversible(module)
