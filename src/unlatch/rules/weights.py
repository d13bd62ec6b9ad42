"""Which weights a pass sees.

Forwards see the newest weights, older ones (`Lagging`), or those predicted for the time of their backward
(`Predicted`).

Backwards are harder. A graph that is kept over an optimizer step would meet changed weights. Torch forbids it (in-place
version check), and cloning all weights for every forward would waste memory. Instead the weights that autograd saves
are handed out through saved-tensor hooks:

- `Current`: torch's own behaviour, for graphs that meet no update, or that are built anew for their backward.
- `Stash`: the graph holds the storage its forward used. An update that happens meanwhile first moves the parameter to
  fresh storage, and only if such a graph exists; otherwise nothing is ever copied.
- `Latest`: the graph holds no weights; at backward it is given the newest ones.
- `Average`: likewise, but it is given a reconstruction of the old ones.

All other saved tensors go through untouched and keep torch's check against in-place changes. Where no graph is kept,
the parameters show the wanted weights for the duration of the backward.

A rule is a small frozen object, the same for all stages; `at` makes a *view* of it for one stage, which may remember.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from ..errors import CheckpointMismatch, ConfigError, StageFailed
from .average import UpdateAverage
from .kept import Kept, MicroBatch, Saved
from .predict import History, Predictor
from .updates import StagePlace, View

__all__ = [
    "Average",
    "BackwardView",
    "BackwardWeights",
    "ComingRates",
    "Current",
    "ForwardView",
    "ForwardWeights",
    "Lagging",
    "Latest",
    "Newest",
    "Predicted",
    "Stash",
    "backward_weights",
    "move_to_fresh_storage",
    "weights_at",
]

Meter = Callable[[Tensor], None]
ComingRates = Callable[[int], Sequence[Sequence[float]]]


@contextmanager
def weights_at(params: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Run the body with `params` showing `values`; afterwards the true weights are back, bit for bit.

    Only pointers move, so the true storage cannot be altered by rounding.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> with weights_at([w], [torch.zeros(2)]):
    ...     float(w.detach().sum())
    0.0
    >>> float(w.detach().sum())
    2.0
    """
    true = [p.data for p in params]
    for p, value in zip(params, values, strict=True):
        p.data = value
    try:
        yield
    finally:
        for p, value in zip(params, true, strict=True):
            p.data = value


def move_to_fresh_storage(params: Sequence[Tensor]) -> None:
    """Make parameters safe to update in place although somebody still needs their values as they are."""
    for p in params:
        p.data = p.data.clone()


# --------------------------------------------------------------------- forward


class ForwardView(View):
    """What the forwards of one stage see. This base: the newest weights."""

    #: Whether somebody may hold the storage of the weights over an update, which must then write elsewhere.
    holds_storage: ClassVar[bool] = False

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)

    def values(
        self, micro: MicroBatch, version: int, coming: ComingRates, *, lasting: bool
    ) -> tuple[list[Tensor] | None, int]:
        """The weights for the forward of a micro-batch.

        **Arguments:**

        - `version`: updates made so far.
        - `coming`: of a number of updates: for each group of the optimizer its learning rate at each of them.
        - `lasting`: whether somebody goes on holding the values after the forward.

        **Returns:** them (`None` for the parameters as they are) and the version that they are of, or start from.
        """
        return None, version


@dataclass(frozen=True)
class ForwardWeights:
    """The rule behind a `ForwardView`."""

    #: Copies of the weights that it takes besides those that somebody stashes.
    copies: ClassVar[int] = 0
    #: Its name in messages.
    name: ClassVar[str] = ""
    #: Whether forwards may see anything but the parameters as they are.
    differs: ClassVar[bool] = True
    #: Whether also at the last stage, whose backward follows at once.
    differs_at_last: ClassVar[bool] = False

    @property
    def prediction(self) -> Predictor | None:
        """What guesses at the weights to come, if that is what forwards see."""
        return None

    def at(self, params: Sequence[Tensor], optimizer: Optimizer | None, place: StagePlace) -> ForwardView:
        """The view of one stage."""
        return ForwardView(params)

    def version(self, newest: int, applied: int) -> int:
        """Updates that a forward's weights have seen, if `newest` is the last update then, and `applied` the one that
        its gradient is applied to."""
        return newest

    def crossed(self, late: int) -> int:
        """Versions between a forward's and that of its update, where the schedule crosses up to `late`."""
        return late


