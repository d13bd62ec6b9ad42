"""A method on given devices in virtual time: cut or place the layers as the method wants, then simulate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from ..schedule.machine import Machine, StageWork

__all__ = ["MethodRun", "simulate_method"]

#: Fewer stages than there are devices are taken only if more are slower than this.
_AS_FAST = 1.001
_MOST_ACTIONS = 60_000_000


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
        """Stages, or processors with something to do where tasks are placed."""
        return self.plan.busy_processors if self.plan is not None else len(self.starts)

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
    linear: Sequence[bool] | None = None,
) -> MethodRun:
    """Simulate a method.

    **Arguments:**

    - `method`: a name or an object from `unlatch.methods`.
    - `costs`: of the layers, for a whole batch. Parts of a batch cost in proportion.
    - `devices`: how many; each holds one stage.
    - `batches`: how many; by default enough for a steady state.
    - `batch_size`: samples per batch, which limits `microbatches="auto"`.
    - `split`: names of the layers that start the second and later stages; by default the best cut, links considered,
      with fewer stages where messages take longer than the stages save.
    - `machine`: speeds, links, jitter.
    - `linear`: which layers are linear maps, if it is known: only they can share their D (`layerpipe`).

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
        # More processors than tasks do not deepen the pipeline.
        chosen = chosen.resolve(min(devices, 3 * len(chain) - 1), batch_size)
        assert isinstance(chosen, LayerPipe)
        return _placed(chosen, chain, devices, batches, machine, linear)
    if split is None:
        return _best_cut(chosen, chain, devices, batches, batch_size, machine)
    starts = _positions(chain, split)
    if len(starts) > devices:
        raise PlanError(f"the split {list(split)} makes {len(starts)} stages, but there are only {devices} devices")
    return _staged(chosen.resolve(len(starts), batch_size), chain, starts, devices, batches, machine)


def _best_cut(
    method: Method,
    chain: Sequence[LayerCost],
    devices: int,
    batches: int | None,
    batch_size: int | None,
    machine: Machine,
) -> MethodRun:
    """With as many stages as there are devices; with fewer where messages would take longer than they save."""
    most = min(devices, len(chain))
    counts = [most]
    if isinstance(machine.channel, Channel) and machine.channel != FREE:
        # Beside such a latency the work would vanish in rounding.
        hopeless = machine.channel.latency > 1e9 * float(total_work(chain))
        counts = [1] if hopeless else _stage_counts(most)
    runs = []
    for stages in counts:
        chosen = method.resolve(stages, batch_size)
        cuts = {tuple(cut) for cut in _cuts(chain, stages, chosen, machine)}
        runs += [_staged(chosen, chain, cut, devices, batches, machine) for cut in sorted(cuts)]
    best = min(run.time_per_batch for run in runs)
    fast = [run for run in runs if run.time_per_batch <= _AS_FAST * best]
    return min((run for run in fast if run.stages == fast[0].stages), key=lambda run: run.time_per_batch)


def _stage_counts(most: int) -> list[int]:
    """Numbers of stages worth a trial, the largest first: all up to 8, then three in every doubling."""
    steps = {round(2 ** (step / 3)) for step in range(9, 3 * most.bit_length())}
    return sorted({*range(1, min(most, 8) + 1), *(step for step in steps if step < most), most}, reverse=True)


def _staged(
    method: Method,
    chain: Sequence[LayerCost],
    starts: Sequence[int],
    devices: int,
    batches: int | None,
    machine: Machine,
) -> MethodRun:
    stages, parts = len(starts), method.microbatches
    assert parts != "auto", "the method is resolved"
    schedule = method.schedule(stages)
    count = batches or _enough(schedule.flushes, stages, parts * method.accumulate) * method.accumulate
    _check_size(3 * stages, count * parts)
    simulation = simulate_schedule(
        schedule,
        [_work(chain, starts, stage, method) for stage in range(stages)],
        batches=count,
        microbatches=parts,
        per_update=method.accumulate,
        machine=_first_devices(machine, stages),
    )
    return MethodRun(method, tuple(chain), devices, simulation, starts=tuple(starts))


def _placed(
    method: LayerPipe,
    chain: Sequence[LayerCost],
    devices: int,
    batches: int | None,
    machine: Machine,
    linear: Sequence[bool] | None,
) -> MethodRun:
    parts = method.microbatches
    assert parts != "auto", "the method is resolved"
    channel = machine.channel if isinstance(machine.channel, Channel) else FREE
    shares = [_share(layer, parts) for layer in chain]
    plan = plan_layerpipe(shares, devices, method.mode, channel=channel, linear=linear)
    count = (batches or _enough(False, plan.busy_processors, parts)) * parts
    _check_size(len(plan.tasks), count)
    simulation = simulate_layerpipe(plan, count, machine, exact=False)
    return MethodRun(method, tuple(chain), devices, simulation, plan=plan)


def _check_size(actions: int, times: int) -> None:
    if actions * times > _MOST_ACTIONS:
        raise PlanError(
            f"{times:,} micro-batches of {actions:,} actions each are more than {_MOST_ACTIONS:,} actions, which no "
            "memory holds: simulate fewer batches (--batches) or fewer devices"
        )


def _enough(flushes: bool, stages: int, parts: int) -> int:
    """Updates after which the middle half of the run is steady."""
    return 6 if flushes else max(8, -(-(10 * stages + 16) // parts))


def _cuts(chain: Sequence[LayerCost], stages: int, method: Method, machine: Machine) -> Iterator[list[int]]:
    """Cuts among which the best one is: by work alone if messages take no time."""
    last = [float(layer.work) for layer in chain]
    inner = [total + (float(layer.F) if method.recomputes else 0.0) for layer, total in zip(chain, last, strict=True)]
    channel = machine.channel
    if not isinstance(channel, Channel) or channel.bandwidth == math.inf:
        yield contiguous_split(inner, stages, last=last)
        return
    back = _bytes_back(method, stages)
    times = [float(layer.activation_bytes) / channel.bandwidth for layer in chain[:-1]]
    if channel.overlapped:
        # Up and down have a wire each, beside the work.
        beside = [0.0, *(max(1, back) * time for time in times)]
        yield contiguous_split(inner, stages, last=last, borders=beside, overlapped=True)
    # Where a stage waits for messages, be it only because few batches are under way, they add to its work.
    yield contiguous_split(inner, stages, last=last, borders=[0.0, *((1 + back) * time for time in times)])


def _bytes_back(method: Method, stages: int) -> int:
    """Bytes that come back over a border for each that went up: of gradients, and of outputs to be reversed."""
    if getattr(method.schedule(stages), "independent", False):
        return 0
    return 2 if method.rules().activation.inverts else 1


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
    return StageWork(times, output_bytes=output, returned_bytes=output * _bytes_back(method, len(starts)))


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
