"""From a blueprint to a run: which rank holds what, the engine of this rank, and its links to others."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ..errors import ConfigError, PlanError, ScheduleError
from ..methods import Method
from ..nn.chain import chain, cut
from ..nn.device import Accelerator
from ..nn.parts import in_parts
from ..nn.tree import copied
from ..plan import Plan
from ..plan.partition import contiguous_split
from ..runtime.blueprint import Blueprint
from ..runtime.engine import Engine
from ..runtime.evaluation import evaluation_schedule
from ..runtime.faulty import break_engine, check_faults
from ..runtime.replicas import Columns
from ..runtime.station import ChainStation, Station
from ..schedule import OUTSIDE, Replicated, Schedule, WholeNorm, parts_of, steady_buffers
from ..transport.faults import Faults
from ..transport.faulty_link import FaultyLink
from ..transport.lanes import BACKENDS, Lanes
from ..transport.link import Carrier, Link
from ..transport.local_link import LocalLink, Neighbours, call_on_neighbours
from ..transport.mail import Mail, Message
from ..transport.rounding import Format
from ..transport.staging import Staging
from ..transport.world import World
from .compile_options import check_compile
from .rounding_options import compression_for
from .run import Run

__all__ = ["connect", "place"]

log = logging.getLogger("unlatch")


def place(stages: int, ranks: int, costs: Sequence[float] | None = None) -> list[range]:
    """Spread stages over ranks with the smallest possible largest load.

    **Arguments:** `costs`: time per stage; equal if unknown.

    >>> place(4, 2)
    [range(0, 2), range(2, 4)]
    """
    if ranks > stages:
        raise PlanError(
            f"{ranks} ranks cannot share {stages} stage(s): start at most {stages} processes, or cut the model into "
            "more stages"
        )
    starts = contiguous_split(costs or [1.0] * stages, ranks)
    return [range(a, b) for a, b in zip(starts, [*starts[1:], stages], strict=True)]


def connect(blueprint: Blueprint, method: Method, faults: Faults) -> Run:
    """Build the engine of this rank and its links to the ranks that it exchanges messages with."""
    world = blueprint.world
    schedule = method.program(blueprint)
    if blueprint.options.clips_whole_norm and schedule.flushes and blueprint.stages > 1:
        schedule = WholeNorm(schedule)
    check_compile(blueprint, method, schedule)
    placed = method.placement(blueprint)
    devices = [blueprint.ranks[device] for device in placed]
    if schedule.stations != len(devices):
        raise ScheduleError(
            f"the schedule is for {schedule.stations} station(s), but {method.name} has {len(devices)} for stages="
            f"{blueprint.stages}: a schedule must be made for the number of stages that it is asked for"
        )
    if blueprint.replicas > 1:
        travelling = _gradient_parts(blueprint, schedule.stations)
        schedule = Replicated(schedule, blueprint.replicas, method.also_applies, travelling)
    width = len(devices)
    devices = [rank + column * blueprint.span for column in range(blueprint.replicas) for rank in devices]
    # No device of one replica is one of another.
    placed = [device + column * (max(placed) + 1) for column in range(blueprint.replicas) for device in placed]
    evaluation = evaluation_schedule(schedule.stages)
    links: dict[int, Carrier] = {}
    device = blueprint.options.device
    backend = BACKENDS.get(blueprint.transport) if world.group is not None else None
    lanes = Lanes(device) if backend is not None else None
    staging = Staging(device) if isinstance(device, Accelerator) and world.group is not None and lanes is None else None
    passages = lanes or staging

    def forward_to(message: Message) -> None:
        links[devices[message.stage]].send(message)

    mail = Mail(
        {station for station, rank in enumerate(devices) if rank == world.rank},
        forward_to=forward_to,
        calls=world.calls,
        copied=lanes.copied if lanes is not None else copied,
    )
    for one, parts, accumulate in ((schedule, blueprint.microbatches, blueprint.accumulate), (evaluation, 1, 1)):
        mail.allow(_checked_room(one, parts, accumulate))
    stations = _stations(blueprint, method, width)
    if blueprint.options.precision == "fp16":
        _check_scaling(method, stations.values(), blueprint.replicas)
    engine = Engine(
        stations,
        schedule,
        mail,
        devices=devices,
        microbatches=blueprint.microbatches,
        accumulate=blueprint.accumulate,
        mean_loss=blueprint.mean_loss,
        fed=method.reads_on_every_rank,
        device=device,
        landed=passages.landed if passages is not None else None,
        columns=Columns(blueprint.replicas, blueprint.mean_loss),
    )
    make_link: Callable[..., Link] = Link
    tampered = any(fault.message is not None for fault in faults)
    if faults:
        check_faults(faults, engine, inline=world.group is None)
        faults = faults.of_this_start()
        if world.rank == 0:
            log.warning("faults are injected into this run: %s", "; ".join(map(str, faults)) or "none in this start")
        break_engine(engine, faults)
        make_link = partial(FaultyLink, faults=faults)
    if (compression := compression_for(blueprint, placed)) is not None:
        engine.compress(compression)
    health = world.health
    if world.group is not None and health is not None:

        def describe(rank: int) -> str:
            held = [station for station, at in enumerate(devices) if at == rank]
            replica = f" of replica {held[0] // width}" if blueprint.replicas > 1 else ""
            return _describe([station % width for station in held], schedule.stages) + replica

        health.describe = describe
        health.report_to(mail.fail)
        peers = _peers((schedule, evaluation), devices, world.rank)
        if lanes is not None and backend is not None:
            lanes.open(world, _ways((schedule, evaluation), devices), backend)
        # Messages can be damaged on a wire, and not where there is none; those of a device are not in memory to share.
        far = blueprint.transport == "gloo" or tampered or passages is not None
        channels = call_on_neighbours(world, health, peers, alone=far)
        neighbours = Neighbours(mail) if channels else None
        for peer, boxes in peers.items():
            if neighbours is not None and peer in channels:
                links[peer] = LocalLink(peer, channels[peer], neighbours, mail, health, boxes)
            else:
                passage = lanes.to(peer) if lanes is not None else staging
                links[peer] = make_link(peer, world.group, mail, health, boxes, passage)

    def rebuild(other: Method, plan: Plan, messages: Format, replicas: int) -> Run:
        """A run of the same model by another method, cut and format, from copies, in this process alone."""
        model = copy.deepcopy(blueprint.model)
        microbatches = other.microbatches if other.microbatches != "auto" else 1
        again = replace(
            blueprint,
            model=model,
            blocks=in_parts(chain(model), plan.split or ()),
            plan=plan,
            ranks=[0] * max(plan.devices, len(plan.starts)),
            world=World(),
            microbatches=microbatches,
            accumulate=other.accumulate,
            messages=messages,
            replicas=replicas,
        )
        return connect(again, other, Faults())

    return Run(blueprint, method, engine, list(links.values()), health, rebuild)


def _stations(blueprint: Blueprint, method: Method, width: int) -> dict[int, Station]:
    """The stations of this process, of all replicas, each of which has `width` of them."""
    # Copies of the model are made before anything is done to it.
    columns = [blueprint.column(number) for number in range(blueprint.replicas)]
    found: dict[int, Station] = {}
    for number, column in enumerate(columns):
        for index, station in (method.stations(column) if column is not None else {}).items():
            station.number, station.column = index + number * width, number
            found[station.number] = station
    return found


def _gradient_parts(blueprint: Blueprint, stations: int) -> tuple[int, ...]:
    """In how many parts the gradients of each station travel; the same on all ranks, whatever they hold."""
    found = []
    for part in cut(blueprint.blocks, blueprint.plan.starts):
        weights = {id(p): p.nbytes for block in part for p in block.module.parameters() if p.requires_grad}
        found.append(parts_of(sum(weights.values())))
    return tuple((*found, *[1] * stations)[:stations])


def _check_scaling(method: Method, stations: Iterable[Station], replicas: int) -> None:
    """Refuse a scaled loss where not all gradients come from it, or where gradients of several scales are compared."""
    if not all(isinstance(station, ChainStation) for station in stations):
        why = "has gradients that do not come down a chain from one loss"
    elif method.rules().gradient.copies:
        why = "compares gradients with earlier ones, whose scale was another"
    elif replicas > 1:
        why = f"sums those of {replicas} replicas, whose scales may differ"
    else:
        return
    raise ConfigError(f'precision="fp16" scales the loss, and {method.name} {why}: use precision="bf16"')


def _checked_room(schedule: Schedule, parts: int, accumulate: int) -> dict[tuple[str, int], int]:
    """Refuse a schedule that cannot be executed; otherwise tell how many messages each box must hold.

    Where entries depend on the batch, nothing is told: messages pile up most where one kind of batch follows another,
    and which follow is not known before.
    """
    found = steady_buffers(schedule, parts, accumulate)
    room: dict[tuple[str, int], int] = {}
    if any(entry.when is not None for entry in schedule.entries):
        return room
    for (name, _, receiver), count in found.room.items():
        # The end of the data is announced by one more.
        room[name, receiver] = count + 1
    return room


def _peers(schedules: Iterable[Schedule], devices: Sequence[int], own: int) -> dict[int, list[tuple[str, int]]]:
    """The ranks that this one exchanges messages with, and the boxes here that only they fill."""
    peers: dict[int, list[tuple[str, int]]] = {}
    for schedule in schedules:
        for entry in schedule.entries:
            for name, sender in entry.takes:
                if sender == OUTSIDE or devices[sender] == devices[entry.station]:
                    continue
                if devices[entry.station] == own:
                    peers.setdefault(devices[sender], []).append((name, entry.station))
                elif devices[sender] == own:
                    peers.setdefault(devices[entry.station], [])
    return dict(sorted(peers.items()))


def _ways(schedules: Iterable[Schedule], devices: Sequence[int]) -> list[tuple[int, int]]:
    """From which rank to which messages go, whoever asks."""
    taken = (
        (devices[sender], devices[entry.station])
        for schedule in schedules
        for entry in schedule.entries
        for _, sender in entry.takes
        if sender != OUTSIDE
    )
    return sorted({way for way in taken if way[0] != way[1]})


def _describe(stations: Sequence[int], stages: int) -> str:
    held = [station for station in stations if station < stages]
    if not held:
        return "tasks of other stages"
    return f"stage {held[0]}" if len(held) == 1 else f"stages {held[0]}-{held[-1]}"
