"""Notes from strangers, from other runs, and from nobody: not believed, mentioned once, and nothing breaks."""

from __future__ import annotations

import json
import logging

import pytest

from unlatch.transport.notes import Notary

SHAPE = {"rank": int, "text": str}
NOTE = {"rank": 1, "text": "disk full"}
PLACE = "unlatch/run/failure"
notary = Notary("a secret")
SIGNED = notary.write(PLACE, NOTE)


def altered(**changes):
    found = json.loads(SIGNED)
    found["note"] |= changes
    return json.dumps(found).encode()


STRANGE = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "no JSON": b"{",
    "a number": b"17",
    "nested": b"[" * 8000 + b"]" * 8000,
    "huge": json.dumps({"note": {**NOTE, "text": "x" * 100_000}, "mac": ""}).encode(),
    "no signature": json.dumps(NOTE).encode(),
    "empty signature": json.dumps({"note": NOTE, "mac": ""}).encode(),
    "forged": json.dumps({"note": NOTE, "mac": "0" * 64}).encode(),
    "strange signature": json.dumps({"note": NOTE, "mac": "\u00e4"}).encode(),
    "signature of another type": json.dumps({"note": NOTE, "mac": 5}).encode(),
    "other secret": Notary("a guess").write(PLACE, NOTE).encode(),
    "of another run": notary.write("unlatch/earlier/failure", NOTE).encode(),
    "of another kind": notary.write("unlatch/run/stop", NOTE).encode(),
    "another text": altered(text="give up"),
    "another rank": altered(rank=0),
    "a rank that is no number": notary.write(PLACE, {**NOTE, "rank": "1"}).encode(),
    "a rank that is a truth value": notary.write(PLACE, {**NOTE, "rank": True}).encode(),
    "more than asked for": notary.write(PLACE, {**NOTE, "more": 1}).encode(),
    "less than asked for": notary.write(PLACE, {"rank": 1}).encode(),
}


@pytest.mark.parametrize("raw", STRANGE.values(), ids=STRANGE.keys())
def test_what_is_not_believed(raw, caplog):
    reader = Notary("a secret")
    with caplog.at_level(logging.WARNING, logger="unlatch"):
        for _ in range(3):
            assert reader.read(PLACE, raw, SHAPE) is None
        assert reader.read(PLACE, SIGNED.encode(), SHAPE) == NOTE
    [line] = caplog.messages
    assert PLACE in line
    assert "\n" not in line


def test_before_ranks_have_met(caplog):
    """Without a secret only signs of life are read; who has it already is silent about those who do not."""
    early, later = Notary(None), Notary("a secret")
    assert early.read(PLACE, SIGNED.encode(), SHAPE) is None
    assert early.read(PLACE, SIGNED.encode(), SHAPE, unsigned=True) == NOTE
    assert early.read(PLACE, early.write(PLACE, NOTE).encode(), SHAPE, unsigned=True) == NOTE
    assert later.read(PLACE, early.write(PLACE, NOTE).encode(), SHAPE, unsigned=True) is None
    assert caplog.messages == []
    assert later.read(PLACE, early.write(PLACE, NOTE).encode(), SHAPE) is None
    assert len(caplog.messages) == 1
