"""A stage with auxiliary variables: predicted input, local loss, correction. `schedule` says in which order."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import ConfigError, DataError
from ...nn.statistics import frozen_statistics
from ...nn.tree import flatten, map_tensors
from ...rules.losses import measured
from ...runtime.stage import Stage
from ...runtime.station import Operation, Roundable, Station
from ...runtime.trained import Trained
from ...runtime.updating import Updater
from ...schedule import Kind
from ...transport.mail import BACKWARD, FORWARD, Micro
from ...transport.wire import dense_tree
from ..local.stations import ADJOINT, LEARN, LOSS_DOWN
from ..local.statistics import MOST_RECORDS, BorderRecord, LocalStatistics, time_by_part
from ..local.synthesis import Synthesis
from . import schedule as kinds
from .mismatch import relaxed_multiplier
from .probe import GradientProbe
from .records import BorderValues, measure_border
from .sources import Raw, Shortcut, Source
from .tables import Roster, TableSource, sample_keys

if TYPE_CHECKING:
    from .border import BorderMethod

__all__ = ["BorderStation", "TableStation", "check_same", "checksum"]

# Keeps random numbers of the pass at the true state apart from those of the stage.
_ECHO_STREAM = 1 << 34
# Messages that hold nothing but states, what is predicted of them, and gradients of them.
_STATES = {FORWARD, BACKWARD, ADJOINT, kinds.INPUT, kinds.STATE, kinds.MULTIPLIER, kinds.INTRODUCED}


@dataclass(slots=True)
class _UnderWay:
    """What a station knows about a micro-batch so far."""

    raw: Raw
    inputs: Any = None
    out: Any = None
    #: At the border below: predicted input, arriving state, gradient on the input, multiplier.
    lam: Tensor | None = None
    x: Tensor | None = None
    p: Tensor | None = None
    kappa: Tensor | None = None
    #: At the border above: what the next stage started from, its multiplier, and the seed made of both.
    lam_above: Tensor | None = None
    kappa_above: Tensor | None = None
    seed: Tensor | None = None


class BorderStation(Station):
    """Drives one stage, its predicted inputs, and its part of the borders below and above.

    **Arguments:**

    - `source`: of predicted inputs; stage 0 has none.
    - `synthesis`: guesses multipliers for the border above, where the method asks for that.
    - `probe`: compares gradients with those of backpropagation, where the method asks for that.
    - `alone`: whether all stages are in this process, so that nobody else's data can differ.
    """

    stage: Stage

    def __init__(
        self,
        stage: Stage,
        method: BorderMethod,
        source: Source | None = None,
        synthesis: Synthesis | None = None,
        probe: GradientProbe | None = None,
        *,
        alone: bool = True,
    ) -> None:
        super().__init__(stage.index, stage)
        self.method, self.rule = method, method.border_rule()
        self.source, self.synthesis, self.probe = source, synthesis, probe
        self.multiplier: Any = method.multiplier_source
        self.replays = self.multiplier == "replay"
        self.shallow = method.ablation == "shallow"
        self.frozen = method.ablation == "frozen" and not stage.last
        #: Measurements at the border below.
        self.records: deque[BorderRecord] = deque(maxlen=MOST_RECORDS)
        self.under_way: dict[int, _UnderWay] = {}
        self._alone = alone
        self._true_state: tuple[Micro, Raw, Tensor] | None = None
        self._statistics = frozen_statistics(stage.module)
        self._batches = 0

    def operations(self) -> Mapping[Kind, Operation]:
        return {
            kinds.DATA: self.enter,
            kinds.SERIAL_FORWARD: self.serial_forward,
            kinds.SERIAL_BACKWARD: self.serial_backward,
            kinds.SERIAL_UPDATE: super().update,
            kinds.DISTIL: self.distil,
            kinds.UPDATE_AUXILIARY: self.update_auxiliary,
            kinds.PREDICT: self.predict,
            Kind.F: self.forward,
            kinds.SEED: self.seed,
            kinds.TRIAL: self.trial,
            Kind.B: self.backward,
            kinds.MULTIPLY: self.multiply,
            kinds.PROBE: self.compare,
            kinds.ECHO: self.echo,
            Kind.U: self.update,
            kinds.CORRECT: self.correct,
            kinds.REDUCE: self.reduce,
            kinds.SPREAD: self.spread,
            LEARN: self.learn,
            LOSS_DOWN: self.hand_loss_down,
        }

    def roundable(self, name: str) -> Roundable:
        return "all" if name in _STATES else "nothing"

    # ------------------------------------------------------------------------ data

    def enter(self, micro: Micro, *arrived: Any) -> Sequence[Any]:
        """Take in the raw data; stations above get it from here, or only its checksum where they read their own."""
        builds = self.method.data == "build"
        if self.stage.first:
            ((x, y),) = arrived
            digest = None if self._alone else checksum((x, y))
        elif builds:
            (_, digest), (x, y) = arrived
        else:
            (x, y), digest = arrived[0]
        here = self.stage.options.device.here
        raw = Raw(here(dense_tree(x)), here(dense_tree(y)))
        if digest is not None and not self.stage.first:
            check_same(raw, digest, micro, self.index)
        self.under_way[micro.id] = _UnderWay(raw)
        if self.stage.last:
            return ()
        # The caller may use its memory for the next batch before this one has left the process.
        sent = None if builds else (raw.x if self._alone else map_tensors(Tensor.clone, raw.x), raw.y)
        return ((sent, digest),)

    def hand_loss_down(self, micro: Micro, *above: Any) -> Sequence[Any]:
        """The last thing about a micro-batch, unless it is corrected a slot later."""
        if not self.replays or self.source is None:
            del self.under_way[micro.id]
        return () if self.stage.first else (None,)

    # ---------------------------------------------------------------------- serial

    def serial_forward(self, micro: Micro, *below: Any) -> Sequence[Any]:
        """Plain backpropagation, first half."""
        now, stage = self.under_way[micro.id], self.stage
        now.inputs = now.raw.x if stage.first else below[0]
        out = self.run_forward(micro, now.inputs, now.raw.y)
        return () if stage.last else (out,)

    def serial_backward(self, micro: Micro, *above: Any) -> Sequence[Any]:
        """Plain backpropagation, second half."""
        found = self.stage.backward(micro, [above[0]] if above else None).gradients
        if self.source is None:
            del self.under_way[micro.id]
        return () if self.stage.first else (found[0],)

    def distil(self, micro: Micro) -> Sequence[Any]:
        """The predicted inputs learn from the true ones."""
        assert self.source is not None
        now = self.under_way.pop(micro.id)
        self.source.distil(micro, now.raw, now.inputs)
        self._count(micro)
        return ()

    # -------------------------------------------------------------------- parallel

    def predict(self, micro: Micro) -> Sequence[Any]:
        """Make the stage's input; the stage below is told."""
        assert self.source is not None
        now = self.under_way[micro.id]
        nets = [trained.module for trained in self.source.trained().values()]
        with self.stage.weighing_beside(micro.id, nets, flatten(now.raw.x)[0]):
            now.lam = self.source.predict(micro, now.raw, keep=not self.replays)
        now.kappa = self.source.multiplier(now.raw)
        if callable(self.multiplier):
            now.kappa = given_multiplier(self.multiplier, self.index, now.raw, now.lam)
        if self.replays or self.shallow:
            return ()
        return (self._for_below(micro, now, None if callable(self.multiplier) else now.kappa),)

    def _for_below(self, micro: Micro, now: _UnderWay, kappa: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The predicted input, shifted by the multiplier where one tensor can stand for both."""
        assert now.lam is not None
        weight = self._beta(micro) * self.method.pull
        if kappa is None or self.rule.normalise or self.rule.downsample > 1 or not weight:
            return self.rule.filter(now.lam), kappa
        return now.lam - kappa * (self.method.kappa_stage / (weight * self.rule.stiffness(now.lam))), None

    def forward(self, micro: Micro, *state: Tensor) -> Sequence[Any]:
        """Run the stage; the stage above is told what came out."""
        now, stage = self.under_way[micro.id], self.stage
        if stage.first:
            now.inputs = now.raw.x
        else:
            assert now.lam is not None
            now.inputs = now.lam
            if state:
                (now.x,) = state
                now.inputs = now.lam.lerp(now.x, self.method.share_at(micro.update))
        context: Any = torch.no_grad() if self.frozen else nullcontext()
        with context:
            now.out = self.run_forward(micro, now.inputs, now.raw.y)
        return () if stage.last else (self.rule.filter(now.out),)

    def seed(self, micro: Micro, above: tuple[Tensor, Tensor | None]) -> Sequence[Any]:
        """Make what the backward starts from: the gradient of the stage's own local loss."""
        now = self.under_way[micro.id]
        now.lam_above, now.kappa_above = above
        if self.synthesis is not None:
            now.kappa_above = self.synthesis.guess(now.out, now.raw.y)
        elif callable(self.multiplier):
            now.kappa_above = given_multiplier(self.multiplier, self.index + 1, now.raw, now.out)
        now.seed = self._seed(micro, now)
        return ()

    def _seed(self, micro: Micro, now: _UnderWay) -> Tensor | None:
        if self.frozen:
            return None
        assert now.lam_above is not None
        seed = (self._beta(micro) * self.method.pull) * self.rule.gradient(now.out, now.lam_above)
        if now.kappa_above is not None:
            seed = seed + self.method.kappa_stage * now.kappa_above
        return seed.to(now.out.dtype)

    def trial(self, micro: Micro) -> Sequence[Any]:
        """A backward that only serves to make a multiplier for the stage below."""
        self._backward(micro, self.under_way[micro.id], again=True)
        if self.stage.updater.optimizer is not None:
            self.stage.updater.optimizer.zero_grad(set_to_none=True)
        return ()

    def backward(self, micro: Micro, *multiplier: Tensor) -> Sequence[Any]:
        """Go back from the loss, or from the mismatch at the border above."""
        now = self.under_way[micro.id]
        if multiplier:
            (now.kappa_above,) = multiplier
            now.seed = self._seed(micro, now)
        self._backward(micro, now)
        if self.source is None or self.shallow:
            return ()
        if self.replays:
            return (self._for_below(micro, now, now.p),)
        return (now.p,) if self.multiplier == "synthesiser" else ()

    def _backward(self, micro: Micro, now: _UnderWay, *, again: bool = False) -> None:
        seeds = None if self.stage.last else [now.seed]
        found = self.stage.backward(micro, seeds, again=again).gradients
        now.p = found[0] if found else None

    def multiply(self, micro: Micro, *state: Tensor) -> Sequence[Any]:
        """Make a multiplier out of this iteration's gradient, for the stage below to go back once more."""
        now = self.under_way[micro.id]
        if state:
            (now.x,) = state
        assert now.lam is not None
        assert now.x is not None
        assert now.p is not None
        seed = (self._beta(micro) * self.method.pull) * self.rule.gradient(now.x, now.lam)
        now.kappa = relaxed_multiplier(seed, now.p, self.method.theta)
        return (now.kappa,)

    def compare(self, micro: Micro) -> Sequence[Any]:
        """Compare the gradient that is about to be applied with that of backpropagation."""
        assert self.probe is not None
        self.probe.compare(self.index, micro, self.under_way[micro.id].raw)
        return ()

    def echo(self, micro: Micro) -> Sequence[Any]:
        """Mix in the gradient at the true state of the batch before, so that the last stage learns the network it
        will be used in. The state is there anyway, to correct the predicted input."""
        share = self.method.echo_at(micro.update)
        if self._true_state is None or share == 0.0:
            return ()
        (heard, raw, x), self._true_state = self._true_state, None
        stage, options = self.stage, self.stage.options
        grads = [p.grad for p in stage.params if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, 1.0 - share)
        with options.random(stage.index + _ECHO_STREAM, heard.id), options.autocast():
            loss, _ = measured(options.loss_fn(stage.module(x), raw.y))
        torch.autograd.backward(share * heard.scale * loss)
        return ()

    def update(self, micro: Micro) -> Sequence[Any]:
        """Apply the gradients; repeat with the same inputs and aims if several steps are asked for."""
        now = self.under_way.get(micro.id)
        if now is not None and not self.frozen and self.method.stage_steps > 1:
            p, out = now.p, now.out
            for _ in range(self.method.stage_steps - 1):
                with self.stage.updater.unscheduled():
                    self.stage.update()
                with self._statistics:
                    # The loss that is reported is that of the first step.
                    now.out = self.stage.forward(micro, now.inputs, now.raw.y if self.stage.last else None)
                if not self.stage.last:
                    now.seed = self._seed(micro, now)
                self._backward(micro, now)
            now.p, now.out = p, out
        self.stage.update()
        return ()

    def correct(self, micro: Micro, *state: Tensor) -> Sequence[Any]:
        """Correct the predicted input, now that the state is there."""
        assert self.source is not None
        now = self.under_way[micro.id]
        assert now.lam is not None
        if state:
            (now.x,) = state
        kappa = now.p if self.replays else now.kappa
        values = BorderValues(now.lam, now.x, now.p, kappa, self._beta(micro))
        if now.x is not None and micro.ends and micro.update % self.method.measure == 0:
            self.records.append(measure_border(self.method, self.rule, values, micro.update))
        self.source.correct(micro, now.raw, values)
        self.stage.freed_beside(micro.id)
        if self.method.echo != 0.0 and self.stage.last and now.x is not None:
            self._true_state = micro, now.raw, now.x
        self._count(micro)
        if self.replays:
            del self.under_way[micro.id]
        return ()

    def _count(self, micro: Micro) -> None:
        self._batches += micro.index == micro.count - 1

    # ---------------------------------------------------------------- what predicts

    def update_auxiliary(self, micro: Micro) -> Sequence[Any]:
        """Apply what the predictions have learned."""
        assert self.source is not None
        self.source.update(self._batches)
        self._batches = 0
        return ()

    def reduce(self, micro: Micro, *above: list[Tensor]) -> Sequence[Any]:
        """Add up the gradients of a shared network, from the last stage down."""
        assert self.source is not None
        below = self.source.reduce(above[0] if above else None)
        return (below,) if self.index > 1 and not self.shallow else ()

    def spread(self, micro: Micro, *below: list[Tensor]) -> Sequence[Any]:
        """Hand the sums up again, and update all copies alike."""
        assert self.source is not None
        above = self.source.spread(below[0] if below else None)
        self.update_auxiliary(micro)
        return () if self.stage.last else (above,)

    def learn(self, micro: Micro, gradient: Tensor) -> Sequence[Any]:
        """Teach the synthesiser what the gradient was."""
        assert self.synthesis is not None
        now = self.under_way[micro.id]
        self.synthesis.learn(now.out, now.raw.y, gradient)
        return ()

    # ------------------------------------------------------------------ around it

    def route(self, path: str | None) -> Any:
        if path == "auxiliary" or (path is None and self.shallow):
            return Shortcut(self.stage, self.source)
        return super().route(path)

    def _kept_state(self) -> dict[str, Any]:
        true = self._true_state
        return {
            "under_way": {number: _as_dict(now) for number, now in self.under_way.items()},
            "true_state": None if true is None else (asdict(true[0]), tuple(true[1]), true[2]),
            "batches": self._batches,
            "records": [astuple(record) for record in self.records],
        }

    def _load_kept(self, state: Mapping[str, Any]) -> None:
        self.under_way = {
            number: _UnderWay(**{**saved, "raw": Raw(*saved["raw"])}) for number, saved in state["under_way"].items()
        }
        true = state["true_state"]
        self._true_state = None if true is None else (Micro(**true[0]), Raw(*true[1]), true[2])
        self._batches = state["batches"]
        self.records = deque((BorderRecord(*record) for record in state["records"]), maxlen=MOST_RECORDS)

    def applied(self, kind: Kind) -> Sequence[Updater] | None:
        if kind in (kinds.UPDATE_AUXILIARY, kinds.REDUCE) and self.source is not None:
            return [trained.updater for trained in self.source.trained().values()]
        return super().applied(kind)

    def trained(self) -> dict[str, Trained]:
        found = self.source.trained() if self.source is not None else {}
        return {**found, "synthesiser": self.synthesis.net} if self.synthesis is not None else found

    def measured(self, seconds: Mapping[str, float], micros: int, batches: int) -> LocalStatistics:
        return LocalStatistics(
            stage=self.index,
            seconds=time_by_part(seconds),
            micros=micros,
            batches=batches,
            records=list(self.records),
            cosines=list(self.probe.found[self.index]) if self.probe is not None else [],
            capacity=self.source.capacity if self.source is not None else None,
        )

    def _beta(self, micro: Micro) -> float:
        return self.method.beta_at(micro.update) * micro.scale


def _as_dict(now: _UnderWay) -> dict[str, Any]:
    known = {field.name: getattr(now, field.name) for field in fields(now)}
    return {**known, "raw": tuple(now.raw)}


class TableStation(BorderStation):
    """A stage with stored auxiliary variables: samples that have not been met go through the network once first.

    **Arguments** (besides those of `BorderStation`): `roster`: the samples met so far, the same on every stage; that of
    the source where there is one.
    """

    def __init__(
        self,
        stage: Stage,
        method: BorderMethod,
        source: TableSource | None,
        roster: Roster,
        probe: GradientProbe | None = None,
        *,
        alone: bool = True,
    ) -> None:
        super().__init__(stage, method, source, None, probe, alone=alone)
        self.roster = roster

    def operations(self) -> Mapping[Kind, Operation]:
        return {**super().operations(), kinds.INTRODUCE: self.introduce}

    def recognise(self, x: Any) -> bool:
        return self.roster.unknown(sample_keys(x))

    def introduce(self, micro: Micro, *below: Any) -> Sequence[Any]:
        """Begin with true inputs for new samples."""
        raw = self.under_way[micro.id].raw
        inputs = raw.x if self.stage.first else below[0]
        if isinstance(self.source, TableSource):
            self.source.store(raw, inputs, only_new=True)
        else:
            self.roster.enter(sample_keys(raw.x), self.index)
        return () if self.stage.last else (self._pass(micro, inputs),)

    @torch.no_grad()
    def _pass(self, micro: Micro, inputs: Any) -> Any:
        options = self.stage.options
        with self._statistics, options.random(self.index, micro.id), options.autocast():
            return self.stage.module(inputs)

    def _kept_state(self) -> dict[str, Any]:
        return {**super()._kept_state(), "stored": self.stored()}

    def _load_kept(self, state: Mapping[str, Any]) -> None:
        super()._load_kept(state)
        self.load_stored(state["stored"])

    def stored(self) -> dict[str, Tensor]:
        return {**self.roster.tensors(), **(self.source.tensors() if self.source is not None else {})}

    def load_stored(self, found: dict[str, Tensor]) -> None:
        self.roster.load_tensors(found)
        if self.source is not None:
            self.source.load_tensors(found)


def given_multiplier(function: Any, border: int, raw: Raw, like: Tensor) -> Tensor:
    """What a user's function says, if it fits the border."""
    found = function(border, raw.x, raw.y)
    if not isinstance(found, Tensor) or found.shape != like.shape:
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"the multiplier function must return a tensor of shape {tuple(like.shape)} for border {border}, the state "
            f"of this batch there, got {got}"
        )
    return found.detach()


def checksum(tree: Any) -> float:
    """A CRC-32 of all bytes, as a number that JSON carries exactly.

    >>> checksum(torch.zeros(3)) == checksum(torch.zeros(3)), checksum(torch.zeros(3)) == checksum(torch.ones(3))
    (True, False)
    """
    value = 0
    for t in flatten(tree)[0]:
        value = zlib.crc32(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return float(value)


def check_same(raw: Raw, expected: float, micro: Micro, stage: int) -> None:
    """Raise `DataError` unless raw data has the checksum that the first rank found."""
    got = checksum((raw.x, raw.y))
    if got != expected:
        raise DataError(
            f"stage {stage} has other data for {micro} than stage 0 (checksums {got:.0f} and {expected:.0f}): with "
            'data="build" every rank must use the same sampler seed and the same augmentation stream'
        )
