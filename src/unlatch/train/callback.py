"""What a session tells whoever wants to know: hooks, and what happens when one of them raises."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import CallbackFailed, ConfigError, OutOfStep, UnlatchError
from .epoch import Epoch
from .run import StepResult

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Callback", "Callbacks"]

log = logging.getLogger("unlatch")


class Callback:
    """Is told what happens in a session. Override what you need; all hooks are called on every rank alike.

    `trainer.stop(why)` in a hook ends training, `trainer.log({"name/of": number})` hands numbers to all callbacks that
    write them down, `trainer.rank` and `trainer.gather(value)` are for what one rank does or all know. Ranks exchange
    values in `on_start`, `on_evaluation`, `on_epoch` and `on_end` only: during a pass they are at different places.

    >>> import torch, unlatch
    >>> class Show(unlatch.callbacks.Callback):
    ...     def on_epoch(self, trainer, epoch):
    ...         print(epoch.epoch, epoch.samples)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> run = unlatch.parallelize(model, "bp", stages=2, loss_fn=torch.nn.functional.cross_entropy, split=["1"],
    ...                           optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> _ = unlatch.Trainer(run, callbacks=[Show()]).fit([(torch.randn(8, 4), torch.randint(2, (8,)))], epochs=2)
    0 8
    1 8
    """

    def attach(self, trainer: Trainer) -> None:
        """A trainer was made with this callback."""

    def on_start(self, trainer: Trainer) -> None:
        """`fit` begins, perhaps after `resume`."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """A batch was fed; `result` is about the one that finished."""

    def on_evaluation(self, trainer: Trainer, found: dict[str, float]) -> None:
        """The data of `eval_loader` were evaluated after a pass; what is added to `found` becomes part of the epoch."""

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """A pass is complete, and evaluated if it is to be."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """A checkpoint is in place: told at the latest before the next one is begun, or at the end."""

    def on_log(self, trainer: Trainer, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers to write down, after so many batches; the trainer hands out losses, results and measurements."""

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """`fit` ends, however it does: `error` is what it raises.

        After `None` and `Interrupted` all ranks are here; after anything else others may be lost.
        """

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain values, which are those of rank 0, and tensors by name, from all ranks.

        A tensor that is called like a parameter of the model comes back where that parameter is; others everywhere.
        """
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned when the checkpoint was written."""


class Callbacks:
    """The callbacks of a trainer, in order.

    One that raises does not end training on the spot, since all ranks must end after the same batch: it is remembered,
    no callback is told of anything further, and the trainer ends `fit` at the next place where all ranks meet.
    """

    def __init__(self, trainer: Trainer, callbacks: Iterable[Callback]) -> None:
        self._trainer = trainer
        if not isinstance(callbacks, Iterable):
            raise ConfigError(f"callbacks must be a list of callbacks, got {callbacks!r:.80}; put it into brackets")
        self.listed = list(callbacks)
        callback: Any
        for number, callback in enumerate(self.listed):
            if not isinstance(callback, Callback):
                called = "; call it" if isinstance(callback, type) else ""
                raise ConfigError(
                    f"callbacks[{number}] must be an object of a class derived from unlatch.callbacks.Callback, got "
                    f"{callback!r:.80}{called}"
                )
        #: What the first one that raised has raised.
        self.failure: CallbackFailed | None = None
        self._left = list(self.listed)

    def begin(self) -> None:
        """`fit` begins: what earlier ones raised is over, and all are to be told of the end."""
        self.failure, self._left = None, list(self.listed)

    def attach(self) -> None:
        """Introduce the trainer."""
        for callback in self.listed:
            callback.attach(self._trainer)

    def tell(self, hook: str, *happened: Any) -> None:
        """Call a hook of all."""
        for callback in self.listed:
            self.tell_one(callback, hook, *happened)

    def tell_one(self, callback: Callback, hook: str, *happened: Any) -> None:
        """Call a hook of one."""
        if self.failure is None:
            if hook == "on_end":
                self._left.remove(callback)
            with self._remembering(callback, hook):
                getattr(callback, hook)(self._trainer, *happened)

    def abandon(self, error: BaseException) -> None:
        """Tell those that know of no end yet of one by an error; what they raise on top of it goes to the log."""
        for callback in self._left:
            try:
                callback.on_end(self._trainer, error)
            except Exception as further:
                log.warning("callback %s raised in on_end as well: %r", type(callback).__name__, further)

    @contextmanager
    def _remembering(self, callback: Callback, hook: str) -> Iterator[None]:
        run = self._trainer.run
        try:
            yield
        except Exception as error:
            if isinstance(error, OutOfStep) or (isinstance(error, UnlatchError) and run.failure() is not None):
                # Not the callback is at fault: it waited for a rank that is gone, or whose own callback has raised.
                raise
            if self.failure is None:
                self.failure = CallbackFailed(
                    f"callback {type(callback).__name__} raised in {hook} after batch {run.batches}: "
                    f"{type(error).__name__}: {error}"
                )
                self.failure.__cause__ = error
                if 0 not in run.stations:
                    # Only the rank that feeds can end the pass.
                    run.request_stop(0)

    # --------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Plain values by callback, and all tensors by their full names."""
        plain: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for key, callback in self._named():
            found = self._state_of(callback)
            plain[key] = {name: value for name, value in found.items() if not isinstance(value, Tensor)}
            tensors |= {f"{key}/{name}": value for name, value in found.items() if isinstance(value, Tensor)}
        return {"callbacks": {key: own for key, own in plain.items() if own}, **tensors}

    def _state_of(self, callback: Callback) -> Mapping[str, Any]:
        try:
            found = callback.state()
            json.dumps({name: value for name, value in found.items() if not isinstance(value, Tensor)})
            return found
        except Exception as error:
            if self.failure is not None:
                # The state of the rest is worth more than a second complaint.
                return {}
            raise CallbackFailed(
                f"callback {type(callback).__name__} raised in state after batch {self._trainer.run.batches}, where a "
                f"dict of plain values and tensors was expected: {type(error).__name__}: {error}"
            ) from error

    def load(self, found: Mapping[str, Any]) -> None:
        """Take over what a checkpoint has of them; one that it knows nothing of starts afresh."""
        for key, callback in self._named():
            own = dict(found.get("callbacks", {}).get(key, {}))
            own |= {
                name.removeprefix(f"{key}/"): value
                for name, value in found.items()
                if isinstance(value, Tensor) and name.startswith(f"{key}/")
            }
            if own:
                callback.load(own)

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Each with a name of its own: the second of a kind has a number."""
        seen: dict[str, int] = {}
        for callback in self.listed:
            kind = type(callback).__name__
            seen[kind] = seen.get(kind, 0) + 1
            yield (kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"), callback
