"""The truth to test against: delayed training as a recursion over batches, with no queues, messages or clocks.

Every delayed method is fixed by which weight version the forward of micro-batch `i` sees at each stage, and whether its
gradient is taken at that version or at the one current when it is applied (version `i // M` with `M` micro-batches per
update), or at a reconstruction of the first from the second. This file computes the trajectory from these two tables
alone, keeping every version of every weight. It shares no code with the executors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .nn.randomness import replayable
from .nn.tree import flatten, map_tensors, unflatten

__all__ = ["SGD", "Adam", "Trajectory", "recursion"]

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, written out."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def step(self, w: Tensor, v: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """One update. **Returns:** the new weight and velocity."""
        if self.weight_decay:
            g = g.add(w, alpha=self.weight_decay)
        if self.momentum == 0.0:
            return w.add(g, alpha=-self.lr), None
        v = g.clone() if v is None else v.mul(self.momentum).add(g)
        return w.add(g.add(v, alpha=self.momentum) if self.nesterov else v, alpha=-self.lr), v

    def predict(
        self, name: str, w: Tensor, before: Tensor, v: Tensor | None, g: Tensor, last: float, coming: Sequence[float]
    ) -> Tensor:
        """The weight after updates at the `coming` rates, from the `last` rate and what moved by it: the weight
        `before`, to velocity `v`, with gradient `g`."""
        if name == "difference":
            return w + len(coming) * (w - before)
        if name == "constant-gradient":
            for lr in coming:
                w, v = replace(self, lr=lr).step(w, v, g)
            return w
        direction = (before - w) / last if v is None or (name == "geometric" and self.nesterov) else v
        if name == "linear":
            return w - sum(coming) * direction
        ahead = 1 if name == "coasting" and self.nesterov else 0
        return w - sum(lr * self.momentum ** (n + ahead) for n, lr in enumerate(coming, start=1)) * direction


@dataclass(frozen=True)
class Adam:
    """Adam and, if weights decay apart from the gradient (`decoupled`), AdamW, written out."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def step(self, w: Tensor, moments: Any, g: Tensor) -> tuple[Tensor, Any]:
        """One update. **Returns:** the new weight, and both moments with the number of updates."""
        if self.decoupled:
            w = w * (1 - self.lr * self.weight_decay)
        else:
            g = g + self.weight_decay * w
        m, n, t = moments or (torch.zeros_like(w), torch.zeros_like(w), 0)
        first, second = self.betas
        moments = first * m + (1 - first) * g, second * n + (1 - second) * g * g, t + 1
        return w - self.lr * self._direction(*moments), moments

    def _direction(self, m: Tensor, n: Tensor, t: int) -> Tensor:
        first, second = self.betas
        return m / (1 - first**t) / ((n / (1 - second**t)).sqrt() + self.eps)

    def predict(
        self, name: str, w: Tensor, before: Tensor, moments: Any, g: Tensor, last: float, coming: Sequence[float]
    ) -> Tensor:
        """The weight after updates at the `coming` rates. No step is measured but by `difference`, so that the rate
        of the `last` one does not matter."""
        if name == "difference":
            return w + len(coming) * (w - before)
        if name == "linear":
            decay = self.weight_decay if self.decoupled else 0.0
            return w - sum(coming) * (self._direction(*moments) + decay * w)
        going_on = self
        if name != "constant-gradient":
            # No gradients come any more, and decay that is added to them counts as one.
            g, going_on = torch.zeros_like(g), self if self.decoupled else replace(self, weight_decay=0.0)
        for lr in coming:
            w, moments = replace(going_on, lr=lr).step(w, moments, g)
        return w


@dataclass
class Trajectory:
    """All versions of all weights, and the loss of every micro-batch."""

    weights: list[list[Weights]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def _exchanged(w: Weights, other: Weights) -> AbstractContextManager[Any]:
    """Whatever autograd saves of the weights `w` becomes the same part of the `other` ones."""
    found = {t.data_ptr(): other[n].detach() for n, t in w.items()}

    def pack(t: Tensor) -> Tensor:
        instead = found.get(t.untyped_storage().data_ptr())
        return t if instead is None else instead.as_strided(t.size(), t.stride(), t.storage_offset())

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)


def _leaf(t: Tensor, *, wanted: bool) -> Tensor:
    return t.detach().requires_grad_(wanted and t.is_floating_point())


