"""A method on given devices in virtual time: cut or place the layers as the method wants, then simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..errors import PlanError
from ..lookup import did_you_mean
from ..methods import LayerPipe, Method
from ..methods import get as get_method
from ..plan.layer_costs import LayerCost, Number, as_chain, total_work
from ..plan.layerpipe import LayerPipePlan, plan_layerpipe
from ..plan.layerpipe_run import simulate_layerpipe
from ..plan.partition import contiguous_split
from ..schedule import Kind
from ..schedule.channel import FREE, Channel
from ..schedule.simulation import Simulation, simulate_schedule
from ..schedule.simulator_stages import Machine, StageWork

__all__ = ["MethodRun", "simulate_method"]


@dataclass(frozen=True)
class MethodRun:
    """A simulated method.

    **Arguments:**

    - `method`: with every `"auto"` decided.
    - `layers`: costs of the layers for a whole batch.
    - `devices`: how many there are; with fewer layers than devices some stay idle.
    - `starts`: first layer of each stage, where whole layers are placed.
    - `plan`: where tasks are placed one by one.
    """

    method: Method
    layers: tuple[LayerCost, ...]
    devices: int
    simulation: Simulation
    starts: tuple[int, ...] = ()
    plan: LayerPipePlan | None = None

    @property
    def microbatches(self) -> int:
        """Parts of a batch."""
        assert self.method.microbatches != "auto", "the method is resolved"
        return self.method.microbatches

    @property
    def stages(self) -> int:
        """Stages, or processors where tasks are placed."""
        return self.devices if self.plan is not None else len(self.starts)

    @property
    def time_per_batch(self) -> float:
        """Time per batch in steady state."""
        return float(self.simulation.interval) * self.microbatches

    @property
    def speedup(self) -> float:
        """How much faster than one device that does everything once."""
        return float(total_work(self.layers)) / self.time_per_batch

    @property
    def utilisation(self) -> float:
        """Share of all devices' time that goes into necessary work; doing a forward twice does not count."""
        return self.speedup / self.devices

    @property
    def gaps(self) -> tuple[int, ...]:
        """Per stage (per layer, where tasks are placed), micro-batches by which gradients are late."""
        return self.plan.delays.gradient if self.plan is not None else self.method.gaps(self.stages)

    @property
    def split(self) -> tuple[str, ...]:
        """Names of the layers that start the second and later stages."""
        return tuple(self.layers[start].name for start in self.starts[1:])


def simulate_method(
    method: str | Method,
    costs: Sequence[LayerCost],
    devices: int,
    *,
    batches: int | None = None,
    batch_size: int | None = None,
    split: Sequence[str] | None = None,
    machine: Machine | None = None,
) -> MethodRun:
    """Simulate a method.

    **Arguments:**

    - `method`: a name or an object from `unlatch.methods`.
    - `costs`: of the layers, for a whole batch. Parts of a batch cost in proportion.
    - `devices`: how many; each holds one stage.
    - `batches`: how many; by default enough for a steady state.
    - `batch_size`: samples per batch, which limits `microbatches="auto"`.
    - `split`: names of the layers that start the second and later stages; by default the best cut.
    - `machine`: speeds, links, jitter.

    >>> layers = [LayerCost(name, 1, 1, 1) for name in "abcd"]
    >>> run = simulate_method("pipedream", layers, 4)
    >>> run.time_per_batch, round(run.speedup, 2), run.split
    (3.0, 3.67, ('b', 'c', 'd'))
    """
    if devices < 1:
        raise PlanError(f"expected at least 1 device, got {devices}")
    chain = as_chain(costs)
    chosen = get_method(method)
    machine = machine or Machine()
    if isinstance(chosen, LayerPipe) and chosen.places_tasks and split is None:
        chosen = chosen.resolve(devices, batch_size)
        assert isinstance(chosen, LayerPipe)
        return _placed(chosen, chain, devices, batches, machine)
    stages = min(devices, len(chain)) if split is None else len(split) + 1
    if stages > devices:
        raise PlanError(f"the split {list(split or [])} makes {stages} stages, but there are only {devices} devices")
    chosen = chosen.resolve(stages, batch_size)
    starts = _cut(chain, stages, chosen) if split is None else _positions(chain, split)
    works = [_work(chain, starts, stage, chosen) for stage in range(stages)]
    schedule = chosen.schedule(stages)
    parts = chosen.microbatches
    assert parts != "auto", "the method is resolved"
    simulation = simulate_schedule(
        schedule,
        works,
        batches=batches or _enough(schedule.flushes, stages, parts * chosen.accumulate) * chosen.accumulate,
        microbatches=parts,
        per_update=chosen.accumulate,
        machine=_first_devices(machine, stages),
    )
    return MethodRun(chosen, tuple(chain), devices, simulation, starts=tuple(starts))