@dataclass(frozen=True)
class Newest(ForwardWeights):
    """The weights as they are."""

    name: ClassVar[str] = "newest"
    differs: ClassVar[bool] = False


@dataclass(frozen=True)
class Lagging(ForwardWeights):
    """The weights `updates` versions before the one that the gradient will meet (PipeDream-2BW); one at most."""

    name: ClassVar[str] = "lagging"
    differs_at_last: ClassVar[bool] = True
    updates: int = 1

    def __post_init__(self) -> None:
        if self.updates != 1:
            raise ConfigError(f"lagging forward weights: one version is remembered, so updates=1, got {self.updates!r}")

    def at(self, params: Sequence[Tensor], optimizer: Optimizer | None, place: StagePlace) -> ForwardView:
        # A single stage waits for nobody, so it has no reason to be behind.
        return _LaggingView(params, self.updates) if place.count > 1 else ForwardView(params)

    def version(self, newest: int, applied: int) -> int:
        return max(0, applied - self.updates)

    def crossed(self, late: int) -> int:
        return min(late, self.updates)


class _LaggingView(ForwardView):
    holds_storage = True

    def __init__(self, params: Sequence[Tensor], updates: int) -> None:
        super().__init__(params)
        self._updates = updates
        self._previous: list[Tensor] = []

    def values(
        self, micro: MicroBatch, version: int, coming: ComingRates, *, lasting: bool
    ) -> tuple[list[Tensor] | None, int]:
        if micro.update - version < self._updates and self._previous:
            return self._previous, version - 1
        return None, version

    def before_update(self) -> None:
        self._previous = [p.data for p in self.params]

    def forget(self) -> None:
        self._previous = []

    def state(self) -> dict[str, Any]:
        return {"previous": self._previous}

    def load(self, state: dict[str, Any]) -> None:
        self._previous = state["previous"]


@dataclass(frozen=True)
class Predicted(ForwardWeights):
    """The weights that `predictor` expects at the time of the backward."""

    copies: ClassVar[int] = 1
    name: ClassVar[str] = "predicted"
    predictor: Predictor

    @property
    def prediction(self) -> Predictor:
        return self.predictor

    def at(self, params: Sequence[Tensor], optimizer: Optimizer | None, place: StagePlace) -> ForwardView:
        return ForwardView(params) if optimizer is None else PredictedView(params, optimizer, self.predictor)


class PredictedView(ForwardView):
    """Predicts for every forward that has updates ahead of it; those that would predict the same share one prediction.

    A forward only reads the weights that it is shown, so they can be shown to several.
    """

    def __init__(self, params: Sequence[Tensor], optimizer: Optimizer, predictor: Predictor) -> None:
        super().__init__(params)
        self._optimizer = optimizer
        self._predictor = predictor
        self._buffers: list[Tensor] | None = None
        self._newest: tuple[Any, list[Tensor]] | None = None
        self.forget()

    def values(
        self, micro: MicroBatch, version: int, coming: ComingRates, *, lasting: bool
    ) -> tuple[list[Tensor] | None, int]:
        steps = micro.update - version
        return (self._predict(steps, coming(steps), lasting) if steps > 0 else None), version

    def _predict(self, steps: int, rates: Sequence[Sequence[float]], lasting: bool) -> list[Tensor]:
        # All that it depends on beside updates, which forget it: the user may have written to the weights.
        question = (steps, rates, lasting, [p._version for p in self.params])
        if self._newest is None or self._newest[0] != question:
            out = None if lasting else self._buffers
            found = self._predictor.predict(self.params, self._optimizer, steps, self._history, out=out, rates=rates)
            if not lasting:
                self._buffers = found
            self._newest = question, found
        return self._newest[1]

    def before_update(self) -> None:
        self._newest = None
        self._history.before_step(self.params)

    def after_update(self) -> None:
        self._history.after_step(self.params)

    def forget(self) -> None:
        self._newest = None
        self._history: History = self._predictor.history(self.params, self._optimizer)

    def state(self) -> dict[str, Any]:
        return self._history.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self._newest = None
        self._history.load_state_dict(state)


# -------------------------------------------------------------------- backward


