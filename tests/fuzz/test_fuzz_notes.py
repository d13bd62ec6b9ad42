"""Notes that somebody else wrote into the store: never believed, never fatal."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing import altered, cases, damaged, values
from unlatch.transport.notes import Notary

SHAPE = {"rank": int, "text": str}
NOTE = {"rank": 1, "text": "the disk is full"}
PLACE = "run/failure"
OURS = Notary("a secret")
RAW = OURS.write(PLACE, NOTE).encode()

raws = st.one_of(
    damaged(RAW),
    st.binary(max_size=100),
    values.map(lambda value: json.dumps(value).encode()),
    altered(json.loads(RAW)).map(lambda tree: json.dumps(tree).encode()),
)


@cases(400)
@given(raws)
@example(b"[" * 10_000)
@example(b"9" * 10_000)
@example(b'{"note": {"rank": 1, "text": "x"}, "mac": "\\ud800"}')
def test_only_what_was_signed_is_believed(raw):
    assert OURS.read(PLACE, raw, SHAPE) in (None, NOTE)


@cases(200)
@given(raws)
def test_before_there_is_a_secret(raw):
    for unsigned in (False, True):
        found: Any = Notary(None).read(PLACE, raw, SHAPE, unsigned=unsigned)
        assert found is None or (unsigned and type(found["rank"]) is int and type(found["text"]) is str)


@cases(100)
@given(st.text(max_size=20), values)
def test_a_note_of_another_place_or_run_says_nothing(place, value):
    raw = Notary("another").write(PLACE, {"rank": 1, "text": str(value)}).encode()
    assert OURS.read(PLACE, raw, SHAPE) is None
    if place != PLACE:
        assert OURS.read(place, RAW, SHAPE) is None
