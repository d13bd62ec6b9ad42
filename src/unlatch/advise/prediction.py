"""A method on given devices in virtual time: cut or place the layers as the method wants, then simulate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError, PlanError
from ..lookup import did_you_mean
from ..methods import Method
from ..methods import get as get_method
from ..plan import Plan
from ..plan.layer_costs import LayerCost, as_chain, exact, total_work
from ..plan.layerpipe import PlannedTasks
from ..plan.memory import layer_sizes, stage_memory, task_memory
from ..plan.partition import contiguous_split
from ..schedule import Replicated, parts_of
from ..schedule.channel import FREE, Channel
from ..schedule.machine import Machine
from ..schedule.simulation import Costed, Simulation

__all__ = ["MethodRun", "simulate_method"]

#: Fewer stages than there are devices are taken only if more are slower than this.
_AS_FAST = 1.001
_MOST_ACTIONS = 60_000_000
#: So many times as many where the simulator need not list them.
_IN_BULK = 100


@dataclass(frozen=True)
class MethodRun:
    """A simulated method.

    **Arguments:**

    - `method`: with every `"auto"` decided.
    - `layers`: costs of the layers for a whole batch.
    - `devices`: how many there are; with fewer layers than devices some stay idle.
    - `costed`: its schedule, with times and bytes.
    - `starts`: first layer of each stage, where whole layers are placed.
    - `plan`: where tasks are placed one by one.
    - `update`: what an update of all weights takes one device.
    - `replicas`: that train it together, each on its share of the devices.
    """

    method: Method
    layers: tuple[LayerCost, ...]
    devices: int
    costed: Costed
    simulation: Simulation
    starts: tuple[int, ...] = ()
    plan: PlannedTasks | None = None
    update: float = 0
    replicas: int = 1

    @property
    def microbatches(self) -> int:
        """Parts of a batch."""
        assert self.method.microbatches != "auto", "the method is resolved"
        return self.method.microbatches

    @property
    def stages(self) -> int:
        """Stages of each replica, or devices with something to do where tasks are placed."""
        return self.plan.plan.busy_devices if self.plan is not None else len(self.starts)

    @property
    def time_per_batch(self) -> float:
        """Time per batch in steady state."""
        return float(self.simulation.interval) * self.microbatches

    @property
    def speedup(self) -> float:
        """How much faster than one device that does everything once, with one update per batch."""
        return (float(total_work(self.layers)) + self.update) / self.time_per_batch

    @property
    def utilisation(self) -> float:
        """Share of all devices' time that goes into necessary work; doing a forward twice does not count."""
        return self.speedup / self.devices

    @property
    def lateness(self) -> tuple[int, ...]:
        """Per stage (per layer, where tasks are placed), micro-batches by which gradients are late."""
        return self.plan.delays.gradient if self.plan is not None else self.method.lateness(self.stages)

    @property
    def split(self) -> tuple[str, ...]:
        """Names of the layers that start the second and later stages."""
        return tuple(self.layers[start].name for start in self.starts[1:])

    @property
    def cut(self) -> Plan:
        """Where whole layers are placed, the stages as a plan."""
        ends = (*self.starts[1:], len(self.layers))
        works = [sum(layer.work for layer in self.layers[a:b]) for a, b in zip(self.starts, ends, strict=True)]
        names = tuple(layer.name for layer in self.layers)
        return Plan(names, self.starts, tuple(float(work) / self.microbatches for work in works))

    def device_bytes(self, *, optimizer_slots: int = 1, input_bytes: float = 0) -> list[float]:
        """Memory of each device in use, of the first replica; without the copies of gradients that a sum takes.

        **Arguments:**

        - `optimizer_slots`: numbers that the optimizer keeps per weight: 0 for plain SGD, 1 with momentum, 2 for Adam.
        - `input_bytes`: of one batch of data, which the first layer keeps.

        >>> layers = [LayerCost(name, 1, 1, 1, activation_bytes=10, weight_bytes=100) for name in "ab"]
        >>> simulate_method("pipedream", layers, 2).device_bytes()
        [420.0, 330.0]
        """
        rules, parts, schedule = self.method.rules(), self.microbatches, self.costed.schedule
        if self.plan is not None:
            return task_memory(
                self.plan,
                rules,
                schedule,
                self.simulation.devices,
                per_update=parts * self.method.accumulate,
                optimizer_slots=optimizer_slots,
                message_bytes=self.costed.workload.bytes,
                input_bytes=input_bytes / parts,
            )
        found = stage_memory(
            layer_sizes(self.layers, self.starts, microbatches=parts * self.replicas, input_bytes=input_bytes),
            rules,
            schedule.base if isinstance(schedule, Replicated) else schedule,
            microbatches=parts,
            accumulate=self.method.accumulate,
            delays=self.lateness,
            optimizer_slots=optimizer_slots,
            message_bytes=self.costed.workload.bytes,
        )
        return [stage.total for stage in found]


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
    data_bytes: float = 0,
    update: float = 0,
    replicas: int = 1,
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
    - `linear`: which layers are linear maps, if it is known: only they can share their D.
    - `data_bytes`: of one batch of data, for methods that send it on.
    - `update`: what an update of all weights takes one device. Each device takes its share by the bytes of its weights,
      beside what the machine charges for updates.
    - `replicas`: of the network, each on as many devices, that sum gradients by messages, as
      `parallelize(replicas=)` does. Their rows of a batch travel for nothing.

    >>> layers = [LayerCost(name, 1, 1, 1) for name in "abcd"]
    >>> run = simulate_method("pipedream", layers, 4)
    >>> run.time_per_batch, round(run.speedup, 2), run.split
    (3.0, 3.67, ('b', 'c', 'd'))
    >>> simulate_method("pipedream", layers, 4, replicas=2).split
    ('c',)
    """
    if devices < 1:
        raise PlanError(f"expected at least 1 device, got {devices}")
    chain = as_chain(costs)
    chosen = get_method(method)
    chosen.check_replicas(replicas)
    if devices % replicas:
        raise ConfigError(
            f"{devices} devices cannot be shared out among {replicas} replicas: every replica needs equally many; "
            f"expected a number of devices that {replicas} divides"
        )
    machine = machine or Machine()
    trial = _Trial(chain, devices // replicas, batches, batch_size, machine, data_bytes, update, replicas)
    if split is None:
        return trial.placed(chosen, linear) or trial.best_cut(chosen)
    starts = _positions(chain, split)
    if len(starts) > trial.devices:
        raise PlanError(
            f"the split {list(split)} makes {len(starts)} stages, but there are only {trial.devices} devices"
            + (" for each replica" if replicas > 1 else "")
        )
    return trial.staged(chosen.resolve(len(starts), batch_size), starts)


@dataclass(frozen=True)
class _Trial:
    """One network on one machine; the arguments of `simulate_method`, but for `devices`: those of each replica."""

    chain: Sequence[LayerCost]
    devices: int
    batches: int | None
    batch_size: int | None
    machine: Machine
    data_bytes: float
    update: float
    replicas: int = 1

    def placed(self, method: Method, linear: Sequence[bool] | None) -> MethodRun | None:
        """Tasks one by one, if the method does that."""
        chosen = method.resolve(min(self.devices, method.most_stages(len(self.chain))), self.batch_size)
        parts = chosen.per_batch
        channel = self.machine.channel if isinstance(self.machine.channel, Channel) else FREE
        found = chosen.placed(_shares(self.chain, parts), self.devices, channel, linear)
        if found is None:
            return None
        plan, costed = found
        count = self.batches or _enough(False, plan.plan.busy_devices, parts)
        weights = [0.0] * plan.devices
        for task in plan.tasks:
            if task.kind == "G":
                weights[task.device] += float(task.fraction * exact(self.chain[task.layer].weight_bytes))
        # Layers update one by one.
        places = costed.devices or range(costed.schedule.stations)
        updates = Counter(places[e.station] for e in costed.schedule.entries if e.kind.cost == "update")
        return self._run(chosen, costed, count, self._updating(self.machine, weights, updates), plan=plan)

    def best_cut(self, method: Method) -> MethodRun:
        """With as many stages as there are devices; with fewer where messages would take longer than they save."""
        most, channel = min(self.devices, len(self.chain)), self.machine.channel
        counts = [most]
        if isinstance(channel, Channel) and channel != FREE:
            # Beside such a latency the work would vanish in rounding.
            hopeless = channel.latency > 1e9 * float(total_work(self.chain))
            counts = [1] if hopeless else _stage_counts(most)
        runs = []
        for stages in counts:
            chosen = method.resolve(stages, self.batch_size)
            cuts = {tuple(cut) for cut in self._cuts(chosen, stages)}
            runs += [self.staged(chosen, cut) for cut in sorted(cuts)]
        best = min(run.time_per_batch for run in runs)
        fast = [run for run in runs if run.time_per_batch <= _AS_FAST * best]
        return min((run for run in fast if run.stages == fast[0].stages), key=lambda run: run.time_per_batch)

    def staged(self, method: Method, starts: Sequence[int]) -> MethodRun:
        """Whole layers, cut here."""
        stages, machine, costed = len(starts), self.machine, self._costed(method, starts)
        ends = (*starts[1:], len(self.chain))
        weights = [sum(float(c.weight_bytes) for c in self.chain[a:b]) for a, b in zip(starts, ends, strict=True)]
        if self.replicas > 1:
            costed = self._together(method, costed, weights)
        count = self.batches or _enough(costed.schedule.flushes, stages, method.per_update) * method.accumulate
        if machine.speeds is not None:
            machine = replace(machine, speeds=self._used(machine.speeds, stages))
        if not isinstance(machine.update, int | float):
            machine = replace(machine, update=self._used(machine.update, stages))
        machine = self._updating(machine, weights * self.replicas)
        return self._run(method, costed, count, machine, starts=tuple(starts))

    def _used(self, of_devices: Sequence[float], stages: int) -> tuple[float, ...]:
        """What is known of all devices, for the first ones of each replica."""
        firsts = range(0, self.devices * self.replicas, self.devices)
        return tuple(value for first in firsts for value in of_devices[first : first + stages])

    def _together(self, method: Method, column: Costed, weights: Sequence[float]) -> Costed:
        """All replicas, which sum gradients as large as the weights."""
        parts = [parts_of(nbytes) for nbytes in weights]
        parts += [1] * (column.schedule.stations - len(parts))
        schedule = Replicated(column.schedule, self.replicas, method.also_applies, tuple(parts))
        gradients = [*weights, *[0.0] * (len(parts) - len(weights))]
        owners = [station % column.schedule.stations for station in range(schedule.stations)]
        return Costed(schedule, schedule.together(column.workload, gradients), owners=owners)

    def _updating(
        self, machine: Machine, weights: Sequence[float], updates: Mapping[int, int] | None = None
    ) -> Machine:
        """The machine, with what updates of so many bytes of weights take each device, in so many entries."""
        if not self.update or not sum(weights):
            return machine
        own = [machine.update] * len(weights) if isinstance(machine.update, int | float) else machine.update
        counts = [1] * len(weights) if updates is None else [updates.get(n, 1) for n in range(len(weights))]
        whole = sum(weights) / self.replicas
        shares = [self.update * size / whole / count for size, count in zip(weights, counts, strict=True)]
        return replace(machine, update=tuple(a + b for a, b in zip(own, shares, strict=True)))

    def _costed(self, method: Method, starts: Sequence[int]) -> Costed:
        parts = method.per_batch * self.replicas
        workload = method.workload(_shares(self.chain, parts), starts, self.data_bytes / parts)
        return Costed(method.schedule(len(starts)), workload)

    def _run(
        self,
        method: Method,
        costed: Costed,
        batches: int,
        machine: Machine,
        *,
        starts: tuple[int, ...] = (),
        plan: PlannedTasks | None = None,
    ) -> MethodRun:
        in_bulk = costed.in_bulk(batches, method.accumulate, machine)
        _check_size(len(costed.schedule.entries), batches * method.per_batch, in_bulk)
        simulation = costed.simulate(batches, method.per_batch, method.accumulate, machine)
        devices = self.devices * self.replicas
        return MethodRun(
            method, tuple(self.chain), devices, costed, simulation, starts, plan, self.update, self.replicas
        )

    def _cuts(self, method: Method, stages: int) -> Iterator[list[int]]:
        """Cuts among which the best one is: those of the method if messages take no time."""
        found = method.cuts(self.chain, stages)
        yield from found
        channel = self.machine.channel
        if not isinstance(channel, Channel) or channel.bandwidth == math.inf:
            return
        last = [float(layer.work) for layer in self.chain]
        inner = [w + (float(c.F) if method.recomputes else 0.0) for c, w in zip(self.chain, last, strict=True)]
        up, down = _sent_per_byte(self._costed(method, found[0]))
        times = [float(layer.activation_bytes) / channel.bandwidth for layer in self.chain[:-1]]
        if channel.overlapped:
            # Up and down have a wire each, beside the work.
            beside = [0.0, *(max(up, down) * time for time in times)]
            yield contiguous_split(inner, stages, last=last, borders=beside, overlapped=True)
        # Where a stage waits for messages, be it only because few batches are under way, they add to its work.
        yield contiguous_split(inner, stages, last=last, borders=[0.0, *((up + down) * time for time in times)])


def _sent_per_byte(costed: Costed) -> tuple[float, float]:
    """Bytes that go up and come down over borders, for each byte of the outputs there."""
    up = down = outputs = 0.0
    for entry in costed.schedule.entries:
        for route in entry.outgoing:
            _, sender, receiver = route
            size = costed.workload.bytes(route)
            up += size if receiver > sender else 0.0
            down += size if receiver < sender else 0.0
            outputs += size if entry.kind.cost == "forward" else 0.0
    return (up / outputs, down / outputs) if outputs else (1.0, 1.0)


def _stage_counts(most: int) -> list[int]:
    """Numbers of stages worth a trial, the largest first: all up to 8, then three in every doubling."""
    steps = {round(2 ** (step / 3)) for step in range(9, 3 * most.bit_length())}
    return sorted({*range(1, min(most, 8) + 1), *(step for step in steps if step < most), most}, reverse=True)


def _check_size(actions: int, times: int, in_bulk: bool) -> None:
    if actions * times > _MOST_ACTIONS * (_IN_BULK if in_bulk else 1):
        raise PlanError(
            f"{times:,} micro-batches of {actions:,} actions each are more than {_MOST_ACTIONS:,} actions, which no "
            "memory holds: simulate fewer batches (--batches) or fewer devices"
        )


def _enough(flushes: bool, stages: int, parts: int) -> int:
    """Updates after which the middle half of the run is steady."""
    return 6 if flushes else max(8, -(-(10 * stages + 16) // parts))


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


def _shares(layers: Sequence[LayerCost], parts: int) -> list[LayerCost]:
    return [layer.share(parts) for layer in layers]
