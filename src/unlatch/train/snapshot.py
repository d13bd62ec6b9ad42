"""Run state to checkpoint and back, by original parameter names, so that stages and methods do not matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointMismatch
from ..io import checkpoint
from ..runtime.beside import beside_settings, beside_tensors, load_beside
from ..runtime.engine import Engine
from ..runtime.stage import Stage
from ..runtime.updating import completed, plain_part
from ..transport.world import World

__all__ = ["load", "model_state", "save"]

Names = Mapping[int, Mapping[str, str]]


def model_state(stages: Iterable[Stage], names: Names) -> dict[str, Tensor]:
    """Weights and buffers of these stages under their original names."""
    return {names[s.index][key]: t for s in stages for key, t in s.module.state_dict().items()}


def save(
    path: Path, engine: Engine, names: Names, world: World, loop: dict[str, Any], layout: Sequence[int]
) -> None:
    """Write one checkpoint from the stages of all ranks; `layout` is the cut that what is beside them belongs to."""
    stages = engine.stages.values()
    for stage in stages:
        stage.updater.forget()
    own = (model_state(stages, names), *_optimizer_state(stages, names), _settings(stages, names))
    parts = world.gather(own)
    stations = engine.stations.values()
    beside = world.gather((beside_tensors(stations), beside_settings(stations, layout)))
    error: Exception | None = None
    if world.rank == 0:
        state = {
            "loop": {**loop, **engine.counters()},
            "optimizer": {k: v for _, _, scalars, _ in parts for k, v in scalars.items()},
            **_common([stage for *_, settings in parts for stage in settings]),
            "beside": {k: v for _, settings in beside for k, v in settings.items()},
        }
        extra = {k: v for tensors, _ in beside for k, v in tensors.items()}
        try:
            checkpoint.write(
                path,
                model={k: v for model, *_ in parts for k, v in model.items()},
                optimizer={k: v for _, tensors, *_ in parts for k, v in tensors.items()},
                state=state,
                extra={"beside": extra} if extra else None,
            )
        except Exception as failure:  # the other ranks must not wait for a folder that will not come
            error = failure
    if (problem := world.broadcast(error)) is not None:
        raise problem


def load(
    path: Path, engine: Engine, names: Names, world: World, layout: Sequence[int], *, optimizer: bool
) -> dict[str, Any]:
    """Read a checkpoint into the stages of this rank. **Returns:** the loop state."""
    found = checkpoint.read(path)
    expected = {name for part in world.gather({n for s in names.values() for n in s.values()}) for name in part}
    _compare_names(path, expected, set(found.model))
    for stage in engine.stages.values():
        own = names[stage.index]
        for key, t in stage.module.state_dict(keep_vars=True).items():
            saved = found.model[own[key]]
            if saved.shape != t.shape:
                raise CheckpointMismatch(
                    f"{path}: {own[key]} has shape {tuple(saved.shape)} there and {tuple(t.shape)} in the model"
                )
            t.data.copy_(saved)
        if optimizer and stage.updater.optimizer is not None:
            _restore_optimizer(path, stage, own, found)
    loop: dict[str, Any] = found.state.get("loop", {})
    if optimizer:
        tensors, settings = found.extra.get("beside", {}), found.state.get("beside", {})
        load_beside(engine.stations.values(), layout, tensors, settings)
        engine.restore_counters(loop)
    return loop


def _compare_names(path: Path, expected: set[str], got: set[str]) -> None:
    missing, surplus = sorted(expected - got), sorted(got - expected)
    if missing or surplus:
        raise CheckpointMismatch(
            f"{path} is not a checkpoint of this model: missing {missing[:3] or 'nothing'}, not in the model "
            f"{surplus[:3] or 'nothing'} ({len(missing)} and {len(surplus)} in all)"
        )


def _parameter_names(stage: Stage, names: Mapping[str, str]) -> dict[int, str]:
    """Original names of a stage's trained parameters, by identity."""
    return {id(t): names[key] for key, t in stage.module.state_dict(keep_vars=True).items()}


def _optimizer_state(stages: Iterable[Stage], names: Names) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for stage in stages:
        if stage.updater.optimizer is None:
            continue
        known = _parameter_names(stage, names[stage.index])
        for p, state in stage.updater.optimizer.state.items():
            for key, value in state.items():
                target: dict[str, Any] = tensors if isinstance(value, Tensor) else scalars
                target[f"{known[id(p)]}/{key}"] = value
    return tensors, scalars


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


def _restore_optimizer(path: Path, stage: Stage, names: Mapping[str, str], found: checkpoint.Checkpoint) -> None:
    assert stage.updater.optimizer is not None
    kind = type(stage.updater.optimizer).__name__
    if found.state.get("kind") != kind:
        raise CheckpointMismatch(
            f"{path} was written with {found.state.get('kind')}, this run uses {kind}: pass optimizer=False to take "
            "over only the weights"
        )
    known = _parameter_names(stage, names)
    stage.updater.optimizer.state.clear()
    entries: dict[str, dict[str, Any]] = {}
    for source in (found.optimizer, found.state.get("optimizer", {})):
        for full, value in source.items():
            name, key = full.rsplit("/", 1)
            entries.setdefault(name, {})[key] = value
    for p in stage.params:
        state = entries.get(known[id(p)], {})
        if state:
            stage.updater.optimizer.state[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    place = _place(stage, names)
    settings = next((one for one in found.state.get("stages", []) if one["place"] == place), found.state)
    for group, saved in zip(stage.updater.optimizer.param_groups, settings.get("groups", []), strict=False):
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()})
    if stage.updater.scheduler is not None and settings.get("schedule"):
        scheduler = stage.updater.scheduler
        scheduler.load_state_dict(completed(scheduler.state_dict(), settings["schedule"]))
    stage.updater.forget()
