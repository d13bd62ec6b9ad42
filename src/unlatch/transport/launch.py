"""Starts a function on local ranks and brings back what it returns, or the one error that explains the rest.

The parent hosts the rendezvous store, so there is no port to choose and no race for one, and notes about failures
outlive the rank that failed. Children end when the parent ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import ConfigError, Interrupted, PeerLost, StageFailed, UnlatchError
from ..io.space import bytes_text
from .forwarding import Forwarding
from .meeting import START_LIMIT
from .memory import TAKES_LESS, most_held
from .nursery import Nursery, Worker
from .parcel import pack
from .rank import Place
from .restarts import Attempts
from .signals import REQUESTS
from .store import host_store

__all__ = ["Ranks", "launch"]

# Seconds for the other ranks to say what they know once one has failed: echoes may arrive before the cause.
_GRACE = 15.0


def launch(
    fn: Callable[..., Any],
    processes: int,
    *,
    args: Sequence[Any] = (),
    threads: int = 1,
    timeout: float | None = None,
    max_restarts: int = 0,
) -> list[Any]:
    """Run `fn(*args)` on `processes` local ranks with a gloo process group, and return their results by rank.

    The function and its arguments travel to fresh interpreters: by name if these can import it, so a script calls
    `launch` under `if __name__ == "__main__":`; else as it is (from a notebook, a lambda, a function in a function),
    which needs the extra `notebook`. So do results and errors on their way back.

    SIGTERM and SIGINT go to the ranks, where a `Trainer` writes its checkpoint first; see `Ranks.run`.

    **Arguments:**

    - `threads`: intra-op threads per rank.
    - `timeout`: seconds after which the ranks are stopped.
    - `max_restarts`: how often to start all ranks anew and call `fn` again when one is lost or fails; see `Ranks`.

    **Raises:** the error of the rank that failed first, with its traceback; the others are stopped within seconds.
    """
    with Ranks(processes, threads=threads, max_restarts=max_restarts) as ranks:
        return ranks.run(fn, *args, timeout=timeout)


class Ranks:
    """Local ranks that stay alive between calls; `launch` with the cost of starting them paid once.

    ```python
    with unlatch.Ranks(2) as ranks:
        ranks.run(train, "bp")
        ranks.run(train, "dtrp")
    ```

    **Arguments:**

    - `threads`: intra-op threads per rank.
    - `max_restarts`: how often, in each `run`, to start all ranks anew after a rank was lost (`PeerLost`,
      `TransportError`) or code in it raised (`StageFailed`, which covers errors of the system such as `OSError`). The
      function is then called again, with `UNLATCH_RESTARTS` in the environment counting from 1, and should go on from
      its last checkpoint, as `trainer.resume("latest")` does. Errors that would come again are raised at once: those of
      settings, plans, shapes, data, checkpoints and losses that are not finite. Two failures without a newer
      checkpoint between them end it with `NoProgress`.
    - `start_limit`: seconds for all ranks to have started.
    """

    def __init__(
        self, processes: int, *, threads: int = 1, max_restarts: int = 0, start_limit: float = START_LIMIT
    ) -> None:
        if processes < 1:
            raise ConfigError(f"launch needs at least 1 process, got {processes}")
        if max_restarts < 0:
            raise ConfigError(f"max_restarts must be 0 or more, got {max_restarts}")
        self._processes, self._threads = processes, threads
        self._max_restarts, self._start_limit = max_restarts, start_limit
        self._pipes: list[Connection] = []
        self._workers: list[Worker] = []
        self._forwarding = Forwarding(self._workers)
        with self._forwarding.hearing_signals(), self._ended_on_error():
            self._start()
            self._forwarding.check()

    def _start(self) -> None:
        self._store, secret = host_store(), secrets.token_hex(32)
        self._joined = set[int]()
        # Linux ends a child with the thread that started it, and only the main one lasts as long as the process.
        bound = threading.current_thread() is threading.main_thread()
        places = [
            Place(
                rank=rank,
                ranks=self._processes,
                port=self._store.port,
                secret=secret,
                threads=self._threads,
                parent=os.getpid(),
                bound=bound,
                start_limit=self._start_limit,
            )
            for rank in range(self._processes)
        ]
        with self._forwarding.undisturbed():
            self._nursery = Nursery(places)
            self._pipes += self._nursery.lines
            self._workers += self._nursery.workers

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run `fn(*args)` on every rank and return the results by rank.

        The first SIGTERM or SIGINT is passed on to the ranks if any of them heeds it, as `Trainer.fit` does, and this
        waits for them to save and stop; a second one, 2 s later or more, ends them at once. If no rank heeds it, the
        first one does. Handlers of your own stay in force instead, and this works in the main thread only.

        **Raises:** `Interrupted` after a signal; else the error that explains the failure.
        """
        if not self._pipes:
            raise PeerLost("these ranks were stopped, by close() or by an earlier failure: start new ranks")
        deadline = None if timeout is None else time.monotonic() + timeout
        attempts = Attempts(self._max_restarts)
        with self._forwarding.hearing_signals(), self._ended_on_error():
            while True:
                self._forwarding.check()
                outcome = self._attempt((fn, args, attempts.restarts), attempts, deadline)
                if len(outcome.results) == self._processes:
                    self._forwarding.check()
                    return [outcome.results[rank] for rank in range(self._processes)]
                if not outcome.failures:
                    missing = sorted(set(range(self._processes)) - set(outcome.results))
                    raise PeerLost(f"ranks {missing} did not finish within {timeout:g} s and were stopped")
                error = _root_cause(outcome.failures)
                if self._forwarding.asked is not None:
                    raise error
                attempts.failed(error)
                self.close(force=True)
                self._start()

    def _attempt(self, job: tuple[Any, ...], attempts: Attempts, deadline: float | None) -> _Outcome:
        """Run a job on the ranks there are, until all are done, one has failed, or the time is up."""
        outcome = _Outcome()
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(pack(job))
            except (BrokenPipeError, OSError):
                outcome.failures.append(self._loss(rank))
                return outcome
        while len(outcome.heard) < self._processes:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in outcome.heard]
            ready = wait(waiting, None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    self._collect(rank, outcome, attempts)
            if outcome.failures:
                # Those who have not met yet know nothing of each other.
                grace = time.monotonic() + (_GRACE if len(self._joined) == self._processes else 0.0)
                deadline = grace if deadline is None else min(deadline, grace)
        return outcome

    def _collect(self, rank: int, outcome: _Outcome, attempts: Attempts) -> None:
        try:
            match self._pipes[rank].recv():
                case ("done", value):
                    outcome.results[rank] = value
                case ("failed", error, trace):
                    outcome.failures.append(_Failure(rank, error, trace))
                case ("joined",):
                    self._joined.add(rank)
                    self._nursery.over()
                case ("saved", step):
                    attempts.saved(step)
                case ("heeding", begins, heard):
                    self._forwarding.heeded(rank, begins, heard)
        except (EOFError, OSError):
            outcome.failures.append(self._loss(rank))

    def _loss(self, rank: int) -> _Failure:
        """What is known about a rank that went without a word."""
        self._workers[rank].join(_GRACE)
        code = self._workers[rank].exitcode
        if code in [128 + number for number in REQUESTS]:
            # It was asked twice and did not wait; nor shall the others.
            raise Interrupted(code - 128)
        return _Failure(rank, PeerLost(f"rank {rank} {_ending(code)}"), died=code != -signal.SIGABRT)

    def close(self, *, force: bool = False) -> None:
        """Stop the ranks: politely, or at once."""
        with self._forwarding.undisturbed():
            for pipe in self._pipes:
                if not force:
                    with contextlib.suppress(OSError):
                        pipe.send(None)
                pipe.close()
            for worker in self._workers:
                if force:
                    # A stopped process does not hear anything milder.
                    worker.kill()
            for worker in self._workers:
                worker.join(_GRACE)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
            self._pipes.clear()
            self._workers.clear()
            self._forwarding.forget_ranks()
            # An error that is kept keeps this object, and the port would stay open with it.
            self._store = None

    @contextlib.contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close(force=True)
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(force=kind is not None)


@dataclass
class _Failure:
    """How a rank ended before its time.

    **Arguments:**

    - `trace`: where its error was raised; empty if it said nothing.
    - `died`: whether its process ended of itself. An abort does not count: the communication library does that to a
      process that has lost another one.
    """

    rank: int
    error: BaseException
    trace: str = ""
    died: bool = False

    def echoes(self) -> tuple[int, bool]:
        """How little it explains: a rank that died was the first, one that lost another was not."""
        if isinstance(self.error, PeerLost) and not self.died:
            return 3, bool(self.trace)
        return 0 if self.died else 2 if isinstance(self.error, Interrupted) else 1, not self.trace


@dataclass
class _Outcome:
    """What the ranks said in one attempt."""

    results: dict[int, Any] = field(default_factory=dict)
    failures: list[_Failure] = field(default_factory=list)

    @property
    def heard(self) -> set[int]:
        """Ranks that are done, one way or the other."""
        return set(self.results) | {failure.rank for failure in self.failures}


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with code {code} before it was done: look at its output"
    hint = ""
    if -code == signal.SIGKILL:
        most = bytes_text(most_held(children=True))
        hint = (
            "; if nobody did that, the system may have, for lack of memory\n  the largest rank that has ended held "
            f"{most}: {TAKES_LESS}"
        )
    return f"was killed by signal {-code} ({signal.Signals(-code).name}){hint}"


def _root_cause(failures: list[_Failure]) -> BaseException:
    """The failure that is not just the echo of another one, with its traceback attached as text."""
    cause = min(failures, key=_Failure.echoes)
    rank, error, trace = cause.rank, cause.error, cause.trace
    if trace and not isinstance(error, UnlatchError | Interrupted):
        failed = StageFailed(f"rank {rank} raised {type(error).__name__}: {error}\n\n{trace}")
        failed.__cause__ = error
        return failed
    if cause.died and (witness := next((f for f in failures if f.trace and not f.died), None)) is not None:
        return PeerLost(f"{error}\n  what rank {witness.rank} saw of it: {witness.error}")
    if trace and isinstance(error, StageFailed):
        error.add_note(f"On rank {rank}:\n{trace}")
    return error
