"""Where messages between stages wait: one box per (kind, stage), in the order they were sent.

Inline, `post` and `take` are all there is. Distributed, a link carries what is addressed to a stage of another rank.
What arrives from other machines is posted by receiver threads; what arrives from ranks of the same machine by whoever
waits here, one thread at a time (`Fetcher`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

from ..errors import TransportError, UnlatchError
from ..nn.tree import copied, tree_bytes
from .calls import Calls

__all__ = [
    "ACK",
    "BACKWARD",
    "DATA",
    "EVALUATE",
    "FORWARD",
    "MARK",
    "VOID",
    "Cut",
    "Fetcher",
    "Mail",
    "Message",
    "Micro",
    "Voided",
    "Waiting",
]

#: Batches on their way into the first station, from nobody.
DATA = "data"
FORWARD, BACKWARD, EVALUATE, ACK = "forward", "backward", "evaluate", "ack"
_UNWEIGHED = (DATA, EVALUATE, ACK)
#: Tells a peer that what was sent before it belongs to a snapshot, and what follows does not.
MARK = "mark"
#: Tells a peer that whatever was sent before it counts for nothing: all ranks go back to an earlier state, or stop.
VOID = "void"


class Voided(Exception):
    """A peer called off the batches under way. It never reaches a user: whoever guards the run answers it."""


@dataclass(frozen=True, slots=True)
class Micro:
    """Which part of which batch, and which update it contributes to.

    **Arguments:**

    - `id`: counts micro-batches over the whole run.
    - `batch`: the user's batch it was cut from, counted over the whole run.
    - `index`, `count`: it is the `index`-th of `count` parts of that batch.
    - `size`: samples in it.
    - `scale`: weight of its mean loss in the batch's loss (`size / samples of the batch`).
    - `update`: number of the update it contributes to; also the version its backward will see.
    - `ends`: whether that update follows its backward.
    - `fresh`: whether it holds samples that were not met before, where the method asks.
    """

    id: int
    batch: int
    index: int
    count: int
    size: int
    scale: float
    update: int
    ends: bool
    fresh: bool = False

    def __str__(self) -> str:
        part = f", part {self.index + 1} of {self.count}" if self.count > 1 else ""
        return f"batch {self.batch}{part}"


@dataclass(slots=True)
class Message:
    """What one stage tells a neighbour.

    **Arguments:**

    - `kind`: `forward` (activation and target), `backward` (gradient and loss), `evaluate`, `ack`.
    - `stage`: who it is for.
    - `micro`: whose it is; `None` with a `control` word.
    - `payload`: any tree of tensors.
    - `version`: the sender's weight version.
    - `scalars`: the loss of the micro-batch or sums of metrics.
    - `control`: an order in place of a payload, such as the end of the data.
    """

    kind: str
    stage: int
    micro: Micro | None = None
    payload: Any = None
    version: int = 0
    scalars: dict[str, float] | None = None
    control: str | None = None


class Waiting:
    """Bytes of messages that have come for a stage and were not taken up yet: now, and at most.

    >>> waiting = Waiting()
    >>> waiting.change(3, 100); waiting.change(3, 20); waiting.change(3, -100)
    >>> waiting.most[3]
    120
    """

    def __init__(self) -> None:
        self.most: Counter[int] = Counter()
        self._now: Counter[int] = Counter()

    def change(self, stage: int, nbytes: int) -> None:
        """Note that bytes came, or (below zero) were taken up."""
        now = self._now[stage] = self._now[stage] + nbytes
        if now > self.most[stage]:
            self.most[stage] = now


class Cut:
    """The messages under way to this process at one moment of the run, although ranks reach it at different times.

    What waits here is known at once. Whatever a peer sent before its own snapshot, and only that, arrives before its
    mark, so the rest is known as soon as every peer's mark has come. Nobody waits for it meanwhile.
    """

    def __init__(
        self,
        number: int,
        messages: list[Message],
        peers: Iterable[int],
        wait_until: Callable[[Callable[[], bool]], bool],
    ) -> None:
        self.number = number
        self.missing = set(peers)
        self.messages = messages
        #: Whether it will never be complete, since all ranks have gone back to an earlier state.
        self.dropped = False
        self._wait_until = wait_until

    def wait(self, failure: Callable[[], UnlatchError | None]) -> list[dict[str, Any]]:
        """All of them as plain values, each box in its order."""
        # Who asks for a failure sees what has arrived meanwhile, so that is asked first.
        self._wait_until(lambda: failure() is not None or not self.missing or self.dropped)
        if self.missing:
            raise failure() or TransportError("what was under way was called off before all of it was known")
        return [
            {f.name: getattr(m, f.name) for f in fields(m)} | {"micro": asdict(m.micro) if m.micro else None}
            for m in self.messages
        ]


class _Boxed(NamedTuple):
    """A message in its box, its bytes as far as they count, and how many marks its sender had sent before it."""

    message: Message
    nbytes: int
    age: int


class Fetcher(Protocol):
    """Who brings what has arrived from other ranks when it is asked."""

    def fetch(self, seconds: float) -> None:
        """Post what has arrived; wait for it so long if nothing has. Never asked by two threads at once."""

    def ring(self) -> None:
        """End a `fetch` that is under way on another thread."""


class Mail:
    """Boxes of messages for the stages of this process.

    **Arguments:**

    - `stages`: the stages that live here.
    - `forward_to`: called with messages for any other.
    - `calls`: told while somebody waits here.
    - `copied`: makes the copies of payloads that a cut holds.
    """

    def __init__(
        self,
        stages: Container[int],
        forward_to: Callable[[Message], None] | None = None,
        calls: Calls | None = None,
        copied: Callable[[Any], Any] = copied,
    ) -> None:
        self.stages = stages
        self._copied = copied
        self._calls = calls or Calls()
        self._room: dict[tuple[str, int], int] = {}
        self._elsewhere = forward_to
        self._boxes: dict[tuple[str, int], deque[_Boxed]] = {}
        self._lock = threading.RLock()
        self._arrival = threading.Condition(self._lock)
        #: Threads that wait for an arrival, which is news for nobody else.
        self._sleepers = 0
        self._fetcher: Fetcher | None = None
        #: The thread that fetches, if one does.
        self._fetching: int | None = None
        self._marks: Counter[int] = Counter()
        self._begun = 0
        self._cuts: list[Cut] = []
        self._failure: UnlatchError | None = None
        self._ended: dict[tuple[str, int], UnlatchError] = {}
        self._voided_by: set[int] = set()
        #: Of messages that belong to training.
        self.waiting = Waiting()

    def allow(self, room: Mapping[tuple[str, int], int]) -> None:
        """Hold at most so many messages of each name, for each station; more mean that a peer broke its schedule."""
        self._room.update(room)

    def serve_from(self, fetcher: Fetcher) -> None:
        """Ask `fetcher` for what has arrived whenever somebody waits."""
        self._fetcher = fetcher

    def send(self, message: Message) -> None:
        """Deliver to a stage here, or hand over for transport."""
        if message.stage in self.stages:
            self.post(message)
        elif self._elsewhere is not None:
            self._elsewhere(message)
        else:
            raise TransportError(f"no way to stage {message.stage}: this process holds {self.stages}")

    def post(self, message: Message, sender: int | None = None) -> None:
        """Put a message into its box. **Arguments:** `sender`: the rank that it comes from, if from another one."""
        nbytes, place = 0 if message.kind in _UNWEIGHED else tree_bytes(message.payload), (message.kind, message.stage)
        with self._lock:
            box = self._boxes.get(place)
            if box is None:
                box = self._boxes[place] = deque()
            room = self._room.get(place)
            if room is not None and len(box) >= room:
                raise TransportError(
                    f"{len(box)} {message.kind} messages wait for stage {message.stage}, where the schedule allows "
                    f"{room}: the sender runs ahead of its schedule"
                )
            box.append(_Boxed(message, nbytes, self._begun if sender is None else self._marks[sender]))
            self.waiting.change(message.stage, nbytes)
            for cut in self._cuts:
                if sender in cut.missing:
                    cut.messages.append(self._copy(message))
            self._changed()

    def peek(self, kind: str, stage: int) -> Message:
        """The next message of a box, left there; waits for it."""
        if box := self._boxes.get((kind, stage)):
            return box[0].message
        with self._calls.waiting():
            self.wait_until(lambda: self._next(kind, stage) is not None)
        return self._boxes[kind, stage][0].message

    def wait_until(self, ready: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait until something is so, which other threads and ranks bring about. **Returns:** whether it is."""
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                if ready():
                    return True
                # A bounded wait keeps Ctrl-C and failure notices responsive.
                left = min(1.0, deadline - time.monotonic())
                if left <= 0:
                    return False
                if self._fetcher is None or self._fetching is not None:
                    self._sleepers += 1
                    try:
                        self._arrival.wait(left)
                    finally:
                        self._sleepers -= 1
                    continue
                self._fetching = threading.get_ident()
            self._fetch(left)

    def _fetch(self, seconds: float) -> None:
        """Look what has arrived. This thread was noted as the one that does."""
        assert self._fetcher is not None
        try:
            self._fetcher.fetch(seconds)
        finally:
            with self._lock:
                self._fetching = None
                # Whoever waits meanwhile may be the next to fetch.
                self._changed()

    def _look(self) -> None:
        """See what has arrived already, for questions that nobody waits for."""
        with self._lock:
            if self._fetcher is None or self._fetching is not None:
                return
            self._fetching = threading.get_ident()
        self._fetch(0.0)

    def _changed(self) -> None:
        """Tell all who wait; called with the lock held."""
        if self._sleepers:
            self._arrival.notify_all()
        if self._fetching is not None and self._fetcher is not None and self._fetching != threading.get_ident():
            self._fetcher.ring()

    def _next(self, kind: str, stage: int) -> Message | None:
        """The next message of a box if it is there; raises why none will come."""
        if box := self._boxes.get((kind, stage)):
            return box[0].message
        error = self._failure or self._ended.get((kind, stage))
        if error is not None:
            raise error
        if self._voided_by:
            raise Voided
        return None

    def take(self, kind: str, stage: int, micro: Micro | None = None) -> Message:
        """The next message of a box, removed; waits for it and refuses one about another micro-batch."""
        message = self.peek(kind, stage)
        if micro is not None and message.micro is not micro and message.micro != micro:
            raise TransportError(
                f"stage {stage} expected the {kind} message of {micro} (id {micro.id}), got {message.micro}"
            )
        with self._lock:
            self.waiting.change(stage, -self._boxes[kind, stage].popleft().nbytes)
        return message

    def mark(self, sender: int) -> None:
        """Note that a peer has taken its snapshot."""
        with self._lock:
            self._marks[sender] += 1
            for cut in self._cuts:
                if self._marks[sender] > cut.number:
                    cut.missing.discard(sender)
            self._cuts = [cut for cut in self._cuts if cut.missing]
            self._changed()

    def cut(self, peers: Iterable[int] = ()) -> Cut:
        """Copies of all messages that wait here, and of those that `peers` sent before their marks.

        Each peer's n-th mark belongs to the n-th cut.
        """
        with self._lock:
            number, self._begun = self._begun, self._begun + 1
            waiting = [self._copy(w.message) for box in self._boxes.values() for w in box if w.age <= number]
            cut = Cut(number, waiting, (p for p in peers if self._marks[p] <= number), self.wait_until)
            if cut.missing:
                self._cuts.append(cut)
            return cut

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Put messages that a cut listed into empty boxes."""
        self._boxes.clear()
        self.waiting = Waiting()
        for saved in state:
            micro = saved["micro"]
            self.post(Message(**{**saved, "micro": Micro(**micro) if micro is not None else None}))

    @property
    def voided(self) -> bool:
        """Whether a peer has called off the batches under way."""
        self._look()
        return bool(self._voided_by)

    def void(self, sender: int) -> None:
        """Note that a peer calls off the batches under way: waits for messages end."""
        with self._lock:
            self._voided_by.add(sender)
            self._changed()

    def wait_for_void(self, peers: Iterable[int]) -> None:
        """Return once all `peers` have called off the batches under way, so that nothing old can arrive any more."""
        wanted = set(peers)

        def all_have() -> bool:
            error = self._failure or next(iter(self._ended.values()), None)
            if error is not None and not wanted <= self._voided_by:
                raise error
            return wanted <= self._voided_by

        self.wait_until(all_have)

    def begin_again(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Drop everything, what is known of marks included, and go on with the messages that a cut listed."""
        with self._lock:
            self._voided_by.clear()
            self._marks.clear()
            for cut in self._cuts:
                cut.dropped = True
            self._begun, self._cuts = 0, []
            self._changed()
        self.load(state)

    def end(self, boxes: Iterable[tuple[str, int]], error: UnlatchError) -> None:
        """Make waits for messages in these boxes raise `error` once they are empty: nobody fills them any more."""
        with self._lock:
            self._ended.update(dict.fromkeys(boxes, error))
            self._changed()

    def failure(self) -> UnlatchError | None:
        """Why this rank cannot go on, if it cannot."""
        if self._failure is None:
            self._look()
        return self._failure

    def fail(self, error: UnlatchError) -> None:
        """Make every present and future wait raise `error`; the first one counts."""
        with self._lock:
            self._failure = self._failure or error
            self._changed()

    def _copy(self, message: Message) -> Message:
        return replace(message, payload=self._copied(message.payload))