def _placed(
    method: LayerPipe, chain: Sequence[LayerCost], devices: int, batches: int | None, machine: Machine
) -> MethodRun:
    parts = method.microbatches
    assert parts != "auto", "the method is resolved"
    channel = machine.channel if isinstance(machine.channel, Channel) else FREE
    plan = plan_layerpipe([_share(layer, parts) for layer in chain], devices, method.mode, channel=channel)
    count = (batches or _enough(False, devices, parts)) * parts
    simulation = simulate_layerpipe(plan, count, machine, exact=False)
    return MethodRun(method, tuple(chain), devices, simulation, plan=plan)


def _enough(flushes: bool, stages: int, parts: int) -> int:
    """Updates after which the middle half of the run is steady."""
    return 6 if flushes else max(8, -(-(10 * stages + 16) // parts))


def _cut(chain: Sequence[LayerCost], stages: int, method: Method) -> list[int]:
    last = [float(layer.work) for layer in chain]
    inner = [total + (float(layer.F) if method.recomputes else 0.0) for layer, total in zip(chain, last, strict=True)]
    return contiguous_split(inner, stages, last=last)


def _positions(chain: Sequence[LayerCost], split: Sequence[str]) -> list[int]:
    names = [layer.name for layer in chain]
    starts = [0]
    for name in split:
        if name not in names:
            raise PlanError(f"no layer is called {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}")
        if names.index(name) <= starts[-1]:
            raise PlanError(f"layer {name!r} cannot start a stage here (split {list(split)}): keep the model's order")
        starts.append(names.index(name))
    return starts


def _work(chain: Sequence[LayerCost], starts: Sequence[int], stage: int, method: Method) -> StageWork:
    """Times and bytes of one stage for one micro-batch."""
    end = starts[stage + 1] if stage + 1 < len(starts) else len(chain)
    layers = [_share(layer, int(method.microbatches)) for layer in chain[starts[stage] : end]]
    forward, down, weight = (sum(float(getattr(layer, kind)) for layer in layers) for kind in ("F", "D", "G"))
    is_last = stage == len(starts) - 1
    again = forward if method.recomputes and not is_last else 0.0
    times = {Kind.F: forward, Kind.B: down + weight + again, Kind.I: down + again, Kind.W: weight, Kind.U: 0.0}
    output = float(layers[-1].activation_bytes)
    # A reversible stage gets its output back beside the gradient.
    returned = output * (2 if method.rules().activations == "reverse" else 1)
    return StageWork(times, output_bytes=output, returned_bytes=returned)


def _share(layer: LayerCost, parts: int) -> LayerCost:
    """The costs of one of `parts` equal parts of a batch; weights stay whole."""

    def part(value: Number) -> Number:
        return value / parts if isinstance(value, float) else Fraction(value, parts)

    return LayerCost(
        layer.name,
        part(layer.F),
        part(layer.D),
        part(layer.G),
        part(layer.activation_bytes),
        layer.weight_bytes,
        part(layer.hadamard),
        None if layer.kept_bytes is None else part(layer.kept_bytes),
    )


def _first_devices(machine: Machine, stages: int) -> Machine:
    return machine if machine.speeds is None else replace(machine, speeds=tuple(machine.speeds[:stages]))
