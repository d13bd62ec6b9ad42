"""Where torch's SGD, Adam and AdamW will be in s updates, under an assumption about the gradients to come.

Everything works on a `Bucket`: the parameters of one optimizer group with their state, and the tensors that receive the
prediction. Parameters that have not been updated yet have no state and stay. What follows the motion (`follow`,
`repeat`, `coast`) writes all of these tensors; what iterates or scales starts from what is in them.

A prediction has little to compute and much to read, so what counts is how often it goes through memory. On a CPU torch
takes a list of tensors one by one anyway; so do these forms, with all they do to one before they turn to the next.

SGD with buffer v does, per update, v <- mu v + (1 - dampening)(g + lambda W), then W <- W - lr v, or under Nesterov
W <- W - lr (g + lambda W + mu v). With g = 0 and no decay, s updates therefore move W by -lr (mu + ... + mu^s) v, and
under Nesterov by mu times that, because each of them applies the buffer only after one more multiplication by mu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..errors import ConfigError

__all__ = [
    "Bucket",
    "adam_coast",
    "adam_iterate",
    "adam_repeat",
    "buckets",
    "extend",
    "momentum_of",
    "require_closed_form",
    "scale_displacement",
    "sgd_follow",
    "sgd_iterate",
]


Tensors = tuple[Tensor, ...] | list[Tensor]


@dataclass(frozen=True)
class Bucket:
    """The parameters of one optimizer group, where they stand in the caller's list, and where predictions go."""

    group: dict[str, Any]
    #: The learning rate of each coming update.
    rates: tuple[float, ...]
    decoupled: bool
    where: list[int]
    params: list[Tensor]
    out: list[Tensor]
    states: list[dict[str, Any]]

    def only(self, keep: Sequence[bool]) -> Bucket:
        """The part of this bucket for which `keep` holds."""

        def part(items: list[Any]) -> list[Any]:
            return [item for item, kept in zip(items, keep, strict=True) if kept]

        if all(keep):
            return self
        return replace(
            self, where=part(self.where), params=part(self.params), out=part(self.out), states=part(self.states)
        )

    def having(self, key: str) -> Bucket:
        """The part whose optimizer state has `key`."""
        return self.only([state.get(key) is not None for state in self.states])

    def moving(self, key: str) -> Bucket:
        """The same, where the rest is predicted to stay."""
        has = [state.get(key) is not None for state in self.states]
        if not all(has):
            self.only([not one for one in has]).stay()
        return self.only(has)

    def stay(self) -> None:
        """Predict the current weights."""
        if self.out:
            torch._foreach_copy_(self.out, self.params)

    def pieces(self) -> Iterator[Bucket]:
        """In portions that are best worked on one after the other: single tensors on a CPU, all of them elsewhere."""
        if not all(w.is_cpu for w in self.out):
            yield self
            return
        for i, w, out, state in zip(self.where, self.params, self.out, self.states, strict=True):
            yield replace(self, where=[i], params=[w], out=[out], states=[state])

    def state(self, key: str) -> list[Tensor]:
        return [state[key] for state in self.states]

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.rates[0]

    def mean_rate(self, fade: float = 1.0) -> float:
        """Of the coming updates, where each one counts `fade` times what the one before it does."""
        parts = [fade**n for n in range(len(self.rates))]
        return sum(part * rate for part, rate in zip(parts, self.rates, strict=True)) / sum(parts)


def buckets(
    params: Sequence[Tensor], optimizer: Optimizer, out: Sequence[Tensor], rates: Sequence[Sequence[float]]
) -> Iterator[Bucket]:
    """Sort `params` by optimizer group, with its coming `rates`. What the optimizer does not own is in no bucket."""
    where: dict[int, int] = {id(p): i for i, p in enumerate(params)}
    for group, coming in zip(optimizer.param_groups, rates, strict=True):
        found = [where[id(p)] for p in group["params"] if id(p) in where]
        if found:
            # .get: the state is a defaultdict, looking a parameter up in it would enter it there.
            states = [optimizer.state.get(params[i], {}) for i in found]
            # Torch releases differ in whether AdamW says so in its groups.
            decoupled = bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
            ours, theirs = [params[i] for i in found], [out[i] for i in found]
            yield Bucket(group, tuple(coming), decoupled, found, ours, theirs, states)


