"""The `unlatch` command; also `python -m unlatch` and `torchrun -m unlatch`.

Importing what the commands need takes seconds, and a signal may come before that is done.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Answer to signals, then import and run the command line."""
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        # Whoever started this may want it to be deaf to some, as `nohup` and shells with jobs in the background do.
        if signal.getsignal(number) is usual:
            signal.signal(number, _end)
    from .cli import main as run

    run()


def _end(number: int, frame: FrameType | None) -> None:
    # Not by an exception: modules that are half imported may catch it, or print it.
    os.write(2, f"interrupted by {signal.Signals(number).name} before anything began\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()
