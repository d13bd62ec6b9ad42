"""When a loss, gradient or weight is not finite: all ranks stop together, or all go on as if the batch never was.

    a rank finds it      `NonFinite` leaves the engine; nothing was applied                                 1
    void                 every rank calls off what is under way, on every link, and waits for the others    2
    agree                which batch is at fault, and which kept state all ranks have from before it        3
    stop                 save that state; the finder raises what it found, the others quote it              4
    or go back           to that state, and do again what was done since, without the batch                 5

Ranks are at different places when that happens, and each goes on to where it was. States are kept by the number of
batches that were offered, those left out included, which is the same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import NonFinite, PeerLost, UnlatchError
from ..io.checkpoint import Checkpoint
from ..nn.tree import copied
from ..runtime.engine import Engine, Finished, Order
from ..transport.link import Carrier
from ..transport.mail import Voided
from ..transport.world import World
from .saving import Saving

__all__ = ["Guard", "Snapshot"]

log = logging.getLogger("unlatch")

T = TypeVar("T")
#: Batches between two states that are kept, at least.
_INTERVAL = 20
#: Batches that may be left out one after the other.
_LIMIT = 10


class Snapshot(NamedTuple):
    """All that is under way here.

    **Arguments:** `part`: this rank's part of a checkpoint, with the state in second place; waits for messages.
    `made`: the checkpoint of all parts.
    """

    part: Callable[[], tuple[Any, ...]]
    made: Callable[[Sequence[Any]], Checkpoint]


@dataclass
class _Kept:
    """A state, where it was taken, and what was done since."""

    position: int
    left_out: int
    batches: int
    state: Snapshot
    done: list[Callable[[], Any]] = field(default_factory=list)


class _Fault(NamedTuple):
    """What a rank found: the positions of the first and last batch that may be the cause."""

    first: int
    last: int
    rank: int
    error: NonFinite


class Guard:
    """Stands between a run and its engine. The same on every rank.

    **Arguments:**

    - `policy`: `"stop"`, `"skip"` or `"ignore"`.
    - `snapshot`: a state of this moment, given what a session says about itself.
    - `finish_saving`: waits for a checkpoint that is being written.
    - `describe`: what a rank does, for messages.
    - `tell`: takes notes for the user.
    """

    def __init__(
        self,
        policy: str,
        engine: Engine,
        links: Sequence[Carrier],
        world: World,
        snapshot: Callable[[Mapping[str, Any]], Snapshot],
        finish_saving: Callable[[], None],
        describe: Callable[[int], str],
        tell: Callable[[str], None],
    ) -> None:
        self.policy = policy
        #: Batches left out so far.
        self.left_out = 0
        #: Where the state from before the fault goes when the run stops: a path, and what to call once it is there.
        self.place: Callable[[int], tuple[Path, Callable[[], None]]] | None = None
        #: What a session wants to find in it.
        self.progress: Callable[[], Mapping[str, Any]] = dict
        self._saves, self._last_save = 0, (-1, Path())
        self._engine, self._links, self._world = engine, links, world
        self._snapshot, self._finish_saving = snapshot, finish_saving
        self._describe, self._tell = describe, tell
        self._aside: World | None = None
        # A rank may be as far ahead of another as a batch is under way, and the batch at fault was under way as well.
        self._every = max(_INTERVAL, 2 * engine.schedule.depth + engine.accumulate + 2)
        self._kept: list[_Kept] = []
        # What the session said of itself where states were taken: the same when they are taken again.
        self._said: dict[int, Mapping[str, Any]] = {}
        self._to_do: list[Callable[[], Any]] = []
        self._open: Callable[[], Any] | None = None
        self._at: dict[int, int] = {}
        self._without: set[int] = set()
        self._finished: list[Finished] = []
        self._reported = 0
        self._rounds = 0

    @property
    def position(self) -> int:
        """Batches offered so far, those left out included."""
        return self._engine.batches + self.left_out

    # ------------------------------------------------------------------- what is kept

    def keep(self) -> None:
        """Keep a copy of the state if one is due. Called on all ranks after the same batch."""
        if not (self.policy == "skip" or (self.policy == "stop" and self.place is not None)):
            return
        if self._aside is None:
            self._aside = self._world.aside()
            self._aside.heed(self._engine.mail.failure)
        if not self._kept or self._due():
            self._engine.careful = False
            self._take(dict(self.progress()))

    def saving(self, path: Path) -> None:
        """Note that a checkpoint was begun. Called on all ranks after the same batch."""
        self._saves, self._last_save = self._saves + 1, (self.position, path)

    def forget(self) -> None:
        """Another state was loaded: those that were kept have nothing to do with it."""
        self._kept.clear()
        self._said.clear()
        self._at.clear()
        self._without.clear()
        self._finished.clear()
        self.left_out = self._reported = 0
        self._last_save = (-1, Path())

    def _due(self) -> bool:
        return self.position % self._every == 0 and self._kept[-1].position != self.position

    def _take(self, progress: Mapping[str, Any]) -> None:
        kept = _Kept(self.position, self.left_out, self._engine.batches, self._snapshot(progress))
        self._kept = [*self._kept, kept][-2:]
        self._said = {at: said for at, said in self._said.items() if at >= self._kept[0].position}
        self._said[self.position] = progress
        oldest = self._kept[0].batches
        self._at = {batch: position for batch, position in self._at.items() if batch >= oldest}

    # ------------------------------------------------------------------------ doing

    def feed(self, *unit: Any) -> list[Finished] | Order:
        """Let the engine take one step."""
        if self.policy == "skip":
            # The caller may use its memory for the next batch, and a model may change its input in place.
            given = copied(unit)
            return self._do(lambda: self._step(*copied(given)))
        return self._do(partial(self._step, *unit))

    def announce(self, order: Order) -> None:
        """Let the engine announce an order."""
        self._do(partial(self._engine.announce, order))

    def perform(self, work: Callable[[], None]) -> None:
        """Do something else to the stages between two batches: whoever goes back before it does it again."""
        self._do(work)

    def drain(self) -> list[Finished]:
        """Let the engine finish every batch under way, and wait until all others have."""
        finished = self._do(self._engine.drain)
        self.settle()
        return finished + self._news()

    def settle(self) -> None:
        """Wait until all ranks have done all that was fed: whatever else ranks do together, they do after that.

        Otherwise a rank that has to go back could be in the midst of it.
        """
        if self.policy == "skip" and self._kept:
            while len(set(self._world.gather(self._rounds))) > 1:
                # One of them had to go back while it waited here.
                pass

    def alarm(self) -> UnlatchError | None:
        """Why waiting for others is in vain, if it is; if they go back to an earlier state, this rank does so too."""
        mail = self._engine.mail
        if mail.failure() is not None or not mail.voided:
            return mail.failure()
        try:
            self._recover(None)
        except UnlatchError as error:
            return error
        return None

    def _do(self, work: Callable[[], T]) -> T:
        if not self._kept:
            return work()
        if self.policy == "skip":
            self._kept[-1].done.append(work)
        self._open = work
        try:
            if self._engine.mail.voided:
                raise Voided
            result: T = self._perform(work)
        except (NonFinite, Voided) as error:
            result = self._recover(error)
        finally:
            self._open = None
        return self._news() if isinstance(result, list) else result  # type: ignore[return-value]

    def _step(self, *unit: Any) -> list[Finished] | Order:
        if self.position in self._without:
            self.left_out += 1
            return []
        self._at[self._engine.batches] = self.position
        return self._engine.step(*unit)

    def _perform(self, work: Callable[[], Any]) -> Any:
        result = work()
        if isinstance(result, list):
            self._finished += result
        return result

    def _news(self) -> list[Finished]:
        """Batches that have finished, each told once."""
        news = [batch for batch in self._finished if batch.batch >= self._reported]
        self._finished = []
        if news:
            self._reported = news[-1].batch + 1
        return news

    # ------------------------------------------------------------------- going back

    def _recover(self, error: NonFinite | Voided | None) -> Any:
        """Go back with all other ranks and on to where this one was. **Returns:** what the work under way gives."""
        while True:
            self._go_back(self._agree(error))
            try:
                return self._do_again()
            except (NonFinite, Voided) as again:
                error = again

    def _agree(self, error: NonFinite | Voided | None) -> _Kept:
        """Call off what is under way and find, all ranks alike, what to do. **Returns:** the state to go back to."""
        self._engine.recorder.pause()
        found = error if isinstance(error, NonFinite) else None
        if self._aside is None:
            raise found or PeerLost("another rank goes back to a state that was never kept here")
        for link in self._links:
            link.void()
        try:
            self._engine.mail.wait_for_void(link.peer for link in self._links)
            told = self._aside.gather((self._fault(found), [kept.position for kept in self._kept], self._saves))
        except UnlatchError:
            if found is not None:
                raise found from None
            raise
        self._rounds += 1
        faults = [fault for fault, *_ in told if fault is not None]
        first = min(fault.first for fault in faults)
        fault = min(faults, key=lambda fault: (fault.last, fault.rank))
        everywhere = set.intersection(*(set(positions) for _, positions, _ in told))
        before = [kept for kept in self._kept if kept.position in everywhere and kept.position <= first]
        self._stop_if(fault, before[-1] if before else None, len({saves for *_, saves in told}) == 1)
        if fault.first == fault.last:
            self._leave_out(fault)
        else:
            # Done again with a look after every entry, it shows which of the batches it is.
            self._engine.careful = True
        return before[-1]

    def _fault(self, error: NonFinite | None) -> _Fault | None:
        if error is None:
            return None
        first, last = (self._at.get(batch, -1) for batch in error.batches or (-1, -1))
        return _Fault(first, last, self._world.rank, error)

    def _leave_out(self, fault: _Fault) -> None:
        batch = next((batch for batch, position in self._at.items() if position == fault.last), None)
        if batch is not None and batch < self._reported:
            # Its number goes to the one after it.
            self._reported -= 1
        self._without.add(fault.last)
        text = f"batch {fault.last} of those offered is left out on all stages: {fault.error.found}"
        self._tell(text)
        if self._world.rank == 0:
            log.warning("%s", text)

    def _go_back(self, kept: _Kept) -> None:
        engine, again = self._engine, self._kept.index(kept)
        self._to_do = [work for later in self._kept[again:] for work in later.done] + self._to_do
        self._kept = self._kept[: again + 1]
        kept.done = []
        state = engine.device.here(copied(kept.state.part()[1]))
        engine.load(state)
        engine.mail.begin_again(state["mail"])
        self.left_out = kept.left_out
        self._at = {batch: position for batch, position in self._at.items() if batch < kept.batches}
        self._finished = []
        assert self._aside is not None
        # Whoever goes on first must not send to one who has yet to empty its boxes.
        self._aside.gather(None)

    def _do_again(self) -> Any:
        result = None
        while self._to_do:
            work = self._to_do.pop(0)
            self._kept[-1].done.append(work)
            result = self._perform(work)
            # After the work under way, whoever called for it keeps a state.
            if work is not self._open and self._due():
                self._take(self._said.get(self.position, {}))
        return result

    # --------------------------------------------------------------------- stopping

    def _stop_if(self, fault: _Fault, kept: _Kept | None, saves: bool) -> None:
        """Raise what was found if nothing is to be done about it, after saving the state from before it.

        **Arguments:** `saves`: all ranks have begun the same checkpoints, so the last one will be complete; otherwise
        it never will be.
        """
        row = next(n for n in range(len(self._without) + 1) if fault.last - 1 - n not in self._without)
        if self.policy == "skip" and kept is not None and row < _LIMIT:
            return
        outcome = []
        if row >= _LIMIT:
            outcome.append(f"The {row} batches before it were left out for the like.")
        if kept is None:
            outcome.append("No state from before it was kept.")
        elif self.place is not None:
            path = (self._newer_than(kept, fault) if saves else None) or self._saved(kept, *self.place(kept.batches))
            outcome.append(f"The last good state is saved in {path}.")
        error: UnlatchError = fault.error
        fault.error.outcome = " ".join(outcome) or None
        if fault.rank != self._world.rank:
            error = PeerLost(f"rank {fault.rank} ({self._describe(fault.rank)}) stopped: {error}")
        self._engine.mail.fail(error)
        raise error

    def _newer_than(self, kept: _Kept, fault: _Fault) -> Path | None:
        """The last checkpoint, if it came later than what was kept, and before the fault."""
        try:
            self._finish_saving()
        except (OSError, UnlatchError):
            return None
        position, path = self._last_save
        return path if kept.position <= position <= fault.first else None

    def _saved(self, kept: _Kept, path: Path, landed: Callable[[], None]) -> Path | str:
        assert self._aside is not None
        try:
            Saving(path, self._aside, kept.state.part, kept.state.made, landed).wait()
        except (OSError, UnlatchError) as error:
            return f"no place: it could not be written ({error})"
        return path

    def close(self) -> None:
        """Give the connections back."""
        if self._aside is not None:
            self._aside.close()
