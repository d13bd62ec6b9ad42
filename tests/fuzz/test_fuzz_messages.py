"""Headers of messages and structures of trees that nobody sealed: refused by name, without touching foreign memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing import altered, cases, damaged, outcome, values
from unlatch.errors import ShapeMismatch, TransportError
from unlatch.nn.tree import flatten, unflatten
from unlatch.transport.mail import Message, Micro
from unlatch.transport.wire import HEADER_BYTES, close_notice, open_envelope, seal

MICRO = Micro(id=1, batch=2, index=0, count=1, size=8, scale=0.25, update=3, ends=False)
PAYLOAD = {"h": torch.arange(6.0).reshape(2, 3), "rest": (torch.zeros(3, 1500).t(), [None, 7, True])}
MESSAGE = Message("forward", 1, MICRO, PAYLOAD, version=3, scalars={"loss": 1.5})


def text_of(header: torch.Tensor) -> bytes:
    return header[16 : 16 + int(header[:8].view(torch.int64))].numpy().tobytes()


def headed(text: bytes, rest: bytes = b"") -> torch.Tensor:
    """A header with this text and a checksum that is right."""
    room = (len(text) + 15) // 16 * 16
    body = (text.ljust(room, b"\0") + rest).ljust(HEADER_BYTES - 16, b"\0")[: HEADER_BYTES - 16]
    length = len(text).to_bytes(8, "little")
    checksum = (xxhash.xxh3_64_intdigest(length + body) - 2**63).to_bytes(8, "little", signed=True)
    return torch.frombuffer(bytearray(length + checksum + body), dtype=torch.uint8)


HEADS = [json.loads(text_of(header)) for header in (seal(MESSAGE, 5)[0], close_notice(9))]


def read(header: torch.Tensor) -> Message | None:
    """What a receiver makes of a header; no tensor reaches beyond its memory. Blocks are not filled: some are large."""
    envelope = open_envelope(header)
    if envelope.closes:
        return None
    message = envelope.message()
    for tensor in flatten(message.payload)[0]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (last + 1) * tensor.itemsize if tensor.numel() else 0
        assert needed <= tensor.untyped_storage().nbytes()
    return message


def test_what_is_sealed_by_hand_is_read():
    found = read(headed(text_of(seal(MESSAGE, 5)[0]), bytes(100)))
    assert found is not None
    assert (found.micro, found.scalars) == (MICRO, {"loss": 1.5})


@cases(400)
@given(st.data())
def test_heads_with_other_values(data):
    """The checksum is right, the text is JSON: only what it says is wrong."""
    head = data.draw(altered(data.draw(st.sampled_from(HEADS))))
    outcome(read, headed(json.dumps(head).encode()[: HEADER_BYTES - 16]))


@cases(300)
@given(st.sampled_from(HEADS).flatmap(lambda head: damaged(json.dumps(head).encode())))
def test_damaged_text_with_a_right_checksum(text):
    outcome(read, headed(text))


@cases(200)
@given(damaged(bytes(seal(MESSAGE, 5)[0].tolist())))
@example(b"")
def test_damaged_headers(raw):
    buffer = raw.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
    outcome(read, torch.frombuffer(bytearray(buffer), dtype=torch.uint8))


DTYPES = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
sizes = st.one_of(st.integers(0, 9), st.sampled_from([2**20, 2**31, 2**40, 2**62, 2**63, 2**64, -1]))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@cases(400)
@given(st.sampled_from([*DTYPES, "Tensor", "", "float33"]), st.lists(sizes, max_size=5), st.lists(sizes, max_size=5))
@example("float32", [2**45], [1])
@example("float32", [2, 2], [1, 2**40])
@example("uint8", [4097], [4096])
@example("int64", [], [])
@example("float32", [0], [2**70])
def test_tensors_that_a_header_announces(dtype, shape, strides):
    """Dtypes of all kinds, sizes of terabytes, strides that lead elsewhere."""
    head = {**HEADS[0], "structure": "tensor", "tensors": [[dtype, shape, strides]]}
    outcome(read, headed(json.dumps(head).encode()))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([["float32", [2**40], [1]]], "more than this machine has"),
        ([["float32", [2, 2], [2, 9]]], "do not hold"),
        ([["float32", [2, 2], [1]]], "do not hold"),
        ([["quint4x2", [4], [1]]], "unknown dtype 'quint4x2'"),
        ([["float33", [2], [1]]], "unknown dtype 'float33'"),
        ([["float32", [-2], [1]]], "greater than or equal to 0"),
        ([["float32", [1.5], [1]]], "valid integer"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_named(tensors, text):
    head = {**HEADS[0], "structure": "tensor", "tensors": tensors}
    with pytest.raises(TransportError, match=text):
        open_envelope(headed(json.dumps(head).encode()))


def test_micro_batches_of_wrong_types_used_to_pass():
    head = {**HEADS[0], "micro": {**HEADS[0]["micro"], "id": "1"}}
    with pytest.raises(TransportError, match="a header cannot be read"):
        open_envelope(headed(json.dumps(head).encode()))


structures = st.recursive(
    st.one_of(st.just("tensor"), values),
    lambda inner: st.lists(st.one_of(st.sampled_from(["tuple", "list", "dict", "constant", "tensor"]), inner)),
    max_leaves=8,
)


@cases(400)
@given(structures, st.integers(0, 3))
@example([], 0)
@example(["dict", ["a"]], 0)
@example(["dict", [["x"], "tensor"]], 1)
@example(["constant"], 0)
@example(["constant", 1, 2], 0)
def test_structures_of_trees(structure: Any, count: int):
    found = outcome(unflatten, structure, [torch.zeros(1)] * count)
    if not isinstance(found, ShapeMismatch):
        assert len(flatten(found)[0]) == count


def test_a_structure_without_end_is_refused():
    deep: Any = "tensor"
    for _ in range(100_000):
        deep = ["tuple", deep]
    with pytest.raises(ShapeMismatch):
        unflatten(deep, [torch.zeros(1)])
