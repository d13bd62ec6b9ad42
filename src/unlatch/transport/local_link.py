"""Carries messages between ranks of one machine: frames over a Unix socket, tensors in memory that both ranks see.

No thread is needed. Whoever sends writes its frame into the socket, which takes it at once; whoever waits for a message
reads all sockets meanwhile, and puts what has come into the mail. So a message costs neither a change of threads nor a
second wake-up, and the end of a peer shows at once, as the end of its socket.

    sender                                        receiver
    copy tensors into slots        1
    one frame into the socket      2   ------->   3   wake up in `Neighbours.fetch`, read frames
                                                  4   tensors in the slots, as they are, into the mail
                                                  5   when the last of them is freed, the slot is
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..errors import PeerLost, TransportError, UnlatchError
from .health import Health
from .link import Witness
from .local_wire import FORM, LETTER, Reader, Writer
from .mail import Mail, Message
from .shared_memory import SHARES_MEMORY, Incoming, Outgoing
from .world import World

__all__ = ["LocalLink", "Neighbours", "call_on_neighbours"]

_SLOT, _MARK, _VOID, _CLOSE = b"S", b"M", b"V", b"C"
_SLOT_FRAME = struct.Struct("<cIQ")
# Bytes of the longest frame: the description of a form.
_LONGEST = 1 << 17
_DESCRIPTOR = socket.CMSG_SPACE(4)


class Neighbours:
    """All links of this process to ranks of the same machine, served by whoever waits for mail."""

    def __init__(self, mail: Mail) -> None:
        self._mail = mail
        self._links: dict[int, LocalLink] = {}
        self._open = 0
        self._poll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.EPOLLIN)
        self._closed = False
        self._ending = threading.Lock()
        mail.serve_from(self)

    def add(self, link: LocalLink) -> None:
        """Serve a link from now on."""
        self._open += 1
        self._links[link.fileno()] = link
        self._poll.register(link.fileno(), select.EPOLLIN)

    def watch(self, link: LocalLink, *, writing: bool) -> None:
        """Also look whether the socket of a link has room again."""
        with contextlib.suppress(OSError, ValueError):
            self._poll.modify(link.fileno(), select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    def remove(self, link: LocalLink) -> None:
        """Serve a link no more."""
        if self._links.pop(link.fileno(), None) is not None:
            self._poll.unregister(link.fileno())

    def ring(self) -> None:
        """End a `fetch` that is under way on another thread."""
        with self._ending:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def fetch(self, seconds: float) -> None:
        """Put what has arrived into the mail; wait for it so long if nothing has. Only one thread at a time.

        Who waits does so for one message, as a rule, and asks again if it was another one: so of each peer no more
        than one is read. A look for more would cost as much.
        """
        if self._closed:
            time.sleep(min(seconds, 0.1))
            return
        for descriptor, events in self._poll.poll(seconds):
            link = self._links.get(descriptor)
            if link is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                continue
            if events & select.EPOLLOUT:
                link.send_waiting()
            if events & ~select.EPOLLOUT:
                link.receive(everything=seconds == 0.0)

    def closed(self, link: LocalLink) -> None:
        """Take note that a link is closed; with the last one everything is given back."""
        self.remove(link)
        self._open -= 1
        if self._open == 0:
            # A bell that is rung now must not be somebody else's file.
            with self._ending:
                self._closed = True
                self._poll.close()
                os.close(self._bell)


class LocalLink:
    """Both directions of the connection to one peer on the same machine.

    **Arguments:**

    - `peer`: its global rank.
    - `channel`: a connected socket that keeps frames apart.
    - `neighbours`: who serves it.
    - `mail`, `health`, `sends`: as for `Link`.
    """

    def __init__(
        self,
        peer: int,
        channel: socket.socket,
        neighbours: Neighbours,
        mail: Mail,
        health: Witness,
        sends: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.peer = peer
        self._frame_bytes = 0
        self._channel, self._neighbours = channel, neighbours
        self._mail, self._health, self._sends = mail, health, sends
        self._memory = Outgoing(self._announce)
        self._writer = Writer(self._memory)
        self._slots = Incoming()
        self._reader = Reader(self._slots, peer)
        self._buffer = bytearray(_LONGEST)
        self._view = memoryview(self._buffer)
        self._buffers = [self._buffer]
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._sending = threading.Lock()
        self._closing = self._left = self._broken = False
        channel.setblocking(False)
        neighbours.add(self)

    def fileno(self) -> int:
        """Of its socket."""
        return self._channel.fileno()

    @property
    def bytes_sent(self) -> int:
        """Of frames and tensors."""
        return self._frame_bytes + self._memory.placed

    # ---------------------------------------------------------------- sending

    def send(self, message: Message) -> None:
        """Send a message; its tensors may be changed afterwards."""
        for frame in self._writer.frames(message):
            self._put(frame)

    def mark(self) -> None:
        """Tell the peer that whatever was sent before belongs to the snapshot taken here."""
        self._put(_MARK)

    def void(self) -> None:
        """Tell the peer that whatever was sent before counts for nothing."""
        self._put(_VOID)

    def _announce(self, number: int, capacity: int, file: int) -> None:
        self._put(_SLOT_FRAME.pack(_SLOT, number, capacity), file)

    def _put(self, frame: bytes, file: int | None = None) -> None:
        if len(frame) > _LONGEST:
            raise TransportError(
                f"the description of a message takes {len(frame)} bytes, more than the {_LONGEST} that may travel at "
                "once: pass fewer separate tensors between blocks (stack them)"
            )
        if self._broken:
            return
        self._frame_bytes += len(frame)
        try:
            with self._sending:
                if self._outbox or not self._sent(frame, file):
                    # The socket is full, which bounded messages hardly make it: sent as soon as this rank waits.
                    self._outbox.append((frame, None if file is None else os.dup(file)))
                    self._neighbours.watch(self, writing=True)
        except OSError as error:
            # Not under the lock: who is told may hold that of the mail, and wait for this one.
            self._failed(error)

    def _sent(self, frame: bytes, file: int | None) -> bool:
        """Whether the socket took a frame."""
        try:
            if file is None:
                self._channel.send(frame)
            else:
                socket.send_fds(self._channel, [frame], [file])
        except BlockingIOError:
            return False
        return True

    def send_waiting(self) -> None:
        """Send what the socket had no room for."""
        try:
            with self._sending:
                while self._outbox:
                    frame, file = self._outbox[0]
                    if not self._sent(frame, file):
                        return
                    self._outbox.popleft()
                    if file is not None:
                        os.close(file)
                self._neighbours.watch(self, writing=False)
        except OSError as error:
            self._failed(error)

    # -------------------------------------------------------------- receiving

    def receive(self, *, everything: bool = True) -> None:
        """Put what has come into the mail, or only what has come up to the first message."""
        try:
            while not self._left:
                try:
                    size, controls, *_ = self._channel.recvmsg_into(self._buffers, _DESCRIPTOR)
                except BlockingIOError:
                    return
                if size == 0:
                    raise ConnectionError("connection closed by peer")
                self._read(self._view[:size], controls)
                if not everything and self._buffer[0] == LETTER[0]:
                    return
        except Exception as error:
            self._failed(error)

    def _read(self, frame: memoryview, controls: list[tuple[int, int, bytes]]) -> None:
        first = frame[:1]
        if first == LETTER:
            self._mail.post(self._reader.message(frame), self.peer)
        elif first == FORM:
            self._reader.learn(frame)
        elif first == _SLOT:
            _, number, capacity = _SLOT_FRAME.unpack(frame)
            files = [file for *_, data in controls for (file,) in struct.iter_unpack("i", data)]
            if len(files) != 1:
                raise TransportError(f"rank {self.peer} announced a slot with {len(files)} files")
            self._slots.add(number, capacity, files[0])
        elif first == _MARK:
            self._mail.mark(self.peer)
        elif first == _VOID:
            self._mail.void(self.peer)
        elif first == _CLOSE:
            self._left = True
            self._neighbours.remove(self)
            self._mail.end(self._sends, self._health.departure(self.peer))
        else:
            raise TransportError(f"a frame that begins with {bytes(first)!r} came from rank {self.peer}")

    def _failed(self, error: Exception) -> None:
        if self._broken:
            return
        self._broken = True
        self._neighbours.remove(self)
        if not self._closing:
            known = isinstance(error, UnlatchError) and not isinstance(error, PeerLost)
            self._mail.fail(error if known else self._health.loss(self.peer, error))  # type: ignore[arg-type]

    # ------------------------------------------------------------------- end

    def close(self, timeout: float = 10.0, sending: float = 60.0) -> None:
        """Send what is left, take leave of the peer, and wait for its own leave.

        **Arguments:** as for `Link.close`.
        """
        self._closing = True
        self._put(_CLOSE)
        self._serve(lambda: not self._outbox, sending)
        self._serve(lambda: self._left, timeout)
        self._neighbours.closed(self)
        self._channel.close()

    def _serve(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait until `done`, but hardly for a peer that is lost: it may still listen."""
        # Who asks for a failure sees what has arrived meanwhile, so that is asked first.
        self._mail.wait_until(lambda: self._mail.failure() is not None or done() or self._broken, seconds)


