"""`unlatch show`: a page that shows runs, beside each other, while they train and afterwards."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ..errors import Interrupted
from .console import people

__all__ = ["command"]


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs, finished or not.")],
    port: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=65535, help="Where it is served; default: any free port.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in a browser, where there is a display.")
    ] = True,
) -> None:
    """Open a page that shows runs, finished or still training.

    \b
    unlatch show runs/dtr-1
    unlatch show runs/bp-1 runs/dtr-1 --port 8000 --no-browser

    The page is served to this machine only (127.0.0.1), until Ctrl-C. Runs that still train move on it; those that were
    started with `unlatch train --live` also show what their stages do just now.
    """
    from ..live.document import Watch, serving
    from ..live.server import listening

    watch = Watch(runs)
    try:
        with serving(listening(port or 0), watch) as server:
            people().print(f"{watch.title}: {server.url} (Ctrl-C ends it)")
            sys.stdout.flush()
            if browser and _has_display():
                import webbrowser

                webbrowser.open(server.url)
            while True:
                # Not for ever at once: a signal just before it begins, or to another thread, does not wake it.
                time.sleep(0.5)
    except Interrupted as request:
        # Ctrl-C is how it is meant to end.
        if request.number != signal.SIGINT:
            raise


def _has_display() -> bool:
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
