"""PETRA as a recursion over micro-batches, written out from its formulas; no code shared with couplings or executors.

With tau = 2(J-1-j) ticks of delay at stage j and k micro-batches per update, the forward of micro-batch b uses version
max(0, b - tau) // k of the stage's weights and its backward version b // k. A stage of couplings y = x~ + f(x), y~ = x
computes x = y~, x~ = y - f(y~) with the latter. Batch norm normalises by the batch in every pass and counts in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from unlatch.reference import SGD

Weights = dict[str, Tensor]
State = tuple[Tensor, ...]


@dataclass
class Petra:
    """What the recursion found: weights[stage][version], gradients[stage][micro-batch], errors likewise, losses."""

    weights: list[list[Weights]] = field(default_factory=list)
    gradients: list[list[Weights]] = field(default_factory=list)
    errors: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def petra_recursion(
    stages: Sequence[nn.Sequential],
    reversible: Sequence[bool],
    micros: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    sgd: SGD,
    *,
    k: int = 1,
    delays: Sequence[int] | None = None,
    backward: Literal["current", "stash", "average"] = "current",
    predict: str = "none",
    counting: Literal["forward", "backward"] = "backward",
) -> Petra:
    """Train on micro-batches in order.

    **Arguments:**

    - `stages`: each a sequence of blocks; those marked `reversible` consist of modules with a branch `f`.
    - `delays`: ticks between forward and backward per stage, by default PETRA's.
    - `backward`: the weights to go backward with: the current ones, a stash of the forward's, or an average
      reconstruction of the latter: W(t) + d ubar(t), ubar the bias-corrected mean of updates with decay (D-1)/(D+1).
    - `predict`: the forward's weights as they are expected to be at the time of the backward.
    - `counting`: the pass whose batch statistics enter the running ones, in the buffers of `stages` themselves.
    """
    count = len(stages)
    taus = [2 * (count - 1 - j) for j in range(count)] if delays is None else delays
    path = Petra(
        [[{n: p.detach().clone() for n, p in s.named_parameters()}] for s in stages],
        [[] for _ in stages],
        [[] for _ in stages],
    )
    speeds: list[list[dict[str, Tensor | None]]] = [[dict.fromkeys(w[0])] for w in path.weights]
    applied: list[list[Weights]] = [[] for _ in stages]
    sums: list[Weights] = [{} for _ in stages]

    def seen_by_forward(j: int, version: int, now: int) -> Weights:
        w = path.weights[j][version]
        if predict == "none" or version in (0, now):
            return w
        before, v, g = path.weights[j][version - 1], speeds[j][version], applied[j][version - 1]
        coming = [sgd.lr] * (now - version)
        return {n: sgd.predict(predict, w[n], before[n], v[n], g[n], sgd.lr, coming) for n in w}

    def seen_by_backward(j: int, version: int, now: int) -> Weights:
        w = path.weights[j][now]
        if backward == "current" or version == now:
            return w
        longest = -(-taus[j] // k)
        decay = (longest - 1) / (longest + 1)
        mean = {n: torch.zeros_like(t) for n, t in w.items()}
        for old, new in pairwise(path.weights[j][: now + 1]):
            mean = {n: decay * mean[n] + (1 - decay) * (old[n] - new[n]) for n in mean}
        return {n: w[n] + (now - version) * mean[n] / (1 - decay**now) for n in w}

    for b, (x, y) in enumerate(micros):
        now, versions = b // k, [max(0, b - tau) // k for tau in taus]
        seen = [seen_by_forward(j, versions[j], now) for j in range(count)]
        inputs: list[State] = [(x,)]
        for j in range(count - 1):
            with torch.no_grad(), _statistics(stages[j], counting == "forward"):
                inputs.append(_call(stages[j], seen[j], inputs[j]))
        state, delta = inputs[-1], None
        for j in reversed(range(count)):
            at = seen[j] if backward == "stash" else seen_by_backward(j, versions[j], now)
            with _statistics(stages[j], counting == "backward" or j == count - 1):
                if j == count - 1:
                    loss, found, delta = _top(stages[j], at, inputs[j], y, loss_fn, 1 / k)
                    path.losses.append(loss)
                elif reversible[j]:
                    state, found, delta = _reverse(stages[j], at, state, delta)
                else:
                    state = inputs[j]
                    found, delta = _recompute(stages[j], at, state, delta)
            path.gradients[j].append(found)
            path.errors[j].append(_error(state, inputs[j]))
            sums[j] = {n: sums[j][n] + g for n, g in found.items()} if sums[j] else found
        if (b + 1) % k == 0:
            for j in range(count):
                stepped = {n: sgd.step(path.weights[j][-1][n], speeds[j][-1][n], g) for n, g in sums[j].items()}
                path.weights[j].append({n: w for n, (w, _) in stepped.items()})
                speeds[j].append({n: v for n, (_, v) in stepped.items()})
                applied[j].append(sums[j])
                sums[j] = {}
    return path


@contextmanager
def _statistics(stage: nn.Module, count: bool) -> Iterator[None]:
    """Unless this pass counts, running statistics are afterwards what they were before."""
    before = {name: value.clone() for name, value in stage.named_buffers()}
    yield
    if not count:
        for name, value in stage.named_buffers():
            value.copy_(before[name])


def _call(stage: nn.Module, weights: Weights, state: State) -> Any:
    out = functional_call(stage, weights, (state if len(state) > 1 else state[0],))
    return out if isinstance(out, tuple) else (out,)


def _leaves(state: State, weights: Weights) -> tuple[State, Weights]:
    return (
        tuple(t.detach().requires_grad_() for t in state),
        {n: w.detach().requires_grad_() for n, w in weights.items()},
    )


def _top(
    stage: nn.Module, weights: Weights, state: State, y: Tensor, loss_fn: Any, share: float
) -> tuple[float, Weights, State]:
    state, weights = _leaves(state, weights)
    loss = loss_fn(_call(stage, weights, state)[0], y)
    grads = torch.autograd.grad(loss * share if share != 1.0 else loss, [*weights.values(), *state])
    return float(loss.detach()), dict(zip(weights, grads, strict=False)), tuple(grads[len(weights) :])


def _recompute(stage: nn.Module, weights: Weights, state: State, delta: State) -> tuple[Weights, State]:
    state, weights = _leaves(state, weights)
    grads = torch.autograd.grad(_call(stage, weights, state), [*weights.values(), *state], delta)
    return dict(zip(weights, grads, strict=False)), tuple(grads[len(weights) :])


def _reverse(stage: nn.Sequential, weights: Weights, state: State, delta: State) -> tuple[State, Weights, State]:
    """Block by block from the top: x = y~, x~ = y - f(y~); gradients dx = dy~ + f'(x)^T dy, dx~ = dy."""
    found: Weights = {}
    for name, block in reversed(list(stage.named_children())):
        y, x = state
        delta_y, delta_carried = delta
        own = {n: weights[f"{name}.{n}"] for n, _ in block.named_parameters()}
        (leaf,), own = _leaves((x,), own)
        out = functional_call(block.f, {n.removeprefix("f."): w for n, w in own.items()}, (leaf,))
        grads = torch.autograd.grad(out, [*own.values(), leaf], delta_y)
        found |= {f"{name}.{n}": g for n, g in zip(own, grads, strict=False)}
        state = (x, y - out.detach())
        delta = (delta_carried + grads[-1], delta_y)
    return state, {n: found[n] for n in weights}, delta


def _error(found: State, true: State) -> float:
    norms = [(float((a - b).norm()), float(b.norm())) for a, b in zip(found, true, strict=True)]
    return max(distance / norm for distance, norm in norms)
