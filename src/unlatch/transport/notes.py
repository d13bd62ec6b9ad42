"""Notes that ranks leave for each other in the store: signed, so that nobody is believed who only found the store.

A note is JSON with an HMAC-SHA256 over its place and its content. The place holds the name of the run, so that a note
of one run says nothing in another, and no note can stand in for one of another kind or rank.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["SECRET", "Notary", "Note"]

log = logging.getLogger("unlatch")

#: Where ranks find the secret that they sign with.
SECRET = "UNLATCH_SECRET"
Note: TypeAlias = dict[str, Any]
# Nobody who belongs to the run writes more.
_MOST_BYTES = 16384


class Notary:
    """Signs notes and reads those of others.

    **Arguments:** `secret`: what only the ranks of this run know; `None` while they have not met yet. Then notes are
    not signed, and only those are read that may be (`unsigned`).

    >>> ours, theirs = Notary("a secret"), Notary("a guess")
    >>> note = ours.write("run/failure", {"rank": 1, "text": "disk full"}).encode()
    >>> ours.read("run/failure", note, {"rank": int, "text": str})
    {'rank': 1, 'text': 'disk full'}
    >>> theirs.read("run/failure", note, {"rank": int, "text": str}) is None
    True
    """

    def __init__(self, secret: str | None) -> None:
        self.secret = secret
        self._complained: set[str] = set()

    def write(self, place: str, note: Note) -> str:
        """The text to put at `place`."""
        return json.dumps({"note": note, "mac": self._mac(place, note)})

    def read(self, place: str, raw: bytes, shape: Mapping[str, type], *, unsigned: bool = False) -> Note | None:
        """The note at `place`, or `None` with one line in the log if it is none of this run.

        **Arguments:**

        - `shape`: the names in it and the types of their values.
        - `unsigned`: whether it may be read by one who has no secret yet.
        """
        try:
            note, why = self._opened(place, raw, shape, unsigned)
        except (ValueError, RecursionError):
            note, why = None, "it is not JSON"
        if why and place not in self._complained:
            self._complained.add(place)
            log.warning("ignored what somebody wrote to %s in the store: %s", place, why)
        return note

    def _opened(
        self, place: str, raw: bytes, shape: Mapping[str, type], unsigned: bool
    ) -> tuple[Note | None, str | None]:
        if len(raw) > _MOST_BYTES:
            return None, f"it has {len(raw)} bytes"
        found = json.loads(raw)
        if not isinstance(found, dict) or found.keys() != {"note", "mac"}:
            return None, "it has not the form of a note"
        note, mac = found["note"], found["mac"]
        if not isinstance(note, dict) or not isinstance(mac, str) or note.keys() != shape.keys():
            return None, "it has not the form of a note"
        # A bool is an int to `isinstance`.
        if wrong := [name for name, kind in shape.items() if type(note[name]) is not kind]:
            return None, f"{', '.join(wrong)} has the wrong type"
        if self.secret is None:
            return (note, None) if unsigned else (None, None)
        if mac == "" and unsigned:
            # Of a rank that has not heard the secret yet: no sign of anything, but no offence either.
            return None, None
        if not hmac.compare_digest(mac.encode(), self._mac(place, note).encode()):
            return None, "it is not signed with the secret of this run"
        return note, None

    def _mac(self, place: str, note: Note) -> str:
        if self.secret is None:
            return ""
        text = json.dumps([place, note], sort_keys=True)
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()
