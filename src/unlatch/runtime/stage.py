"""What one stage can do: forward, backward, its two halves, update. It knows nothing of who calls, or when.

Both executors drive this class, so whatever it computes is the same inline and distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteLoss
from ..nn.randomness import replayable
from ..nn.split_backward import Pending, input_gradients
from ..nn.statistics import frozen_statistics
from ..nn.tree import Structure, Tree, flatten, map_tensors, unflatten
from ..rules.bundle import Rules
from ..rules.history import History
from ..rules.weights import weight_rule, weights_at
from .micro import Micro

__all__ = ["Stage", "StageOptions"]

Optimizer = torch.optim.Optimizer
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


@dataclass(slots=True)
class _Kept:
    """What a forward leaves behind for its backward."""

    micro: Micro
    version: int
    nbytes: int
    inputs: list[Tensor]
    spec: Structure
    outputs: list[Tensor] | None = None
    pending: Pending | None = None

    @property
    def has_graph(self) -> bool:
        return self.outputs is not None or self.pending is not None


class Stage:
    """One stage of the network with its optimizer, its rules, and what it keeps for batches under way."""

    def __init__(self, index: int, stages: int, module: nn.Module, rules: Rules, options: StageOptions) -> None:
        self.index = index
        self.first = index == 0
        self.last = index == stages - 1
        self.module = module
        self.rules = rules
        self.options = options
        self.version = self.seen = 0
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = options.optimizer(self.params) if self.params else None
        self.scheduler = options.lr_scheduler(self.optimizer) if options.lr_scheduler and self.optimizer else None
        self.lr_factor = rules.step_decay ** (stages - 1 - index)
        self.weights = weight_rule(rules.weights, self.params)
        self.history = self.fresh_history()
        self.recomputes = rules.activations == "input" and not self.last
        self.loss: float | None = None
        self.kept_bytes = self.peak_bytes = self.peak_versions = 0
        self._kept: dict[int, _Kept] = {}
        self._previous: list[Tensor] = []
        self._predicted: list[Tensor] | None = None
        self._statistics = frozen_statistics(module)
        self._graph_bytes: dict[tuple[Any, ...], int] = {}
        self._batches = 0

    def fresh_history(self) -> History:
        """An empty record of what the predictor wants to know about past updates."""
        predictor = self.rules.predictor
        if predictor is None or self.optimizer is None:
            return History(self.params, frozenset())
        return predictor.history(self.params, self.optimizer)

    def forget_past(self) -> None:
        """Drop what is known of earlier weights, so that a continued and a resumed run go on alike."""
        self.history = self.fresh_history()
        self._previous = []

    # ---------------------------------------------------------------- forward

    def forward(self, micro: Micro, inputs: Tree, target: Tree = None) -> Tree:
        """Take one micro-batch forward and keep what its backward will need.

        **Returns:** the detached output, or at the last stage `None` (the loss is in `self.loss`).
        """
        leaves, spec = flatten(inputs)
        leaves = [t.detach() for t in leaves]
        kept = _Kept(micro, self.version, 0, leaves, spec)
        if self.recomputes:
            with torch.no_grad(), self._forward_weights(micro, reuse=True), self._statistics:
                outputs = self._run(micro, leaves, spec)
            kept.nbytes = sum(t.nbytes for t in leaves)
        else:
            with self._forward_weights(micro, reuse=False), self._recording(kept):
                outputs = self._run_with_graph(kept, target)
        self._kept[micro.id] = kept
        self._count(kept.nbytes)
        return None if self.last else map_tensors(Tensor.detach, outputs)

    def _run(self, micro: Micro, leaves: list[Tensor], spec: Structure, target: Tree = None) -> Tree:
        """Evaluate the module, and at the last stage the loss."""
        with replayable(self.options.seed, self.index, micro.id), self._autocast():
            outputs = self.module(unflatten(spec, leaves))
            return self.options.loss_fn(outputs, target) if self.last else outputs

    def _run_with_graph(self, kept: _Kept, target: Tree = None) -> Tree:
        if not self.first:
            for t in kept.inputs:
                if t.is_floating_point():
                    t.requires_grad_()
        outputs = self._run(kept.micro, kept.inputs, kept.spec, target)
        if self.last:
            outputs = self._checked_loss(outputs, kept.micro)
        kept.outputs = flatten(outputs)[0]
        return outputs

    def _checked_loss(self, loss: Tensor, micro: Micro) -> Tensor:
        self.loss = value = float(loss.detach())
        if not math.isfinite(value):
            lr = self.optimizer.param_groups[0]["lr"] if self.optimizer else 0.0
            raise NonFiniteLoss(
                f"the loss of {micro} is {value} (stage {self.index}, after {self.version} updates, lr {lr:g}). "
                "Lower the learning rate, clip gradients (clip_grad_norm=1.0), or, under a delayed method, raise microbatches."
            )
        return loss if micro.scale == 1.0 else loss * micro.scale

    @contextmanager
    def _forward_weights(self, micro: Micro, *, reuse: bool) -> Iterator[None]:
        """Show the forward the weights its method wants: current, older by `lag`, or predicted."""
        ahead = micro.update - self.version
        predictor = self.rules.predictor
        self.seen = self.version
        if self.rules.lag and ahead < self.rules.lag and self._previous:
            values = self._previous
            self.seen -= 1
        elif predictor is not None and ahead > 0 and self.optimizer is not None:
            out = self._predicted if reuse else None
            values = predictor.predict(
                self.params, self.optimizer, ahead, self.history, out=out, lr_scale=self._lr_scale()
            )
            if reuse:
                self._predicted = values
        else:
            yield
            return
        with weights_at(self.params, values):
            yield

    @contextmanager
    def _recording(self, kept: _Kept) -> Iterator[None]:
        """Keep the graph under the weight rule; the first graph of each input shape is weighed."""
        shapes = tuple((t.shape, t.dtype) for t in kept.inputs)
        known = self._graph_bytes.get(shapes)
        if known is not None:
            with self.weights.recording():
                yield
            kept.nbytes = known
            return
        storages: dict[int, int] = {}

        def weigh(t: Tensor) -> None:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()

        owned = {t.untyped_storage().data_ptr() for t in [*self.module.parameters(), *self.module.buffers()]}
        with self.weights.recording(weigh):
            yield
        for t in [*kept.inputs, *(kept.outputs or [])]:
            weigh(t)
        kept.nbytes = self._graph_bytes[shapes] = sum(n for ptr, n in storages.items() if ptr not in owned)

    # --------------------------------------------------------------- backward

    def backward(self, micro: Micro, cotangent: Gradients | None = None) -> Gradients | None:
        """Take one micro-batch backward; gradients of the weights add up in `.grad`.

        **Arguments:** `cotangent`: one gradient (or `None`) per tensor of the stage's output.

        **Returns:** one per tensor of the stage's input; `None` from the first stage.
        """
        kept, outputs, grads = self._prepare_backward(micro, cotangent)
        if outputs:
            torch.autograd.backward(outputs, grads)
        self._forget(kept)
        return None if self.first else [t.grad for t in kept.inputs]

    def backward_input(self, micro: Micro, cotangent: Gradients | None = None) -> Gradients | None:
        """First half of a backward: only the gradient of the stage's input; the weights' half can wait."""
        kept, outputs, grads = self._prepare_backward(micro, cotangent)
        wanted = [t for t in kept.inputs if t.requires_grad]
        found, kept.pending = input_gradients(outputs, grads, wanted, self.params)
        kept.outputs = None
        results = iter(found)
        return None if self.first else [next(results) if t.requires_grad else None for t in kept.inputs]

    def backward_weights(self, micro: Micro) -> None:
        """Second half of a backward: add the gradients of the weights."""
        kept = self._kept[micro.id]
        assert kept.pending is not None
        kept.pending.weight_gradients()
        self._forget(kept)

    def _prepare_backward(self, micro: Micro, cotangent: Gradients | None) -> tuple[_Kept, list[Tensor], Gradients]:
        kept = self._kept[micro.id]
        if self.recomputes:
            self.kept_bytes -= kept.nbytes
            with self._recording(kept):
                self._run_with_graph(kept)
            self._count(kept.nbytes)
        assert kept.outputs is not None
        if self.last:
            return kept, kept.outputs, [None]
        assert cotangent is not None
        pairs = [(y, g) for y, g in zip(kept.outputs, cotangent, strict=True) if g is not None and y.requires_grad]
        shrink = self.rules.shrink
        return kept, [y for y, _ in pairs], [g if shrink == 1.0 else g * shrink for _, g in pairs]

    def _forget(self, kept: _Kept) -> None:
        del self._kept[kept.micro.id]
        self.kept_bytes -= kept.nbytes
        if kept.micro.index == kept.micro.count - 1:
            self._batches += 1

    def _count(self, nbytes: int) -> None:
        self.kept_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes)

    # ----------------------------------------------------------------- update

    def update(self) -> None:
        """Apply the gradients collected since the last update."""
        batches, self._batches = self._batches, 0
        if self.optimizer is not None:
            if self.rules.lag:
                self._previous = [p.data for p in self.params]
            if self.rules.lag or any(kept.has_graph for kept in self._kept.values()):
                self.weights.release()
            grads = [p.grad for p in self.params if p.grad is not None]
            if batches > 1 and self.rules.average:
                torch._foreach_div_(grads, float(batches))
            if self.options.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.params, self.options.clip_grad_norm)
            self.history.before_step(self.params)
            with self._scaled_lr(self.optimizer):
                self.optimizer.step()
            self.history.after_step(self.params)
            self.optimizer.zero_grad(set_to_none=True)
            if self.scheduler is not None:
                self.scheduler.step()
        self.version += 1
        old = {kept.version for kept in self._kept.values() if kept.has_graph}
        self.peak_versions = max(self.peak_versions, len(old) if self.rules.weights == "stash" else 0)

    @property
    def unapplied(self) -> bool:
        """Whether gradients of complete batches wait for an update."""
        return self._batches > 0

    def _lr_scale(self) -> float:
        extra = self.options.lr_scale(self.version) if self.options.lr_scale else 1.0
        return self.lr_factor * extra

    @contextmanager
    def _scaled_lr(self, optimizer: Optimizer) -> Iterator[None]:
        """Multiply the learning rate for one step only, so that any scheduler keeps working on the user's numbers."""
        factor = self._lr_scale()
        if factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

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
