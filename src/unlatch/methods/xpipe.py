"""XPipe: one prediction of the weights per mini-batch, shared by all its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError
from ..rules.activations import Graph
from ..rules.bundle import Rules
from ..rules.kept import MicroBatch
from ..rules.predict import NoPrediction, Predictor, predictor
from ..rules.updates import StagePlace
from ..rules.weights import ComingRates, ForwardView, Predicted, PredictedView, Stash
from ..schedule import Schedule, one_f_one_b_async
from .base import Delayed, register

__all__ = ["XPipe"]


@register
@dataclass(frozen=True)
class XPipe(Delayed):
    """Asynchronous micro-batches at weights predicted once per mini-batch (Guan et al. 2019).

    The first micro-batch of a mini-batch predicts the weights for the time of its update; the others use the same ones,
    forward and backward, although newer weights may be there by then. So all parts of a gradient belong to one network.
    With `accumulate`, a mini-batch is all that goes into one update.

    **Arguments:** `predict`: `"linear"` follows the optimizer's present velocity, as recalled for Adam; see `Delayed`.

    >>> XPipe(microbatches=4).lateness(3), XPipe(microbatches=4).staleness(3)
    ((4, 4, 0), (1.0, 1.0, 0.0))
    """

    predict: str | Predictor = "linear"

    name = "xpipe"
    summary = "1F1B without flush, one prediction per mini-batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(predictor(self.predict), NoPrediction):
            raise ConfigError('xpipe: predict must not be "none"; without prediction this is pipedream')

    def schedule(self, stages: int) -> Schedule:
        return one_f_one_b_async(stages)

    def rules(self) -> Rules:
        return self._rules(Graph(), Stash(), forward=PredictedOnce(predictor(self.predict)))

    def choose_microbatches(self, stages: int, batch_size: int | None) -> int:
        return stages if batch_size is None else max(1, min(stages, batch_size))

    def lateness(self, stages: int) -> tuple[int, ...]:
        """Those of the first micro-batch of a mini-batch, in whole mini-batches: the others see the same weights."""
        parts = (stages if self.microbatches == "auto" else self.microbatches) * self.accumulate
        return tuple(-(-late // parts) * parts for late in super().lateness(stages))


@dataclass(frozen=True)
class PredictedOnce(Predicted):
    """`Predicted`, by the first micro-batch of each update for all of them."""

    def at(self, params: Sequence[Tensor], optimizer: Optimizer | None, place: StagePlace) -> ForwardView:
        return ForwardView(params) if optimizer is None else _SharedView(params, optimizer, self.predictor)


class _SharedView(PredictedView):
    def __init__(self, params: Sequence[Tensor], optimizer: Optimizer, predictor: Predictor) -> None:
        self._update, self._version = -1, 0
        self._shared: list[Tensor] | None = None
        super().__init__(params, optimizer, predictor)

    def forget(self) -> None:
        super().forget()
        self._update = -1

    def values(
        self, micro: MicroBatch, version: int, coming: ComingRates, *, lasting: bool
    ) -> tuple[list[Tensor] | None, int]:
        if micro.update != self._update:
            self._update = micro.update
            self._shared, self._version = super().values(micro, version, coming, lasting=True)
        return self._shared, self._version

    def state(self) -> dict[str, Any]:
        shared = {"update": self._update, "version": self._version, "values": self._shared}
        return {"history": super().state(), "shared": shared}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state["history"])
        self._update, self._version, self._shared = (state["shared"][key] for key in ("update", "version", "values"))
