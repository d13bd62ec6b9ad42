"""Faults on purpose, on this machine: is each noticed, named and over in time, or without any effect on the result?"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import NonFiniteLoss, PeerLost, StageFailed, TransportError, UnlatchError
from ...train import parallelize
from ...transport.faults import Faults
from ...transport.launch import Ranks

__all__ = ["Ordeal", "Outcome", "ordeals", "undergo"]

Weights = list[list[float]]

_BATCHES = 12
#: Seconds without a sign of life, for the ordeals in which a process is stopped.
_STALL_LIMIT = 3.0


@dataclass(frozen=True)
class Ordeal:
    """A fault and what should come of it.

    **Arguments:** `expected`: the error that names the cause, and `says`, a part of its text; `None` if the run should
    go on and end with the weights of the undisturbed one.
    """

    name: str
    faults: Faults
    expected: type[UnlatchError] | None = None
    says: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of it. **Arguments:** `seconds`: from the fault until every survivor knew."""

    fault: str
    injected: str
    seconds: float | None
    outcome: str
    expected: bool


def ordeals() -> list[Ordeal]:
    """One of each kind."""
    return [
        Ordeal("paused", Faults().stall(stage=1, at=3, seconds=0.5)),
        Ordeal("slow stage", Faults().delay(stage=0, ms=10, jitter=True)),
        Ordeal("slow messages", Faults().delay(stage=0, ms=10, message="backward", jitter=True)),
        Ordeal("killed", Faults().kill(stage=1, at=3), PeerLost, "rank 1 was killed by signal 9"),
        Ordeal("stopped", Faults().stall(stage=1, at=3), PeerLost, "rank 1 (stage 1) gave no sign of life"),
        Ordeal("user code", Faults().fail(stage=0, at=3), StageFailed, "stage 0 failed in the forward of batch 3"),
        Ordeal("not finite", Faults().poison(stage=1, at=3), NonFiniteLoss, "batch 3"),
        Ordeal("damaged", Faults().corrupt(stage=1, nth=3), TransportError, "checksum"),
        Ordeal("lost", Faults().drop(stage=1, nth=3), TransportError, "message 4 came from rank 0 where 3 was due"),
        Ordeal("doubled", Faults().duplicate(stage=1, nth=3), TransportError, "message 3 came from rank 0 where 4"),
    ]


def undergo(trials: list[Ordeal]) -> Iterator[Outcome]:
    """Try them one after the other on two ranks with a small network."""
    # As many as a rank has: sums depend on it.
    torch.set_num_threads(1)
    undisturbed = [t.tolist() for t in _train(Faults(), distributed=False)]
    ranks = Ranks(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, ordeal in enumerate(trials):
                outcome, broken = _try(ordeal, ranks, Path(folder, str(number)), undisturbed)
                yield outcome
                if broken and ordeal is not trials[-1]:
                    ranks = Ranks(2)
    finally:
        ranks.close(force=True)


def _try(ordeal: Ordeal, ranks: Ranks, log: Path, undisturbed: Weights) -> tuple[Outcome, bool]:
    """**Returns:** what came of it, and whether the ranks are gone."""
    error: UnlatchError | None = None
    found: list[Weights] = []
    try:
        found = ranks.run(_train_on_rank, replace(ordeal.faults, log=str(log)), timeout=120.0)
    except UnlatchError as caught:
        error = caught
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    struck = next((line["time"] for line in lines if "fault" in line), None)
    noticed = max((line["time"] for line in lines if "rank" in line), default=None)
    seconds = noticed - struck if noticed is not None and struck is not None else None
    injected = "; ".join(map(str, ordeal.faults))
    if error is not None:
        first = textwrap.shorten(str(error).partition("\n")[0], 90, placeholder=" ...")
        expected = ordeal.expected is not None and isinstance(error, ordeal.expected) and ordeal.says in str(error)
        return Outcome(ordeal.name, injected, seconds, f"{type(error).__name__}: {first}", expected), True
    same = all(weights == undisturbed for weights in found)
    outcome = f"goes on, with {'the same weights, bit for bit' if same else 'OTHER weights'}"
    return Outcome(ordeal.name, injected, seconds, outcome, same and ordeal.expected is None), False


def _train_on_rank(faults: Faults) -> Weights:
    """`_train` on ranks: says when an error is known here."""
    # What is done on purpose needs no warning here.
    logging.getLogger("unlatch").setLevel(logging.ERROR)
    try:
        return [t.tolist() for t in _train(faults)]
    except UnlatchError:
        with open(str(faults.log), "a", encoding="utf-8", buffering=1) as file:
            file.write(json.dumps({"rank": int(os.environ["RANK"]), "time": time.monotonic()}) + "\n")
        raise


def _train(faults: Faults, distributed: bool | None = None) -> list[Tensor]:
    """The weights of a small network after a few batches."""
    torch.manual_seed(0)
    data = [(torch.randn(64, 32), torch.randint(10, (64,))) for _ in range(_BATCHES)]
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    with parallelize(
        model,
        # Batches overlap, so that a lost message is missed when the next one comes.
        "pipedream",
        stages=2,
        # Two ranks need no two devices for this.
        device="cpu",
        loss_fn=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        split=["2"],
        stall_limit=_STALL_LIMIT,
        distributed=distributed,
        faults=faults,
    ) as run:
        for x, y in data:
            run.step(x, y)
        run.flush()
        return [p.detach().flatten() for p in run.module().parameters()]
