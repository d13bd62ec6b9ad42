"""Answers a browser on this machine: a page, and what it asks for again and again. Reads, never writes.

Programs on this machine may ask, since it listens on loopback only. A page from elsewhere that the browser has open may
not: the name that it lets point here is none of ours, so it is refused, and without leave to share (no CORS) a browser
hands it nothing.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import ConfigError

__all__ = ["Answer", "PageServer", "listening"]

LOOPBACK = "127.0.0.1"
#: What a browser on this machine may call it; any port, since a tunnel from another machine has one of its own.
_OWN_NAMES = frozenset({LOOPBACK, "localhost"})
#: Seconds for a request to come whole.
_PATIENCE = 10.0
_ALWAYS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Answer(NamedTuple):
    """What is sent: bytes, their kind, and what the browser may do with them."""

    body: bytes
    kind: str
    policy: str = "default-src 'none'"


def listening(port: int = 0) -> socket.socket:
    """A socket on loopback, before there is anything to serve: what is wrong with a port shows at once.

    **Arguments:** `port`: 0 for any that is free.

    >>> with listening() as one:
    ...     one.getsockname()[0]
    '127.0.0.1'
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A server that ended just now leaves its port occupied for a minute otherwise.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((LOOPBACK, port))
        found.listen(64)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"port {port} of {LOOPBACK} is not to be had: {error.strerror}; choose another with --port, or none"
        ) from None
    return found


class PageServer(ThreadingHTTPServer):
    """Serves a few known paths.

    **Arguments:**

    - `listener`: from `listening`.
    - `routes`: what answers to each path; called for every request, by several threads.

    >>> from http.client import HTTPConnection
    >>> with PageServer(listening(), {"/": lambda: Answer(b"hello", "text/plain")}) as server:
    ...     browser = HTTPConnection("localhost", server.server_address[1], timeout=5)
    ...     browser.request("GET", "/")
    ...     browser.getresponse().read()
    b'hello'
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, routes: Mapping[str, Callable[[], Answer]]) -> None:
        super().__init__((LOOPBACK, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.routes = routes
        self._asked: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def asked(self, path: str) -> float | None:
        """When a path was last answered, by `time.monotonic`; `None` if it never was."""
        return self._asked.get(path)

    def answered(self, path: str) -> None:
        """Note that a path was answered."""
        self._asked[path] = time.monotonic()

    def __enter__(self) -> PageServer:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no news; a defect of ours is, in one line."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            sys.stderr.write(f"the page: {type(error).__name__}: {error}\n")


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _PATIENCE
    server_version, sys_version = "unlatch", ""

    def do_GET(self) -> None:
        if not self._is_for_us():
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, f"this page is for {LOOPBACK} and localhost only")
            return
        path = urlsplit(self.path).path
        answer = self.server.routes.get(path)
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page; the one there is has the path /")
            return
        self._send(HTTPStatus.OK, answer())
        self.server.answered(path)

    def _refuse_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page is only read", {"Allow": "GET"})

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method  # noqa: N815

    def _is_for_us(self) -> bool:
        """Whether the browser was asked for a name of this machine, and for one only."""
        named = self.headers.get_all("Host", [])
        try:
            return len(named) == 1 and urlsplit(f"//{named[0]}").hostname in _OWN_NAMES
        except ValueError:
            return False

    def _refuse(self, status: HTTPStatus, why: str, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, Answer(f"{why}\n".encode(), "text/plain; charset=utf-8"), headers)

    def _send(self, status: HTTPStatus, answer: Answer, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        own = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        for name, value in {**own, "Content-Security-Policy": answer.policy, **_ALWAYS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request that we know is refused as all else is."""
        self.close_connection = True
        self._refuse(HTTPStatus(code), "this is not a request that a browser makes")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to training."""
