"""Who is alive: heartbeats and last words in a key-value store, beside the data path.

A dead peer closes its sockets, which the transport notices at once; a stopped one does not, which is what heartbeats
are for. A rank that fails leaves a note, so that the others can name the culprit instead of reporting a broken socket.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable

from ..errors import PeerLost
from .store import connect_store

__all__ = ["Health"]

# Seconds for the store to answer: its host may be starved of time without being gone.
_PATIENCE = 30.0


class Health:
    """Watches the other ranks and calls `on_loss` once when one is gone.

    **Arguments:**

    - `run`: a name all ranks share and no other run on this store has.
    - `rank`, `ranks`: this process and how many there are.
    - `describe`: what a rank does, for messages ("stages 2-3").
    - `on_loss`: called from the watching thread with the error to raise.
    - `stall_limit`: seconds without a sign of life before a rank counts as stuck.
    - `clock`: seconds that pass.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        ranks: int,
        describe: Callable[[int], str],
        on_loss: Callable[[PeerLost], None],
        stall_limit: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._last_words = f"unlatch/{run}/failure"
        self._beat = f"unlatch/{run}/beat"
        self._stop_request = f"unlatch/{run}/stop"
        self._wish: int | None = None
        self.describe = describe
        self._on_loss = on_loss
        self._limit = stall_limit
        self._clock = clock
        self._store = connect_store(timeout=_PATIENCE)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="unlatch-health", daemon=True)
        if self._store is not None:
            self._watcher.start()

    def leave_note(self, text: str) -> None:
        """Tell the others why this rank is about to stop."""
        if self._store is not None:
            note = json.dumps({"rank": self.rank, "text": text})
            with contextlib.suppress(RuntimeError), self._lock:
                self._store.compare_set(self._last_words, "", note)

    def loss(self, peer: int, error: Exception | None = None) -> PeerLost:
        """The error to raise when the connection to `peer` broke: with the culprit's own words if it left any."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            note = self._note()
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
        note = self._note()
        if note is not None:
            return self._quote(note)
        return PeerLost(
            f"rank {peer} ({self.describe(peer)}) has closed its run while rank {self.rank} still waits for it: call "
            "step, flush, fit and evaluate equally often on every rank"
        )

    def ask_to_stop(self, number: int) -> None:
        """Ask all ranks to end the run in good order, because signal `number` came; safe in a signal handler."""
        # The watcher passes it on in its next round: a handler may interrupt anything, so it must not wait for a lock.
        self._wish = number

    def asked_to_stop(self) -> int | None:
        """The signal for which some rank has asked all others to end, about a second after it did; else `None`."""
        return self._wish

    def close(self) -> None:
        """Stop watching; afterwards no sign of life is given and nobody is called lost."""
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join(_PATIENCE)

    def _quote(self, note: dict[str, str]) -> PeerLost:
        return PeerLost(f"rank {note['rank']} ({self.describe(int(note['rank']))}) stopped: {note['text']}")

    def _note(self) -> dict[str, str] | None:
        if self._store is None:
            return None
        try:
            with self._lock:
                if not self._store.check([self._last_words]):
                    return None
                found: dict[str, str] = json.loads(self._store.get(self._last_words))
                return found
        except (RuntimeError, ValueError):
            return None

    def _exchange_wishes(self) -> None:
        assert self._store is not None
        if self._wish is not None:
            self._store.compare_set(self._stop_request, "", str(self._wish))
        elif self._store.check([self._stop_request]):
            self._wish = int(self._store.get(self._stop_request))

    def _watch(self) -> None:
        assert self._store is not None
        interval = min(1.0, self._limit / 4)
        seen: dict[int, tuple[int, float]] = {}
        beats = 0
        last_round = self._clock()
        while beats == 0 or not self._stop.wait(interval):
            now = self._clock()
            if now - last_round > self._limit / 2:
                # This process itself was suspended: nobody else can be judged by the time that passed.
                seen.clear()
            last_round = now
            beats += 1
            try:
                with self._lock:
                    self._store.set(f"{self._beat}/{self.rank}", str(beats))
                    peers = {r: f"{self._beat}/{r}" for r in range(self.ranks) if r != self.rank}
                    # One that never gave a sign is judged as well, from the first look on.
                    counts = {r: int(self._store.get(k)) if self._store.check([k]) else 0 for r, k in peers.items()}
                    self._exchange_wishes()
            except (RuntimeError, ValueError):
                if not self._stop.is_set():
                    self._on_loss(self.loss(0))
                return
            note = self._note()
            if note is not None and int(note["rank"]) != self.rank:
                # Its process may live on, with all sockets open.
                self._on_loss(self._quote(note))
                return
            for rank, count in counts.items():
                if seen.get(rank, (None, 0.0))[0] != count:
                    seen[rank] = (count, now)
                elif now - seen[rank][1] > self._limit:
                    self._on_loss(
                        PeerLost(
                            f"rank {rank} ({self.describe(rank)}) gave no sign of life for {self._limit:g} s: it is "
                            "stopped or stuck. Raise stall_limit if it may pause that long."
                        )
                    )
                    return
