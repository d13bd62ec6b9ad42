"""Self-timed runs of tasks that are placed one by one: slot `k` of a device holds task `v` of mini-batch `k - slot(v)`.

Only the order is taken from the slots; devices never wait for a slot to end. Messages go from device to device
directly, those between the same two one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import ScheduleError
from .channel import Channel
from .entries import Action, Kind
from .simulate import Timeline
from .simulation import Simulation
from .simulator_engine import Edge, Graph, execute, no_collection
from .simulator_stages import Machine, jitter_factors

__all__ = ["SlotEdge", "SlotTask", "simulate_slots", "slot_order"]


class SlotTask(NamedTuple):
    """A task of a layer, or a share of one, on its device: mini-batch `t` is due in slot `t + slot`."""

    kind: Kind
    layer: int
    device: int
    time: float
    slot: int


class SlotEdge(NamedTuple):
    """The target needs what the source made of the mini-batch `tokens` before its own."""

    source: int
    target: int
    size: float = 0
    tokens: int = 0


def slot_order(tasks: Sequence[SlotTask], batches: int, devices: int) -> list[list[tuple[int, int]]]:
    """For each device, the tasks by number and the mini-batch of each, slot by slot; within a slot in the order given.

    >>> slot_order([SlotTask(Kind.F, 0, 0, 1, 0), SlotTask(Kind.W, 0, 0, 1, 1)], 2, 1)
    [[(0, 0), (0, 1), (1, 0), (1, 1)]]
    """
    order: list[list[tuple[int, int]]] = [[] for _ in range(devices)]
    placed: list[list[tuple[int, int]]] = [[] for _ in range(devices)]
    for number, task in enumerate(tasks):
        placed[task.device].append((number, task.slot))
    for slot in range(batches + max(task.slot for task in tasks)):
        for device in range(devices):
            order[device] += [(number, slot - due) for number, due in placed[device] if 0 <= slot - due < batches]
    return order


def simulate_slots(
    tasks: Sequence[SlotTask],
    edges: Sequence[SlotEdge],
    *,
    batches: int,
    devices: int,
    machine: Machine | None = None,
    kept_bytes: Sequence[float] | None = None,
    delays: Sequence[int] | None = None,
) -> Simulation:
    """Simulate `batches` mini-batches.

    **Arguments:**

    - `tasks`: in an order in which none comes before what it needs of its own mini-batch.
    - `edges`: what each task needs, by number.
    - `devices`: how many there are, idle ones included.
    - `machine`: its channel is that of all links.
    - `kept_bytes`: per layer, what a mini-batch keeps.
    - `delays`: per layer, updates by which its gradients are late.
    """
    machine = machine or Machine()
    if not isinstance(machine.channel, Channel):
        raise ScheduleError("tasks that are placed one by one use one kind of link: give one channel for all")
    if machine.speeds is not None and len(machine.speeds) != devices:
        raise ScheduleError(f"expected the speeds of {devices} devices, got {len(machine.speeds)}")
    times = [machine.time(task.time, task.device) for task in tasks]
    # Slots already order what one device does; only messages between devices can be waited for.
    remote = [edge for edge in edges if tasks[edge.source].device != tasks[edge.target].device]
    wires = [_edge(edge, tasks, devices, machine.channel) for edge in remote]
    graph = Graph(times, wires, lambda task, number: str(Action(tasks[task].kind, tasks[task].layer, number)))
    with no_collection():
        order = slot_order(tasks, batches, devices)
        numbers = [[number for number, _ in stream] for stream in order]
        starts, ends = execute(graph, numbers, jitter_factors(machine, [len(stream) for stream in order]))
        of = [(task.kind, task.layer) for task in tasks]
        actions = [[Action(*of[number], batch) for number, batch in stream] for stream in order]
    layers = 1 + max(task.layer for task in tasks)
    sent: dict[tuple[int, int], float] = {}
    for edge in remote:
        link = _link(edge, tasks)
        sent[link] = sent.get(link, 0) + edge.size
    return Simulation(
        Timeline(actions, starts, ends),
        stages=layers,
        kept_bytes=tuple(kept_bytes or [0.0] * layers),
        sent_bytes=tuple(sent[link] for link in sorted(sent)),
        groups=(1,) * batches,
        delays=tuple(delays) if delays is not None else (0,) * layers,
    )


def _edge(edge: SlotEdge, tasks: Sequence[SlotTask], devices: int, channel: Channel) -> Edge:
    source, target = tasks[edge.source].device, tasks[edge.target].device
    return Edge(
        edge.source,
        edge.target,
        wire=source * devices + target,
        time=channel.sending(edge.size),
        latency=channel.latency,
        blocking=not channel.overlapped,
        tokens=edge.tokens,
    )


def _link(edge: SlotEdge, tasks: Sequence[SlotTask]) -> tuple[int, int]:
    low, high = sorted((tasks[edge.source].device, tasks[edge.target].device))
    return low, high
