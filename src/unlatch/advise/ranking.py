"""Which method suits? All methods of the library in virtual time, ranked by speed, memory and risk, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import PlanError
from ..methods import Method, names
from ..plan import Plan, plan_to_json
from ..plan.layer_costs import LayerCost
from ..runtime.updating import Optimizer
from ..schedule.machine import Machine
from ..schedule.stability import Motion, chain_limit
from ..table import Table
from .advice import ELSEWHERE, lags_of, no_theory, places_of, verdict_of
from .motion import tuned_motion
from .prediction import MethodRun, simulate_method

__all__ = ["AutoPlan", "Prediction", "plan_auto", "predict"]

#: From harmless to harmful; methods are ranked by this first, then by time.
RISKS = ("exact", "about bp", "some loss", "other gradient", "not known", "large loss")

#: Gains below this are within the error of a prediction.
_WORTH_IT = 1.1
NO_METHOD_PAYS = (
    "no method pays here: none that trains about as well as backpropagation is expected to be faster than one device "
    "by more than a tenth. Train in one process, or give each device more to do: a larger batch, a larger model."
)

#: Of the optimizer that settings have unless they say otherwise.
USUAL = Motion(0.9, nesterov=True)


@dataclass(frozen=True)
class Prediction:
    """What one method is expected to do."""

    #: What to train: the method with its options, and where its work goes.
    plan: Plan
    time_per_batch: float
    #: Against one device that does everything.
    speedup: float
    utilisation: float
    #: Of the device that needs the most.
    memory_bytes: float
    fits: bool
    #: Updates by which the oldest gradients are late.
    staleness: float
    #: Largest stable learning rate x curvature (a*) of all stages together, where there is a theory.
    stability: float | None
    #: One of `RISKS`.
    risk: str
    why: str = ""

    @property
    def method(self) -> str:
        """Its name."""
        return self.plan.method

    @property
    def stages(self) -> int:
        """Devices with something to do."""
        return self.plan.busy_devices

    @property
    def key(self) -> tuple[bool, bool, int, float]:
        """What predictions are ordered by: fitting, risk, time."""
        harmless = self.risk in RISKS[:2]
        return not self.fits, not harmless, 0 if harmless else RISKS.index(self.risk), self.time_per_batch

    def to_config(self) -> dict[str, Any]:
        """Sections of a configuration file for `unlatch train`."""
        run: dict[str, Any] = {"stages": self.stages}
        if self.plan.split:
            run["split"] = list(self.plan.split)
        return {"method": {"name": self.method, **self.plan.options}, "run": run}

    def to_json(self) -> dict[str, Any]:
        """The plan as in a file, and figures about it."""
        figures = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "plan"}
        named = {"method": self.method, "stages": self.stages}
        return named | figures | {"plan": plan_to_json(self.plan), "config": self.to_config()}


@dataclass(frozen=True)
class AutoPlan:
    """All predictions, the best first, and methods that cannot be used here with the reason."""

    devices: int
    memory_limit: float | None
    ranking: tuple[Prediction, ...]
    refused: dict[str, str]

    @property
    def best(self) -> Prediction:
        """What to use."""
        return self.ranking[0]

    @property
    def pays(self) -> bool:
        """Whether any harmless method that fits is expected to be faster than one device."""
        return any(one.fits and one.risk in RISKS[:2] and one.speedup >= _WORTH_IT for one in self.ranking)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; `train` accepts what is under `config`."""
        return {
            "method": "auto",
            "devices": self.devices,
            "memory_limit": self.memory_limit,
            "pays": self.pays,
            "config": self.best.to_config(),
            "ranking": [one.to_json() for one in self.ranking],
            "refused": self.refused,
        }

    def table(self) -> list[str]:
        """Plain lines, the best method first."""
        heads = ("method", "time/batch", "speed-up", "memory", "late", "a*", "risk", "why")
        rows = [
            (
                one.method + ("" if one.fits else " (does not fit)"),
                f"{one.time_per_batch:.4g}",
                f"{one.speedup:.2f}x",
                size(one.memory_bytes),
                f"{one.staleness:.1f}",
                "-" if one.stability is None else f"{one.stability:.3f}",
                one.risk,
                one.why,
            )
            for one in self.ranking
        ]
        lines = Table(heads, rows, left=(0, 6, 7)).lines()
        lines += [f"{name}: {reason}" for name, reason in self.refused.items()]
        if any(one.risk == "about bp" for one in self.ranking):
            lines.append(f"risks go by bounds from short runs on digits; {ELSEWHERE}")
        return lines if self.pays else [*lines, NO_METHOD_PAYS]


