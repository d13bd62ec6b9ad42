"""Trains the rows of the demo with every seed, in turns, so that whatever else the machine does hits all of them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..cli.cost_flags import CostSource
from ..cli.placing import Wish, place
from ..cli.planning import layer_costs, machine_of
from ..cli.prepare import PreparedRun, loaders, prepare
from ..cli.session import SessionOptions, train_session
from ..cli.settings import read_settings, with_run
from ..config import Config
from ..data.loader import Loader
from ..io.run_folder import RunFolder
from ..plan import Plan
from ..report.record import Record, read_run
from ..transport.launch import Ranks
from .entries import PROCESSES, Entry, settings

__all__ = ["train_in_turns"]


def train_in_turns(
    entries: Sequence[Entry], seeds: int, epochs: int, out: Path, deadline: float
) -> tuple[dict[str, list[Record]], dict[str, str]]:
    """Every row with every seed. **Returns:** the runs by label, and how planned ones were placed."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    with Ranks(PROCESSES) as ranks:
        print(f"starting {PROCESSES} processes, measuring the network", flush=True)
        ranks.run(_ready)  # importing torch would disturb the measurements
        runs = _prepared(entries, epochs, out)
        groups: dict[str, list[Record]] = {label: [] for label in runs}
        longest = 0.0
        for seed in range(seeds):
            begin = time.perf_counter()
            if seed and begin + longest > deadline:
                print("this machine is slow or busy: no further seeds", flush=True)
                break
            for label, prepared in runs.items():
                record = _train(label, _seeded(prepared, seed), out, ranks)
                groups[label].append(record)
                accuracy, speed = record.summary["accuracy"], record.summary["samples_per_second"]
                print(f"seed {seed}  {label:<26} {accuracy:6.1%} {speed:>7,.0f} samples/s", flush=True)
            longest = max(longest, time.perf_counter() - begin)
    planned = {entry.label: runs[entry.label].plan for entry in entries if entry.planned}
    return groups, {label: _placed(plan) for label, plan in planned.items()}


def _prepared(entries: Sequence[Entry], epochs: int, out: Path) -> dict[str, PreparedRun]:
    train: dict[str, Loader] = {}
    runs: dict[str, PreparedRun] = {}
    for entry in entries:
        config = settings(entry, epochs)
        if entry.planned:
            config = _planned(entry, config, out)
        elif entry.same_cut and entry.beside in runs:
            config = with_run(config, split=runs[entry.beside].plan.split)
        loader = train.setdefault(entry.model, loaders(config)[0])
        runs[entry.label] = prepare(config, loader)
    return runs


def _planned(entry: Entry, config: Config, out: Path) -> Config:
    """What `unlatch plan CONF --method NAME -o PLAN` and `unlatch train CONF --plan PLAN` do, up to the training."""
    conf, plan = out / f"{entry.label}.toml", out / f"{entry.label}-plan.json"
    conf.write_text(config.dump(), encoding="utf-8")
    wish = Wish(entry.method, PROCESSES, machine_of(math.inf, 0.0), {}).check()
    placement = place(wish, layer_costs(CostSource(None, None, conf, None)))
    plan.write_text(json.dumps(placement.answer, indent=1) + "\n", encoding="utf-8")
    return read_settings(conf, [], plan=plan)[0]


def _placed(plan: Plan) -> str:
    """What its planner has done with the network.

    Layers are those of the plan, in which neighbours that stay together are one.
    """
    homes: dict[int, set[int]] = {}
    for task in plan.tasks:
        homes.setdefault(task.layer, set()).add(task.device)
    apart = [plan.blocks[plan.starts[layer]] for layer, devices in sorted(homes.items()) if len(devices) > 1]
    even = f"which balances the processes to {plan.balance:.0%}"
    if not apart:
        return f"the planner found nothing to gain by taking layers apart and left each in one place, {even}"
    return f"the planner put forward and gradients of {', '.join(apart)} on different processes, {even}"


def _train(label: str, prepared: PreparedRun, out: Path, ranks: Ranks) -> Record:
    name = label.replace(", ", "-").replace(" ", "-")
    folder = RunFolder.at(out / f"{name}-seed{prepared.config.run.seed}", overwrite=True)
    folder.describe(prepared.config.dump())
    options = SessionOptions(str(folder.path), silent=True)
    if prepared.config.run.processes == 1:
        train_session(prepared, options)
    else:
        ranks.run(train_session, prepared, options)
    return read_run(folder.path)


def _seeded(prepared: PreparedRun, seed: int) -> PreparedRun:
    """The same run with another seed: same cut, other initial weights and order of the data."""
    run = prepared.config.run.model_copy(update={"seed": seed})
    return replace(prepared, config=prepared.config.model_copy(update={"run": run}))


def _ready() -> None:
    """A rank that answers has imported everything it needs."""
