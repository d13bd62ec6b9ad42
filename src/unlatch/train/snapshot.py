"""A run to a checkpoint and back.

A drained run is stored by original parameter names, so that stages and methods do not matter. A run with batches under
way is stored as it is (see `exact`), with what it takes to build it again: where it cannot go on as it was, it is
rebuilt, drained, and then taken over by names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..errors import CheckpointMismatch, ConfigError, PlanError, ScheduleError, ShapeMismatch, UnlatchError
from ..io import checkpoint
from ..io.checkpoint import Checkpoint
from ..methods import Method, get
from ..plan import Plan, plan_from_json, plan_to_json
from ..problems import explain
from ..runtime.beside import beside_settings, beside_tensors, load_beside
from ..runtime.engine import Engine
from ..runtime.stage import Stage
from ..runtime.updating import beside, completed, plain_part
from ..transport.rounding import Format

__all__ = [
    "Identity",
    "Named",
    "Saved",
    "compare_names",
    "compare_optimizers",
    "facts",
    "load_named",
    "merged",
    "model_state",
    "named",
    "only_for",
    "read",
    "tolerating",
]

Names = Mapping[int, Mapping[str, str]]

_OPTIMIZER, _BESIDE = "optim", "beside"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Identity(_Strict):
    """What must be alike for a run to go on with the batches that another one had under way.

    **Arguments:**

    - `method`, `options`: as `methods.get` takes them; no options if JSON cannot hold them.
    - `text`: the method in full.
    - `plan`: where the model is cut and what runs where.
    - `optimizer`: the kind, if anything is trained.
    - `messages`: how they travel; those under way are in that form.
    - `replicas`: of the network.
    """

    method: str
    options: dict[str, Any] | None
    text: str
    plan: dict[str, Any]
    mean_loss: bool
    optimizer: str | None
    messages: Format = "exact"
    replicas: int = Field(1, ge=1)

    @classmethod
    def of(
        cls,
        method: Method,
        plan: Plan,
        mean_loss: bool,
        optimizer: str | None,
        *,
        messages: Format = "exact",
        replicas: int = 1,
    ) -> Identity:
        """That of a run."""
        options: dict[str, Any] | None
        try:
            options = json.loads(json.dumps(method.arguments))
        except (TypeError, ValueError):
            options = None
        described = json.loads(json.dumps(plan_to_json(plan)))
        return cls(
            method=method.address,
            options=options,
            text=_in_full(method),
            plan=described,
            mean_loss=mean_loss,
            optimizer=optimizer,
            messages=messages,
            replicas=replicas,
        )

    def matches(self, other: Identity) -> bool:
        """Whether both runs do the same; measured costs and notes in the plan change nothing."""
        return self._essence() == other._essence()

    def _essence(self) -> tuple[Any, ...]:
        plan = [self.plan.get(key) for key in ("blocks", "starts", "tasks", "options")]
        return (self.text, plan, self.mean_loss, self.optimizer, self.messages, self.replicas)

    def made(self, path: Path) -> tuple[Method, Plan]:
        """The method and the plan themselves."""
        try:
            if self.options is None:
                raise UnlatchError("its options hold functions, which no file can")
            method = get(self.method, **self.options)
            if _in_full(method) != self.text:
                raise UnlatchError(f"it is {method} here")
            return method, plan_from_json(self.plan, str(path))
        except UnlatchError as error:
            raise CheckpointMismatch(
                f"{path} has batches under way in {self.text}, which cannot be built again to finish them ({error}): "
                "load it into a run of the same method, cut and optimizer, or save with exact=False"
            ) from error


def _in_full(method: Method) -> str:
    """A method with all its options, those included that it does not show."""
    # Functions are shown with their address, which is another one in each process.
    shown = (f"{name}={re.sub(' at 0x[0-9a-f]+', '', repr(value))}" for name, value in method.arguments.items())
    return f"{method.address}({', '.join(shown)})"


class _Loop(BaseModel):
    """How far the run is; sessions add their own."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    batches: int = Field(0, ge=0)
    micros: int = Field(0, ge=0)
    updates: int = Field(0, ge=0)
    under_way: int = Field(0, ge=0)


class _StageSettings(_Strict):
    kind: str
    place: list[int | str]
    groups: list[dict[str, Any]]
    schedule: dict[str, Any]


class _Exact(_Strict):
    structure: Any
    tensors: list[str]
    orders: dict[str, list[int]] = {}


