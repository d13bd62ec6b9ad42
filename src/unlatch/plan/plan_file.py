"""The plan file: what `unlatch plan` writes, what `unlatch train --plan` reads.

A file is one plan, or a ranking of methods whose entries have a plan each. Beside the plan there may be figures about
it, which are for readers. Whatever is wrong with a file is said in words, with its name and the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import PlanError
from ..io.json_file import read_json
from ..lookup import did_you_mean
from ..problems import explain
from .layer_costs import plain
from .plan import Plan
from .tasks import MODES, Task, TaskKind, by_task

__all__ = ["plan_from_json", "plan_to_json", "read_plan"]

Count = Annotated[int, Field(ge=0)]
Size = Annotated[float, Field(ge=0, lt=1e308)]


class _Strict(BaseModel):
    """JSON has types: nothing is converted. Keys that are not listed are figures for readers."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class _Task(_Strict):
    task: TaskKind
    layer: Count
    device: Count
    fraction: Annotated[float, Field(gt=0, le=1)] = 1
    slot: Count = 0


class _Plan(_Strict):
    """A `Plan` as JSON; see there for the meaning of the keys."""

    method: str
    options: dict[str, Any] = {}
    blocks: Annotated[list[str], Field(min_length=1)]
    starts: Annotated[list[Count], Field(min_length=1)]
    loads: Annotated[list[Size], Field(min_length=1)]
    parameters: list[Count] = []
    measured: bool = False
    border_bytes: list[Count] = []
    tasks: list[_Task] = []
    replicas: list[Annotated[int, Field(ge=1)]] = []
    analysis: str = ""
    note: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> _Plan:
        parts = len(self.starts)
        if self.starts[0] != 0 or sorted(set(self.starts)) != self.starts or self.starts[-1] >= len(self.blocks):
            raise ValueError(f"starts: expected growing positions of {len(self.blocks)} blocks from 0 on")
        for name in ("parameters", "replicas"):
            if len(getattr(self, name)) not in (0, parts):
                raise ValueError(f"{name}: expected {parts} numbers, got {len(getattr(self, name))}")
        if self.tasks or self.options.get("mode") in MODES:
            self._check_tasks(parts)
        elif len(self.loads) < (needed := sum(self.replicas) or parts):
            raise ValueError(f"loads of {len(self.loads)} devices, but {needed} are used")
        return self

    def _check_tasks(self, layers: int) -> None:
        if self.options.get("mode") not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.options.get('mode')!r:.60}")
        shares = by_task(_task(one) for one in self.tasks)
        wanted = [(kind, layer) for layer in range(layers) for kind in "FDG" if (kind, layer) != ("D", 0)]
        missing = [f"{kind} of layer {layer}" for kind, layer in wanted if (kind, layer) not in shares]
        if missing:
            raise ValueError(f"incomplete, without {', '.join(missing)}")
        for (kind, layer), parts in shares.items():
            if layer >= layers:
                raise ValueError(f"tasks: {kind} of layer {layer}, but there are {layers} layers")
            total = float(sum(part.fraction for part in parts))
            if abs(total - 1) > 1e-6 or len({part.device for part in parts}) < len(parts):
                shown = ", ".join(f"{float(part.fraction):g} on {part.device}" for part in parts)
                raise ValueError(
                    f"shares of {kind} of layer {layer} must be on different devices and add up to 1, got {shown}"
                )
        used = sorted({task.device for task in self.tasks})
        if used[-1] >= len(self.loads):
            raise ValueError(f"loads of {len(self.loads)} devices, but {used} are used")


class _Ranked(_Strict):
    plan: _Plan


class _Ranking(_Strict):
    ranking: Annotated[list[_Ranked], Field(min_length=1)]


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain lists, numbers and texts; what is empty is left out.

    >>> plan_to_json(Plan(("a", "b"), (0, 1), (1, 2), method="pipedream"))
    {'method': 'pipedream', 'blocks': ['a', 'b'], 'starts': [0, 1], 'loads': [1, 2]}
    """
    tasks = [
        {"task": kind, "layer": layer, "device": device, "fraction": plain(fraction), "slot": slot}
        for kind, layer, device, fraction, slot in plan.tasks
    ]
    values: dict[str, Any] = {
        "method": plan.method,
        "options": dict(plan.options),
        "blocks": list(plan.blocks),
        "starts": list(plan.starts),
        "loads": [plain(load) for load in plan.loads],
        "parameters": list(plan.parameters),
        "measured": plan.measured,
        "border_bytes": list(plan.border_bytes),
        "tasks": tasks,
        "replicas": list(plan.replicas),
        "analysis": plan.analysis,
        "note": plan.note,
    }
    return {name: value for name, value in values.items() if value or name == "method"}


def plan_from_json(data: Any, source: str = "") -> Plan:
    """The inverse of `plan_to_json`, also after a trip through text. **Arguments:** `source`: the file.

    >>> plan = Plan(("a", "b"), (0, 1), (3, 2, 2), replicas=(1, 2), method="pipedream", analysis="stages have replicas")
    >>> plan_from_json(plan_to_json(plan)) == plan
    True
    """
    return _made(_parsed(_Plan, data, source), source)


def read_plan(path: str | Path, method: str | None = None) -> Plan:
    """Read what `unlatch plan --json` or `-o` wrote.

    **Arguments:** `method`: which one of a ranking (`--method auto`); the best by default.
    """
    data, source = read_json(path, "plan file", PlanError), str(path)
    if not isinstance(data, Mapping) or not isinstance(data.get("method"), str):
        got = f"method {data.get('method')!r}" if isinstance(data, Mapping) else f"a {type(data).__name__}"
        raise PlanError(f"the plan file {path} is none: expected what `unlatch plan --json` prints, got {got}")
    if data["method"] == "auto":
        ranking = {one.plan.method: one.plan for one in _parsed(_Ranking, data, source).ranking}
        name = next(iter(ranking)) if method is None else method
        if name not in ranking:
            raise PlanError(
                f"the plan file {path} does not rank {name!r}.{did_you_mean(name, ranking)} Known: {', '.join(ranking)}"
            )
        return _made(ranking[name], source)
    if method not in (None, data["method"]):
        raise PlanError(f"the plan file {path} is for {data['method']}, not for {method}: leave --method out")
    return plan_from_json(data, source)


M = TypeVar("M", bound=_Strict)


def _parsed(model: type[M], data: Any, source: str) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        named = f"the plan file {source}" if source else "the plan"
        first, *others = explain(error)
        more = f" (and {len(others)} more)" if others else ""
        raise PlanError(f"{named} is damaged: {first}{more}") from None


def _made(found: _Plan, source: str) -> Plan:
    return Plan(
        blocks=tuple(found.blocks),
        starts=tuple(found.starts),
        loads=tuple(found.loads),
        parameters=tuple(found.parameters),
        measured=found.measured,
        border_bytes=tuple(found.border_bytes),
        tasks=tuple(_task(task) for task in found.tasks),
        replicas=tuple(found.replicas),
        method=found.method,
        options=found.options,
        analysis=found.analysis,
        note=found.note,
        source=source,
    )


def _task(one: _Task) -> Task:
    # Shares are fractions of small numbers: what a float makes of a third is a third again.
    return Task(one.task, one.layer, one.device, Fraction(one.fraction).limit_denominator(10**9), one.slot)
