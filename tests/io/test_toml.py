"""What is written as TOML reads back as the same values."""

from __future__ import annotations

import datetime
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlatch.io import toml

text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text | st.datetimes() | st.dates()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8
)


@given(table=st.dictionaries(text, values, max_size=5))
def test_round_trip(table: dict[str, object]) -> None:
    assert tomllib.loads(toml.dumps(table)) == table


def test_every_control_character() -> None:
    table = {"s": "".join(map(chr, range(0x100))) + "\u2028\ufeff\U0001f600"}
    assert tomllib.loads(toml.dumps(table)) == table


def test_types_survive() -> None:
    table = {"i": 1, "f": 1.0, "b": True, "t": datetime.time(1, 2, 3), "e": 1e-7, "big": 1e22}
    read = tomllib.loads(toml.dumps(table))
    assert read == table
    assert [type(value) for value in read.values()] == [type(value) for value in table.values()]


def test_numpy_numbers_are_numbers() -> None:
    assert toml.dumps({"x": np.float64(0.5)}) == "x = 0.5\n"


def test_nothing_is_left_out_and_the_rest_refused() -> None:
    assert tomllib.loads(toml.dumps({"a": None, "s": {"b": None, "c": {"d": None}}})) == {"s": {"c": {}}}
    with pytest.raises(TypeError, match="no form in TOML"):
        toml.dumps({"a": object()})
