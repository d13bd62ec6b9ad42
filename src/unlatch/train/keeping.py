"""What checkpoints keep of a run, and how a run takes it over.

An exact checkpoint holds everything that is under way, a drained one what is left when nothing is. Either is the same
whatever ranks wrote it: parts of all ranks become one whole, of which each rank takes its own share again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import NonFinite, UnlatchError
from ..io.checkpoint import Checkpoint
from ..methods import Method
from ..nn.chain import original_names
from ..plan import Plan
from ..runtime.blueprint import Blueprint
from ..runtime.engine import Engine
from ..transport.link import Carrier
from ..transport.rounding import Format
from . import snapshot
from .batching import Compensation
from .exact import packed, random_state, restore_random, share, unpacked, whole
from .guard import Snapshot

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Keeping"]

log = logging.getLogger("unlatch")

#: The file of a checkpoint with the tensors that a session keeps.
_SESSION = "session"


class Keeping:
    """Of one rank.

    **Arguments:**

    - `compensation`: holds batches that wait to be joined.
    - `rebuild`: makes a run of the same model by another method, cut and format of messages, in this process alone.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        method: Method,
        engine: Engine,
        links: Sequence[Carrier],
        compensation: Compensation,
        rebuild: Callable[[Method, Plan, Format, int], Run],
    ) -> None:
        self._method, self._plan, self._engine, self._links = method, blueprint.plan, engine, links
        self._world, self._compensation, self._rebuild = blueprint.world, compensation, rebuild
        self._messages, self._replicas = blueprint.messages, blueprint.replicas
        self._checks_finite = blueprint.options.checks_finite
        #: For each stage here, what its tensors are called in the whole model.
        self.names = {s.index: original_names(s.module, blueprint.model) for s in engine.stages.values()}
        optimizers = [s.updater.optimizer for s in engine.stages.values() if s.updater.optimizer is not None]
        self._optimizer = type(optimizers[0]).__name__ if optimizers else None

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue where the run was whose state this is; the tensors are used as they are."""
        state = self._engine.device.here(state)
        self._engine.load(state)
        self._engine.mail.load(state["mail"])
        self._compensation.load(state["joining"])

    def under_way(self) -> Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]:
        """Copies of the weights and the state. Training may go on: the result waits for what is still on the wire."""
        engine = self._engine
        cut = engine.mail.cut(link.peer for link in self._links)
        for link in self._links:
            link.mark()
        own = {**engine.state(), "joining": self._compensation.state()}
        device = engine.device
        model, state = device.copied((snapshot.model_state(engine.original_stages.values(), self.names), own))
        return lambda: (model, {**state, "mail": device.on_host(_numbers(cut.wait(engine.mail.failure)))})

    def exact(self, progress: Mapping[str, Any]) -> Snapshot:
        """All that is under way."""
        found, numbers, lost = self.under_way(), random_state(), self._not_finite()
        made = partial(_exact_checkpoint, self._facts(progress), self._engine.devices[0])
        kept = _tensors_in(progress)
        return Snapshot(lambda: (*found(), kept, numbers, lost), partial(self._checked, made))

    def drained(self, progress: Mapping[str, Any]) -> Snapshot:
        part = self.drained_part(_tensors_in(progress))
        return Snapshot(lambda: part, partial(self._checked, partial(_drained, self._facts(progress))))

    def drained_part(self, kept: Mapping[str, Tensor]) -> tuple[Any, ...]:
        own = snapshot.named(self._engine, self.names, self._plan.starts)
        return snapshot.Named(*self._engine.device.copied(tuple(own))), kept, random_state(), self._not_finite()

    def _facts(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        loop = {
            **{name: value for name, value in progress.items() if not isinstance(value, Tensor)},
            "method": repr(self._method),
            "split": self._plan.split,
            "joined": self._compensation.count,
            "under_way": self._engine.under_way,
            **self._engine.counters(),
        }
        return {"loop": loop, "run": self._identity().model_dump()}

    def _not_finite(self) -> NonFinite | None:
        """The first weight of this rank that is not finite."""
        for stage in self._engine.stages.values():
            try:
                stage.updater.check_weights()
            except NonFinite as error:
                return error
        return None

    def _checked(self, made: Callable[[Sequence[Any]], Checkpoint], parts: Sequence[Any]) -> Checkpoint:
        """A checkpoint, unless it is of no use."""
        for *_, lost in parts:
            if lost is not None and self._checks_finite:
                raise lost
            if lost is not None:
                log.warning("a checkpoint is written although %s", lost.found)
        return made(parts)

    def _identity(self) -> snapshot.Identity:
        return snapshot.Identity.of(
            self._method,
            self._plan,
            self._engine.mean_loss,
            self._optimizer,
            messages=self._messages,
            replicas=self._replicas,
        )

    def take_over(self, path: Path, optimizer: bool) -> dict[str, Any] | Exception:
        """What the checkpoint says, or what is wrong with it, on every rank alike."""
        world, engine = self._world, self._engine
        names = {name for part in self.names.values() for name in part.values()}
        own = {station.index for station in engine.stations.values()}
        ranks = world.gather((names, set(engine.stations), own, engine.leads))
        shares: list[Any] | None = None
        if world.rank == 0:
            try:
                with snapshot.tolerating(path):
                    shares = self._shares(path, ranks, optimizer)
            except (UnlatchError, OSError) as error:
                shares = [error] * world.size
        mine = world.share_out(shares)
        if isinstance(mine, Exception):
            return mine
        content, state, saved, kept = mine
        problem: UnlatchError | None = None
        try:
            with snapshot.tolerating(path):
                self._load(path, content, state, saved, optimizer)
        except UnlatchError as error:
            problem = error
        wrong = [found for found in world.gather(problem) if found is not None]
        return wrong[0] if wrong else {**saved.loop.model_dump(), **kept}

    def _shares(self, path: Path, ranks: list[Any], optimizer: bool) -> list[Any]:
        """For each rank what it takes over: tensors by name, or what was under way."""
        content, saved = snapshot.read(path)
        everything = set(content.model)
        kept = [_share_of(content.extra.get(_SESSION, {}), names, everything) for names, *_ in ranks]
        snapshot.compare_names(path, {name for names, *_ in ranks for name in names}, set(content.model))
        brief = saved.model_copy(update={"exact": None})
        if saved.exact is not None:
            assert saved.run is not None
            if optimizer:
                snapshot.compare_optimizers(path, saved.run.optimizer, self._optimizer)
            state = unpacked(content)
            if optimizer and saved.run.matches(self._identity()):
                shares = [(None, share(state, stations, leads), brief) for _, stations, _, leads in ranks]
                return [(*one, own) for one, own in zip(shares, kept, strict=True)]
            if optimizer or saved.run.optimizer == self._optimizer:
                content, brief = self._finished(path, state, saved)
        parts = [snapshot.only_for(content, names, own) for names, _, own, _ in ranks]
        return [(part, None, brief, own) for part, own in zip(parts, kept, strict=True)]

    def _finished(
        self, path: Path, state: Mapping[str, Any], saved: snapshot.Saved
    ) -> tuple[Checkpoint, snapshot.Saved]:
        """Finish what is under way in a run like the one that it is from."""
        assert saved.run is not None
        again = self._rebuild(*saved.run.made(path), saved.run.messages, saved.run.replicas)
        again.restore(state)
        again.flush()
        loop = {**saved.loop.model_dump(), **again._engine.counters()}
        content = _drained({"loop": loop}, [again._keeping.drained_part({})])
        return content, snapshot.Saved.model_validate(content.state)

    def _load(self, path: Path, content: Any, state: Any, saved: snapshot.Saved, optimizer: bool) -> None:
        if state is None:
            args = (content, saved, self._engine, self.names, self._plan.starts, optimizer)
            snapshot.load_named(path, *args)
            return
        self.go_on(state)
        if self._world.rank < len(saved.random):
            restore_random(saved.random[self._world.rank])


def _exact_checkpoint(facts: Mapping[str, Any], leader: int, parts: Sequence[Any]) -> Checkpoint:
    model = {name: t for own, *_ in parts for name, t in own.items()}
    state = whole([state for _, state, *_ in parts], leader)
    return _with_kept(packed(model, state, {**facts, "random": [numbers for *_, numbers, _ in parts]}), parts)


def _drained(facts: Mapping[str, Any], parts: Sequence[Any]) -> Checkpoint:
    numbers = [numbers for *_, numbers, _ in parts]
    return _with_kept(snapshot.merged([own for own, *_ in parts], {**facts, "random": numbers}), parts)


def _numbers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which losses that nobody has read yet are numbers."""
    return [m | {"scalars": {k: float(v) for k, v in m["scalars"].items()}} if m["scalars"] else m for m in messages]


def _tensors_in(progress: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in progress.items() if isinstance(value, Tensor)}


def _with_kept(content: Checkpoint, parts: Sequence[Any]) -> Checkpoint:
    """A checkpoint with the tensors that a session keeps."""
    kept = {name: t for *_, own, _, _ in parts for name, t in own.items()}
    return replace(content, extra={**content.extra, _SESSION: kept}) if kept else content


def _share_of(kept: Mapping[str, Tensor], names: Collection[str], everything: Collection[str]) -> dict[str, Tensor]:
    """What a rank with parameters of these names needs of it."""
    ends = {name: name.partition("/")[2] for name in kept}
    return {name: t for name, t in kept.items() if ends[name] in names or ends[name] not in everything}