class BackwardView(View):
    """What the backwards of one stage see. This base: the parameters as they are, under torch's own checks."""

    #: Whether somebody may hold the storage of the weights over an update, which must then write elsewhere.
    holds_storage: ClassVar[bool] = False

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)

    def note(self, kept: Kept) -> None:
        """A forward begins; the parameters show the weights that it will see."""

    def recording(
        self, kept: Kept, meter: Meter | None = None, replay: Sequence[Tensor | None] = ()
    ) -> AbstractContextManager[None]:
        """Run a forward whose graph will be used later.

        **Arguments:**

        - `meter`: is shown every tensor that autograd saves.
        - `replay`: what to save instead, in the order of saving, where a graph is made again.
        """
        return saved_tensors_hooks(_metered(meter), _checked) if meter is not None else nullcontext()

    def weights(self, kept: Kept, version: int, *, lasting: bool = False) -> list[Tensor]:
        """The weights for the backward of what was kept, after `version` updates.

        **Arguments:** `lasting`: whether they must stay as they are beyond the next call.
        """
        return [p.data for p in self.params]

    def shown(self, kept: Kept, version: int) -> list[Tensor] | None:
        """Get ready for a backward. **Returns:** what the parameters must show meanwhile; `None`: what they do show."""
        return None


def _metered(meter: Meter) -> Callable[[Tensor], Saved]:
    def pack(t: Tensor) -> Saved:
        meter(t)
        return Saved(t)

    return pack


def _checked(found: Saved) -> Tensor:
    if found.tensor._version != found.version:
        raise StageFailed(
            f"a tensor of shape {tuple(found.tensor.shape)} needed for the backward was modified in place after the "
            "forward saved it; use the out-of-place form of the operation that changes it"
        )
    return found.tensor


@dataclass(frozen=True)
class BackwardWeights(ABC):
    """The rule behind a `BackwardView`."""

    #: Its name in options and messages.
    name: ClassVar[str]
    #: What the gradient is taken at, in the words of `unlatch.reference.recursion`.
    taken_at: ClassVar[Literal["forward", "current", "average"]] = "current"
    #: Whether a kept graph may outlive an update.
    bears_updates: ClassVar[bool] = True
    #: Whether the backward through a kept graph is given other weights than its forward saved.
    replaces_saved: ClassVar[bool] = False

    @abstractmethod
    def at(self, params: Sequence[Tensor], place: StagePlace) -> BackwardView:
        """The view of one stage."""

    def copies(self, crossed: int) -> int:
        """Copies of the weights besides the current one, where up to `crossed` updates come in between."""
        return 0


@dataclass(frozen=True)
class Current(BackwardWeights):
    """The weights at the time of the backward. A kept graph must not outlive an update; torch sees to that."""

    name: ClassVar[str] = "current"
    bears_updates: ClassVar[bool] = False

    def at(self, params: Sequence[Tensor], place: StagePlace) -> BackwardView:
        return BackwardView(params)


@dataclass(frozen=True)
class Stash(BackwardWeights):
    """Exactly the weights of the forward."""

    name: ClassVar[str] = "stash"
    taken_at: ClassVar[Literal["forward", "current", "average"]] = "forward"

    def at(self, params: Sequence[Tensor], place: StagePlace) -> BackwardView:
        return StashView(params)

    def copies(self, crossed: int) -> int:
        return crossed


class StashView(BackwardView):
    """Lets graphs, and passes without a graph, hold the storage that their forward used."""

    holds_storage = True

    def note(self, kept: Kept) -> None:
        kept.weights = [p.data for p in self.params]

    def recording(
        self, kept: Kept, meter: Meter | None = None, replay: Sequence[Tensor | None] = ()
    ) -> AbstractContextManager[None]:
        storages = {p.untyped_storage().data_ptr() for p in self.params}

        def pack(t: Tensor) -> Tensor | Saved:
            if meter is not None:
                meter(t)
            # Detached: some operations (convolutions) save the parameter itself, which an update gives other storage.
            return t.detach() if t.untyped_storage().data_ptr() in storages else Saved(t)

        def unpack(found: Tensor | Saved) -> Tensor:
            return _checked(found) if isinstance(found, Saved) else found

        return saved_tensors_hooks(pack, unpack)

    def weights(self, kept: Kept, version: int, *, lasting: bool = False) -> list[Tensor]:
        assert kept.weights is not None
        return kept.weights

    def shown(self, kept: Kept, version: int) -> list[Tensor] | None:
        return None if kept.has_graph else kept.weights