def recursion(
    stages: Sequence[nn.Module],
    micros: Sequence[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], Any],
    sgd: SGD | Adam | Sequence[SGD | Adam],
    forward_version: Callable[[int, int], int],
    *,
    per_update: int = 1,
    backward: Literal["forward", "current", "average"] = "forward",
    mixed: bool = False,
    delays: Sequence[int] = (),
    predict: str = "none",
    gamma: float = 1.0,
    scale: Callable[[int, int], float] = lambda stage, update: 1.0,
    shrink: float = 1.0,
    collected: Callable[[int, list[Tensor], int], list[Tensor]] = lambda stage, gradients, age: gradients,
    seed: int = 0,
) -> Trajectory:
    """Train on micro-batches in order.

    **Arguments:**

    - `stages`: what passes between them may be any tree of tensors.
    - `loss_fn`: a mean over samples, or a sum and what it counts, and then an update divides by all that was counted.
    - `sgd`: the optimizer, or one for each stage.
    - `forward_version`: of (stage, micro-batch): how many updates the weights of its forward have seen.
    - `per_update`: micro-batches per update; their gradients are averaged.
    - `backward`: take gradients at the weights of the `"forward"`, at the `"current"` ones, or at an `"average"`
      reconstruction of the former from the latter: W(t) + d ubar(t), with ubar the bias-corrected average of updates.
    - `mixed`: only weights are replaced, while activations stay those of the forward. At the last stage, whose backward
      follows at once, that is always so.
    - `delays`: per stage, the updates d that the decay of such an average, (d-1)/(d+1), is made for.
    - `predict`: weight predictor of the forward: `none`, `difference`, `linear`, `geometric`, `coasting`,
      `constant-gradient`.
    - `gamma`, `shrink`: step-size factor per stage below the last, gradient factor per border crossed.
    - `scale`: of (stage, update): a further factor on the step size.
    - `collected`: of (stage, gradients of its weights for one micro-batch, their age in updates): what is added up.
    """
    count = len(stages)
    path = Trajectory([[{n: p.detach().clone() for n, p in s.named_parameters()}] for s in stages])
    velocities: list[list[dict[str, Any]]] = [[dict.fromkeys(w[0])] for w in path.weights]
    applied: list[list[Weights]] = [[] for _ in stages]
    sums: list[Weights] = [{} for _ in stages]
    counted = 0.0
    optimizers = sgd if isinstance(sgd, Sequence) else [sgd] * count

    def optimizer_at(k: int, update: int) -> SGD | Adam:
        """The optimizer of a stage as it is at an update."""
        return replace(optimizers[k], lr=optimizers[k].lr * gamma ** (count - 1 - k) * scale(k, update))

    def seen(k: int, version: int, steps: int) -> Weights:
        """Weights of a forward: a version, or its prediction `steps` updates ahead."""
        w = path.weights[k][version]
        if predict == "none" or steps == 0 or version == 0:
            return w
        before, v, g = path.weights[k][version - 1], velocities[k][version], applied[k][version - 1]
        last, *coming = [optimizer_at(k, update).lr for update in range(version - 1, version + steps)]
        return {n: optimizer_at(k, version).predict(predict, w[n], before[n], v[n], g[n], last, coming) for n in w}

    def taken_at(k: int, version: int, now: int) -> Weights:
        """Weights of a backward whose forward saw those of `version`, if not the same."""
        versions = path.weights[k]
        if backward == "current" or now == version:
            return versions[now]
        decay = (delays[k] - 1) / (delays[k] + 1)
        mean = {n: torch.zeros_like(w) for n, w in versions[0].items()}
        for old, new in pairwise(versions[: now + 1]):
            mean = {n: decay * mean[n] + (1 - decay) * (old[n] - new[n]) for n in mean}
        return {n: w + (now - version) / (1 - decay**now) * mean[n] for n, w in versions[now].items()}

    for i, (x, y) in enumerate(micros):
        now = i // per_update
        inputs, forwards = [x], []
        seen_versions = [forward_version(k, i) for k in range(count)]
        for k, stage in enumerate(stages[:-1]):
            version = seen_versions[k]
            forwards.append(seen(k, version, now - version))
            with torch.no_grad(), replayable(seed, k, i):
                inputs.append(functional_call(stage, forwards[k], (inputs[k],)))
        forwards.append(seen(count - 1, seen_versions[-1], 0))
        cotangents: list[Tensor | None] = []
        for k in reversed(range(count)):
            at = forwards[k] if backward == "forward" else taken_at(k, seen_versions[k], now)
            mixes = mixed or k == count - 1
            w = {n: t.detach().requires_grad_() for n, t in (forwards[k] if mixes else at).items()}
            h, form = flatten(map_tensors(lambda t, k=k: _leaf(t, wanted=k > 0), inputs[k]))  # type: ignore[misc]
            with replayable(seed, k, i), _exchanged(w, at) if mixes else nullcontext():
                out = functional_call(stages[k], w, (unflatten(form, h),))
            if k == count - 1:
                loss = loss_fn(out, y)
                if isinstance(loss, tuple):
                    out, number = loss
                    counted += float(number)
                    path.losses.append(float(out.detach()) / float(number))
                else:
                    path.losses.append(float(loss.detach()))
                    out = loss / per_update if per_update > 1 else loss
                cotangents = [None]
            elif shrink != 1.0:
                cotangents = [None if g is None else g * shrink for g in cotangents]
            ends = [
                (t, g)
                for t, g in zip(flatten(out)[0], cotangents, strict=True)
                if t.requires_grad and (g is not None or k == count - 1)
            ]
            below = [t for t in h if t.requires_grad]
            found = torch.autograd.grad(
                [t for t, _ in ends], [*w.values(), *below], [g for _, g in ends], allow_unused=True
            )
            from_below = iter(found[len(w) :])
            cotangents = [next(from_below) if t.requires_grad else None for t in h]
            raw = [torch.zeros_like(t) if g is None else g for t, g in zip(w.values(), found, strict=False)]
            for n, g in zip(w, collected(k, raw, now - seen_versions[k]), strict=True):
                sums[k][n] = sums[k][n] + g if n in sums[k] else g
        if (i + 1) % per_update == 0:
            if counted:
                sums = [{n: g / counted for n, g in total.items()} for total in sums]
                counted = 0.0
            for k in range(count):
                w, v = path.weights[k][-1], velocities[k][-1]
                stepped = {n: optimizer_at(k, now).step(w[n], v[n], g) for n, g in sums[k].items()}
                path.weights[k].append({n: new for n, (new, _) in stepped.items()})
                velocities[k].append({n: new for n, (_, new) in stepped.items()})
                applied[k].append(sums[k])
                sums[k] = {}
    return path
