"""Two ranks in one process, over a wire that a test can tamper with: wrong messages are refused, never trained on."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import mse_loss

import unlatch
from rank_jobs import momentum_sgd
from small_nets import tanh_net, vectors
from unlatch.errors import PeerLost, TransportError
from unlatch.methods import get
from unlatch.runtime.engine import Engine
from unlatch.runtime.stage import Stage, StageOptions
from unlatch.runtime.station import ChainStation
from unlatch.transport import link as transport
from unlatch.transport.mail import ACK, BACKWARD, EVALUATE, FORWARD, Mail, Message, Micro
from unlatch.transport.wire import HEADER_BYTES, Reader

GONE = object()
#: Seconds that a busy machine may take for what is done in milliseconds; nothing waits so long unless it hangs.
PATIENCE = 100.0


class FakeDist:
    """The three calls that links use, over queues. A group is one end of the wire."""

    @staticmethod
    def isend(tensor, peer, group):
        group.send(tensor.clone())

    send = isend

    @staticmethod
    def recv(buffer, peer, group):
        found = group.inbox.get(timeout=PATIENCE)
        if found is GONE:
            raise RuntimeError("Connection closed by peer")
        assert found.numel() == buffer.numel(), "a payload met a buffer of another size"
        buffer.copy_(found)


class Gossip:
    """What `Health` does, without a store."""

    def loss(self, peer, error=None):
        return PeerLost(f"rank {peer} is gone ({error})")

    def departure(self, peer):
        return PeerLost(f"rank {peer} has left")


class Rank:
    """One stage with its engine, mail and link, driven by a thread of its own."""

    def __init__(self, index, model, method, tamper=None):
        self.index, self.peer = index, 1 - index
        self.inbox = queue.Queue()
        self.tamper = tamper
        self.mail = Mail(range(index, index + 1), forward_to=lambda message: self.link.send(message))
        options = StageOptions(loss_fn=mse_loss, optimizer=momentum_sgd)
        self.stage = Stage(index, 2, model[index], method.rules(), options)
        station = ChainStation(index, self.stage)
        self.engine = Engine({index: station}, method.schedule(2), self.mail, devices=(0, 1))
        self.error = None
        self.losses = []

    def connect(self, other):
        def send(tensor):
            for part in self.tamper(tensor) if self.tamper else [tensor]:
                other.inbox.put(part)

        boxes = [(kind, self.index) for kind in ((FORWARD, EVALUATE) if self.peer < self.index else (BACKWARD, ACK))]
        group = SimpleNamespace(send=send, inbox=self.inbox)
        self.link = transport.Link(self.peer, group, self.mail, Gossip(), boxes)

    def train(self, data, leave=True):
        try:
            for x, y in data:
                self.losses += [f.loss for f in self.engine.step(x, y)]
            self.losses += [f.loss for f in self.engine.drain()]
        except Exception as error:
            self.error = error
        if leave:
            self.link.close(timeout=PATIENCE)


@pytest.fixture
def wire(monkeypatch):
    monkeypatch.setattr(transport, "dist", FakeDist)


def train(method="dtr", tamper=None, upwards=True, data=None, model=None):
    """Train on both ranks; `tamper` turns each tensor that goes up (or down) into a list of tensors."""
    data, model = data or vectors(8), model or tanh_net(2)
    chosen = get(method, microbatches=1)
    ranks = [Rank(k, model, chosen, tamper if (k == 0) == upwards else None) for k in range(2)]
    finish(ranks, data)
    return ranks


def finish(ranks, data):
    """Connect two ranks and train until both are done."""
    for rank, other in (ranks, ranks[::-1]):
        rank.connect(other)
    threads = [threading.Thread(target=rank.train, args=(data,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a rank hangs"


def head_of(tensor):
    """What a header says; `None` for anything else that goes over the wire, which may be as long by chance."""
    if tensor.numel() != HEADER_BYTES:
        return None
    reader = Reader(0)
    reader._expected = int.from_bytes(bytes(tensor[11:19].tolist()), "little")
    try:
        return reader.head(tensor)
    except TransportError:
        return None


class Whole:
    """Passes on whole messages, which here are a header and at most a body: small tensors are in these."""

    def __init__(self):
        self.begun = []

    def __call__(self, tensor):
        self.begun.append(tensor)
        if len(self.begun) == 1:
            head = head_of(tensor)
            assert head is not None
            if head.beside:
                return []
        message, self.begun = self.begun, []
        return self.passed(message)


class At(Whole):
    """Treats the n-th message specially and passes the others on."""

    def __init__(self, number, treat):
        super().__init__()
        self.number, self.treat, self.count = number, treat, 0

    def passed(self, message):
        self.count += 1
        return self.treat(message) if self.count == self.number else message


class Swap(Whole):
    """Lets one message overtake another."""

    def __init__(self, number):
        super().__init__()
        self.number, self.count, self.held = number, 0, []

    def passed(self, message):
        self.count += 1
        if self.count == self.number:
            self.held = message
            return []
        held, self.held = self.held, []
        return [*message, *held]


def flip(tensor, at=60):
    tensor = tensor.clone()
    tensor[at] ^= 4
    return tensor


def flip_last(message):
    """In the last tensor, wherever it travels."""
    return [*message[:-1], flip(message[-1], int(message[-1].nonzero().max()))]


@pytest.mark.parametrize("method", ["bp", "dtr", "pipedream", "zb-h1"])
def test_an_honest_wire_gives_the_inline_result(wire, method):
    model = tanh_net(2)
    one, other = train(method, model=model)
    assert one.error is None
    assert other.error is None
    truth = tanh_net(2)
    run = unlatch.parallelize(
        truth, get(method, microbatches=1), stages=2, loss_fn=mse_loss, optimizer=momentum_sgd, split=["1"]
    )
    losses = [r.loss for r in (run.step(x, y) for x, y in vectors(8)) if r.loss is not None]
    losses += [r.loss for r in run.flush()]
    assert one.losses == other.losses == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), truth.parameters(), strict=True))


@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize(
    ("tamper", "sound", "text"),
    [
        pytest.param(lambda: At(3, lambda m: []), 2, "lost, doubled or overtaken", id="lost"),
        pytest.param(lambda: At(3, lambda m: [*m, *m]), 3, "lost, doubled or overtaken", id="doubled"),
        pytest.param(lambda: Swap(3), 2, "lost, doubled or overtaken", id="overtaken"),
        pytest.param(lambda: At(3, lambda m: [flip(m[0]), *m[1:]]), 2, "damaged", id="damaged-header"),
        pytest.param(lambda: At(1, lambda m: [m[0], flip(m[1])]), 0, "damaged", id="damaged-text"),
        pytest.param(lambda: At(3, flip_last), 2, "damaged", id="damaged-tensor"),
        pytest.param(lambda: At(3, lambda m: [torch.zeros_like(t) for t in m]), 2, "damaged", id="blank"),
    ],
)
def test_tampering_is_refused(wire, tamper, sound, text, upwards):
    ranks = train("dtr", tamper(), upwards)
    victim = ranks[1 if upwards else 0]
    assert isinstance(victim.error, TransportError)
    assert text in str(victim.error)
    # Nothing after the damage was used.
    assert victim.stage.version <= sound


def test_a_broken_connection_names_the_peer(wire):
    ranks = train("dtr", At(4, lambda m: [GONE]))
    assert isinstance(ranks[1].error, PeerLost)
    assert "rank 0 is gone (Connection closed by peer)" in str(ranks[1].error)


@pytest.mark.parametrize(("method", "under_way"), [("bp", 1), ("pipedream", 2), ("dtr", 3), ("fdg", 3)])
def test_a_fast_sender_is_held_back_by_the_schedule(wire, method, under_way):
    """No more forwards are sent than backwards came back, plus what the schedule allows: memory stays flat."""
    model, up, down, most = tanh_net(2), [0], [0], [0]
    model[1].register_forward_hook(lambda *_: time.sleep(0.01))

    def count(tensor):
        up[0] += head_of(tensor) is not None
        most[0] = max(most[0], up[0] - down[0])
        return [tensor]

    def answer(tensor):
        down[0] += head_of(tensor) is not None
        return [tensor]

    chosen = get(method, microbatches=1)
    ranks = [Rank(0, model, chosen, count), Rank(1, model, chosen, answer)]
    finish(ranks, vectors(12))
    assert [rank.error for rank in ranks] == [None, None]
    assert 1 <= most[0] <= under_way


def test_large_tensors_travel_beside_the_header(wire):
    data = vectors(4, size=300)
    seen = []

    def watch(tensor):
        seen.append(tensor.numel() if head_of(tensor) is None else "header")
        return [tensor]

    ranks = train("dtr", watch, data=data)
    assert [rank.error for rank in ranks] == [None, None]
    assert len(ranks[0].losses) == 4
    description = seen.pop(1)
    assert description < 1000
    # Activation and target, each time; and the leave.
    assert seen == ["header", 12000, 12000] * 4 + ["header"]


def test_a_flipped_byte_in_a_tensor_is_not_trained_on(wire):
    blocks = itertools.count()

    def damage(tensor):
        if tensor.numel() == 12000 and next(blocks) == 4:
            tensor[7] ^= 1
        return [tensor]

    ranks = train("dtr", damage, data=vectors(4, size=300))
    assert str(ranks[1].error).startswith(
        "the forward message of batch 2 for stage 1 was damaged on its way from rank 0: block 0 of 2"
    )
    assert isinstance(ranks[1].error, TransportError)


def test_a_peer_that_is_slow_to_listen_hears_our_leave(monkeypatch):
    """It was taken for a death: the connection closed after the seconds that a peer has for its own leave."""
    listens, heard = threading.Event(), []

    class Slow(FakeDist):
        @staticmethod
        def send(tensor, peer, group):
            listens.wait(PATIENCE)
            heard.append(head_of(tensor).closes)

    monkeypatch.setattr(transport, "dist", Slow)
    link = transport.Link(1, SimpleNamespace(inbox=queue.Queue()), Mail(range(1)), Gossip())
    timer = threading.Timer(0.2, listens.set)
    timer.start()
    link.close(timeout=0.0)
    timer.join()
    assert heard == [True]


# ------------------------------------------------------------------------------------------------- mail


def card(number):
    return Micro(number, number, 0, 1, 6, 1.0, number, True)


def test_mail_refuses_a_message_about_another_micro_batch():
    mail = Mail(range(2))
    mail.post(Message(BACKWARD, 0, card(4)))
    with pytest.raises(TransportError, match=r"stage 0 expected the backward message of batch 3 \(id 3\), got batch 4"):
        mail.take(BACKWARD, 0, card(3))
    assert mail.take(BACKWARD, 0, card(4)).micro == card(4)


def test_mail_has_room_for_what_the_schedule_allows():
    mail = Mail(range(1))
    mail.allow({(FORWARD, 0): 2})
    mail.post(Message(FORWARD, 0, card(0)))
    mail.post(Message(FORWARD, 0, card(1)))
    mail.post(Message(BACKWARD, 0, card(0)))
    with pytest.raises(TransportError, match=r"2 forward messages wait for stage 0.*runs ahead"):
        mail.post(Message(FORWARD, 0, card(2)))


def test_mail_for_unknown_stages_is_refused():
    with pytest.raises(TransportError, match="no way to stage 5"):
        Mail(range(2)).send(Message(FORWARD, 5))


def test_what_has_arrived_is_delivered_before_a_failure_shows():
    mail = Mail(range(1))
    mail.post(Message(FORWARD, 0, card(0)))
    mail.fail(PeerLost("first"))
    mail.fail(PeerLost("second"))
    assert mail.take(FORWARD, 0).micro == card(0)
    with pytest.raises(PeerLost, match="first"):
        mail.take(FORWARD, 0)


def test_after_a_peer_has_left_only_waits_for_it_fail():
    mail = Mail(range(1))
    mail.post(Message(FORWARD, 0, card(0)))
    mail.end([(FORWARD, 0), (EVALUATE, 0)], PeerLost("below has left"))
    mail.post(Message(BACKWARD, 0, card(0)))
    assert mail.take(FORWARD, 0).micro == card(0)
    assert mail.take(BACKWARD, 0).micro == card(0)
    with pytest.raises(PeerLost, match="below has left"):
        mail.peek(FORWARD, 0)


def test_a_waiting_stage_hears_of_a_failure_at_once():
    mail = Mail(range(1))
    timer = threading.Timer(0.1, mail.fail, [PeerLost("gone")])
    timer.start()
    with pytest.raises(PeerLost, match="gone"):
        mail.take(FORWARD, 0)
    timer.join()


@pytest.mark.parametrize("wrong", [[1], [0, 0], [0, 2]])
def test_an_engine_refuses_micro_batches_out_of_order(wrong):
    """Even if every message is sound in itself."""
    method = get("dtr", microbatches=1)
    options = StageOptions(loss_fn=mse_loss, optimizer=momentum_sgd)
    mail = Mail(range(1, 2), forward_to=lambda _: None)
    stage = Stage(1, 2, tanh_net(1), method.rules(), options)
    engine = Engine({1: ChainStation(1, stage)}, method.schedule(2), mail, devices=(0, 1))
    for number in wrong:
        mail.post(Message(FORWARD, 1, card(number), vectors(1)[0]))
    for _ in wrong[:-1]:
        engine.step()
    with pytest.raises(TransportError, match="expected the forward message of micro-batch"):
        engine.step()
    assert stage.version == len(wrong) - 1