@dataclass(frozen=True)
class Latest(BackwardWeights):
    """The newest weights, with the activations of the forward.

    This is what the public FDG code does by accident: a mixture, not the gradient of any one network.
    """

    name: ClassVar[str] = "latest"
    replaces_saved: ClassVar[bool] = True

    def at(self, params: Sequence[Tensor], place: StagePlace) -> BackwardView:
        return LatestView(params)


class LatestView(BackwardView):
    """Keeps weights out of graphs. What else a graph holds is listed, since nothing else could make it again."""

    def _given(self) -> list[Tensor]:
        """What a backward is given in place of the parameters."""
        return [p.data for p in self.params]

    def recording(
        self, kept: Kept, meter: Meter | None = None, replay: Sequence[Tensor | None] = ()
    ) -> AbstractContextManager[None]:
        owners = {p.untyped_storage().data_ptr(): number for number, p in enumerate(self.params)}
        again = iter(replay)
        kept.saved = []

        def pack(t: Tensor) -> Any:
            if meter is not None:
                meter(t)
            owner = owners.get(t.untyped_storage().data_ptr())
            if owner is not None:
                return owner, t.size(), t.stride(), t.storage_offset()
            before = next(again, None)
            if before is not None and before.shape != t.shape:
                raise CheckpointMismatch(
                    f"{kept.micro}: its graph had saved a tensor of shape {tuple(before.shape)} where the module now "
                    f"saves one of shape {tuple(t.shape)}: the state is of another model"
                )
            saved = Saved(t if before is None else before)
            kept.saved.append(ref(saved))
            return saved

        def unpack(found: Any) -> Tensor:
            if isinstance(found, Saved):
                return _checked(found)
            owner, size, stride, offset = found
            shown: Tensor = self._given()[owner].as_strided(size, stride, offset)
            return shown

        return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class Average(BackwardWeights):
    """A reconstruction of the weights of the forward from a moving average of the updates (LayerPipe2)."""

    name: ClassVar[str] = "average"
    replaces_saved: ClassVar[bool] = True
    taken_at: ClassVar[Literal["forward", "current", "average"]] = "average"

    def at(self, params: Sequence[Tensor], place: StagePlace) -> BackwardView:
        return AverageView(params, place.delay)

    def copies(self, crossed: int) -> int:
        return 1


class AverageView(LatestView):
    """Hands out weights of the past, `delay` updates ago at most."""

    def __init__(self, params: Sequence[Tensor], delay: int) -> None:
        super().__init__(params)
        self._delay = delay
        self._shown: list[Tensor] = []
        self._buffers: list[Tensor] | None = None
        self.forget()

    def _given(self) -> list[Tensor]:
        return self._shown

    def weights(self, kept: Kept, version: int, *, lasting: bool = False) -> list[Tensor]:
        if version <= kept.version:
            return [p.data for p in self.params]
        found = self._average.past(self.params, version - kept.version, out=None if lasting else self._buffers)
        if not lasting and found and found[0] is not self.params[0]:
            self._buffers = found
        return [t.data for t in found]

    def shown(self, kept: Kept, version: int) -> list[Tensor] | None:
        self._shown = self.weights(kept, version)
        return None if kept.has_graph else self._shown

    def before_update(self) -> None:
        self._average.before_step(self.params)

    def after_update(self) -> None:
        self._average.after_step(self.params)

    def forget(self) -> None:
        self._average = UpdateAverage(self._delay)

    def state(self) -> dict[str, Any]:
        return self._average.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self._average.load_state_dict(state)


_BACKWARD: dict[str, BackwardWeights] = {rule.name: rule for rule in (Current(), Stash(), Latest(), Average())}


def backward_weights(name: str) -> BackwardWeights:
    """The rule for backwards that an option calls so.

    >>> backward_weights("stash")
    Stash()
    """
    if name not in _BACKWARD:
        raise ConfigError(f"no backward weights are called {name!r}: expected one of {', '.join(_BACKWARD)}")
    return _BACKWARD[name]
