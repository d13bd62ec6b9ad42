"""Programs that call the methods of a run on some ranks only, or leave a run open at their end."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import rank_jobs
import unlatch
from rank_jobs import conv_run
from small_nets import images


def rank() -> int:
    return int(os.environ["RANK"])


def call(run: unlatch.Run, what: str, folder: str) -> Any:
    """One of the calls that belong on every rank."""
    match what:
        case "step":
            return run.step(*images([8])[0])
        case "evaluate":
            return run.evaluate(images([8]))
        case "save":
            return run.save(Path(folder, "checkpoint"))
        case "fit":
            return unlatch.Trainer(run).fit(images([8]))
        case _:
            return getattr(run, what)()


def calls_differ(made: dict[int, list[str]], folder: str) -> tuple[float, str]:
    """Train, then call on each rank what `made` says. **Returns:** the seconds until it was refused, and how."""
    with conv_run("dtr", 2) as run:
        for x, y in images([8] * 3):
            run.step(x, y)
        began = time.monotonic()
        try:
            for what in made[rank()]:
                call(run, what, folder)
        except unlatch.errors.UnlatchError as error:
            return time.monotonic() - began, f"{type(error).__name__}: {error}"
    return time.monotonic() - began, "done"


def leaves_open(made: dict[int, list[str]], folder: str) -> None:
    """As above, but nobody closes the run, and errors go where they go."""
    run = conv_run("dtr", 2)
    for what in made[rank()]:
        call(run, what, folder)


def is_busy_between_calls() -> None:
    with conv_run("dtr", 2) as run:
        for number, (x, y) in enumerate(images([8] * 4)):
            if number % 2 == rank():
                time.sleep(2.5)
            run.step(x, y)
        run.module()


# ------------------------------------------------------------------------------- programs that end, many times


def program(what: str) -> None:
    """A user's program that never closes its run."""
    run = conv_run("dtr", 2)
    for x, y in images([8] * 3):
        run.step(x, y)
    run.flush()
    if what == "raises" and rank() == 1:
        raise ValueError("a mistake after training")
    if what == "saves":
        run.save(Path(sys.argv[1], f"checkpoint{os.environ['MASTER_PORT']}"), wait=False)
        return
    print("accuracy", run.evaluate(images([8]))["accuracy"], flush=True)


def end_as_a_program_does(what: str) -> None:
    """Never returns. A child that was forked has the interpreter of a program of its own, imports included."""
    try:
        program(what)
    except BaseException as error:
        # What Python itself does with an error that nobody catches.
        sys.last_value = error
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def fork_ranks(what: str, ranks: int = 2) -> list[int]:
    """Run the program on ranks of their own. **Returns:** their exit codes."""
    torch.set_num_threads(1)
    # The first optimizer imports for seconds, which the children need not all do.
    rank_jobs.plain_sgd([torch.nn.Parameter(torch.zeros(1))])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    children = []
    for number in range(ranks):
        os.environ["RANK"] = str(number)
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            end_as_a_program_does(what)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
