"""The update of one stage: average, clip, step, count. Whatever needs to know of past weights is told here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import ConfigError, NonFinite
from ..rules.updates import OptimizerFactory, PerEpoch, StagePlace, UpdateRule, View, make_optimizer
from ..rules.weights import move_to_fresh_storage
from .finite import all_finite, first_not_finite
from .foresight import foreseen_rates

__all__ = ["Optimizer", "Updater", "beside", "completed", "plain_part"]

Optimizer = torch.optim.Optimizer

_AS_IT_IS = nullcontext()


class Updater:
    """An optimizer with its learning-rate schedule and the stage's own step size.

    **Arguments:**

    - `params`: the stage's trained parameters; may be none.
    - `place`: of the stage, which its rule and the optimizer factory may depend on.
    - `lr_scheduler`: steps at every update; wrapped in `PerEpoch`, when an epoch ends.
    - `lr_scale`: of the n-th update on every learning rate.
    - `checks`: whether gradients that are not finite are refused before, and weights after, the optimizer's step.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        rule: UpdateRule,
        place: StagePlace,
        optimizer: OptimizerFactory,
        lr_scheduler: Callable[[Optimizer], Any] | None,
        *,
        lr_scale: Callable[[int], float] | None = None,
        clip_grad_norm: float | None = None,
        checks: bool = True,
    ) -> None:
        self.params = list(params)
        self.rule = rule
        self.place = place
        self.optimizer = make_optimizer(optimizer, self.params, place) if self.params else None
        if self.optimizer is not None:
            rule.tune(self.optimizer, place)
        self.scheduler = lr_scheduler(self.optimizer) if lr_scheduler and self.optimizer else None
        self._by_epoch = isinstance(lr_scheduler, PerEpoch)
        # Epochs that have ended while updates of theirs are still to come: after which update, and with which metric.
        self._epoch_ends: list[tuple[int, float | None]] = []
        if lr_scheduler is not None and self.optimizer is not None:
            _check_scheduler(self.scheduler, self._by_epoch)
        #: Of this stage on every learning rate.
        self.factor = rule.scale(place)
        self.version = 0
        #: Views that are told of every update.
        self.views: tuple[View, ...] = ()
        self._lr_scale = lr_scale
        self._clip = clip_grad_norm
        self._checks = checks
        #: Whether gradients that are not finite mean that an update is left out, and nothing worse.
        self.tolerant = False
        #: Whether the newest update was left out.
        self.left_out = False
        #: The norm that the next update is clipped by, if it is not that of these gradients alone.
        self.whole_norm: Tensor | None = None

    def forget(self) -> None:
        """Drop what is known of earlier updates, so that a continued and a resumed run go on alike."""
        for view in self.views:
            view.forget()

    def step(self, divisor: float = 1.0, *, elsewhere: bool = False) -> None:
        """Apply the gradients and clear them.

        **Arguments:**

        - `divisor`: what they are divided by before, such as the number of batches that they are a sum over.
        - `elsewhere`: write new weights to fresh storage, since somebody holds the old one.
        """
        self.divide(divisor)
        norm, self.whole_norm = self.whole_norm, None
        if self._clip is not None and norm is None:
            norm = nn.utils.get_total_norm(self._gradients())
        self.left_out = self.tolerant and not self._usable(norm)
        if self._checks and not self.left_out:
            self.check_gradients(norm)
        if self._clip is not None and norm is not None and not self.left_out:
            nn.utils.clip_grads_with_norm_(self.params, self._clip, norm)
        factor = self.lr_factor()
        with _AS_IT_IS if factor == 1.0 else self._scaled_lr(factor):
            for view in self.views:
                view.before_update()
            if elsewhere:
                move_to_fresh_storage(self.params)
            if self.optimizer is not None and not self.left_out:
                self.optimizer.step()
        if self._checks and self.optimizer is not None:
            self.check_weights()
        for view in self.views:
            view.after_update()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and not self._by_epoch:
            self.scheduler.step()
        self.version += 1
        self._pass_epoch_ends()

    def divide(self, divisor: float) -> None:
        """Divide the gradients, such as by the number of batches that they are a sum over."""
        if divisor != 1.0 and (grads := self._gradients()):
            torch._foreach_div_(grads, divisor)

    def squared_norm(self) -> Tensor:
        """Of the gradients, in double precision, so that those of many stages add up; refused if not finite."""
        norm = nn.utils.get_total_norm(self._gradients())
        if self._checks and not self.tolerant:
            self.check_gradients(norm)
        return norm.double().square()

    def _usable(self, norm: Tensor | None) -> bool:
        """Whether gradients are finite; those of the whole model, where their norm is known."""
        return all_finite(self._gradients()) and (norm is None or bool(norm.isfinite()))

    def end_epoch(self, metric: float | None = None, due: int = 0) -> None:
        """A pass over the data is complete, or will be when the updates that its batches contribute to are made.

        **Arguments:**

        - `metric`: what a scheduler that waits for a plateau looks at.
        - `due`: so many updates belong to this pass and those before it.
        """
        if self.scheduler is None or not self._by_epoch:
            return
        if metric is None and isinstance(self.scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau looks at a metric when an epoch ends: call run.end_epoch(metric)")
        self._epoch_ends.append((due, metric))
        self._pass_epoch_ends()

    def _pass_epoch_ends(self) -> None:
        while self.scheduler is not None and self._epoch_ends and self._epoch_ends[0][0] <= self.version:
            _end_epoch(self.scheduler, self._epoch_ends.pop(0)[1])

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def check_gradients(self, norm: Tensor | None = None) -> None:
        """Refuse gradients that are not finite, while nothing has been done with them.

        **Arguments:** `norm`: of all of them, if it is known.
        """
        if not all_finite(self._gradients(), norm):
            raise self._not_finite("gradient of", [(name, p.grad) for name, p in self._named()])

    def check_weights(self) -> None:
        """Refuse weights that are not finite."""
        if not all_finite(self.params):
            raise self._not_finite("weight", list(self._named()))

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self.place.names, self.params, strict=True)

    def _not_finite(self, what: str, named: Sequence[tuple[str, Tensor | None]]) -> NonFinite:
        return NonFinite(
            f"the {what} {first_not_finite(named)} is not finite", f"stage {self.place.index}, {self.progress}"
        )

    @property
    def progress(self) -> str:
        """How far training is, for messages."""
        rate = self.optimizer.param_groups[0]["lr"] if self.optimizer is not None else 0.0
        return f"after {self.version} updates, lr {rate:g}"

    @contextmanager
    def unscheduled(self) -> Iterator[None]:
        """Steps inside leave the learning-rate schedule where it is: together with the next they are one update."""
        scheduler, self.scheduler = self.scheduler, None
        try:
            yield
        finally:
            self.scheduler = scheduler

    def coming_rates(self, updates: int) -> list[list[float]]:
        """The learning rate of each of the optimizer's groups at each of the next updates."""
        if self.optimizer is None:
            return []
        factors = [self.lr_factor(n) for n in range(updates)]
        ends = list(self._epoch_ends)

        def after(schedule: Any, n: int) -> None:
            if not self._by_epoch:
                schedule.step()
            while ends and ends[0][0] <= self.version + n:
                _end_epoch(schedule, ends.pop(0)[1])

        by_group = foreseen_rates(self.optimizer, self.scheduler, updates, after)
        return [[rate * factor for rate, factor in zip(rates, factors, strict=True)] for rates in by_group]

    def lr_factor(self, ahead: int = 0) -> float:
        """What multiplies the user's learning rate at the next update, or at one so many updates `ahead` of it."""
        update = self.version + ahead
        factor = self.factor * self.rule.scale_at(self.place, update)
        return factor * (self._lr_scale(update) if self._lr_scale else 1.0)

    @contextmanager
    def _scaled_lr(self, factor: float) -> Iterator[None]:
        """Multiply the learning rate for one step only, so that any scheduler keeps working on the user's numbers."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def state(self) -> dict[str, Any]:
        """Gradients collected so far, optimizer, schedule, and what views remember."""
        return {
            "version": self.version,
            "gradients": [p.grad for p in self.params],
            "optimizer": plain_part(self.optimizer.state_dict()) if self.optimizer is not None else None,
            "schedule": plain_part(self.scheduler.state_dict()) if self.scheduler is not None else None,
            "epoch_ends": [list(end) for end in self._epoch_ends],
            "views": [view.state() for view in self.views],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; the tensors are used as they are."""
        self.version = state["version"]
        for p, grad in zip(self.params, state["gradients"], strict=True):
            p.grad = grad
        if self.optimizer is not None:
            # Parameters that had no step there must have none here.
            self.optimizer.state.clear()
            self.optimizer.load_state_dict(completed(self.optimizer.state_dict(), state["optimizer"]))
            # Torch converts what it loads to the parameters' dtype, which is not the dtype that all of it has.
            listed = [p for group in self.optimizer.param_groups for p in group["params"]]
            for position, saved in state["optimizer"]["state"].items():
                p = listed[position]
                self.optimizer.state[p].update({k: beside(p, k, v, self.optimizer) for k, v in saved.items()})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(completed(self.scheduler.state_dict(), state["schedule"]))
        self._epoch_ends = [(due, metric) for due, metric in state["epoch_ends"]]
        for view, saved in zip(self.views, state["views"], strict=True):
            view.load(saved)