def momentum_of(group: dict[str, Any], optimizer: Optimizer) -> float:
    """The factor by which the group's direction decays from one update to the next without new gradients."""
    if "momentum" in group:
        return float(group["momentum"])
    if "betas" in group:
        return float(group["betas"][0])
    raise ConfigError(
        f"{type(optimizer).__name__} has no momentum, which rho='geometric' needs: use rho='steps', 'capped' or 'power'"
    )


def require_closed_form(name: str, optimizer: Optimizer) -> None:
    """Refuse optimizers whose future no formula here describes."""
    if not isinstance(optimizer, (SGD, Adam, AdamW)):
        raise ConfigError(
            f"predictor {name!r} knows SGD, Adam and AdamW, not {type(optimizer).__name__}: use predictor "
            "'difference', which works with every optimizer"
        )


def scale_displacement(bucket: Bucket, alpha: float) -> None:
    """Go only `alpha` of the way from the current to the predicted weights."""
    if alpha != 1.0:
        torch._foreach_lerp_(bucket.out, bucket.params, 1.0 - alpha)


def sgd_follow(bucket: Bucket, reach: float, fade: float = 1.0) -> None:
    """Take `reach` steps along the momentum buffer, which fade from one to the next."""
    if not reach:
        bucket.stay()
        return
    moving, length = bucket.moving("momentum_buffer"), -bucket.mean_rate(fade) * reach
    if all(w.is_cpu for w in moving.out):
        for w, v, out in zip(moving.params, moving.state("momentum_buffer"), moving.out, strict=True):
            torch.add(w, v, alpha=length, out=out)
    else:
        moving.stay()
        torch._foreach_add_(moving.out, moving.state("momentum_buffer"), alpha=length)


def extend(bucket: Bucket, previous: Sequence[Tensor], reach: float) -> None:
    """Take the step from the `previous` to the current weights `reach` times more."""
    if all(w.is_cpu for w in bucket.out):
        for w, before, out in zip(bucket.params, previous, bucket.out, strict=True):
            torch.lerp(before, w, 1.0 + reach, out=out)
    else:
        torch._foreach_copy_(bucket.out, list(previous))
        torch._foreach_lerp_(bucket.out, bucket.params, 1.0 + reach)


def sgd_iterate(bucket: Bucket, gradient: list[Tensor], steps: int) -> None:
    """Run SGD `steps` times with a constant gradient, weight decay included."""
    group, out = bucket.group, bucket.out
    momentum, decay = float(group["momentum"]), float(group["weight_decay"])
    feed, nesterov = 1.0 - float(group["dampening"]), group["nesterov"]
    force = torch._foreach_mul(gradient, -1.0 if group.get("maximize") else 1.0)
    velocity = [v.clone() for v in bucket.state("momentum_buffer")] if momentum else []
    for rate in bucket.rates[:steps]:
        pull = torch._foreach_add(force, out, alpha=decay) if decay else force
        if momentum:
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, pull, alpha=feed)
        if not momentum or nesterov:
            torch._foreach_add_(out, pull, alpha=-rate)
        if momentum:
            torch._foreach_add_(out, velocity, alpha=-rate * (momentum if nesterov else 1.0))


