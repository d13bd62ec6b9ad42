"""Starts a function on local ranks and brings back what it returns, or the one error that explains the rest.

The parent hosts the rendezvous store, so there is no port to choose and no race for one, and notes about failures
outlive the rank that failed. Children end when the parent ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..errors import ConfigError, PeerLost, StageFailed, UnlatchError
from .notes import SECRET
from .store import host_store
from .world import join_ranks, stay_on_loopback

__all__ = ["Ranks", "launch"]

# Seconds for the other ranks to say what they know once one has failed: echoes may arrive before the cause.
_GRACE = 15.0


def launch(
    fn: Callable[..., Any], processes: int, *, args: Sequence[Any] = (), threads: int = 1, timeout: float | None = None
) -> list[Any]:
    """Run `fn(*args)` on `processes` local ranks with a gloo process group, and return their results by rank.

    The function and its arguments travel to fresh interpreters, so `fn` must be importable: define it at the top level
    of a module and call `launch` under `if __name__ == "__main__":`.

    **Arguments:**

    - `threads`: intra-op threads per rank.
    - `timeout`: seconds after which the ranks are stopped.

    **Raises:** the error of the rank that failed first, with its traceback; the others are stopped within seconds.
    """
    with Ranks(processes, threads=threads) as ranks:
        return ranks.run(fn, *args, timeout=timeout)


class Ranks:
    """Local ranks that stay alive between calls; `launch` with the cost of starting them paid once.

    ```python
    with unlatch.Ranks(2) as ranks:
        ranks.run(train, "bp")
        ranks.run(train, "dtrp")
    ```
    """

    def __init__(self, processes: int, *, threads: int = 1) -> None:
        if processes < 1:
            raise ConfigError(f"launch needs at least 1 process, got {processes}")
        context = multiprocessing.get_context("spawn")
        self._store = host_store()
        secret = secrets.token_hex(32)
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            settings = (rank, processes, self._store.port, secret, threads, os.getpid())
            worker = context.Process(target=_serve, args=(theirs, *settings), name=f"unlatch-rank-{rank}", daemon=False)
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run `fn(*args)` on every rank and return the results by rank."""
        if not self._pipes:
            raise PeerLost("these ranks were stopped, by close() or by an earlier failure: start new ranks")
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((fn, args))
            except (BrokenPipeError, OSError):
                self.close(force=True)
                raise PeerLost(f"rank {rank} is no longer running: start new ranks") from None
        results: dict[int, Any] = {}
        failures: list[tuple[int, BaseException, str]] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(results) + len(failures) < len(self._pipes):
            waiting = [p for r, p in enumerate(self._pipes) if r not in results and r not in {f[0] for f in failures}]
            ready = wait(waiting, None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    self._collect(rank, results, failures)
            if failures:
                grace = time.monotonic() + _GRACE
                deadline = grace if deadline is None else min(deadline, grace)
        if failures:
            self.close(force=True)
            raise _root_cause(failures)
        if len(results) < len(self._pipes):
            missing = sorted(set(range(len(self._pipes))) - set(results))
            self.close(force=True)
            raise PeerLost(f"ranks {missing} did not finish within {timeout:g} s and were stopped")
        return [results[rank] for rank in range(len(self._pipes))]

    def _collect(self, rank: int, results: dict[int, Any], failures: list[tuple[int, BaseException, str]]) -> None:
        try:
            ok, value, trace = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._workers[rank].join(_GRACE)
            failures.append((rank, PeerLost(f"rank {rank} {_ending(self._workers[rank].exitcode)}"), ""))
            return
        if ok:
            results[rank] = value
        else:
            failures.append((rank, value, trace))

    def close(self, *, force: bool = False) -> None:
        """Stop the ranks: politely, or at once."""
        for pipe in self._pipes:
            if not force:
                with contextlib.suppress(OSError):
                    pipe.send(None)
            pipe.close()
        for worker in self._workers:
            if force:
                # A stopped process does not hear anything milder.
                worker.kill()
            worker.join(_GRACE)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._pipes, self._workers = [], []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(force=kind is not None)


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with code {code} before it was done: look at its output"
    hint = "; if nobody did that, the system may have, for lack of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.Signals(-code).name}){hint}"


def _root_cause(failures: list[tuple[int, BaseException, str]]) -> BaseException:
    """The failure that is not just the echo of another one, with its traceback attached as text."""
    # Of echoes, what is known about a rank that died says more than what its neighbours saw.
    failures = sorted(failures, key=lambda f: (isinstance(f[1], PeerLost), isinstance(f[1], PeerLost) == bool(f[2])))
    rank, error, trace = failures[0]
    if trace and not isinstance(error, UnlatchError):
        failed = StageFailed(f"rank {rank} raised {type(error).__name__}: {error}\n\n{trace}")
        failed.__cause__ = error
        return failed
    if trace and isinstance(error, StageFailed):
        error.add_note(f"On rank {rank}:\n{trace}")
    return error


def _serve(pipe: Connection, rank: int, ranks: int, port: int, secret: str, threads: int, parent: int) -> None:
    """Life of a rank: join the group, run what it is given, report."""
    faulthandler.enable()
    # Ctrl-C reaches the whole terminal; the parent decides what it means for its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank)
    )
    os.environ[SECRET] = secret
    stay_on_loopback()
    code = 0
    try:
        join_ranks(hosted=True)
    except UnlatchError as error:
        pipe.send((False, error, ""))
        code = 1
    while not code:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            break
        except Exception as error:
            text = f"rank {rank} cannot import what it is to run ({error}): it must be importable, so define it at the "
            pipe.send((False, ConfigError(f"{text}top level of a module or of a script that is a file"), ""))
            code = 1
            break
        if job is None:
            break
        fn, args = job
        try:
            reply = (True, fn(*args), "")
        except BaseException as error:
            code = 1
            reply = (False, _portable(error), "".join(traceback.format_exception(error)))
        try:
            pipe.send(reply)
        except Exception as error:
            pipe.send((False, ConfigError(f"the result of rank {rank} cannot be sent back: {error}"), ""))
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still sit in the communication library, whose destructors would wait for peers that are gone.
    os._exit(code)


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives the trip to the parent, else one of the same text."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return StageFailed(f"{type(error).__name__}: {error}")
    return error


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