class Saved(_Strict):
    """What `state.json` says of a run.

    **Arguments:**

    - `loop`: how far it is.
    - `run`: what it was.
    - `random`: per rank, where random numbers go on.
    - `optimizer`: numbers of the optimizer, by parameter.
    - `kind`, `groups`, `schedule`, `stages`: its hyper-parameters, common to all stages and per stage.
    - `beside`: how what is trained beside the network is put together.
    - `exact`: the same for what is under way.
    """

    loop: _Loop
    run: Identity | None = None
    random: list[dict[str, Any]] = []
    optimizer: dict[str, Any] = {}
    kind: str | None = None
    groups: list[dict[str, Any]] = []
    schedule: dict[str, Any] = {}
    stages: list[_StageSettings] = []
    beside: dict[str, Any] = {}
    exact: _Exact | None = None


def read(path: Path) -> tuple[Checkpoint, Saved]:
    """A checkpoint and what it says, checked as far as a file can be."""
    content = checkpoint.read(path)
    return content, _checked(path, content.state)


def facts(path: Path) -> Saved:
    """What a checkpoint says; its tensors are neither read nor checked."""
    return _checked(path, checkpoint.state(path))


def _checked(path: Path, state: Mapping[str, Any]) -> Saved:
    try:
        return Saved.model_validate(state)
    except ValidationError as error:
        raise CheckpointMismatch(f"{path / checkpoint.STATE}: state: {explain(error)[0]}") from None


@contextmanager
def tolerating(path: Path) -> Iterator[None]:
    """A checkpoint whose parts do not fit together is named as such, wherever that shows."""
    try:
        yield
    except CheckpointMismatch as error:
        if str(path) in str(error):
            raise
        raise CheckpointMismatch(f"{path}: {error}") from error
    except (ConfigError, PlanError, ScheduleError, ShapeMismatch) as error:
        raise CheckpointMismatch(f"{path}: does not fit this run: {error}") from error
    except UnlatchError:
        raise
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError) as error:
        raise CheckpointMismatch(
            f"{path}: {checkpoint.STATE} and the tensors do not fit this run: {type(error).__name__}: {error}"
        ) from error


# ------------------------------------------------------------------------ by names


class Named(NamedTuple):
    """One rank's part of a drained run: tensors by original names, and plain values."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    numbers: dict[str, Any]
    settings: list[dict[str, Any]]
    beside: dict[str, Tensor]
    beside_settings: dict[str, Any]


def model_state(stages: Iterable[Stage], names: Names) -> dict[str, Tensor]:
    """Weights and buffers of these stages under their original names."""
    return {names[s.index][key]: t for s in stages for key, t in s.module.state_dict().items()}


def named(engine: Engine, names: Names, layout: Sequence[int]) -> Named:
    """The part of this rank; `layout` is the cut that what is trained beside the network belongs to."""
    for stage in engine.stages.values():
        stage.updater.forget()
    stages, stations = engine.original_stages.values(), engine.originals.values()
    return Named(
        model_state(stages, names),
        *_optimizer_state(stages, names),
        _settings(stages, names),
        beside_tensors(stations),
        beside_settings(stations, layout),
    )


def merged(parts: Sequence[Named], facts: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of all ranks' parts, with `facts` beside them."""
    state = {
        **facts,
        "optimizer": {k: v for part in parts for k, v in part.numbers.items()},
        **_common([stage for part in parts for stage in part.settings]),
        "beside": {k: v for part in parts for k, v in part.beside_settings.items()},
    }
    tensors = {
        _OPTIMIZER: {k: v for part in parts for k, v in part.optimizer.items()},
        _BESIDE: {k: v for part in parts for k, v in part.beside.items()},
    }
    model = {k: v for part in parts for k, v in part.model.items()}
    return Checkpoint(model, state, {name: group for name, group in tensors.items() if group})


def only_for(content: Checkpoint, names: Iterable[str], stations: Iterable[int]) -> Checkpoint:
    """What a rank with these parameters and stations needs of a checkpoint."""
    wanted, beside = set(names), tuple(f"stage{index}/" for index in stations)
    extra = {
        _OPTIMIZER: {k: v for k, v in content.extra.get(_OPTIMIZER, {}).items() if k.rsplit("/", 1)[0] in wanted},
        _BESIDE: {k: v for k, v in content.extra.get(_BESIDE, {}).items() if k.startswith(beside)},
    }
    return Checkpoint({k: v for k, v in content.model.items() if k in wanted}, {}, extra)


def load_named(
    path: Path, content: Checkpoint, saved: Saved, engine: Engine, names: Names, layout: Sequence[int], optimizer: bool
) -> None:
    """Take over weights and, if asked to, all that belongs to the `optimizer`; nothing may be under way."""
    for stage in engine.stages.values():
        own = names[stage.index]
        for key, t in stage.module.state_dict(keep_vars=True).items():
            found = content.model[own[key]]
            if found.shape != t.shape:
                raise CheckpointMismatch(
                    f"{path}: {own[key]} has shape {tuple(found.shape)} there and {tuple(t.shape)} in the model"
                )
            t.data.copy_(found)
        # What is predicted from belongs to the weights before.
        stage.updater.forget()
        if optimizer and stage.updater.optimizer is not None:
            _restore_optimizer(path, stage, own, content, saved)
    if optimizer:
        beside_it = engine.device.here(dict(content.extra.get(_BESIDE, {})))
        load_beside(engine.stations.values(), layout, beside_it, saved.beside)
        engine.restore_counters(saved.loop.model_dump())


