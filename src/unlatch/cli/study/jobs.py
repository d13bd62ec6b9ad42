"""Runs one after the other in this process, or several at once in processes of their own, with the same results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ...transport.signals import REQUESTS, held_back
from .run import Job, perform

__all__ = ["performed"]


def performed(jobs: Iterable[Job], at_once: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Do all jobs and yield each with its line as it is done.

    **Arguments:** `at_once`: how many; 1 does them here, so that nothing but the run itself is timed.
    """
    if at_once == 1:
        yield from ((job, perform(job)) for job in jobs)
        return
    waiting, workers = deque(jobs), list[_Worker]()
    # It starts with the first process otherwise, and lets signals through again.
    resource_tracker.ensure_running()
    try:
        while waiting or any(worker.job for worker in workers):
            workers = [worker for worker in workers if worker.alive]
            # A request to stop waits until all are in the list of those that are ended: one that is not would ignore
            # the polite end that the interpreter gives it, and be waited for.
            with held_back():
                workers += [_Worker() for _ in range(min(at_once, len(waiting)) - len(workers))]
            for worker in workers:
                if worker.job is None and waiting:
                    worker.begin(waiting.popleft())
            for line in wait([worker.line for worker in workers if worker.job]):
                worker = next(worker for worker in workers if worker.line is line)
                yield worker.finish()
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that does one job after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        self.job: Job | None = None
        self.alive = True

    def begin(self, job: Job) -> None:
        self.job = job
        with suppress(OSError):  # one that died is heard of by the end of its line
            self.line.send(job)

    def finish(self) -> tuple[Job, dict[str, Any]]:
        """The line of the job; if the process is gone, that is what the line says."""
        assert self.job is not None
        job, self.job = self.job, None
        try:
            return job, self.line.recv()
        except (EOFError, OSError):
            self._process.join(5)
            self.end()
            reason = f"its process ended with code {self._process.exitcode}: out of memory?"
            return job, {**job.key, "status": "failed", "reason": reason}

    def end(self) -> None:
        """At once: what it is at has no line yet, and will be done again."""
        self.alive = False
        self.line.close()
        self._process.kill()
        self._process.join()


def _serve(line: Connection, parent: int) -> None:
    """The life of a worker: it hears requests to stop only while a run heeds them, and never outlives its parent."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            line.send(perform(line.recv()))


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
