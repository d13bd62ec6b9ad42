"""A station: one run of layers at one place, and what it can do when a schedule says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from torch import Tensor

from ..schedule import ADD_SQUARES, TELL_NORM, Kind
from ..transport.mail import BACKWARD, FORWARD, Micro
from .stage import Returned, Stage
from .trained import Trained
from .updating import Updater

__all__ = ["SENT", "ChainStation", "Operation", "Roundable", "Station"]

#: Takes the micro-batch and what the entry takes; returns what the entry gives. Both in the order of the ports.
Operation: TypeAlias = Callable[..., Sequence[Any]]

#: In place of what an entry gives and has sent already.
SENT: Final = object()

#: What of a message may be rounded for a slow link: nothing, all of it, or the first of several parts.
Roundable: TypeAlias = Literal["nothing", "all", "first"]


class Station:
    """What the engine drives. Families of methods derive their own.

    **Arguments:**

    - `index`: its number in the schedule.
    - `stage`: the layers that live here, if any do.
    """

    def __init__(self, index: int, stage: Stage | None = None) -> None:
        self.index = index
        self.stage = stage
        #: In the schedule, where replicas of a network have stations of their own; and which replica it belongs to.
        self.number, self.column = index, 0
        self.share_losses({}, {})

    def share_losses(self, losses: dict[int, Any], counts: dict[int, float]) -> None:
        """Use what the whole process knows of micro-batches under way, by id: their mean losses, and what these are
        means over, if the loss function counts."""
        self.losses, self.counts = losses, counts
        if self.stage is not None:
            self.stage.counts = counts

    @property
    def title(self) -> str:
        """What errors call it."""
        return f"stage {self.index}" + (f" of replica {self.column}" if self.column else "")

    def operations(self) -> Mapping[Kind, Operation]:
        """What it does for each kind of entry. Asked once, when the run is built."""
        return {}

    @property
    def version(self) -> int:
        """Updates made so far."""
        return self.stage.version if self.stage is not None else 0

    @property
    def seen(self) -> int:
        """The version that the newest forward saw."""
        return self.stage.seen if self.stage is not None else 0

    @property
    def kept_bytes(self) -> int:
        """What is kept for micro-batches under way."""
        return self.stage.kept_bytes if self.stage is not None else 0

    def run_forward(self, micro: Micro, inputs: Any, target: Any) -> Any:
        """The stage's output; at the last stage nothing, since its loss is noted for all who ask."""
        stage = self.stage
        assert stage is not None, "only a station with layers can run them"
        outputs = stage.forward(micro, inputs, target if stage.last else None)
        if stage.last:
            self.note_loss(micro)
        return outputs

    def note_loss(self, micro: Micro) -> None:
        """Let all know the loss that the stage has just found."""
        assert self.stage is not None
        assert self.stage.loss is not None
        self.losses[micro.id] = self.stage.loss
        if self.stage.count is not None:
            self.counts[micro.id] = self.stage.count

    def applied(self, kind: Kind) -> Sequence[Updater] | None:
        """Whose gradients an entry of this kind applies, or has a look at before they are; `None` if it does not."""
        return [self.stage.updater] if self.stage is not None and kind.cost == "update" else None

    def update(self, micro: Micro) -> Sequence[Any]:
        """Apply the gradients of the stage."""
        assert self.stage is not None, "only a station with layers has weights to update"
        self.stage.update()
        return ()

    def end_epoch(self, metric: float | None, due: int) -> None:
        """Move learning rates on that change once per epoch: of the stage, after `due` updates."""
        if self.stage is not None:
            self.stage.updater.end_epoch(metric, due)
        for trained in self.trained().values():
            # It has no part in the delay of its stage.
            trained.updater.end_epoch(metric)

    def check_gradients(self) -> None:
        """Refuse gradients that are not finite, of the stage and of whatever is trained beside it."""
        if self.stage is not None and not self.stage.updater.tolerant:
            self.stage.updater.check_gradients()
        for trained in self.trained().values():
            trained.updater.check_gradients()

    def roundable(self, name: str) -> Roundable:
        """What of its messages of this name may be rounded for a slow link: states and their gradients may."""
        return "nothing"

    def recognise(self, x: Any) -> bool:
        """Whether a micro-batch that enters here holds samples that were not met before."""
        return False

    def route(self, path: str | None) -> Any:
        """What evaluation along `path` uses of this station: something with `evaluate`, or `None` for no such path."""
        return self.stage if path in (None, "serial") else None

    def state(self) -> dict[str, Any]:
        """All that the station keeps between two slots, as a tree of plain values and of the tensors in use."""
        return {
            "stage": self.stage.state() if self.stage is not None else None,
            "trained": {name: trained.state() for name, trained in self.trained().items()},
            "kept": self._kept_state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where the station was whose `state` this is; it was made alike. The tensors are used as they are."""
        if self.stage is not None:
            self.stage.load(state["stage"])
        for name, trained in self.trained().items():
            trained.load(state["trained"][name])
        self._load_kept(state["kept"])

    def _kept_state(self) -> dict[str, Any]:
        """What a family of stations keeps beside its stage and what it trains."""
        return {}

    def _load_kept(self, state: Mapping[str, Any]) -> None:
        """Take over what `_kept_state` returned."""

    def trained(self) -> dict[str, Trained]:
        """What is trained here beside the stage, by name."""
        return {}

    def measured(self, seconds: Mapping[str, float], micros: int, batches: int) -> Any:
        """What it measured about itself; `None` for most.

        **Arguments:** `seconds`: by kind of entry; `micros`, `batches`: handled in that time.
        """
        return None

    def stored(self) -> dict[str, Tensor]:
        """What is stored here and belongs into a checkpoint."""
        return {}

    def load_stored(self, found: dict[str, Tensor]) -> None:
        """Take over what `stored` returned."""


class ChainStation(Station):
    """A stage of a chain: states come from below, gradients from above."""

    stage: Stage
    _squares: Tensor

    def operations(self) -> Mapping[Kind, Operation]:
        return {
            Kind.F: self.forward,
            Kind.B: partial(self.backward, self.stage.backward),
            Kind.I: partial(self.backward, self.stage.backward_input),
            Kind.W: self.weight_gradient,
            Kind.U: self.update,
            ADD_SQUARES: self.add_squares,
            TELL_NORM: self.tell_norm,
        }

    def roundable(self, name: str) -> Roundable:
        # A stage that computes its input back from its output needs that output as it was.
        return "first" if name == BACKWARD or (name == FORWARD and not self.stage.reverses) else "nothing"

    def applied(self, kind: Kind) -> Sequence[Updater] | None:
        return [self.stage.updater] if kind is ADD_SQUARES else super().applied(kind)

    def forward(self, micro: Micro, arrived: tuple[Any, ...]) -> Sequence[Any]:
        """One micro-batch up; the target goes along until it is needed."""
        inputs, target, *news = arrived
        scaling = self.stage.scaling
        if scaling is not None and news:
            scaling.hear(news[0])
        outputs = self.run_forward(micro, inputs, target)
        if self.stage.last:
            return ()
        return ((outputs, target),) if scaling is None else ((outputs, target, scaling.news),)

    def backward(self, half: Callable[..., Returned], micro: Micro, *above: tuple[Any, ...]) -> Sequence[Any]:
        """One micro-batch down, whole or only its input gradient; the input goes along where it is asked for."""
        scaling = self.stage.scaling
        if scaling is not None and above:
            scaling.told(micro.update, above[0][2])
        returned = half(micro, *(above[0][:2] if above else ()))
        if self.stage.first:
            return ()
        given = (returned.gradients, returned.inputs)
        return (given,) if scaling is None else ((*given, scaling.of(micro.update)),)

    def weight_gradient(self, micro: Micro) -> Sequence[Any]:
        """The second half of a backward."""
        self.stage.backward_weights(micro)
        return ()

    def add_squares(self, micro: Micro, *above: Tensor) -> Sequence[Any]:
        """The squared norm of the gradient of this stage and of those above."""
        self.stage.finish_gradients()
        self._squares = sum(above, self.stage.updater.squared_norm())
        return () if self.stage.first else (self._squares,)

    def tell_norm(self, micro: Micro, *below: Tensor) -> Sequence[Any]:
        """The norm of the whole gradient, which the first stage knows first."""
        (norm,) = below or (self._squares.sqrt(),)
        self.stage.updater.whole_norm = norm
        return () if self.stage.last else (norm,)
