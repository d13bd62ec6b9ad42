"""The order in which links with lanes send and receive, recorded and compared with the model that was searched.

Ranks are threads here. Tensors wait for each other as over NCCL: a send is over when its receive is, and not before.
"""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import mse_loss

from nccl_model import Model, Order, strays
from rank_jobs import momentum_sgd
from small_nets import tanh_net, vectors
from unlatch.errors import PeerLost, TransportError
from unlatch.methods import get
from unlatch.nn.device import CPU
from unlatch.runtime.engine import Engine
from unlatch.runtime.stage import Stage, StageOptions
from unlatch.runtime.station import ChainStation
from unlatch.transport import lanes, link
from unlatch.transport.lanes import Lanes
from unlatch.transport.mail import Mail
from unlatch.transport.wire import HEADER_BYTES, Reader

GOOD = Order("per direction", "after the header")
#: Seconds that a busy machine may take for what is done in milliseconds; nothing waits so long unless it hangs.
PATIENCE = 60.0


class Trace:
    """What happened, in an order in which nothing comes before its cause."""

    def __init__(self):
        self.steps = []
        self._lock = threading.Lock()

    def note(self, what, way):
        with self._lock:
            self.steps.append((what, way))


class HeaderWay:
    """One direction of gloo: takes everything at once."""

    def __init__(self, way, trace):
        self.way, self.trace, self.queue = way, trace, queue.Queue()

    def isend(self, t):
        if is_header(t):
            self.trace.note("header", self.way)
        self.queue.put(t.clone())

    def recv(self, buffer):
        buffer.copy_(self.queue.get(timeout=PATIENCE))
        if is_header(buffer):
            self.trace.note("read", self.way)


class LaneWay:
    """One group of two ranks, in which one only sends: tensors meet their receives."""

    def __init__(self, way, trace):
        self.way, self.trace, self.queue = way, trace, queue.Queue()
        self.ending = threading.Barrier(2)

    def destroy(self):
        """Takes both ranks."""
        assert self.queue.empty()
        self.ending.wait(PATIENCE)
        self.trace.note("destroyed", self.way)

    def abort(self):
        self.trace.note("aborted", self.way)

    def isend(self, t):
        self.trace.note("send", self.way)
        over = threading.Event()
        self.queue.put((t, over))
        return SimpleNamespace(wait=lambda: over.wait(PATIENCE))

    def irecv(self, buffer):
        self.trace.note("receive", self.way)

        def wait():
            t, over = self.queue.get(timeout=PATIENCE)
            assert t.numel() == buffer.numel(), "a tensor met a buffer of another size"
            # Long enough for whoever does not wait to run ahead.
            time.sleep(0.002)
            buffer.copy_(t)
            self.trace.note("over", self.way)
            over.set()

        return SimpleNamespace(wait=wait)


class FakeDist:
    """Both kinds of groups: a header group is the ways of one rank, by peer."""

    @staticmethod
    def isend(t, peer, group):
        return (group[0][peer] if isinstance(group, tuple) else group).isend(t)

    send = isend

    @staticmethod
    def irecv(t, peer, group):
        return group.irecv(t)

    @staticmethod
    def recv(t, peer, group):
        group[1][peer].recv(t)

    @staticmethod
    def destroy_process_group(group):
        group.destroy()


def is_header(t):
    """Whether it is one: other things may be as long by chance."""
    if t.numel() != HEADER_BYTES:
        return False
    reader = Reader(0)
    reader._expected = int.from_bytes(bytes(t[11:19].tolist()), "little")
    try:
        reader.head(t)
    except TransportError:
        return False
    return True


class Gossip:
    """What `Health` does, without a store."""

    def loss(self, peer, error=None):
        return PeerLost(f"rank {peer} is gone ({error!r})")

    def departure(self, peer):
        return PeerLost(f"rank {peer} has left")


