"""`make demo`: one small residual network, six methods, two local processes, one table.

Handwritten digits that come with scikit-learn, so nothing is downloaded. Every method trains the same network several
times from different seeds, taking turns with plain backpropagation in one process, whose speed is the measure of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .cli.prepare import PreparedRun, loaders, prepare
from .cli.session import SessionOptions, train_session
from .config import Config, from_mapping
from .io.run_folder import RunFolder
from .methods import BASELINE
from .report.comparison import comparison_table, rows_of
from .report.page import write_comparison
from .report.record import Record, read_run
from .transport.launch import Ranks

__all__ = ["main"]

METHODS = ("bp", "1f1b", "pipedream", "fdg", "dtr", "dtrp")
BASELINE_LABEL = f"{BASELINE}, 1 process"
PROCESSES = 2


def settings(method: str, processes: int = PROCESSES, epochs: int = 5) -> Config:
    """What is trained: a ResNet-14 on 8x8 digits, with the library's defaults for everything that concerns delay.

    >>> settings("dtr").run.stages
    2
    """
    return from_mapping(
        {
            "model": {"name": "resnet14"},
            "data": {"name": "digits", "batch_size": 128, "augment": False},
            "method": {"name": method},
            "optimizer": {"lr": 0.2},
            "run": {"stages": processes, "processes": processes, "epochs": epochs},
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the table, write the report."""
    parser = argparse.ArgumentParser(prog="python -m unlatch.demo", description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for runs and report")
    parser.add_argument("--seeds", type=int, default=3, help="how often every method trains")
    parser.add_argument("--seconds", type=float, default=80.0, help="a seed that would end later is not begun")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--methods", default=",".join(METHODS), help="names separated by commas")
    chosen = parser.parse_args(arguments)
    start = time.perf_counter()
    methods = chosen.methods.split(",")
    groups = _train_all(methods, chosen.seeds, chosen.epochs, chosen.out, start + chosen.seconds)
    rows = rows_of(groups, BASELINE_LABEL)
    words = _introduction(len(groups[BASELINE_LABEL]), chosen.epochs)
    page = chosen.out / "report.html"
    write_comparison(page, "Six ways to train one network", words, groups, rows, figures=chosen.out / "figures")
    print(f"\n{comparison_table(rows).text()}\n")
    print("\n".join(words))
    print(f"\n{time.perf_counter() - start:.0f} s; report: {page}, figures and runs beside it", flush=True)


def _train_all(methods: Sequence[str], seeds: int, epochs: int, out: Path, deadline: float) -> dict[str, list[Record]]:
    """Every method with every seed, in turns. **Returns:** the runs by label."""
    torch.set_num_threads(1)
    with Ranks(PROCESSES) as ranks:
        print(f"starting {PROCESSES} processes, measuring the network", flush=True)
        data = loaders(settings(BASELINE))
        ranks.run(_ready)  # importing torch would disturb the measurements
        runs = {BASELINE_LABEL: prepare(settings(BASELINE, 1, epochs), data[0])}
        runs |= {method: prepare(settings(method, epochs=epochs), data[0]) for method in methods}
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
                print(f"seed {seed}  {label:<14} {accuracy:6.1%} {speed:>7,.0f} samples/s", flush=True)
            longest = max(longest, time.perf_counter() - begin)
    return groups


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


def _introduction(seeds: int, epochs: int) -> list[str]:
    return [
        f"ResNet-14 on 8x8 digits, batches of 128, {epochs} epochs, {seeds} seed(s), {PROCESSES} stages on {PROCESSES} "
        "processes with one thread each.",
        "ratio: speed against bp in one process with one thread; 2 is the limit for two processes.",
        "bubble: share of the time in which a process waits.",
        "staleness: updates between the forward and the backward of a batch, measured and as theory has it, per stage.",
        "peak kept: most bytes held for batches under way. old weights: most outdated copies of a stage's weights.",
    ]


if __name__ == "__main__":
    main()
