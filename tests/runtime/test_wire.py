"""Messages survive the wire unchanged, whatever they hold, and damaged ones are refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from unlatch.errors import TransportError
from unlatch.nn.tree import flatten, tree_bytes
from unlatch.transport.mail import BACKWARD, FORWARD, Message, Micro
from unlatch.transport.wire import HEADER_BYTES, Reader, Sealed, Writer, dense

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


class Wire:
    """Both ends of one direction, with nothing in between."""

    def __init__(self) -> None:
        self.writer, self.reader = Writer(), Reader(1)

    def opened(self, sealed: Sealed):
        """What the receiver makes of it before the blocks come."""
        header = sealed.header.clone()
        assert header.nbytes == HEADER_BYTES
        head = self.reader.head(header)
        assert head.beside == (0 if sealed.body is None else sealed.body.nbytes)
        envelope = self.reader.envelope(head, None if sealed.body is None else sealed.body.clone())
        header.fill_(255)  # the receiver uses its buffer again
        assert [b.nbytes for b in envelope.blocks] == [b.nbytes for b in sealed.blocks]
        return envelope

    def passed(self, message: Message) -> Message:
        sealed = self.writer.seal(message)
        envelope = self.opened(sealed)
        for room, block in zip(envelope.blocks, sealed.blocks, strict=True):
            room.copy_(block)
        envelope.verify()
        return envelope.message()


def over_the_wire(message: Message) -> Message:
    """What arrives, the first time and when its form is known: the same."""
    wire = Wire()
    first, found = wire.passed(message), wire.passed(message)
    for one, other in zip(flatten(first.payload)[0], flatten(found.payload)[0], strict=True):
        assert_same_tensor(one, other)
    return found


def raw(t: Tensor) -> bytes:
    """The values in the order of the indices, as bytes: NaN equals itself, -0.0 differs from 0.0."""
    if t.numel() == 0:
        return b""
    values = t.resolve_conj().resolve_neg().contiguous()
    return bytes(values.as_strided((t.numel(),), (1,)).view(torch.uint8).tolist())


def assert_same_tensor(found: Tensor, sent: Tensor) -> None:
    assert found.dtype == sent.dtype
    assert found.shape == sent.shape
    assert raw(found) == raw(sent)


shapes = st.lists(st.integers(0, 5), max_size=5).filter(lambda s: math.prod(s) <= 200)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    if draw(st.integers(0, 9)) == 0:
        shape = [draw(st.integers(1, 3)), 1500]  # too large for the header
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    data = torch.randint(0, 256, (max(1, count * dtype.itemsize),), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        data = data % 2
    t = (data[: count * dtype.itemsize].clone().view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)
    change = draw(st.sampled_from(["", "permute", "slice", "flip", "expand", "offset", "channels_last", "conj"]))
    if change == "permute":
        t = t.permute(draw(st.permutations(range(t.dim()))))
    elif change == "slice" and t.dim():
        t = t[..., :: draw(st.integers(1, 3))]
    elif change == "offset" and t.dim() and t.shape[0] > 1:
        t = t[1:]
    elif change == "expand":
        t = t.unsqueeze(-1).expand(*t.shape, 3)
    elif change == "channels_last" and t.dim() == 4 and count:
        t = t.contiguous(memory_format=torch.channels_last)
    elif change == "conj" and t.is_complex():
        t = t.conj()
    elif change == "flip" and t.dim() and t.is_complex():
        t = t.conj().imag
    return t


constants = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.just(math.inf)
)
keys = st.one_of(st.text(max_size=5), st.integers(-5, 5))
trees = st.recursive(
    st.one_of(tensors(), constants),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=8,
)


@settings(max_examples=80)
@given(payload=trees)
@example(payload={"a": [torch.zeros(1024) for _ in range(6)]})
def test_any_tree_arrives_as_it_left(payload):
    found = over_the_wire(Message(FORWARD, 1, None, payload)).payload
    sent, structure = flatten(payload)
    got, same_structure = flatten(found)
    assert same_structure == structure
    for t, expected in zip(got, sent, strict=True):
        assert_same_tensor(t, expected)


def test_memory_order_is_kept_where_it_is_dense():
    image = torch.randn(2, 3, 4, 5)
    for t in (image, image.contiguous(memory_format=torch.channels_last), image.permute(3, 1, 0, 2), image[1:]):
        assert over_the_wire(Message(FORWARD, 1, None, t)).payload.stride() == t.stride()
    for t in (image[..., ::2], image[:, :1].expand(2, 3, 4, 5)):
        assert over_the_wire(Message(FORWARD, 1, None, t)).payload.stride() == t.contiguous().stride()


def test_dense_copies_only_what_has_gaps():
    image = torch.randn(2, 3, 4, 5)
    for t in (image, image.permute(3, 1, 0, 2), image[1:], image[:, :, :0], torch.tensor(1.0)):
        assert dense(t) is t
    for t in (image[:, ::2], image[..., 1:], torch.zeros(1).expand(4)):
        assert dense(t) is not t
        assert torch.equal(dense(t), t)


@given(
    identity=st.integers(0, 2**40),
    scale=st.floats(allow_nan=False, allow_infinity=False),
    loss=st.floats(),
    version=st.integers(0, 2**40),
    ends=st.booleans(),
)
def test_identity_and_scalars_arrive_exactly(identity, scale, loss, version, ends):
    micro = Micro(identity, identity // 3, 1, 3, 17, scale, version, ends)
    sent = Message(BACKWARD, 4, micro, [None, torch.ones(2)], version, {"loss": loss})
    found = over_the_wire(sent)
    assert (found.kind, found.stage, found.micro, found.version) == (BACKWARD, 4, micro, version)
    assert torch.tensor(found.scalars["loss"], dtype=torch.float64).equal(
        torch.tensor(loss, dtype=torch.float64)
    ) or math.isnan(loss)
    assert found.payload[0] is None


def test_many_small_tensors_fit():
    payload = [torch.full((1000,), float(i)) for i in range(40)]
    found = over_the_wire(Message(FORWARD, 1, None, payload)).payload
    assert all(torch.equal(a, b) for a, b in zip(found, payload, strict=True))


def test_too_many_tensors_are_refused_with_advice():
    with pytest.raises(TransportError, match=r"stage 1 .*pass fewer separate tensors"):
        Writer().seal(Message(FORWARD, 1, None, [torch.zeros(1)] * 1000))


def test_closing():
    wire = Wire()
    wire.passed(Message(FORWARD, 1))
    notice = wire.writer.close_notice()
    assert len(notice.parts) == 1
    assert wire.reader.head(notice.header).closes


def micro(number: int) -> Micro:
    return Micro(number, number, 0, 1, 64, 1.0, number, True)


def stream_of(name: str, count: int):
    """Messages as runs send them; the second but last batch is a short one."""
    for number in range(count):
        rows = 17 if number == count - 2 else 64
        activation = torch.randn(rows, 300)
        if name == "forward":
            yield Message(FORWARD, 1, micro(number), (activation, torch.randn(rows, 16)), number)
        elif name == "labels":
            yield Message(FORWARD, 1, micro(number), (activation, torch.randint(5, (rows,))), number)
        elif name == "backward":
            yield Message(BACKWARD, 0, micro(number), activation, number, {"loss": 0.1 * number})
        else:
            yield Message(BACKWARD, 0, micro(number), {"x": [activation] * 20, "h": None}, number, {"loss": 0.5})


@pytest.mark.parametrize("name", ["forward", "labels", "backward", "many"])
def test_a_message_of_a_known_form_costs_little_beside_its_payload(name):
    """Headers had 16 KB, and over a slow link that was most of what small messages took."""
    writer, costs = Writer(), []
    for message in stream_of(name, 8):
        sealed = writer.seal(message)
        costs.append(sum(part.nbytes for part in sealed.parts) - tree_bytes(message.payload))
    tensors = len(flatten(message.payload)[0])
    # A header; if its 160 bytes of room do not do, 8 bytes per number and checksum, and tensors begin at 16th bytes.
    most = HEADER_BYTES + 32 + 24 * tensors
    assert HEADER_BYTES <= 256
    # The first one describes the form, and the short batch is another form.
    described = {0, 6}
    assert all(cost <= most for number, cost in enumerate(costs) if number not in described), costs
    assert all(most < costs[number] < 4096 for number in described), costs
    # Labels fit into the header of a small batch, so they may even cost less than nothing.
    assert costs[7] == costs[1]


def test_eight_forms_of_a_message_are_described_once_and_further_ones_every_time():
    """So says docs/design.md: a loader of ten batch sizes pays for two of them."""
    wire, described = Wire(), []
    for rows in [*range(1, 11)] * 3:
        message = Message(FORWARD, 1, micro(rows), torch.ones(rows, 300))
        sealed = wire.writer.seal(message)
        envelope = wire.opened(sealed)
        described.append(envelope._head.described > 0)
        if not described[-1]:
            assert sum(part.nbytes for part in sealed.parts) - tree_bytes(message.payload) <= HEADER_BYTES + 32 + 24
    assert described == [True] * 10 + ([False] * 8 + [True] * 2) * 2


def test_what_fits_into_the_header_takes_no_second_message():
    """Each message on the wire is another wake-up at the other end."""
    for name, parts in (("backward", 2), ("labels", 3), ("forward", 3), ("many", 22)):
        writer = Writer()
        counts = [len(writer.seal(message).parts) for message in stream_of(name, 4)]
        assert counts[1] == parts, name


@settings(max_examples=60)
@given(data=st.data())
def test_one_flipped_bit_in_a_header_is_refused(data):
    wire = Wire()
    message = Message(FORWARD, 1, Micro(5, 5, 0, 1, 4, 1.0, 5, True), torch.randn(30), 5)
    wire.passed(message)
    sealed = wire.writer.seal(message)
    assert sealed.body is None
    at, bit = data.draw(st.integers(0, HEADER_BYTES - 1)), data.draw(st.integers(0, 7))
    sealed.header[at] ^= 1 << bit
    with pytest.raises(TransportError, match="damaged"):
        wire.opened(sealed)


@settings(max_examples=60)
@given(data=st.data())
def test_one_flipped_bit_in_a_body_is_refused(data):
    """In the description of a form, in a loss, or in a small tensor."""
    wire = Wire()
    sealed = wire.writer.seal(Message(FORWARD, 1, micro(5), torch.randn(64), 5, {"loss": 0.5}))
    assert sealed.body is not None
    at, bit = data.draw(st.integers(0, sealed.body.nbytes - 1)), data.draw(st.integers(0, 7))
    sealed.body[at] ^= 1 << bit
    with pytest.raises(TransportError, match="damaged"):
        wire.opened(sealed)


@settings(max_examples=60)
@given(data=st.data())
def test_one_flipped_bit_in_a_payload_is_refused(data):
    """It was trained on, until the loss was infinite."""
    wire = Wire()
    sealed = wire.writer.seal(Message(FORWARD, 2, Micro(7, 3, 1, 2, 4, 0.5, 3, True), [torch.randn(3000)] * 2, 5))
    envelope, blocks = wire.opened(sealed), sealed.blocks
    for room, block in zip(envelope.blocks, blocks, strict=True):
        room.copy_(block)
    envelope.verify()
    which, at, bit = (data.draw(st.integers(0, most)) for most in (1, blocks[0].nbytes - 1, 7))
    envelope.blocks[which][at] ^= 1 << bit
    with pytest.raises(TransportError) as caught:
        envelope.verify()
    assert str(caught.value).startswith(
        "the forward message of batch 3, part 2 of 2 for stage 2 was damaged on its way from rank 1: "
        f"block {which} of 2 (12000 bytes) does not match its checksum"
    )


@pytest.mark.parametrize("damage", [torch.zeros, torch.ones])
def test_garbage_is_refused(damage):
    with pytest.raises(TransportError, match="damaged"):
        Reader(1).head(damage(HEADER_BYTES, dtype=torch.uint8))


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2]])
def test_messages_out_of_order_are_refused_before_their_form_is_looked_for(order):
    writer, reader = Writer(), Reader(1)
    sealed = [writer.seal(Message(FORWARD, 1, micro(number), torch.ones(number + 1))) for number in range(3)]
    for number in order[:-1]:
        reader.envelope(reader.head(sealed[number].header), sealed[number].body)
    with pytest.raises(
        TransportError, match=f"message {order[-1]} came from rank 1 where .* lost, doubled or overtaken"
    ):
        reader.head(sealed[order[-1]].header)


def test_many_forms_do_not_add_up():
    """Sums of an evaluation are numbers in the structure, new ones with every batch."""
    wire = Wire()
    for number in range(100):
        assert wire.passed(Message(FORWARD, 1, payload={"loss": (float(number), 1)})).payload == {
            "loss": (float(number), 1)
        }
    assert torch.equal(wire.passed(Message(FORWARD, 1, payload=torch.ones(2))).payload, torch.ones(2))
    assert len(wire.reader._forms._known) < 20