def compare_names(path: Path, expected: set[str], got: set[str]) -> None:
    """Refuse a checkpoint of another model."""
    missing, surplus = sorted(expected - got), sorted(got - expected)
    if missing or surplus:
        raise CheckpointMismatch(
            f"{path} is not a checkpoint of this model: missing {missing[:3] or 'nothing'}, not in the model "
            f"{surplus[:3] or 'nothing'} ({len(missing)} and {len(surplus)} in all)"
        )


def compare_optimizers(path: Path, theirs: str | None, own: str | None) -> None:
    """Refuse a checkpoint whose optimizer is of another kind."""
    if theirs != own:
        raise CheckpointMismatch(
            f"{path} was written with {theirs}, this run uses {own}: pass optimizer=False to take over only the weights"
        )


def _parameter_names(stage: Stage, names: Mapping[str, str]) -> dict[int, str]:
    """Original names of a stage's trained parameters, by identity."""
    return {id(t): names[key] for key, t in stage.module.state_dict(keep_vars=True).items()}


def _optimizer_state(stages: Iterable[Stage], names: Names) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for stage in stages:
        if stage.updater.optimizer is None:
            continue
        known = _parameter_names(stage, names[stage.index])
        for p, state in stage.updater.optimizer.state.items():
            for key, value in state.items():
                target: dict[str, Any] = tensors if isinstance(value, Tensor) else numbers
                target[f"{known[id(p)]}/{key}"] = value
    return tensors, numbers


def _place(stage: Stage, names: Mapping[str, str]) -> list[Any]:
    """Which stage of which cut it is."""
    return [stage.updater.place.count, *sorted(_parameter_names(stage, names).values())]


def _settings(stages: Iterable[Stage], names: Names) -> list[dict[str, Any]]:
    """Hyper-parameters and learning-rate schedule of each stage."""
    found = []
    for stage in stages:
        if stage.updater.optimizer is not None:
            listed = stage.updater.optimizer.param_groups
            groups = [plain_part({k: v for k, v in g.items() if k != "params"}, tensors=False) for g in listed]
            schedule = stage.updater.scheduler.state_dict() if stage.updater.scheduler is not None else {}
            found.append(
                {
                    "kind": type(stage.updater.optimizer).__name__,
                    "place": _place(stage, names[stage.index]),
                    "groups": groups,
                    "schedule": plain_part(schedule, tensors=False),
                }
            )
    return found


def _common(settings: list[dict[str, Any]]) -> dict[str, Any]:
    """What every stage has alike, which fits any cut; and where they differ, each by itself, for the same cut."""
    if not settings:
        return {}
    columns = zip_longest(*(stage["groups"] for stage in settings))
    common = {
        "kind": settings[0]["kind"],
        "groups": [_alike([group for group in column if group is not None]) for column in columns],
        "schedule": _alike([stage["schedule"] for stage in settings]),
    }
    if all(all(common[key] == stage[key] for key in common) for stage in settings):
        return common
    return {**common, "stages": settings}


def _alike(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {k: v for k, v in states[0].items() if all(k in other and other[k] == v for other in states[1:])}


def _restore_optimizer(path: Path, stage: Stage, names: Mapping[str, str], content: Checkpoint, saved: Saved) -> None:
    optimizer = stage.updater.optimizer
    assert optimizer is not None
    compare_optimizers(path, saved.kind, type(optimizer).__name__)
    known = _parameter_names(stage, names)
    optimizer.state.clear()
    entries: dict[str, dict[str, Any]] = {}
    for source in (content.extra.get(_OPTIMIZER, {}), saved.optimizer):
        for full, value in source.items():
            name, key = full.rsplit("/", 1)
            entries.setdefault(name, {})[key] = value
    for p in stage.params:
        state = entries.get(known[id(p)], {})
        if state:
            own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            optimizer.state[p] = {k: beside(p, k, v, optimizer) for k, v in own.items()}
    place = _place(stage, names)
    settings: Saved | _StageSettings = next((one for one in saved.stages if one.place == place), saved)
    for group, found in zip(optimizer.param_groups, settings.groups, strict=False):
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in found.items()})
    if stage.updater.scheduler is not None and settings.schedule:
        scheduler = stage.updater.scheduler
        scheduler.load_state_dict(completed(scheduler.state_dict(), settings.schedule))
    stage.updater.forget()
