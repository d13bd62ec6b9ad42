"""Carries messages between neighbouring ranks over torch.distributed, beside the computation.

Per neighbour one thread sends and one receives. The receiver always has a receive posted, reads each header, makes
room, reads the payload and puts the message into the mail, so the main thread never waits inside the communication
library and can always be told that a peer is gone. There are no tags: what a neighbour sends arrives in its order, and
the header's running number proves it. Messages under way are bounded by the schedule: every forward is answered by a
backward. Tensors of a device need a `Passage`: through the memory of the host (`staging`) or past it (`lanes`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerLost, UnlatchError
from .mail import MARK, VOID, Mail, Message
from .wire import HEADER_BYTES, Reader, Sealed, Writer, room

__all__ = ["Carrier", "Departure", "Link", "Passage", "Witness"]


class Witness(Protocol):
    """Who can say why a peer is gone: `Health`, in a run."""

    def loss(self, peer: int, error: Exception | None = None) -> PeerLost:
        """The connection broke."""

    def departure(self, peer: int) -> PeerLost:
        """The peer took its leave."""


class Carrier(Protocol):
    """Both directions of the connection to one peer, however it is made."""

    @property
    def peer(self) -> int:
        """Its rank."""

    @property
    def bytes_sent(self) -> int:
        """So far."""

    def send(self, message: Message) -> None:
        """Hand over a message; returns at once. Its tensors must not be changed afterwards."""

    def mark(self) -> None:
        """Tell the peer that whatever was sent before belongs to the snapshot taken here."""

    def void(self) -> None:
        """Tell the peer that whatever was sent before counts for nothing."""

    def close(self) -> None:
        """Send what is left, take leave of the peer, and wait for its own leave."""


class Departure(Protocol):
    """A message of a device on its way out."""

    def on_host(self) -> Message:
        """What goes over the link, as soon as it can be read. Asked by the sender thread."""

    def follow(self) -> int:
        """Send what goes another way, now that the peer is told of it. **Returns:** its bytes."""


class Passage(Protocol):
    """How tensors of a device get to the peer and from it."""

    def room(self, nbytes: int) -> Tensor:
        """Memory of the host for a block that will come over the link."""

    def leaving(self, message: Message) -> Departure:
        """Begin with a message; returns at once. Asked by the main thread."""

    def arriving(self, message: Message) -> Message:
        """What goes into the mail for a message that came over the link. Asked by the receiver thread."""

    def close(self, *, broken: bool) -> None:
        """Give back what the peer needed. **Arguments:** `broken`: whether something may be left that never ends."""


class Link:
    """Both directions of the connection to one peer, over the process group.

    **Arguments:**

    - `peer`: its global rank.
    - `group`: a process group of this run's own, so that nothing else travels on it.
    - `mail`: where arriving messages go, and who is told of a failure.
    - `health`: turns a broken connection into an error that names the culprit.
    - `sends`: the boxes here (name, station) that this peer alone fills; a wait for one after it has left is an error.
    - `passage`: how tensors of a device travel, where stations compute on one.
    """

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup,
        mail: Mail,
        health: Witness,
        sends: Sequence[tuple[str, int]] = (),
        passage: Passage | None = None,
    ) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self._group = group
        self._mail = mail
        self._health = health
        self._sends = sends
        self._passage = passage
        self._room = passage.room if passage is not None else room
        self._writer, self._reader = Writer(), Reader(peer)
        self._outbox: queue.SimpleQueue[Message | Departure | None] = queue.SimpleQueue()
        self._closing = self._broke = False
        self._threads = [
            threading.Thread(target=work, name=f"unlatch-{name}-{peer}", daemon=True)
            for name, work in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Hand over a message; returns at once. Its tensors must not be changed afterwards."""
        self._outbox.put(message if self._passage is None else self._passage.leaving(message))

    def mark(self) -> None:
        """Tell the peer that whatever was sent before belongs to the snapshot taken here."""
        self._outbox.put(Message(MARK, self.peer))

    def void(self) -> None:
        """Tell the peer that whatever was sent before counts for nothing."""
        self._outbox.put(Message(VOID, self.peer))

    def close(self, timeout: float = 10.0, sending: float = 60.0) -> None:
        """Send what is left, take leave of the peer, and wait for its own leave.

        **Arguments:** `timeout`: seconds for the peer to leave too; `sending`: for what it may be slow to take, since
        without our leave it would take us for dead.
        """
        self._closing = True
        self._outbox.put(None)
        sender, receiver = self._threads
        self._await(sender, sending)
        self._await(receiver, timeout)
        if self._passage is not None:
            # Not whether the run has failed, which one end may know before the other.
            self._passage.close(broken=self._broke or any(thread.is_alive() for thread in self._threads))

    def _await(self, thread: threading.Thread, seconds: float) -> None:
        """Wait for a thread to end, but hardly for a peer that is lost: it may still listen."""
        deadline = time.monotonic() + seconds
        thread.join(0.1)
        while thread.is_alive() and time.monotonic() < deadline and self._mail.failure() is None:
            thread.join(0.1)

    def _send_all(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                departure = None if isinstance(item, Message) else item
                message = item if isinstance(item, Message) else item.on_host()
                self._transmit(message, self._writer.seal(message), departure)
            dist.send(self._writer.close_notice().header, self.peer, group=self._group)
        except Exception as error:
            self._failed(error)

    def _transmit(self, message: Message, sealed: Sealed, departure: Departure | None) -> None:
        """Put a sealed message on the wire, and then what goes another way."""
        works = [dist.isend(part, self.peer, group=self._group) for part in sealed.parts]
        for work in works:
            if work is not None:
                work.wait()
        self.bytes_sent += sum(part.nbytes for part in sealed.parts)
        if departure is not None:
            self.bytes_sent += departure.follow()

    def _receive_all(self) -> None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        try:
            while True:
                self._receive(header)
                head = self._reader.head(header)
                if head.closes:
                    self._mail.end(self._sends, self._health.departure(self.peer))
                    return
                beside = torch.empty(head.beside, dtype=torch.uint8) if head.beside else None
                if beside is not None:
                    self._receive(beside)
                envelope = self._reader.envelope(head, beside, self._room)
                for block in envelope.blocks:
                    self._receive(block)
                envelope.verify()
                message = envelope.message()
                if message.kind == MARK:
                    self._mail.mark(self.peer)
                elif message.kind == VOID:
                    self._mail.void(self.peer)
                else:
                    if self._passage is not None:
                        message = self._passage.arriving(message)
                    self._mail.post(message, self.peer)
        except Exception as error:
            self._failed(error)

    def _receive(self, buffer: Tensor) -> None:
        dist.recv(buffer, self.peer, group=self._group)

    def _failed(self, error: Exception) -> None:
        self._broke = True
        if not self._closing:
            known = isinstance(error, UnlatchError) and not isinstance(error, PeerLost)
            self._mail.fail(error if known else self._health.loss(self.peer, error))  # type: ignore[arg-type]