class Rank:
    """One stage on a thread, with lanes to its neighbours."""

    def __init__(self, index, stages, method, model):
        self.index, self.error, self.losses = index, None, []
        self.mail = Mail({index}, forward_to=lambda message: self.links[message.stage].send(message))
        stage = Stage(index, stages, model[index], method.rules(), StageOptions(mse_loss, momentum_sgd))
        parts = method.microbatches
        self.lanes = Lanes(CPU)
        self.engine = Engine(
            {index: ChainStation(index, stage)},
            method.schedule(stages),
            self.mail,
            devices=tuple(range(stages)),
            microbatches=parts,
            landed=self.lanes.landed,
        )
        self.lanes._rank = index
        self.peers = [peer for peer in (index - 1, index + 1) if 0 <= peer < stages]

    def connect(self, headers, ways):
        out = {peer: headers[self.index, peer] for peer in self.peers}
        into = {peer: headers[peer, self.index] for peer in self.peers}
        self.lanes._groups = {way: lane for way, lane in ways.items() if self.index in way}
        self.links = {
            peer: link.Link(peer, (out, into), self.mail, Gossip(), (), self.lanes.to(peer)) for peer in self.peers
        }

    def train(self, data):
        try:
            for x, y in data:
                self.losses += [f.loss for f in self.engine.step(x, y)]
            self.losses += [f.loss for f in self.engine.drain()]
        except Exception as error:
            self.error = error
        for one in self.links.values():
            one.close(timeout=PATIENCE)


