"""The server beside a run, as `beside` starts it: `python -m unlatch.live SOCKET FOLDER...`.

It ends with whoever holds the other end of its standard input, and hears its last word there.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from pathlib import Path

from ..errors import ConfigError
from ..transport.signals import REQUESTS
from .document import DOCUMENT, Watch, serving

#: Seconds within which a page that is open asks again.
_OPEN = 3.0
#: Seconds that a page which is open has to fetch the last document, and that others have if one has it.
_GRACE, _OTHERS = 5.0, 1.5


def main() -> None:
    """Serve until standard input ends, and then until pages that are open know the end."""
    # Whoever stops the run stops all of its group; the run decides when it is over.
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    folders = [Path(folder) for folder in sys.argv[2:]]
    try:
        watch = Watch(folders, brief=True)
    except ConfigError as error:
        # A run that is stopped before there is anything to keep takes its folder along, perhaps before this began.
        sys.exit(f"the page: {error}" if folders[0].exists() else 0)
    with serving(socket.socket(fileno=int(sys.argv[1])), watch) as server:
        said = sys.stdin.read()
        last = server.asked(DOCUMENT)
        watch.close(json.loads(said) if said else None)
        ended = time.monotonic()
        if last is None or ended - last > _OPEN:
            return
        told = False
        while time.monotonic() - ended < (_OTHERS if told else _GRACE):
            time.sleep(0.05)
            told = (server.asked(DOCUMENT) or 0.0) > ended


if __name__ == "__main__":
    main()
