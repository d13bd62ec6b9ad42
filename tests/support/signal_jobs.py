"""Jobs that heed signals, or do not, and leave notes about it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fault_jobs import write_whole
from restart_jobs import session
from unlatch import StepResult, Trainer
from unlatch.callbacks import Callback
from unlatch.errors import Interrupted
from unlatch.transport.signals import heeding_signals


def heeds(folder: str) -> None:
    """Work until any rank is asked to stop, then save and say so, as a session does."""
    rank, notes = os.environ["RANK"], [Path(folder, f"asked{r}") for r in range(int(os.environ["WORLD_SIZE"]))]
    with heeding_signals(lambda number: write_whole(Path(folder, f"asked{rank}"), str(number))):
        write_whole(Path(folder, f"pid{rank}"), str(os.getpid()))
        while not (asked := [note for note in notes if note.exists()]):
            time.sleep(0.02)
        time.sleep(0.2)
        write_whole(Path(folder, f"saved{rank}"), "")
        raise Interrupted(int(asked[0].read_text()))


def hears_and_goes_on(folder: str) -> None:
    rank = os.environ["RANK"]
    with heeding_signals(lambda number: write_whole(Path(folder, f"heard{rank}"), str(number))):
        write_whole(Path(folder, f"pid{rank}"), str(os.getpid()))
        while True:
            time.sleep(0.02)


def heeds_nothing(folder: str) -> None:
    write_whole(Path(folder, f"pid{os.environ['RANK']}"), str(os.getpid()))
    while True:
        time.sleep(0.02)


def trains(folder: str) -> None:
    """A session that has some seconds left when it says that it is under way."""

    class Slow(Callback):
        def on_step(self, trainer: Trainer, result: StepResult) -> None:
            time.sleep(0.1)
            if result.step == 4:
                write_whole(Path(folder, f"pid{os.environ['RANK']}"), str(os.getpid()))

    session("dtrp", str(Path(folder, "checkpoints")), callbacks=[Slow()])
