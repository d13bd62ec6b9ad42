"""Two ranks of one machine in one process: what travels through shared memory arrives as it left, or is refused."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlatch.errors import PeerLost, TransportError, UnlatchError
from unlatch.transport.local_link import LocalLink, Neighbours
from unlatch.transport.local_wire import Reader, Writer
from unlatch.transport.mail import BACKWARD, FORWARD, Mail, Message, Micro
from unlatch.transport.shared_memory import SHARES_MEMORY, Incoming, Outgoing

pytestmark = pytest.mark.skipif(not SHARES_MEMORY, reason="this system has no memory without a name")
#: Seconds that a busy machine may take for what is done in milliseconds.
PATIENCE = 60.0


class Gossip:
    """What `Health` does, without a store."""

    def loss(self, peer, error=None):
        return PeerLost(f"rank {peer} is gone ({error})")

    def departure(self, peer):
        return PeerLost(f"rank {peer} has left")


class End:
    """One rank: mail and a link, served by whoever waits."""

    def __init__(self, rank, channel):
        self.channel = channel
        self.mail = Mail({rank})
        self.link = LocalLink(1 - rank, channel, Neighbours(self.mail), self.mail, Gossip(), [(FORWARD, rank)])


@pytest.fixture
def ends():
    found = [End(*pair) for pair in enumerate(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))]
    yield found
    threads = [threading.Thread(target=end.link.close, kwargs={"timeout": 1.0, "sending": 1.0}) for end in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)


def card(number):
    return Micro(number, number, 0, 1, 6, 0.25, number, True, fresh=number % 2 == 0)


def passed(ends, payload, **more):
    """What comes out at the other end."""
    ends[0].link.send(Message(FORWARD, 1, card(3), payload, 7, **more))
    return ends[1].mail.take(FORWARD, 1, card(3))


TENSORS = [
    torch.randn(3, 4),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(4, 3).t(),
    torch.tensor(2.5, dtype=torch.float64),
    torch.arange(5),
    torch.tensor([True, False]),
    torch.randn(3).to(torch.bfloat16),
    torch.randn(2, dtype=torch.complex64),
    torch.empty(0, 4),
    torch.randn(300, 300),
]


@pytest.mark.parametrize("sent", TENSORS, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")
def test_a_tensor_arrives_as_it_left(ends, sent):
    got = passed(ends, sent).payload
    assert torch.equal(got, sent)
    assert (got.dtype, got.shape, got.stride()) == (sent.dtype, sent.shape, sent.stride())
    assert got.numel() == 0 or got.data_ptr() % 64 == 0


def test_trees_numbers_and_words_arrive(ends):
    tree = ({"a": torch.ones(2), "b": [torch.zeros(1), None]}, "word")
    for _ in range(3):
        message = passed(ends, tree, scalars={"loss": 0.5, "count": 3.0})
        (first, word), scalars = message.payload, message.scalars
        assert list(first) == ["a", "b"]
        assert torch.equal(first["a"], torch.ones(2))
        assert first["b"][1] is None
        assert (word, scalars, message.version, message.micro) == ("word", {"loss": 0.5, "count": 3.0}, 7, card(3))
    ends[0].link.send(Message(FORWARD, 1, control="end"))
    last = ends[1].mail.take(FORWARD, 1)
    assert (last.control, last.micro, last.scalars) == ("end", None, None)


def test_constants_that_are_equal_but_not_the_same_stay_apart(ends):
    """1, 1.0 and True are equal in Python: a form that was known for one of them would have served for all."""
    for constant in (1, True, 1.0, 1, True, None, "1", -0.0, 0.0, math.nan):
        got = passed(ends, (torch.ones(1), constant)).payload[1]
        assert (type(got), repr(got)) == (type(constant), repr(constant))


def test_many_forms_do_not_add_up(ends):
    """Sums of an evaluation are numbers in the structure, new ones with every batch."""
    for number in range(100):
        assert passed(ends, {"loss": (float(number), 1.0)}).payload == {"loss": (float(number), 1.0)}
    assert torch.equal(passed(ends, torch.ones(2)).payload, torch.ones(2))


def test_the_sender_may_change_its_tensor_and_the_receiver_its_own(ends):
    sent = torch.ones(100)
    got = passed(ends, sent).payload
    sent.zero_()
    assert torch.equal(got, torch.ones(100))
    got.fill_(7.0)
    again = passed(ends, sent).payload
    assert torch.equal(again, torch.zeros(100))
    assert torch.equal(got, torch.full((100,), 7.0))


def test_memory_is_used_again_when_nobody_refers_to_it(ends, monkeypatch):
    made, real = [], os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name: made.append(name) or real(name))
    for _ in range(50):
        passed(ends, torch.ones(1000))
    assert len(made) == 1
    kept = [passed(ends, torch.full((1000,), float(n))).payload for n in range(5)]
    views = [t[10:20] for t in kept]
    assert len(made) == 5
    assert [float(t.mean()) for t in views] == [0.0, 1.0, 2.0, 3.0, 4.0]
    del kept
    gc.collect()
    passed(ends, torch.full((1000,), 9.0))
    assert len(made) == 6, "a view of a tensor still uses its memory"
    assert [float(t.mean()) for t in views] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_graph_keeps_the_memory_that_it_needs(ends):
    weight = torch.full((100,), 2.0, requires_grad=True)
    x = passed(ends, torch.full((100,), 3.0)).payload
    loss = (weight * x).sum()
    del x
    passed(ends, torch.full((100,), 5.0))
    loss.backward()
    assert torch.equal(weight.grad, torch.full((100,), 3.0))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_does_not_give_memory_back(ends):
    """Workers of a DataLoader inherit tensors, and let go of them while their parent still uses them."""
    got = passed(ends, torch.ones(100)).payload
    child = os.fork()
    if child == 0:
        del got
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    other = passed(ends, torch.zeros(100)).payload
    assert torch.equal(got, torch.ones(100))
    assert torch.equal(other, torch.zeros(100))


def test_a_full_socket_loses_nothing(ends):
    """What the socket does not take is sent while this rank waits; files of new slots included."""
    count = 3000
    held = []
    for number in range(count):
        ends[0].link.send(Message(FORWARD, 1, card(number), torch.full((600,), float(number))))
    reader = threading.Thread(target=lambda: held.extend(ends[1].mail.take(FORWARD, 1, card(n)) for n in range(count)))
    reader.start()
    assert not ends[0].mail.wait_until(lambda: not reader.is_alive(), 0.0)
    assert ends[0].mail.wait_until(lambda: not reader.is_alive(), PATIENCE)
    assert [float(message.payload[0]) for message in held] == [float(number) for number in range(count)]


def test_what_cannot_travel_at_once_fails_where_it_is_sent(ends):
    """It arrived cut off, and the receiver complained of JSON."""
    with pytest.raises(TransportError, match=r"takes \d+ bytes, more than the \d+ .* pass fewer separate tensors"):
        ends[0].link.send(Message(FORWARD, 1, card(0), [torch.ones(1)] * 4000))


def test_the_end_of_a_peer_shows_at_once(ends):
    ends[0].link.send(Message(FORWARD, 1, card(0), torch.ones(1)))
    ends[0].channel.shutdown(socket.SHUT_RDWR)
    assert ends[1].mail.take(FORWARD, 1, card(0)).micro == card(0)
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        ends[1].mail.take(FORWARD, 1)
    assert isinstance(ends[1].mail.failure(), PeerLost)


def test_a_failure_is_found_by_those_who_only_ask(ends):
    """Who waits in an exchange of all ranks asks now and then whether it is in vain."""
    assert ends[1].mail.failure() is None
    ends[0].channel.shutdown(socket.SHUT_RDWR)
    assert isinstance(ends[1].mail.failure(), PeerLost)


def test_a_question_sees_past_messages_that_nobody_has_taken(ends):
    """Who waits reads one message at a time; whoever only asks must know all that has come."""
    for number in range(3):
        ends[0].link.send(Message(FORWARD, 1, card(number), torch.ones(1)))
    assert not ends[1].mail.voided
    for number in range(3, 6):
        ends[0].link.send(Message(FORWARD, 1, card(number), torch.ones(1)))
    ends[0].link.void()
    assert ends[1].mail.take(FORWARD, 1, card(0)).micro == card(0)
    assert ends[1].mail.voided
    assert [ends[1].mail.take(FORWARD, 1).micro for _ in range(5)] == [card(number) for number in range(1, 6)]


def test_one_message_is_read_for_who_waits_for_it(ends):
    """The others stay in the socket until somebody asks for them, and none is lost."""
    for number in range(3):
        ends[0].link.send(Message(FORWARD, 1, card(number), torch.ones(1)))
    assert ends[1].mail.take(FORWARD, 1, card(0)).micro == card(0)
    assert not ends[1].mail._boxes[FORWARD, 1]
    assert [ends[1].mail.take(FORWARD, 1).micro for _ in range(2)] == [card(1), card(2)]


def test_who_took_leave_is_not_lost(ends):
    leaving = threading.Thread(target=ends[0].link.close)
    ends[0].link.send(Message(FORWARD, 1, card(0), torch.ones(1)))
    leaving.start()
    assert ends[1].mail.take(FORWARD, 1, card(0)).micro == card(0)
    with pytest.raises(PeerLost, match="rank 0 has left"):
        ends[1].mail.take(FORWARD, 1)
    assert ends[1].mail.failure() is None
    ends[1].link.close()
    leaving.join(PATIENCE)
    assert not leaving.is_alive()


def test_closing_does_not_wait_for_what_has_come():
    """It waited a second for a peer's leave that it had just read, while it asked whether the peer was lost."""
    start = time.monotonic()
    for _ in range(10):
        found = [End(*pair) for pair in enumerate(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))]
        threads = [threading.Thread(target=end.link.close) for end in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert time.monotonic() - start < 5.0


def test_a_waiting_stage_hears_of_a_failure_at_once(ends):
    timer = threading.Timer(0.1, ends[1].mail.fail, [PeerLost("gone")])
    timer.start()
    with pytest.raises(PeerLost, match="gone"):
        ends[1].mail.take(FORWARD, 1)
    timer.join()


def test_two_threads_wait_and_both_are_served(ends):
    """A checkpoint waits for marks on a thread of its own while training waits for a message."""
    cut, found = ends[1].mail.cut([0]), []
    saving = threading.Thread(target=lambda: found.extend(cut.wait(ends[1].mail.failure)))
    saving.start()

    def sends():
        ends[0].link.send(Message(BACKWARD, 1, card(0), torch.ones(1)))
        ends[0].link.mark()
        ends[0].link.send(Message(FORWARD, 1, card(1), torch.ones(1)))

    timer = threading.Timer(0.1, sends)
    timer.start()
    assert ends[1].mail.take(FORWARD, 1, card(1)).micro == card(1)
    saving.join(PATIENCE)
    assert [message["kind"] for message in found] == [BACKWARD]
    ends[0].link.void()
    ends[1].mail.wait_for_void([0])
    assert ends[1].mail.voided


# ------------------------------------------------------------------------------------------------- frames


def written(count=1):
    """Frames of some messages, and a reader that can see their slots."""
    memory = Incoming()
    writer = Writer(Outgoing(lambda number, capacity, file: memory.add(number, capacity, os.dup(file))))
    frames = [frame for n in range(count) for frame in writer.frames(Message(FORWARD, 1, card(n), torch.ones(n + 1)))]
    return Reader(memory, peer=0), [memoryview(frame) for frame in frames]


def test_lost_and_doubled_frames_are_refused():
    reader, (form, letter, second_form, second) = written(2)
    reader.learn(form)
    reader.learn(second_form)
    with pytest.raises(TransportError, match=r"message 1 came from rank 0 where 0 was due: one was lost"):
        reader.message(second)
    reader.message(letter)
    with pytest.raises(TransportError, match=r"message 0 came from rank 0 where 1 was due"):
        reader.message(letter)


def test_a_frame_of_an_unknown_form_or_slot_is_refused():
    reader, (form, letter) = written()
    with pytest.raises(TransportError, match="the form of no message"):
        reader.message(letter)
    reader.learn(form)
    with pytest.raises(TransportError, match="the form of no message"):
        reader.message(letter[:-1])
    elsewhere = Reader(Incoming(), peer=0)
    elsewhere.learn(form)
    with pytest.raises(TransportError, match="names 4 bytes in slot 0, which are not there"):
        elsewhere.message(letter)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_garbage_is_refused_and_nothing_worse(garbage, at):
    reader, (form, letter) = written()
    broken = bytearray(form)
    broken[1 + at % (len(broken) - 1)] ^= 1 + len(garbage)
    for frame in (memoryview(b"F" + garbage), memoryview(bytes(broken))):
        with contextlib.suppress(UnlatchError):
            reader.learn(frame)
            reader.message(letter)
    with contextlib.suppress(TransportError):
        reader.message(memoryview(b"L" + garbage))
