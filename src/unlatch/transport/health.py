"""Who is alive: heartbeats and last words in a key-value store, beside the data path.

A dead peer closes its sockets, which the transport notices at once; a stopped one does not, which is what heartbeats
are for. A rank that fails leaves a note, so that the others can name the culprit instead of reporting a broken socket.
One that has closed its run says so in its last heartbeat, and is not missed. A heartbeat also says which methods of the
run were called, so that ranks that wait for each other in different ones find it out.

Two threads: one does what must be done at the store (`Clerk`), the other waits for it and judges. So a store that does
not answer, because its host is down or cut off, is noticed like a rank that gives no sign of life.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import OutOfStep, PeerLost, UnlatchError
from .calls import CallReport, Calls, first_difference, out_of_step
from .notes import Notary, Note
from .store import Clerk, Store, connect_store, fetch, store_address

__all__ = ["Health"]

log = logging.getLogger("unlatch")

T = TypeVar("T")
# Seconds for the store to accept a connection: its host may be starved of time without being gone.
_PATIENCE = 30.0
# Seconds in which last words are written, and those of others looked for.
_LAST_WORDS, _SEARCH = 5.0, 1.0
_MOST_TEXT = 1000
# Seconds between two heartbeats, at most.
_INTERVAL = 1.0
# What is in a note, by what it is about.
_BEAT = {"rank": int, "count": int, "leaves": bool, "calls": int, "recent": list, "waits": bool}
_FAILURE = {"rank": int, "text": str}
_STOP = {"rank": int, "signal": int}
_CALL = {"rank": int, "to": int}


@dataclass
class _Sign:
    """The newest heartbeat of a rank that was seen, when, and what it said of its calls."""

    count: int
    at: float
    calls: CallReport = field(default_factory=CallReport)


class Health:
    """Watches the other ranks and tells once when one is gone.

    **Arguments:**

    - `run`: a name all ranks share and no other run on this store has.
    - `rank`, `ranks`: this process and how many there are.
    - `describe`: what a rank does, for messages ("stages 2-3"); may be replaced once that is known.
    - `on_loss`: called from the watching thread with the error to raise.
    - `stall_limit`: seconds without a sign of life before a rank counts as stuck.
    - `clock`: seconds that pass.
    - `secret`: what notes are signed with; `None` until `trust` brings it, and until then last words and requests to
      stop are neither written nor believed.
    - `start_limit`: seconds for the first sign of life of a rank; `stall_limit` if not given.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        ranks: int,
        describe: Callable[[int], str] = lambda rank: "starting",
        on_loss: Callable[[UnlatchError], None] | None = None,
        stall_limit: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        secret: str | None = None,
        start_limit: float | None = None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.describe = describe
        #: What is called on this rank.
        self.calls = Calls()
        self._place = f"unlatch/{run}"
        self._listeners = [on_loss] if on_loss is not None else []
        self._limit = stall_limit
        self._start_limit = max(stall_limit, start_limit or 0.0)
        self._clock = clock
        self._notary = Notary(secret)
        self._failure: UnlatchError | None = None
        self._told = threading.Lock()
        self._wish: int | None = None
        self._beats = 0
        self._signs: dict[int, _Sign] = {}
        #: Ranks whose signs of life are in the store.
        self._written: set[int] = set()
        self._left: set[int] = set()
        self._cut_off = False
        self._stop = threading.Event()
        self._leaving = False
        self._watcher = threading.Thread(target=self._watch, name="unlatch-health", daemon=True)
        store = connect_store(timeout=_PATIENCE)
        self._clerk = Clerk(store) if store is not None else None
        if self._clerk is not None:
            # Whoever is stopped from here on has been there: it is missed sooner than one that may still be coming.
            self._ask(self._beat, _PATIENCE)
            self._watcher.start()

    def trust(self, secret: str) -> None:
        """From now on sign notes with `secret`, and believe those that are signed with it."""
        self._notary.secret = secret

    def introduction(self, peer: int) -> bytes:
        """What this rank says to `peer` when it calls it directly."""
        place = f"{self._place}/call"
        return self._notary.write(place, {"rank": self.rank, "to": peer}).encode()

    def introduced(self, word: bytes) -> int | None:
        """The rank that introduced itself to this one so; `None` if it is none of this run."""
        note = self._notary.read(f"{self._place}/call", word, _CALL)
        return note["rank"] if note is not None and note["to"] == self.rank else None

    def report_to(self, listener: Callable[[UnlatchError], None]) -> None:
        """Call `listener` too when waiting is in vain, at once if that is known already."""
        with self._told:
            self._listeners.append(listener)
            if self._failure is not None:
                listener(self._failure)

    def failure(self) -> UnlatchError | None:
        """Why it is in vain to wait for the others, if it is: who was lost, or who calls something else."""
        return self._failure

    def leave_note(self, text: str) -> None:
        """Tell the others why this rank is about to stop; it is not watched nor does it watch any more."""
        if self._clerk is None or self._stop.is_set():
            # There is nobody to tell, or all was said.
            return
        note = {"rank": self.rank, "text": text[:_MOST_TEXT]}
        self._ask(lambda store: self._be_first(store, "failure", note, _FAILURE), _LAST_WORDS)
        self._stop.set()

    def loss(self, peer: int, error: Exception | None = None) -> PeerLost:
        """The error to raise when the connection to `peer` broke: with the culprit's own words if it left any."""
        deadline = time.monotonic() + _SEARCH
        while (left := deadline - time.monotonic()) > 0:
            note = self._ask(self._last_words, left)
            if note is not None:
                return self._quote(note)
            time.sleep(0.05)
        detail = f" ({str(error).splitlines()[0]})" if error and str(error) else ""
        return PeerLost(
            f"rank {peer} ({self.describe(peer)}) is gone without a word{detail}. It was killed or crashed: look at "
            "its output, and at the machine's memory."
        )

    def departure(self, peer: int) -> PeerLost:
        """The error to raise when something is expected of `peer` after it took its leave."""
        note = self._ask(self._last_words, _SEARCH)
        return self._quote(note) if note is not None else self._departed(peer, "for it")

    def out_of_step(self) -> OutOfStep | None:
        """The first call that not all ranks have in common, if they say so within a second or so."""
        deadline = time.monotonic() + _SEARCH + _INTERVAL
        while (left := deadline - time.monotonic()) > 0:
            if (found := self._ask(self._round, left)) is not None:
                told = {rank: _calls(beat) for rank, beat in found[0].items() if beat is not None}
                if (difference := first_difference({self.rank: self.calls.report(), **told})) is not None:
                    return out_of_step(difference, self.describe)
            time.sleep(_INTERVAL / 4)
        return None

    def ask_to_stop(self, number: int) -> None:
        """Ask all ranks to end the run in good order, because signal `number` came; safe in a signal handler.

        **Arguments:** `number`: 0 if it is the session's own wish.
        """
        # Passed on in the next round: a handler may interrupt anything, so it must not wait for a lock.
        self._wish = number

    def asked_to_stop(self) -> int | None:
        """The signal for which some rank has asked all others to end, about a second after it did; else `None`."""
        return self._wish

    def close(self) -> None:
        """Take leave of the others: afterwards none of them misses this rank, and nobody is called lost here."""
        self._leaving = True
        self._stop.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(_PATIENCE)

    # --------------------------------------------------------------- at the store

    def _ask(self, errand: Callable[[Store], T], seconds: float) -> T | None:
        """The result of an errand, or `None` if there is no store or it does not answer in time."""
        if self._clerk is None or self._cut_off:
            return None
        try:
            return self._clerk.ask(errand).result(seconds)
        except (TimeoutError, RuntimeError):
            return None

    def _read(self, store: Store, what: str, shape: Mapping[str, type]) -> Note | None:
        place = f"{self._place}/{what}"
        return self._opened(place, fetch(store, place), shape)

    def _opened(
        self, place: str, raw: bytes | None, shape: Mapping[str, type], *, unsigned: bool = False
    ) -> Note | None:
        note = self._notary.read(place, raw, shape, unsigned=unsigned) if raw is not None else None
        return note if note is not None and 0 <= note["rank"] < self.ranks else None

    def _be_first(self, store: Store, what: str, note: Note, shape: Mapping[str, type]) -> None:
        """Write a note unless one of this run is there already; what a stranger wrote is none."""
        if self._notary.secret is None:
            return
        place = f"{self._place}/{what}"
        text = self._notary.write(place, note)
        if store.compare_set(place, "", text) != text.encode() and self._read(store, what, shape) is None:
            store.set(place, text)

    def _beat(self, store: Store, *, leaves: bool = False) -> None:
        self._beats += 1
        place, calls = f"{self._place}/beat/{self.rank}", self.calls.report()
        told = {"calls": calls.count, "recent": calls.recent, "waits": calls.waits}
        note = {"rank": self.rank, "count": self._beats, "leaves": leaves, **told}
        store.set(place, self._notary.write(place, note))

    def _last_words(self, store: Store) -> Note | None:
        return self._read(store, "failure", _FAILURE)

    def _round(self, store: Store) -> tuple[dict[int, Note | None], Note | None]:
        """Give a sign of life, look for those of all others, and for last words."""
        self._beat(store)
        if self._wish is not None:
            self._be_first(store, "stop", {"rank": self.rank, "signal": self._wish}, _STOP)
        elif (request := self._read(store, "stop", _STOP)) is not None and 0 <= request["signal"] < 128:
            self._wish = request["signal"]
        others = [rank for rank in range(self.ranks) if rank != self.rank and rank not in self._left]
        return self._signs_of(store, others), self._last_words(store)

    def _signs_of(self, store: Store, ranks: list[int]) -> dict[int, Note | None]:
        places = {rank: f"{self._place}/beat/{rank}" for rank in ranks}
        # What was there once stays there, and can be had with one question for all.
        known = [rank for rank in ranks if rank in self._written]
        raw: dict[int, bytes | None] = {rank: fetch(store, places[rank]) for rank in ranks if rank not in self._written}
        if known:
            raw |= zip(known, store.multi_get([places[rank] for rank in known]), strict=True)
        self._written.update(rank for rank, word in raw.items() if word is not None)
        return {rank: self._opened(places[rank], raw[rank], _BEAT, unsigned=True) for rank in ranks}

    # ------------------------------------------------------------------- judging

    def _watch(self) -> None:
        assert self._clerk is not None
        try:
            self._watch_rounds(self._clerk)
        except Exception as error:
            log.exception("rank %d cannot watch the others any more", self.rank)
            self._tell(PeerLost(f"rank {self.rank} cannot watch the others any more: {type(error).__name__}: {error}"))
        finally:
            if self._leaving and not self._cut_off:
                self._clerk.ask(lambda store: self._beat(store, leaves=True))
            self._clerk.close(0.0 if self._cut_off else _LAST_WORDS)

    def _watch_rounds(self, clerk: Clerk) -> None:
        interval = min(_INTERVAL, self._limit / 4)
        answered = looked = self._clock()
        under_way: Future[tuple[dict[int, Note | None], Note | None]] | None = None
        while True:
            if under_way is None:
                under_way = clerk.ask(self._round)
            found = None
            try:
                found = under_way.result(interval)
            except TimeoutError:
                pass
            except RuntimeError as error:
                if not self._stop.is_set() and 0 not in self._left:
                    self._tell(self._store_lost(str(error).splitlines()[0]))
                return
            now = self._clock()
            if now - looked > self._limit / 2:
                # This process itself was suspended: nobody else can be judged by the time that passed.
                answered = now
                for sign in self._signs.values():
                    sign.at = now
            looked = now
            if found is not None:
                under_way, answered = None, now
                if self._failure is None:
                    self._judge(*found, now)
            elif now - answered > self._limit:
                self._tell(self._store_lost(f"no answer for {self._limit:g} s"))
                return
            # What was not answered has been waited for already.
            if self._stop.wait(interval if found is not None else 0.0):
                return

    def _judge(self, beats: dict[int, Note | None], last_words: Note | None, now: float) -> None:
        if last_words is not None and last_words["rank"] != self.rank:
            # Its process may live on, with all sockets open.
            self._tell(self._quote(last_words))
            return
        never_came = []
        for rank, beat in beats.items():
            sign = self._signs.setdefault(rank, _Sign(0, now))
            # Only a higher count is news: an old note may have been written there again.
            if beat is not None and beat["count"] > sign.count:
                self._signs[rank] = _Sign(beat["count"], now, _calls(beat))
                if beat["leaves"]:
                    self._left.add(rank)
            elif sign.count == 0 and now - sign.at > self._start_limit:
                never_came.append(rank)
            elif sign.count > 0 and now - sign.at > self._limit:
                self._tell(
                    PeerLost(
                        f"rank {rank} ({self.describe(rank)}) gave no sign of life for {self._limit:g} s: it is "
                        "stopped or stuck. Raise stall_limit if it may pause that long."
                    )
                )
                return
        self._compare_calls()
        if never_came:
            who = ", ".join(f"rank {rank} ({self.describe(rank)})" for rank in never_came)
            self._tell(
                PeerLost(
                    f"{who} gave no sign of life within {self._start_limit:g} s of the start: look whether it was "
                    f"started, and whether it reaches {_where()}. UNLATCH_START_LIMIT allows more seconds."
                )
            )

    def _compare_calls(self) -> None:
        """Tell if this rank waits in a call that another one never makes, or all wait for each other in different ones.

        One that waits for long may do so with good reason, and so may all of them while messages are on the wire: only
        what they have called shows that it is in vain.
        """
        own = self.calls.report()
        if not own.waits:
            return
        others = {rank: sign.calls for rank, sign in self._signs.items()}
        for rank in self._left:
            if others[rank].count < own.count:
                last = f"{others[rank].recent[-1]}, call {others[rank].count}" if others[rank].recent else "none"
                self._tell(self._departed(rank, f"in {own.recent[-1]}, call {own.count} here (its last was {last})"))
                return
        if all(calls.waits for rank, calls in others.items() if rank not in self._left):
            difference = first_difference({self.rank: own, **others})
            if difference is not None:
                self._tell(out_of_step(difference, self.describe))

    def _departed(self, peer: int, where: str) -> PeerLost:
        return PeerLost(
            f"rank {peer} ({self.describe(peer)}) has closed its run while rank {self.rank} still waits {where}: call "
            "the methods of a run equally often on every rank"
        )

    def _quote(self, note: Note) -> PeerLost:
        return PeerLost(f"rank {note['rank']} ({self.describe(note['rank'])}) stopped: {note['text']}")

    def _store_lost(self, why: str) -> PeerLost:
        self._cut_off = True
        return PeerLost(
            f"rank 0 ({self.describe(0)}) or its host is gone, or cut off from this one: the store at {_where()} is "
            f"out of reach ({why})"
        )

    def _tell(self, error: UnlatchError) -> None:
        with self._told:
            if self._failure is None:
                self._failure = error
                for listener in self._listeners:
                    listener(error)


def _calls(beat: Note) -> CallReport:
    return CallReport(beat["calls"], tuple(str(name) for name in beat["recent"]), beat["waits"])


def _where() -> str:
    return ":".join(str(part) for part in store_address() or ("an unknown place",))
