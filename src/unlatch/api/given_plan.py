"""A plan file, as `unlatch plan` writes it, on its way to a run: which method, how many stages, which task where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PlanError
from ..lookup import did_you_mean
from ..methods import LayerPipe, Method
from ..methods import get as get_method
from ..methods.layerpipe.planning import Precision
from ..nn.chain import Block
from ..plan.json_file import read_json
from ..plan.layer_groups import Span, group_blocks, linear_of
from ..plan.retiming import retime
from ..plan.task_plan import TaskPlan, merge_whole_layers, shift_weight_gradients
from ..plan.tasks import MODES, Task, by_task

__all__ = ["GivenPlan", "follow_tasks", "read_plan"]

_KINDS = {int: "a whole number", str: "a text", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class GivenPlan:
    """What a plan file asks for.

    **Arguments:**

    - `options`: of the method.
    - `stages`: or processors with something to do, where tasks are placed.
    - `split`: names of the layers that start the second and later stages; `None` where tasks are placed.
    - `tasks`, `names`, `loads`: where tasks are placed, the layers' names, and the time of each processor.
    """

    source: str
    method: str
    options: dict[str, Any]
    stages: int
    split: tuple[str, ...] | None = None
    tasks: tuple[Task, ...] = ()
    names: tuple[str, ...] = ()
    loads: tuple[float, ...] = field(default=())


def read_plan(path: str | Path, method: str | None = None) -> GivenPlan:
    """Read what `unlatch plan --json` or `-o` wrote.

    **Arguments:** `method`: which one of a ranking (`--method auto`); the best by default.
    """
    data = read_json(path, "plan file")
    if not isinstance(data, dict) or data.get("method") not in ("auto", "layerpipe", "pipedream"):
        got = f"method {data.get('method')!r}" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise PlanError(f"the plan file {path} is none: expected what `unlatch plan --json` prints, got {got}")
    if data["method"] == "auto":
        return _known(_chosen(data, str(path), method))
    if method not in (None, data["method"]):
        raise PlanError(f"the plan file {path} is for {data['method']}, not for {method}: leave --method out")
    return _known((_placed if data["method"] == "layerpipe" else _straight)(data, str(path)))


def _known(given: GivenPlan) -> GivenPlan:
    """The plan if there is such a method with such options."""
    try:
        get_method(given.method, **given.options)
    except (ConfigError, TypeError) as error:
        raise PlanError(f"the plan file {given.source}: {error}") from None
    return given


def _chosen(data: Mapping[str, Any], source: str, method: str | None) -> GivenPlan:
    ranking: dict[str, Any] = {_get(one, "method", str, source): one for one in _items(data, "ranking", source)}
    if not ranking:
        raise PlanError(f"the plan file {source}: the ranking is empty")
    name = next(iter(ranking)) if method is None else method
    if name not in ranking:
        raise PlanError(
            f"the plan file {source} does not rank {name!r}.{did_you_mean(name, ranking)} Known: {', '.join(ranking)}"
        )
    config = _get(ranking[name], "config", dict, source)
    options = {key: value for key, value in _get(config, "method", dict, source).items() if key != "name"}
    if ranking[name].get("placement") is not None:
        placed = _placed(_get(ranking[name], "placement", dict, source), source)
        return GivenPlan(
            source, name, placed.options | options, placed.stages, None, placed.tasks, placed.names, placed.loads
        )
    run = _get(config, "run", dict, source)
    return GivenPlan(source, name, options, *_cut(_get(run, "stages", int, source), run.get("split", []), source))


def _straight(data: Mapping[str, Any], source: str) -> GivenPlan:
    stages = _items(data, "stages", source)
    for number, stage in enumerate(stages):
        if _get(stage, "replicas", int, source) != 1:
            raise PlanError(
                f"the plan file {source} gives stage {number} {stage['replicas']} workers, but training runs each "
                "stage on one: plan without --replicate"
            )
    return GivenPlan(source, "pipedream", {}, *_cut(len(stages), data.get("split"), source))


def _cut(stages: int, split: Any, source: str) -> tuple[int, tuple[str, ...]]:
    if stages < 1:
        raise PlanError(f"the plan file {source} is damaged: expected at least 1 stage, got {stages}")
    if not isinstance(split, list) or len(split) != stages - 1 or not all(isinstance(name, str) for name in split):
        raise PlanError(
            f"the plan file {source} is damaged: expected split to name the {stages - 1} layers that start the second "
            f"and later of {stages} stages, got {split!r:.60}"
        )
    return stages, tuple(split)


def _placed(data: Mapping[str, Any], source: str) -> GivenPlan:
    if data.get("contiguous") is False:
        raise PlanError(
            f"the plan file {source} places tasks anywhere, but training follows plans in a row: "
            "plan with --placement row"
        )
    tasks, names = [], dict[int, str]()
    for one in _items(data, "tasks", source):
        kind, layer = _get(one, "task", str, source), _get(one, "layer", int, source)
        if kind not in ("F", "D", "G", "H"):
            raise PlanError(f"the plan file {source}: a task is F, D, G or H, got {kind!r}")
        fraction = _get(one, "fraction", int | float, source)
        if not 0 < fraction <= 1:
            raise PlanError(f"the plan file {source}: a fraction is above 0 and at most 1, got {fraction}")
        share = Fraction(fraction).limit_denominator(10**9)
        tasks.append(Task(kind, layer, _get(one, "processor", int, source), share))
        names[layer] = _get(one, "name", str, source)
    shares = by_task(tasks)
    count = len(names)
    missing = [f"{kind} of layer {n}" for n in range(count) for kind in "FDG" if (kind, n) not in shares]
    missing = [what for what in missing if what != "D of layer 0"]
    if not tasks or missing or sorted(names) != list(range(count)):
        raise PlanError(f"the plan file {source} is incomplete: {', '.join(missing) or 'some layers have no tasks'}")
    for (kind, layer), parts in shares.items():
        if abs(float(sum(part.fraction for part in parts)) - 1) > 1e-6 or len({part.processor for part in parts}) < len(
            parts
        ):
            shown = ", ".join(f"{float(part.fraction):g} on {part.processor}" for part in parts)
            raise PlanError(
                f"the plan file {source}: shares of {kind} of layer {layer} must be on different processors and add up "
                f"to 1, got {shown}"
            )
    if data.get("mode") not in MODES:
        raise PlanError(f"the plan file {source}: mode must be one of {', '.join(MODES)}, got {data.get('mode')!r:.60}")
    loads = _get(data, "loads", list, source)
    if any(isinstance(load, bool) or not isinstance(load, int | float) or not 0 <= load < 1e308 for load in loads):
        raise PlanError(f"the plan file {source} is damaged: expected numbers from 0 on as loads, got {loads!r:.60}")
    used = sorted({task.processor for task in tasks})
    if used[0] < 0 or used[-1] >= len(loads):
        raise PlanError(f"the plan file {source} has loads of {len(loads)} processors, but uses {used}")
    return GivenPlan(
        source,
        "layerpipe",
        {"mode": data["mode"]},
        len(used),
        None,
        tuple(tasks),
        tuple(names[layer] for layer in range(count)),
        tuple(float(loads[processor]) for processor in used),
    )


def follow_tasks(given: GivenPlan, blocks: Sequence[Block], method: Method, precision: Precision = "fp32") -> TaskPlan:
    """The plan of a file for a model; processors with nothing to do are left out.

    Its layers must be those of the model: one per block, or one per block with weights together with what follows it.
    """
    if not isinstance(method, LayerPipe):
        raise ConfigError(f"{given.source} places tasks of layerpipe, not of {method.name}")
    spans = group_blocks(blocks)
    numbers = _numbers(given, blocks, spans)
    linear = [linear_of(blocks, span, precision) for span in spans]
    tasks = []
    for kind, layer, processor, fraction, _ in given.tasks:
        if layer in numbers:
            number = numbers[layer]
            found = linear[number]
            # Other layers than linear maps multiply with their derivatives themselves.
            if kind != "H" or (found is not None and found.function is not None):
                tasks.append(Task(kind, number, processor, fraction))
    whole = _whole_shares(tasks, [found is not None for found in linear])
    used = sorted({task.processor for task in whole})
    if len(used) < given.stages:
        raise PlanError(
            f"the plan file {given.source} gives some processors nothing but a share of an input gradient that cannot "
            "be shared in this model: plan it with `unlatch plan CONF.toml`, or with --mode atomic"
        )
    dense = [task._replace(processor=used.index(task.processor)) for task in whole]
    placed, groups = merge_whole_layers(shift_weight_gradients(retime(dense, len(spans)), method.g), len(spans))
    counts = [sum(p.numel() for b in blocks[start:end] for p in b.module.parameters()) for start, end in spans]
    return TaskPlan(
        blocks=tuple(block.name for block in blocks),
        starts=tuple(spans[first][0] for first, _ in groups),
        stage_costs=given.loads,
        parameters=tuple(sum(counts[first:end]) for first, end in groups),
        note=f"as {Path(given.source).name} says",
        tasks=tuple(placed),
        processors=len(used),
        mode=method.mode,
    ).check()


def _numbers(given: GivenPlan, blocks: Sequence[Block], spans: Sequence[Span]) -> dict[int, int]:
    """For each layer of the plan that stands for one of the model, its number there."""
    names = [block.name for block in blocks]
    firsts = [names[start] for start, _ in spans]
    if list(given.names) == firsts:
        return {number: number for number in range(len(spans))}
    if list(given.names) == names:
        # Blocks without weights go where the layer goes that they belong to.
        return {start: number for number, (start, _) in enumerate(spans)}
    raise PlanError(
        f"the plan file {given.source} is for another model: its layers are {', '.join(given.names)}; those of this "
        f"model are {', '.join(firsts)}"
    )


def _whole_shares(tasks: Sequence[Task], linear: Sequence[bool]) -> list[Task]:
    """Shares that make exactly one; a D that cannot be shared by rows goes to the processor with most of it."""
    found: list[Task] = []
    for (kind, layer), shares in by_task(tasks).items():
        if len(shares) > 1 and (kind != "D" or not linear[layer]):
            most = max(shares, key=lambda share: share.fraction)
            found.append(most._replace(fraction=Fraction(1)))
            continue
        total = sum((share.fraction for share in shares), Fraction(0))
        found += [share._replace(fraction=share.fraction / total) for share in shares]
    return found


def _get(data: Any, key: str, kind: Any, source: str) -> Any:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        what = _KINDS.get(kind, "a number")
        raise PlanError(f"the plan file {source} is damaged: expected {what} as {key}, got {value!r:.60}")
    return value


def _items(data: Any, key: str, source: str) -> list[Any]:
    found: list[Any] = _get(data, key, list, source)
    return found