# ------------------------------------------------------------------------------------------------- meeting


def call_on_neighbours(
    world: World, health: Health, peers: Iterable[int], *, alone: bool = False
) -> dict[int, socket.socket]:
    """Connect with those of `peers` that are on the same machine. Called by all ranks together.

    **Arguments:** `alone`: whether this rank wants no such connection.

    **Returns:** a socket for each of them.
    """
    with contextlib.ExitStack() as stack:
        listener = None if alone else _listener()
        if listener is not None:
            stack.enter_context(listener)
        machine, address = _machine(), listener.getsockname() if listener is not None else None
        told = world.gather((machine, address))
        found: dict[int, socket.socket] = {}
        if listener is None:
            return found
        near = {peer: where for peer in peers for at, where in [told[peer]] if at == machine and where is not None}
        for peer, where in near.items():
            if peer > world.rank:
                found[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    found[peer].connect(where)
                    found[peer].send(health.introduction(peer))
                except OSError as lost:
                    raise health.loss(peer, lost) from lost
        expected = {peer for peer in near if peer < world.rank}
        while expected:
            if (error := health.failure()) is not None:
                raise error
            caller, channel = _caller(listener, health)
            if caller in expected and channel is not None:
                expected.remove(caller)
                found[caller] = channel
            elif channel is not None:
                channel.close()
        return dict(sorted(found.items()))


def _listener() -> socket.socket | None:
    """A socket that others of this machine can call; `None` where there are none of that kind."""
    if not (SHARES_MEMORY and hasattr(os, "eventfd") and hasattr(select, "epoll")):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The system chooses a name that is in no file system and ends with the socket.
    listener.bind("")
    listener.listen(1024)
    listener.settimeout(0.2)
    return listener


def _caller(listener: socket.socket, health: Health) -> tuple[int | None, socket.socket | None]:
    """Who calls, as far as its word can be believed; nobody, for a while, is a stranger too."""
    try:
        channel, _ = listener.accept()
    except TimeoutError:
        return None, None
    channel.settimeout(1.0)
    try:
        return health.introduced(channel.recv(_LONGEST)), channel
    except OSError:
        return None, channel


def _machine() -> tuple[str, int] | None:
    """What two ranks have in common that can call each other: the machine since it was started, and its network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
