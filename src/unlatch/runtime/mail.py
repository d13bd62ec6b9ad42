"""Where messages between stages wait: one box per (kind, stage), in the order they were sent.

Inline, `post` and `take` are all there is. Distributed, a `Link` carries what is addressed to a stage of another rank,
and receiver threads post what arrives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import TransportError, UnlatchError
from ..nn.tree import tree_bytes
from .metering import Waiting
from .micro import Micro

__all__ = ["ACK", "BACKWARD", "EVALUATE", "FORWARD", "Mail", "Message"]

FORWARD, BACKWARD, EVALUATE, ACK = "forward", "backward", "evaluate", "ack"


@dataclass(frozen=True, slots=True)
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


class Mail:
    """Boxes of messages for the stages of this process.

    **Arguments:**

    - `stages`: the stages that live here; `forward_to` is called with messages for any other.
    - `capacity`: messages a box may hold. The schedule bounds them, so more means that a peer broke it.
    """

    def __init__(
        self, stages: range, capacity: int = 1 << 30, forward_to: Callable[[Message], None] | None = None
    ) -> None:
        self.stages = stages
        self.capacity = capacity
        self._elsewhere = forward_to
        self._boxes: dict[tuple[str, int], deque[Message]] = {}
        self._arrival = threading.Condition()
        self._failure: UnlatchError | None = None
        self._ended: dict[str, UnlatchError] = {}
        #: Of messages that belong to training.
        self.waiting = Waiting()

    def send(self, message: Message) -> None:
        """Deliver to a stage here, or hand over for transport."""
        if message.stage in self.stages:
            self.post(message)
        elif self._elsewhere is not None:
            self._elsewhere(message)
        else:
            raise TransportError(f"no way to stage {message.stage}: this process holds {self.stages}")

    def post(self, message: Message) -> None:
        """Put a message into its box."""
        with self._arrival:
            box = self._boxes.setdefault((message.kind, message.stage), deque())
            if len(box) >= self.capacity:
                raise TransportError(
                    f"{len(box)} {message.kind} messages wait for stage {message.stage}, where the schedule allows "
                    f"{self.capacity}: the sender runs ahead of its schedule"
                )
            box.append(message)
            self._weigh(message, 1)
            self._arrival.notify_all()

    def peek(self, kind: str, stage: int) -> Message:
        """The next message of a box, left there; waits for it."""
        with self._arrival:
            while True:
                box = self._boxes.get((kind, stage))
                if box:
                    return box[0]
                error = self._failure or self._ended.get(kind)
                if error is not None:
                    raise error
                # A bounded wait keeps Ctrl-C and failure notices responsive.
                self._arrival.wait(timeout=1.0)

    def take(self, kind: str, stage: int, micro: Micro | None = None) -> Message:
        """The next message of a box, removed; waits for it and refuses one about another micro-batch."""
        message = self.peek(kind, stage)
        if micro is not None and message.micro != micro:
            raise TransportError(
                f"stage {stage} expected the {kind} message of {micro} (id {micro.id}), got {message.micro}"
            )
        with self._arrival:
            self._boxes[kind, stage].popleft()
            self._weigh(message, -1)
        return message

    def _weigh(self, message: Message, sign: int) -> None:
        if message.kind in (FORWARD, BACKWARD):
            self.waiting.change(message.stage, sign * tree_bytes(message.payload))

    def end(self, kinds: Iterable[str], error: UnlatchError) -> None:
        """Make waits for messages of these kinds raise `error` once the boxes are empty: nobody sends them any more."""
        with self._arrival:
            self._ended.update(dict.fromkeys(kinds, error))
            self._arrival.notify_all()

    def failure(self) -> UnlatchError | None:
        """Why this rank cannot go on, if it cannot."""
        return self._failure

    def fail(self, error: UnlatchError) -> None:
        """Make every present and future wait raise `error`; the first one counts."""
        with self._arrival:
            self._failure = self._failure or error
            self._arrival.notify_all()
