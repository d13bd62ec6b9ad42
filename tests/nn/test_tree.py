"""Trees of tensors come apart and together without loss."""

from __future__ import annotations

import json
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlatch.errors import ShapeMismatch
from unlatch.nn import batch_size, flatten, map_tensors, split_batch, tree_bytes, unflatten

leaves = st.one_of(
    st.integers(0, 3).map(lambda n: torch.arange(n)),
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.text(max_size=3),
    st.just("tensor"),
)
keys = st.one_of(st.text(max_size=3), st.integers(0, 3))
trees = st.recursive(
    leaves,
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(keys, child, max_size=3),
    ),
    max_leaves=12,
)


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@given(trees)
@settings(max_examples=150, deadline=None)
def test_structure_survives_json(tree: object) -> None:
    tensors, structure = flatten(tree)
    carried = json.loads(json.dumps(structure))
    assert carried == structure
    assert same(tree, unflatten(carried, tensors))


def test_tensor_is_its_own_tree() -> None:
    x = torch.zeros(2)
    assert flatten(x) == ([x], "tensor")
    assert unflatten("tensor", [x]) is x


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_tensors(count: int) -> None:
    structure = ["tuple", "tensor", "tensor"]
    with pytest.raises(ShapeMismatch, match=r"too (few|many)"):
        unflatten(structure, [torch.zeros(1)] * count)


def test_unknown_structure() -> None:
    with pytest.raises(ShapeMismatch, match="not the structure"):
        unflatten(["set", "tensor"], [torch.zeros(1)])


def test_foreign_containers_are_refused_by_name() -> None:
    pair = namedtuple("Pair", "a b")
    with pytest.raises(ShapeMismatch, match="Pair"):
        flatten(pair(torch.zeros(1), torch.zeros(1)))
    with pytest.raises(ShapeMismatch, match="plain keys"):
        flatten({(1, 2): torch.zeros(1)})


def test_map_keeps_constants_and_types() -> None:
    out = map_tensors(lambda t: t * 2, {"a": [torch.ones(1), 3], "b": (None, torch.ones(2))})
    assert type(out["a"]) is list
    assert out["a"][1] == 3
    assert out["b"][0] is None
    assert torch.equal(out["b"][1], torch.full((2,), 2.0))


def test_bytes() -> None:
    assert tree_bytes((torch.zeros(3, dtype=torch.float64), [torch.zeros(2, dtype=torch.bfloat16)])) == 28


def test_batch_size_checks_all_tensors() -> None:
    assert batch_size({"x": torch.zeros(4, 2), "n": 3, "y": torch.zeros(4)}) == 4
    with pytest.raises(ShapeMismatch, match=r"tensor 0 has 4 .* tensor 1 has 5"):
        batch_size((torch.zeros(4, 2), torch.zeros(5)))
    with pytest.raises(ShapeMismatch, match="dimension 0"):
        batch_size(torch.zeros(()))
    with pytest.raises(ShapeMismatch, match="at least one tensor"):
        batch_size(())


@given(st.integers(1, 20), st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_split_covers_the_batch_once(size: int, pieces: int) -> None:
    x, y = torch.arange(size * 2).reshape(size, 2), torch.arange(size)
    parts = split_batch((x, {"y": y, "flag": True}), pieces)
    assert len(parts) == min(size, pieces)
    sizes = [batch_size(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1]["y"] for part in parts]), y)
    assert all(part[1]["flag"] is True for part in parts)


def test_split_refuses_nonsense() -> None:
    with pytest.raises(ShapeMismatch, match="1 or more"):
        split_batch(torch.zeros(2), 0)
    with pytest.raises(ShapeMismatch, match="at least one sample"):
        split_batch(torch.zeros(0, 3), 2)


def test_split_keeps_memory_format() -> None:
    x = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in split_batch(x, 2))
