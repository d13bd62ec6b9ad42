"""Messages survive the wire unchanged, whatever they hold, and damaged ones are refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from unlatch.errors import TransportError
from unlatch.nn.tree import flatten
from unlatch.transport.mail import BACKWARD, FORWARD, Message, Micro
from unlatch.transport.wire import HEADER_BYTES, close_notice, dense, open_envelope, seal

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def over_the_wire(message: Message, sequence: int = 0) -> Message:
    header, blocks = seal(message, sequence)
    assert header.nbytes == HEADER_BYTES
    envelope = open_envelope(header.clone())
    assert envelope.sequence == sequence
    assert not envelope.closes
    assert [b.nbytes for b in envelope.blocks] == [b.nbytes for b in blocks]
    for room, block in zip(envelope.blocks, blocks, strict=True):
        room.copy_(block)
    header.fill_(255)  # the receiver uses its buffer again
    return envelope.message()


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
    found = over_the_wire(sent, sequence=identity)
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
        seal(Message(FORWARD, 1, None, [torch.zeros(1)] * 1000), 0)


def test_closing():
    envelope = open_envelope(close_notice(12))
    assert envelope.closes
    assert envelope.sequence == 12


@settings(max_examples=60)
@given(data=st.data())
def test_one_flipped_bit_in_a_header_is_refused(data):
    header, _ = seal(Message(FORWARD, 1, Micro(5, 5, 0, 1, 4, 1.0, 5, True), torch.randn(64), 5), 3)
    used = int(header.nonzero().max()) + 1
    at, bit = data.draw(st.integers(0, used - 1)), data.draw(st.integers(0, 7))
    header[at] ^= 1 << bit
    with pytest.raises(TransportError, match="damaged"):
        open_envelope(header)


@settings(max_examples=60)
@given(data=st.data())
def test_one_flipped_bit_in_a_payload_is_refused(data):
    """It was trained on, until the loss was infinite."""
    header, blocks = seal(Message(FORWARD, 2, Micro(7, 3, 1, 2, 4, 0.5, 3, True), [torch.randn(3000)] * 2, 5), 3)
    envelope = open_envelope(header)
    for room, block in zip(envelope.blocks, blocks, strict=True):
        room.copy_(block)
    envelope.verify(1)
    which, at, bit = (data.draw(st.integers(0, most)) for most in (1, blocks[0].nbytes - 1, 7))
    envelope.blocks[which][at] ^= 1 << bit
    with pytest.raises(TransportError) as caught:
        envelope.verify(1)
    assert str(caught.value).startswith(
        "the forward message of batch 3, part 2 of 2 for stage 2 was damaged on its way from rank 1: "
        f"block {which} of 2 (12000 bytes) does not match its checksum"
    )


@pytest.mark.parametrize("damage", [torch.zeros, torch.ones])
def test_garbage_is_refused(damage):
    with pytest.raises(TransportError, match="damaged"):
        open_envelope(damage(HEADER_BYTES, dtype=torch.uint8))