@dataclass(frozen=True)
class _Adam:
    """The settings of an Adam group, and its step size and bias correction at future updates."""

    bucket: Bucket

    def __post_init__(self) -> None:
        if any(p.is_complex() for p in self.bucket.params):
            raise ConfigError("Adam's prediction is for real parameters: use predictor 'difference' for complex ones")

    @property
    def betas(self) -> tuple[float, float]:
        first, second = self.bucket.group["betas"]
        return float(first), float(second)

    @property
    def decay(self) -> float:
        return float(self.bucket.group["weight_decay"])

    @property
    def second_moment(self) -> str:
        return "max_exp_avg_sq" if self.bucket.group["amsgrad"] else "exp_avg_sq"

    def corrections(self, ahead: int) -> list[tuple[float, float]]:
        """1 - beta^t for both betas, at the update `ahead` of the last one, for each parameter."""
        first, second = self.betas
        ages = [float(t) + ahead for t in self.bucket.state("step")]
        return [(1.0 - first**age, 1.0 - second**age) for age in ages]

    def apply(self, mean: Tensors, root: Tensors, ahead: int, by: float, shrink: float = 1.0) -> None:
        """Subtract `by` times mean / (shrink * root + eps), both bias-corrected for the update `ahead`."""
        corrections = self.corrections(ahead)
        spread = torch._foreach_mul(root, [shrink / math.sqrt(second) for _, second in corrections])
        torch._foreach_add_(spread, float(self.bucket.group["eps"]))
        sizes = [-by / first for first, _ in corrections]
        torch._foreach_addcdiv_(self.bucket.out, mean, spread, sizes)


def adam_repeat(bucket: Bucket, reach: float, fade: float = 1.0) -> None:
    """Take `reach` times the last step again, fading: its direction, and the decoupled decay of AdamW."""
    length = reach * bucket.mean_rate(fade)
    for piece in bucket.moving("exp_avg").pieces():
        adam = _Adam(piece)
        piece.stay()
        if piece.decoupled and adam.decay:
            torch._foreach_add_(piece.out, piece.params, alpha=-length * adam.decay)
        adam.apply(piece.state("exp_avg"), torch._foreach_sqrt(piece.state(adam.second_moment)), ahead=0, by=length)


def adam_coast(bucket: Bucket, alpha: float = 1.0) -> None:
    """Run Adam at the coming rates with gradient zero: both moments fade, bias correction and decoupled decay go on.

    Decay that Adam adds to the gradient counts as gradient and is left out.

    **Arguments:** `alpha`: the share of the way to go.
    """
    for piece in bucket.moving("exp_avg").pieces():
        adam = _Adam(piece)
        first, second = adam.betas
        piece.stay()
        root = torch._foreach_sqrt(piece.state(adam.second_moment))
        # amsgrad divides by the largest second moment so far, which a fading one never exceeds.
        fade = 1.0 if piece.group["amsgrad"] else math.sqrt(second)
        for i, rate in enumerate(piece.rates, start=1):
            if piece.decoupled and adam.decay:
                torch._foreach_mul_(piece.out, 1.0 - rate * adam.decay)
            adam.apply(piece.state("exp_avg"), root, ahead=i, by=rate * first**i, shrink=fade**i)
        scale_displacement(piece, alpha)


def adam_iterate(bucket: Bucket, gradient: list[Tensor], steps: int) -> None:
    """Run Adam `steps` times with a constant gradient, weight decay of either kind included."""
    adam = _Adam(bucket)
    first, second = adam.betas
    force = torch._foreach_mul(gradient, -1.0 if bucket.group["maximize"] else 1.0)
    mean = [m.clone() for m in bucket.state("exp_avg")]
    square = [v.clone() for v in bucket.state("exp_avg_sq")]
    largest = [v.clone() for v in bucket.state(adam.second_moment)] if bucket.group["amsgrad"] else None
    for i, rate in enumerate(bucket.rates[:steps], start=1):
        pull = force
        if adam.decay and bucket.decoupled:
            torch._foreach_mul_(bucket.out, 1.0 - rate * adam.decay)
        elif adam.decay:
            pull = torch._foreach_add(force, bucket.out, alpha=adam.decay)
        torch._foreach_lerp_(mean, pull, 1.0 - first)
        torch._foreach_mul_(square, second)
        torch._foreach_addcmul_(square, pull, pull, 1.0 - second)
        if largest is not None:
            torch._foreach_maximum_(largest, square)
        adam.apply(mean, torch._foreach_sqrt(square if largest is None else largest), ahead=i, by=rate)
