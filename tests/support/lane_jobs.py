"""Runs whose tensors go over lanes: groups of two ranks beside the link, here of gloo and for tensors of the CPU.

Everything but the backend of the groups, and the device, is what `transport="nccl"` does.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

import fault_jobs
import rank_jobs
from fault_jobs import write_whole
from order_jobs import begun, data
from recording import feed as feed_all
from replica_jobs import in_parts
from resume_jobs import SAVED_AT, Outcome, ended, feed
from small_nets import vectors
from unlatch import Faults
from unlatch.nn.tree import tree_bytes
from unlatch.transport.lanes import BACKENDS, Backend, Lane, Lanes
from unlatch.transport.mail import Cut, Mail, Message

NAME = "lanes"


@contextmanager
def lanes() -> Iterator[dict[str, Any]]:
    """Inside, there is a transport with lanes for the CPU. What it yields is the option that asks for it."""
    BACKENDS[NAME] = Backend("gloo", "cpu")
    try:
        yield {"transport": NAME}
    finally:
        del BACKENDS[NAME]


@contextmanager
def sending(before: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    """Inside, `before` is called with tensors whose header was sent, before they are."""
    send = Lane.send

    def later(lane: Lane, tensors: Sequence[Tensor], ready: Any) -> None:
        before(tensors)
        send(lane, tensors, ready)

    Lane.send = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        Lane.send = send  # type: ignore[method-assign]


def train_conv(methods: Sequence[Any], stages: int, **options: Any) -> tuple[dict[str, rank_jobs.Outcome], int]:
    """By method what comes of it; and how many bytes this rank sent over lanes."""
    sent = [0]

    def counted(tensors: Sequence[Tensor]) -> None:
        sent[0] += tree_bytes(list(tensors))

    with lanes() as option, sending(counted):
        return {str(name): rank_jobs.train_conv(name, stages, **option, **options) for name in methods}, sent[0]


def train_replicas(method: str, least: int | None) -> tuple[rank_jobs.Outcome, int]:
    """What comes of two replicas, and how many messages had tensors for a lane.

    **Arguments:** `least`: bytes of gradients that are worth a part of their own, if not so many as always.
    """
    sent = [0]

    def counted(tensors: Sequence[Tensor]) -> None:
        sent[0] += bool(tensors)

    with lanes() as option, sending(counted), nullcontext() if least is None else in_parts(least):
        return rank_jobs.train_conv(method, 2, replicas=2, **option), sent[0]


def bytes_by_way(batches: int) -> tuple[int, int, list[int]]:
    """Bytes over lanes, bytes of messages, both of this rank; and what the statistics say."""
    found: Counter[str] = Counter()

    def counted(tensors: Sequence[Tensor]) -> None:
        found["lanes"] += tree_bytes(list(tensors))

    with lanes() as option, sending(counted), fault_jobs.start("pipedream", 2, **option) as run:
        forward_to = run._engine.mail._elsewhere

        def noted(message: Message) -> None:
            found["messages"] += tree_bytes(message.payload)
            forward_to(message)

        run._engine.mail._elsewhere = noted
        feed_all(run, vectors(batches, 50))
        return found["lanes"], found["messages"], [stage.bytes_sent for stage in run.statistics()]


def groups_made() -> tuple[list[list[int]], list[tuple[int, int]], int]:
    """The ranks of all groups in the order in which they are made here, the ways that are open, and on how many."""
    made: list[list[int]] = []
    new_group = dist.new_group

    def noted(ranks: Any = None, **options: Any) -> Any:
        if ranks is not None:
            made.append(ranks)
        return new_group(ranks, **options)

    opened: list[Lanes] = []
    open_all = Lanes.open

    def kept(own: Lanes, *args: Any) -> None:
        open_all(own, *args)
        opened.append(own)

    dist.new_group, Lanes.open = noted, kept  # type: ignore[method-assign]
    try:
        with lanes() as option, fault_jobs.start("dtr", dist.get_world_size(), **option):
            ways = opened[0]._groups
            return made, sorted(ways), len({id(group) for group in ways.values()})
    finally:
        dist.new_group, Lanes.open = new_group, open_all  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------------ checkpoints


def saved_and_continued(case: str, folder: str) -> tuple[Outcome, Outcome, int]:
    """A run that was saved with tensors on their way, the one that goes on from there; and how many came after the cut.

    Only what all ranks have of it: losses and weights of the network.
    """
    path = str(Path(folder, case.replace(" ", "_")))
    cuts: list[tuple[Cut, int]] = []
    cut = Mail.cut

    def noted(mail: Mail, *args: Any) -> Cut:
        made = cut(mail, *args)
        cuts.append((made, len(made.messages)))
        return made

    def slowly(tensors: Sequence[Tensor]) -> None:
        time.sleep(0.03)

    Mail.cut = noted  # type: ignore[method-assign]
    try:
        with lanes() as option:
            with sending(slowly), begun(case, 1, **option) as run:
                feed(run, 0, SAVED_AT)
                run.save(path, wait=True)
                one = ended(run)
            with begun(case, 1, **option) as run:
                for x, y in data()[:2]:
                    run.step(x + 1, y)
                run.load(path)
                other = ended(run)
    finally:
        Mail.cut = cut  # type: ignore[method-assign]
    late = sum(len(made.messages) - before for made, before in cuts)
    return (one[0], one[1][:8]), (other[0], other[1][:8]), late


def left_out(method: str, faults: Faults | None) -> rank_jobs.Outcome:
    """A batch that is not finite calls off what is under way, on lanes too."""
    with lanes() as option, fault_jobs.start(method, 2, faults=faults, nonfinite="skip", **option) as run:
        feed_all(run, [batch for number, batch in enumerate(vectors(8)) if faults is not None or number != 3])
        return {"steps": [run.batches], "state": rank_jobs.copied_state(run.module())}


# ----------------------------------------------------------------------------------------------------------- faults


def breaks(method: str, stages: int, what: Faults | str, at_stage: int, folder: str, limit: float) -> None:
    """Train until the fault shows; each rank writes down what it saw and when, and the fault when it struck.

    **Arguments:** `what`: injected faults, or a signal that a rank gives itself when it has sent a header, and the
    tensor not yet.
    """
    rank, struck = int(os.environ["RANK"]), str(Path(folder, "struck"))
    count = [0]

    def betrayed(tensors: Sequence[Tensor]) -> None:
        count[0] += 1
        if isinstance(what, str) and rank == at_stage and count[0] == 4:
            fault_jobs.note_strike(struck)
            os.kill(os.getpid(), signal.Signals[what])

    faults = replace(what, log=struck) if isinstance(what, Faults) else None
    limit = fault_jobs.NEVER if rank == at_stage else limit
    try:
        with (
            lanes() as option,
            sending(betrayed),
            fault_jobs.start(method, stages, faults=faults, limit=limit, **option) as run,
        ):
            feed_all(run, vectors(40, 300))
    except Exception as error:
        report = {"text": f"{type(error).__name__}: {error}", "time": time.monotonic()}
        write_whole(Path(folder, f"rank{rank}"), json.dumps(report))
        raise


def dies_at_the_start(folder: str) -> None:
    """Rank 1 ends when the first group is tried out; the other one writes down what it saw."""
    try_out = Lanes._try_out

    def betrayed(own: Lanes, *args: Any) -> None:
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try_out(own, *args)

    Lanes._try_out = betrayed  # type: ignore[method-assign]
    try:
        with lanes() as option:
            fault_jobs.start("dtr", 2, limit=fault_jobs.LIMIT, **option)
    except Exception as error:
        write_whole(Path(folder, "seen"), f"{type(error).__name__}: {error}")
        raise
    finally:
        Lanes._try_out = try_out  # type: ignore[method-assign]


def held_bytes(batches: int) -> list[tuple[int, int]]:
    """Most batches in flight and most bytes that waited, by stage, where one stage is slow, and so are its messages."""
    slow = Faults().delay(1, ms=5).delay(0, ms=2, message="backward", jitter=True)
    with lanes() as option, fault_jobs.start("pipedream", 2, faults=slow, **option) as run:
        feed_all(run, vectors(batches))
        return [(stage.in_flight, stage.message_bytes) for stage in run.statistics()]


def threads_afterwards() -> set[str]:
    """Of a rank that has closed a run."""
    with lanes() as option, fault_jobs.start("dtr", 2, **option) as run:
        feed_all(run, vectors(3))
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("unlatch-send", "unlatch-rec"))}


def disagrees() -> None:
    """Rank 1 means other connections than rank 0."""
    with lanes() as option:
        fault_jobs.start("dtr", 2, **(option if os.environ["RANK"] == "1" else {}))
