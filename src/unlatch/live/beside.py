"""A page beside training: served by a process of its own, since a thread would take its time from what trains here.

    unlatch train --live                  python -m unlatch.live
      listens on the port  --socket-->      serves the page from the run's folder
      holds its input      --pipe---->      ends when that ends, however the run does
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from ..errors import UnlatchError
from ..transport.signals import held_back
from .server import LOOPBACK, listening

__all__ = ["PageBeside"]

#: Seconds for a page that is open to learn of the end, and for the process to go.
_FAREWELL = 10.0


class PageBeside:
    """A page that this process offers while it does something else.

    **Arguments:** `port`: 0 for any that is free; taken at once, so that what is wrong with it shows first.
    """

    def __init__(self, port: int = 0) -> None:
        self._listener: socket.socket | None = listening(port)
        self.url = f"http://{LOOPBACK}:{self._listener.getsockname()[1]}/"
        self._process: subprocess.Popen[str] | None = None

    def show(self, *folders: Path) -> None:
        """Begin to serve, when there are folders of runs; one that is named twice is shown once."""
        assert self._listener is not None
        number = self._listener.fileno()
        shown = {folder.resolve(): str(folder) for folder in folders}.values()
        # The same modules as here, wherever these were found, and none that happens to lie where the user is.
        searched = os.pathsep.join(path for path in sys.path if path)
        # It is deaf to requests to stop, which reach the whole group, from its first moment on.
        with held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __package__, str(number), *shown],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(number,),
                env={**os.environ, "PYTHONPATH": searched},
                text=True,
            )
        # Nobody waits for it: a browser that comes earlier is kept by the system until there is an answer.
        self._listener.close()
        self._listener = None

    def close(self, word: str | None = None) -> None:
        """End it, once pages that are open know how the run ended. **Arguments:** `word`: what went wrong, if any."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            process.communicate(json.dumps(word) if word is not None else "", timeout=_FAREWELL)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def __enter__(self) -> PageBeside:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # What ends the command as it should has nothing to tell.
        self.close(str(error) if isinstance(error, UnlatchError) else None)