def _end_epoch(scheduler: Any, metric: float | None) -> None:
    scheduler.step(*([metric] if isinstance(scheduler, ReduceLROnPlateau) else []))


def _check_scheduler(scheduler: Any, by_epoch: bool) -> None:
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"the lr_scheduler factory must return a scheduler, something with step(), got {type(scheduler).__name__}"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and not by_epoch:
        raise ConfigError(
            "ReduceLROnPlateau looks at a metric, and there is none at an update: set lr_scheduler_per='epoch' and let "
            "a Trainer evaluate, or call run.end_epoch(metric)"
        )


def plain_part(state: Mapping[Any, Any], *, tensors: bool = True) -> dict[Any, Any]:
    """Numbers, texts and `tensors` of a state, and of the states that it is made of; functions and such drop out."""
    kinds: tuple[type, ...] = (type(None), bool, int, float, str, *((Tensor,) if tensors else ()))

    def plain(value: Any) -> bool:
        return all(map(plain, value)) if type(value) in (list, tuple) else isinstance(value, kinds)

    part: dict[Any, Any] = {}
    for key, value in state.items():
        if type(value) is dict:
            part[key] = plain_part(value, tensors=tensors)
        elif type(value) is list and value and all(type(v) is dict for v in value):
            part[key] = [plain_part(v, tensors=tensors) for v in value]
        elif plain(value):
            part[key] = value
    return part


def beside(p: Tensor, key: str, value: Any, optimizer: Optimizer) -> Any:
    """What an optimizer remembers about a parameter, on the device where it keeps it: that of the parameter, except
    for the count of steps, which torch's optimizers keep on the host unless they run on the device as a whole."""
    if not isinstance(value, Tensor):
        return value
    whole = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return value.cpu() if key == "step" and not whole else value.to(p.device)


def completed(own: Any, saved: Any) -> Any:
    """The saved state, with what was not saved taken from the object itself."""
    if isinstance(own, dict) and isinstance(saved, dict):
        return {**own, **{k: completed(own.get(k), v) for k, v in saved.items()}}
    if isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        return [completed(mine, theirs) for mine, theirs in zip(own, saved, strict=True)]
    return saved