def recorded(monkeypatch, name, stages, micros):
    """Train on ranks. **Returns:** the schedule, and what was recorded."""
    monkeypatch.setattr(link, "dist", FakeDist)
    monkeypatch.setattr(lanes, "dist", FakeDist)
    synchronous = get(name).schedule(stages).flushes
    method = get(name, microbatches=micros if synchronous else 1)
    trace, model = Trace(), tanh_net(stages)
    pairs = [(a, b) for a in range(stages) for b in (a - 1, a + 1) if 0 <= b < stages]
    headers, ways = {way: HeaderWay(way, trace) for way in pairs}, {way: LaneWay(way, trace) for way in pairs}
    ranks = [Rank(index, stages, method, model) for index in range(stages)]
    for rank in ranks:
        rank.connect(headers, ways)
    data = vectors(1 if synchronous else micros, size=8)
    threads = [threading.Thread(target=rank.train, args=(data,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    assert [rank.error for rank in ranks] == [None] * stages
    assert all(rank.losses == ranks[0].losses != [] for rank in ranks)
    assert sorted(way for what, way in trace.steps if what == "destroyed") == sorted([*pairs, *pairs])
    assert not [way for what, way in trace.steps if what == "aborted"]
    return method.schedule(stages), trace.steps


def steps_of(trace):
    """The steps of messages with tensors: one send, receive and end for each, however many tensors it has.

    A sender's step is its header: the model sends and posts at once, and a receiver may be faster than a second note.
    """
    begun, tensors = {}, {}
    for number, (what, way) in enumerate(trace):
        if what == "header":
            begun[way] = number
        elif what == "send":
            assert way in begun, "a tensor was sent before any header"
            tensors[begun[way]] = tensors.get(begun[way], 0) + 1
    # By way, tensors of each message that has some.
    sizes = {
        way: [tensors[n] for n, one in enumerate(trace) if one == ("header", way) and n in tensors] for way in begun
    }
    found, read, left = [], {}, {}
    for number, (what, way) in enumerate(trace):
        if what == "header" and number in tensors:
            found.append(("send", way))
        elif what == "read":
            read[way] = True
        elif what == "receive" and read.pop(way, False):
            found.append(("receive", way))
            left[way] = sizes[way].pop(0)
        elif what == "receive":
            assert left.get(way, 0) > 0, "a receive was posted before its header was read"
        elif what == "over":
            left[way] -= 1
            if left[way] == 0:
                found.append(("over", way))
    assert not any(left.values())
    assert not any(sizes.values())
    return found


@pytest.mark.parametrize(("stages", "micros"), [(2, 5), (3, 4), (4, 4)])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "pipedream", "dtr", "fdg"])
def test_what_links_do_is_a_way_through_the_model(monkeypatch, name, stages, micros):
    schedule, trace = recorded(monkeypatch, name, stages, micros)
    steps = steps_of(trace)
    # Forward and backward over every border.
    assert len(steps) == 3 * 2 * (stages - 1) * micros
    assert strays(Model(schedule, micros, GOOD), steps) == ""


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_a_sender_that_does_not_wait_strays(monkeypatch, name):
    """Its next header is out before the tensor of the last one has been received."""
    isend = LaneWay.isend

    def impatient(way, t):
        isend(way, t)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(LaneWay, "isend", impatient)
    schedule, trace = recorded(monkeypatch, name, 2, 5)
    assert "is not allowed in" in strays(Model(schedule, 5, GOOD), steps_of(trace))


def test_a_trace_with_steps_in_another_order_strays(monkeypatch):
    schedule, trace = recorded(monkeypatch, "pipedream", 2, 3)
    steps, model = steps_of(trace), Model(schedule, 3, GOOD)
    assert strays(model, steps) == ""
    assert strays(model, steps[:-1]).startswith("it ends in")
    for number, (what, way) in enumerate(steps):
        if what == "receive":
            # Before the send that it is for.
            early = steps.index(("send", way))
            moved = [*steps[:early], (what, way), *steps[early:number], *steps[number + 1 :]]
            assert "is not allowed in" in strays(model, moved)
            break


def test_zero_elements_and_tensors_without_a_lane(monkeypatch):
    monkeypatch.setattr(lanes, "dist", FakeDist)
    there = Lanes(CPU)
    lane = there.to(1)
    with pytest.raises(TransportError, match="to rank 1, where the schedule names no message"):
        lane.send([torch.ones(1)], torch.cpu.Event())
    empty = lane.leaving(lanes.Message("forward", 1, payload={"x": torch.empty(0, 3), "n": None}))
    got = lane.arriving(empty.on_host()).payload
    assert empty.follow() == 0
    assert got["n"] is None
    assert got["x"].shape == (0, 3)


def one_end(monkeypatch, group):
    """Lanes from rank 0 to rank 1, over groups that are alike."""
    monkeypatch.setattr(lanes, "dist", FakeDist)
    there = Lanes(CPU)
    there._groups = {(0, 1): group(), (1, 0): group()}
    return there


def test_a_group_whose_other_end_is_gone_is_aborted_when_that_is_known(monkeypatch):
    """Not after the patience of the group: somebody watches."""
    trace = Trace()
    there = one_end(monkeypatch, lambda: LaneWay((0, 1), trace))
    there._alarm = lambda: PeerLost("rank 1 is gone")
    begun = time.monotonic()
    there.to(1).close(broken=False)
    assert [what for what, _ in trace.steps] == ["aborted", "aborted"]
    assert time.monotonic() - begun < PATIENCE / 2


def test_a_group_that_never_ends_keeps_nobody_for_long(monkeypatch):
    monkeypatch.setattr(lanes, "_PARTING", 0.2)
    trace = Trace()
    one_end(monkeypatch, lambda: LaneWay((0, 1), trace)).to(1).close(broken=False)
    assert [what for what, _ in trace.steps] == ["aborted", "aborted"]


def test_versions_of_torch_without_abort(monkeypatch):
    one_end(monkeypatch, SimpleNamespace).to(1).close(broken=True)


def test_what_another_rank_did_does_not_part_two_that_took_leave(monkeypatch):
    """One of them may know of it, and the other one not yet: then one would abort while the other destroys."""
    trace = Trace()
    headers = {way: HeaderWay(way, trace) for way in ((0, 1), (1, 0))}
    ways = {way: LaneWay(way, trace) for way in headers}
    monkeypatch.setattr(link, "dist", FakeDist)
    ranks = [Rank(index, 2, get("dtr"), tanh_net(2)) for index in (0, 1)]
    monkeypatch.setattr(lanes, "dist", FakeDist)
    for rank in ranks:
        rank.connect(headers, ways)
    own = [rank.links[1 - rank.index] for rank in ranks]
    for one in own:
        one._outbox.put(None)
    for thread in (thread for one in own for thread in one._threads):
        thread.join(PATIENCE)
    ranks[0].mail.fail(PeerLost("rank 2 is gone"))
    closing = [threading.Thread(target=one.close) for one in own]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(PATIENCE)
    assert sorted(what for what, _ in trace.steps if what in ("destroyed", "aborted")) == ["destroyed"] * 4


def test_a_program_that_ends_can_close_without_a_new_thread(monkeypatch):
    """Python 3.12 and later begin none while functions of atexit run."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    for broken in (False, True):
        there = one_end(monkeypatch, lambda: LaneWay((0, 1), Trace()))
        with monkeypatch.context() as patch:
            lane = there.to(1)
            patch.setattr(threading.Thread, "start", refuse)
            lane.close(broken=broken)
        assert there._groups == {}
