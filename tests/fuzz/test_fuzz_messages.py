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
from unlatch.transport.wire import HEADER_BYTES, Reader, Writer

MICRO = Micro(id=1, batch=2, index=0, count=1, size=8, scale=0.25, update=3, ends=False)
PAYLOAD = {"h": torch.arange(6.0).reshape(2, 3), "rest": (torch.zeros(3, 1500).t(), [None, 7, True])}
MESSAGE = Message("forward", 1, MICRO, PAYLOAD, version=3, scalars={"loss": 1.5})
SEALED = Writer().seal(MESSAGE)
assert SEALED.body is not None
BODY = bytes(SEALED.body.tolist())


def checked(data: bytes) -> bytes:
    """With the checksum of what follows in the place of the first 8 bytes."""
    return (xxhash.xxh3_64_intdigest(data[8:]) - 2**63).to_bytes(8, "little", signed=True) + data[8:]


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def headed(text: bytes, rest: bytes = b"", **fields: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Header and body with this description and checksums that are right.

    **Arguments:** `rest`: of the body; `fields`: what the header says otherwise than what is so.
    """
    body = text.ljust((len(text) + 15) // 16 * 16, b"\0") + rest
    header = bytearray(SEALED.header.tolist())
    found = {"described": (27, len(text)), "beside": (31, len(body))}
    for name, (at, value) in found.items():
        header[at : at + 4] = fields.get(name, value).to_bytes(4, "little")
    header[35:43] = (xxhash.xxh3_64_intdigest(body) - 2**63).to_bytes(8, "little", signed=True)
    return as_tensor(checked(bytes(header))), as_tensor(body or b"\0")


TEXT = BODY[: int.from_bytes(bytes(SEALED.header[27:31].tolist()), "little")]
REST = BODY[(len(TEXT) + 15) // 16 * 16 :]
HEAD = json.loads(TEXT)


def read(header: torch.Tensor, body: torch.Tensor | None = None) -> Message | None:
    """What a receiver makes of a header; no tensor reaches beyond its memory. Blocks are not filled: some are large."""
    reader = Reader(0)
    head = reader.head(header)
    if head.closes:
        return None
    message = reader.envelope(head, body if head.beside else None).message()
    for tensor in flatten(message.payload)[0]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (last + 1) * tensor.itemsize if tensor.numel() else 0
        assert needed <= tensor.untyped_storage().nbytes()
    return message


def test_what_is_sealed_by_hand_is_read():
    found = read(*headed(TEXT, REST))
    assert found is not None
    assert (found.micro, found.scalars) == (MICRO, {"loss": 1.5})
    assert torch.equal(found.payload["h"], PAYLOAD["h"])


@cases(400)
@given(st.data())
def test_heads_with_other_values(data):
    """The checksums are right, the text is JSON: only what it says is wrong."""
    outcome(read, *headed(json.dumps(data.draw(altered(HEAD))).encode(), REST))


@cases(300)
@given(damaged(json.dumps(HEAD).encode()), st.one_of(st.just(REST), st.binary(max_size=40)))
def test_damaged_text_with_a_right_checksum(text, rest):
    outcome(read, *headed(text, rest))


@cases(300)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@example(0, len(BODY))
@example(len(BODY), len(BODY))
def test_wrong_lengths_with_a_right_checksum(described, beside):
    outcome(read, *headed(TEXT, REST, described=described, beside=beside))


@cases(200)
@given(damaged(bytes(SEALED.header.tolist())), st.booleans())
@example(b"", False)
def test_damaged_headers(raw, right):
    """With a checksum that is right as well."""
    buffer = raw.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
    outcome(read, as_tensor(checked(buffer) if right else buffer), SEALED.body)


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
    head = {**HEAD, "structure": "tensor", "tensors": [[dtype, shape, strides]]}
    outcome(read, *headed(json.dumps(head).encode(), bytes(4200)))


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
    head = {**HEAD, "structure": "tensor", "tensors": tensors}
    with pytest.raises(TransportError, match=text):
        read(*headed(json.dumps(head).encode(), bytes(4200)))


def test_forms_of_wrong_types_are_refused():
    head = {**HEAD, "stage": "1"}
    with pytest.raises(TransportError, match="a form of rank 0 cannot be read"):
        read(*headed(json.dumps(head).encode(), REST))


def test_a_form_that_nobody_described_is_refused():
    header, body = headed(b"", REST)
    with pytest.raises(TransportError, match="the form of no message"):
        read(header, body)


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