def plan_auto(
    costs: Sequence[LayerCost],
    devices: int,
    *,
    memory_limit: float | None = None,
    methods: Sequence[str | Method] | None = None,
    batch_size: int | None = None,
    machine: Machine | None = None,
    linear: Sequence[bool] | None = None,
    moved_by: Motion | Optimizer | None = USUAL,
    optimizer_slots: int = 1,
    input_bytes: float = 0,
    update: float = 0,
) -> AutoPlan:
    """Rank methods for a model on `devices` devices.

    **Arguments:**

    - `costs`: of the layers (blocks) for a whole batch, measured or counted.
    - `memory_limit`: bytes of one device; methods that need more come last.
    - `methods`: which to compare; all of the library by default.
    - `batch_size`: samples per batch, which limits the micro-batches that a method may ask for.
    - `machine`: speeds, links, jitter.
    - `linear`: as in `simulate_method`.
    - `moved_by`: the optimizer, or how it moves, for the risk that delay brings; `None` if it is not known.
    - `optimizer_slots`, `input_bytes`: as in `MethodRun.device_bytes`.
    - `update`: as in `simulate_method`.

    >>> layers = [LayerCost(name, 1, 1, 1, 1000, 100) for name in "abcdefgh"]
    >>> plan = plan_auto(layers, 2, methods=["bp", "1f1b", "pipedream"])
    >>> [one.method for one in plan.ranking]
    ['pipedream', '1f1b', 'bp']
    """
    found: list[Prediction] = []
    refused: dict[str, str] = {}
    for one in methods if methods is not None else names():
        try:
            run = simulate_method(
                one,
                costs,
                devices,
                batch_size=batch_size,
                machine=machine,
                linear=linear,
                data_bytes=input_bytes,
                update=update,
            )
        except PlanError as error:
            refused[one if isinstance(one, str) else one.name] = str(error)
            continue
        memory = max(run.device_bytes(optimizer_slots=optimizer_slots, input_bytes=input_bytes))
        found.append(predict(run, memory, memory_limit, moved_by))
    if not found:
        raise PlanError("no method can be used here: " + "; ".join(f"{n}: {r}" for n, r in refused.items()))
    return AutoPlan(devices, memory_limit, tuple(sorted(found, key=lambda one: one.key)), refused)


def predict(
    run: MethodRun, memory: float, memory_limit: float | None, moved_by: Motion | Optimizer | None = USUAL
) -> Prediction:
    """What a simulated method means for time, memory and risk."""
    method, lateness = run.method, run.lateness
    risk, limit = _risk(method, lateness, moved_by)
    late = max(lateness) / method.per_update
    fits = memory_limit is None or memory <= memory_limit
    plan = run.cut if run.plan is None else run.plan.plan
    options = {**plan.options, "microbatches": run.microbatches, **method.settings}
    return Prediction(
        plan=replace(plan, method=method.name, options=options),
        time_per_batch=run.time_per_batch,
        speedup=run.speedup,
        utilisation=run.utilisation,
        memory_bytes=memory,
        fits=fits,
        staleness=late,
        stability=limit,
        risk=risk,
        why=_why(run, risk, late, None if fits else f"needs {size(memory)} of {size(memory_limit or 0)}"),
    )


def _motions(method: Method, lateness: Sequence[int], moved_by: Motion | Optimizer) -> list[Motion]:
    """Of each stage, since a method may set optimizers by how late they are; none if one of them has no theory."""
    if isinstance(moved_by, Motion):
        return [moved_by] * len(lateness)
    tuned = [tuned_motion(moved_by, method.rules().update, place) for place in places_of(method, lateness)]
    known = [motion for motion in tuned if motion is not None]
    return known if len(known) == len(tuned) else []


def _risk(method: Method, lateness: Sequence[int], moved_by: Motion | Optimizer | None) -> tuple[str, float | None]:
    """One of `RISKS`, and the limit that it follows from, if one does."""
    if method.gradient == "local":
        return "other gradient", None
    motions = [] if moved_by is None or no_theory(method, moved_by) else _motions(method, lateness, moved_by)
    if not motions:
        return "exact" if max(lateness) == 0 else "not known", None
    lags = lags_of(method, lateness, motions)
    return "exact" if max(lateness) == 0 else verdict_of(lags), chain_limit(lags)


def _why(run: MethodRun, risk: str, late: float, too_large: str | None) -> str:
    reasons = [too_large] if too_large else []
    method = run.method
    if method.schedule(run.stages).flushes:
        idle = 1 - float(run.simulation.steady_utilisation)
        reasons.append(f"idle {idle:.0%} of the time, while the pipeline fills and empties")
    elif run.plan is not None:
        reasons.append(f"tasks placed one by one, {run.utilisation:.0%} busy")
    else:
        busy = run.simulation.busy
        reasons.append(f"never empties; stage {busy.index(max(busy))} of {len(busy)} sets the pace")
    if method.recomputes and run.stages > 1:
        reversible = "stages recompute; keeps nothing if they are reversible"
        reasons.append(reversible if method.inverts else "forwards run twice")
    if risk == "exact":
        reasons.append("gradients of backpropagation")
    elif risk == "other gradient":
        reasons.append("learns from local losses: accuracy is not predicted, the cost of its own networks estimated")
    elif risk == "not known":
        reasons.append(f"gradients up to {late:.1f} updates late, about which there is no theory here")
    else:
        reasons.append(f"gradients up to {late:.1f} updates late: {risk}")
    if run.stages < run.devices:
        reasons.append(f"only {run.stages} of {run.devices} devices used")
    return "; ".join(reasons)


def size(count: float) -> str:
    """Bytes for readers.

    >>> size(1234567)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
