"""Runs whose events are compared with what their schedule says."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from small_nets import on_plain_nets
from unlatch.methods import get
from unlatch.schedule import streams

#: Every method, and every option of one that changes the order of work.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in unlatch.methods.names()},
    "petra 1f1b": ("petra", {"order": "1f1b"}),
    "layerpipe atomic": ("layerpipe", {"mode": "atomic"}),
    "layerpipe factor": ("layerpipe", {"mode": "factor"}),
    "layerpipe stages": ("layerpipe", {"mode": "stages"}),
    "layerpipe stages late": ("layerpipe", {"mode": "stages", "extra_delay": 2}),
    "layerpipe stages halves": ("layerpipe", {"mode": "stages", "split_backward": True}),
    "layerpipe tasks late": ("layerpipe", {"extra_delay": 1}),
    "auxnet replay": ("auxnet", {"form": "lagrangian"}),
    "auxnet synthesiser": ("auxnet", {"form": "lagrangian", "multiplier": "synthesiser"}),
    "auxnet rebuild": ("auxnet", {"form": "lagrangian", "multiplier": "rebuild"}),
    "auxnet serial warm-up": ("auxnet", {"serial_first": 2}),
    "auxnet replay, serial warm-up": ("auxnet", {"form": "lagrangian", "serial_first": 2, "serial_every": 4}),
    "auxnet shared": ("auxnet", {"shared": True}),
    "auxnet shallow": ("auxnet", {"ablation": "shallow"}),
    "auxnet echo": ("auxnet", {"echo": 0.5}),
    "auxnet true share": ("auxnet", {"true_share": ((0, 1.0), (3, 0.0))}),
    "auxnet explicit": ("auxnet", {"correction": "explicit", "aux_steps": 2}),
    "auxvar lagrangian": ("auxvar", {"form": "lagrangian"}),
}
BATCHES, EPOCH = 7, 4


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)) for _ in range(EPOCH)]


def begun(case: str, accumulate: int = 1, distributed: bool | None = None, **more: Any) -> unlatch.Run:
    """A run of a case on a small network with three stages (devices, where tasks are placed)."""
    name, options = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    method = on_plain_nets(get(name, accumulate=accumulate, **options), 3)
    planned = name == "layerpipe" and method.mode != "stages"
    log = logging.getLogger("unlatch")
    level = log.level
    # Sizes of AuxNets and limits of stability are not the subject here.
    log.setLevel(logging.ERROR)
    try:
        return unlatch.parallelize(
            model,
            method,
            stages=3,
            loss_fn=mse_loss,
            optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
            **more,
            # Costs that are measured would place tasks differently in each process that is compared.
            **({} if planned else {"split": ["1", "3"], "sample": data()[0]}),
            distributed=distributed,
        )
    finally:
        log.setLevel(level)


def recorded(
    case: str, accumulate: int = 1, distributed: bool | None = None
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Per station of this process: what was done, and what the schedule says."""
    batches = data()
    with begun(case, accumulate, distributed) as run:
        for number in range(BATCHES):
            run.step(*batches[number % EPOCH])
        run.flush()
        parts = run.method.microbatches
        assert parts != "auto"
        expected = streams(run.schedule, [parts] * BATCHES, accumulate, fresh=lambda batch: batch < EPOCH)
        done: dict[int, list[str]] = {}
        for event in run.events:
            done.setdefault(event.stage, []).append(f"{event.stage}{event.kind}{event.batch}")
    return done, {station: list(map(str, stream)) for station, stream in enumerate(expected)}


def recorded_everywhere(accumulate: int = 1) -> dict[str, tuple[dict[int, list[str]], dict[int, list[str]]]]:
    """All cases, on the ranks of this process group."""
    return {case: recorded(case, accumulate) for case in CASES if accumulate == 1 or accumulates(case)}


def accumulates(case: str) -> bool:
    """Whether a case can have several batches per update."""
    alone = ("auxnet rebuild", "auxnet shared", "auxnet echo", "auxnet explicit", "auxnet replay, serial warm-up")
    return case not in alone
