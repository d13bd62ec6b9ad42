"""Ranks that misbehave on purpose, at a given stage and batch."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unlatch
from rank_jobs import Outcome, copied_state
from recording import feed
from small_nets import on_plain_nets, vectors
from unlatch import Faults
from unlatch.plan import Plan

#: Seconds without a sign of life that those who wait for a stopped rank allow it.
LIMIT = 2.0
#: So many that nobody is called lost for being slow, and that no test passes by waiting for it.
NEVER = 1000.0


def write_whole(path: Path, text: str) -> None:
    """Write a file that others wait for: whoever sees it sees all of it."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


def note_strike(path: str | None) -> None:
    """Write down that a fault strikes now, as the injector does."""
    if path is not None:
        write_whole(Path(path), json.dumps({"pid": os.getpid(), "time": time.monotonic()}) + "\n")


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: str | None) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        note_strike(ctx.note)
        raise ValueError("boom in backward")


class BadSGD(torch.optim.SGD):
    """Fails at its third step."""

    steps = 0
    note: str | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 3:
            note_strike(self.note)
            raise ValueError("boom in optimizer")
        super().step(closure)


@contextmanager
def little_memory() -> Iterator[None]:
    """Inside, this process gets no more memory than it has, as on a machine where there is none left."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


class Trouble(nn.Module):
    """User code that does something at the third training forward."""

    def __init__(self, what: str, note: str | None = None) -> None:
        super().__init__()
        self.what, self.note, self.calls = what, note, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls != 3 or not self.training:
            return x
        if self.what == "backward":
            return BadBackward.apply(x, self.note)
        if self.what == "forward":
            note_strike(self.note)
            raise ValueError("boom in forward")
        if self.what == "memory":
            note_strike(self.note)
            with little_memory():
                return x + torch.zeros(2**28).sum()
        if self.what == "exit":
            note_strike(self.note)
            os._exit(3)
        return x


class BadLoss:
    """Fails at the third batch."""

    def __init__(self, bad: bool, note: str | None = None) -> None:
        self.bad, self.note, self.calls = bad, note, 0

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.bad and self.calls == 3:
            note_strike(self.note)
            raise ValueError("boom in loss")
        return mse_loss(out, target)


def network(stages: int, trouble: nn.Module | None = None, at_stage: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(stages)]
    if trouble is not None:
        blocks[at_stage].append(trouble)
    return nn.Sequential(*blocks).double()


def start(
    method: Any,
    stages: int,
    what: str = "",
    at_stage: int = 0,
    note: str | None = None,
    limit: float = NEVER,
    faults: Faults | None = None,
    plan: Plan | None = None,
    **more: Any,
) -> unlatch.Run:
    """A run with bad user code in one stage, or with injected faults."""
    model = network(stages, Trouble(what, note) if what else None, at_stage)
    bad = {id(p) for p in model[at_stage].parameters()} if what == "optimizer" else set()

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = (BadSGD if id(params[0]) in bad else torch.optim.SGD)(params, lr=0.1, momentum=0.9)
        if isinstance(made, BadSGD):
            made.note = note
        return made

    return unlatch.parallelize(
        model,
        on_plain_nets(method, stages),
        stages=stages,
        loss_fn=BadLoss(what == "loss", note),
        optimizer=optimizer,
        split=[str(k) for k in range(1, stages)] if plan is None else "auto",
        plan=plan,
        # Bad user code counts how often it is called.
        sample=None if what else vectors(1)[0],
        stall_limit=limit,
        faults=faults,
        **more,
    )


def breaks(
    method: Any, stages: int, what: str | Faults, at_stage: int, folder: str, limit: float = NEVER, size: int = 6
) -> None:
    """Train until the fault shows; each rank writes down what it saw and when, and the fault when it struck.

    **Arguments:** `what`: injected faults, or the kind of bad user code; `limit`: for those who wait for the faulty
    rank, which itself has no reason to blame anybody; `size`: samples in a batch.
    """
    rank = int(os.environ["RANK"])
    struck = str(Path(folder, "struck"))
    limit = NEVER if rank == at_stage else limit
    injected = replace(what, log=struck) if isinstance(what, Faults) else None
    user_code = what if isinstance(what, str) else ""
    try:
        with start(method, stages, user_code, at_stage, struck, limit, injected) as run:
            feed(run, vectors(40, size))
    except Exception as error:
        report = {"text": f"{type(error).__name__}: {error}", "time": time.monotonic()}
        write_whole(Path(folder, f"rank{rank}"), json.dumps(report))
        raise


def survives(method: Any, stages: int, faults: Faults | None = None, limit: float = NEVER) -> Outcome:
    with start(method, stages, faults=faults, limit=limit) as run:
        steps = [(r.step, r.batch, r.loss) for r in feed(run, vectors(8))]
        return {"steps": steps, "state": copied_state(run.module())}


def resumes(
    method: Any, batches: int, folder: str | None = None, faults: Faults | None = None, plan: Plan | None = None
) -> tuple[Outcome, Plan]:
    """A session that goes on from its latest checkpoint, if there is one. **Returns:** its end, and its plan."""
    with start(method, 2, faults=faults, plan=plan) as run:
        trainer = unlatch.Trainer(run, checkpoints=folder, save_every="2 batches" if folder else None)
        if folder is not None:
            trainer.resume("latest")
        trainer.fit(vectors(batches) if 0 in run.stations else None, until=1)
        return {"state": copied_state(run.module())}, run.plan


def bubbles(method: Any, faults: Faults) -> list[float]:
    with start(method, 2, faults=faults) as run:
        feed(run, vectors(12))
        return [stage.bubble for stage in run.statistics()]


def held_bytes(method: Any, faults: Faults, batches: int) -> list[tuple[int, int]]:
    """Most batches in flight and most bytes that waited, by stage."""
    with start(method, 2, faults=faults) as run:
        feed(run, vectors(batches))
        return [(stage.in_flight, stage.message_bytes) for stage in run.statistics()]


def sleeps_in_between(path: str, limit: float) -> Outcome:
    """As `survives`, with a second for others to do something; says when it begins."""
    with start("dtr", 2, limit=limit) as run:
        data = vectors(8)
        steps = [run.step(x, y) for x, y in data[:4]]
        write_whole(Path(path), "")
        time.sleep(1.0)
        steps += [run.step(x, y) for x, y in data[4:]] + run.flush()
        done = [(r.step, r.batch, r.loss) for r in steps if r.batch is not None]
        return {"steps": done, "state": copied_state(run.module())}


def reported(job: Any, *args: Any) -> str:
    """The error of this rank as text, so that the ranks live on."""
    try:
        job(*args)
    except unlatch.errors.UnlatchError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def leaves_out(method: str, faults: Faults | None) -> Outcome:
    """As `survives`, without the fourth batch: it is poisoned or, where there are no faults, not fed."""
    with start(method, 2, faults=faults, nonfinite="skip") as run:
        feed(run, [batch for number, batch in enumerate(vectors(8)) if faults is not None or number != 3])
        return {"steps": [run.batches], "state": copied_state(run.module())}


def becomes_nan(method: str, faults: Faults | None = None) -> None:
    run = start(method, 2, faults=faults or Faults().poison(stage=1, at=2))
    try:
        feed(run, vectors(10))
    finally:
        run.close()


def breaks_between_steps(what: str) -> None:
    """One rank dies or stops while the other waits in an exchange between all ranks."""
    rank = int(os.environ["RANK"])
    with start("dtr", 2, limit=LIMIT if what == "stop" and rank == 0 else NEVER) as run:
        feed(run, vectors(3))
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        run.module()


def closes(what: str, folder: str) -> str | None:
    """Rank 0 closes its run at once, while rank 1 is busy for long, dies or stops. Who was lost, by this rank."""
    rank = int(os.environ["RANK"])
    run = start("dtr", 2, limit=LIMIT)
    feed(run, vectors(3))
    trained = Path(folder, "trained")
    if rank == 0:
        write_whole(trained, "")
    else:
        while not trained.exists():
            time.sleep(0.05)
        if what == "busy":
            time.sleep(3 * LIMIT)
        else:
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    began = time.monotonic()
    run.close()
    write_whole(Path(folder, f"closed{rank}"), str(time.monotonic() - began))
    return str(run.failure()) if run.failure() is not None else None


def bad_batch() -> None:
    """As many targets as there are not samples."""
    run = start("dtr", 2)
    try:
        x, y = vectors(1)[0]
        run.step(x, y)
        run.step(x, y[1:])
    finally:
        run.close()


def raising_loader() -> Any:
    yield from vectors(3)
    raise OSError("the disk is gone")


def loader_breaks() -> None:
    with start("dtr", 2) as run:
        unlatch.Trainer(run).fit(raising_loader() if 0 in run.stations else None)


def disagree(what: str) -> None:
    """Rank 1 means another run than rank 0."""
    other = int(os.environ["RANK"]) == 1
    torch.manual_seed(5 if other and what == "weights" else 0)
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])
    unlatch.parallelize(
        model,
        "dtr" if other and what == "method" else "dsp",
        stages=3 if other and what == "stages" else 2,
        loss_fn=mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        split="auto" if what == "stages" else (["1"] if other and what == "split" else ["2"]),
        seed=1 if other and what == "seed" else 0,
        precision="bf16" if other and what == "precision" else "fp32",
        clip_grad_norm=1.0 if other and what == "clip_grad_norm" else None,
        loss_reduction="sum" if other and what == "loss_reduction" else "mean",
    )


def too_few_stages() -> None:
    start("dtr", 1)


def stops_early(steps_by_rank: tuple[int, ...], method: str) -> str:
    """Ranks that do not agree on how many batches there are. The error of this rank as text."""
    rank = int(os.environ["RANK"])
    text = "no error"
    run = start(method, len(steps_by_rank))
    try:
        for x, y in vectors(steps_by_rank[rank]):
            run.step(x, y)
    except unlatch.errors.UnlatchError as error:
        text = f"{type(error).__name__}: {error}"
    run.close()
    return text


def crosses(stages: int) -> Outcome:
    """A method that users put together themselves, with a function in it."""
    method = unlatch.methods.Compose(order=unlatch.schedule.one_f_one_b_async, activations="input", microbatches=2)
    return survives(method, stages)


class Odd(Exception):
    """Cannot be unpickled: it takes two arguments and keeps one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def raises_what_cannot_travel() -> None:
    raise Odd(1, 2)


def returns_what_cannot_travel() -> Any:
    return (number for number in range(3))


def never_ends() -> None:
    while True:
        time.sleep(0.1)


def train_forever(folder: str) -> None:
    """Until somebody ends it; says so once training is under way, and what ended it."""
    rank = int(os.environ["RANK"])
    try:
        with start("dtr", 2) as run:
            feed(run, vectors(5))
            write_whole(Path(folder, f"pid{rank}"), str(os.getpid()))
            while True:
                feed(run, vectors(5))
    except unlatch.errors.UnlatchError as error:
        write_whole(Path(folder, f"error{rank}"), f"{type(error).__name__}: {error}")
        raise


def listens_on() -> set[str]:
    """The addresses of this process that others can connect to, in the middle of a run."""
    with start("dtr", 2) as run:
        feed(run, vectors(2))
        found = psutil.Process().net_connections(kind="inet")
        return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}
