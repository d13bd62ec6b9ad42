"""One run of a study: settings in, one line of results out, whatever becomes of the run."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from ...config import Config
from ...data.tensors import TensorData
from ...errors import ConfigError, NonFinite, UnlatchError
from ...io import metrics
from ...io.run_folder import RunFolder
from ...io.versions import versions
from ...lookup import search_also
from ...methods import get
from ...report.probe import read_probe
from ...train.probe import Comparison
from ...transport.launch import Ranks
from ..prepare import data_parts, loaders, prepare
from ..session import SessionOptions, train_session

__all__ = ["Job", "perform", "samples"]

#: What a line keeps of each stage.
_STAGE = (
    *("staleness", "predicted_staleness", "peak_bytes", "weight_copies", "delay", "bubble"),
    *("reconstruction_error", "usual_reconstruction_error"),
)
_COMPARED = ("cosine", "norm_ratio", "relative_error")


@dataclass(frozen=True)
class Job:
    """One run to do, ready to travel to another process.

    **Arguments:**

    - `key`: what the line begins with: digest, labels and seed.
    - `folder`: for what the run writes on its way; deleted at its end.
    - `probe`, `recalibrate`: as `SessionOptions` has them.
    - `beside`: folders in which modules of the user are looked for too.
    """

    key: dict[str, Any]
    config: Config
    folder: str
    probe: int
    recalibrate: int
    beside: tuple[str, ...] = ()


def perform(job: Job) -> dict[str, Any]:
    """Do a run. One that diverges or fails has a line too, with the reason and the epochs it came to.

    **Returns:** the line; its `status` is `"interrupted"` if a signal ended the run, which is then no result.
    """
    for place in job.beside:
        search_also(place)
    clock = _Clock()
    Path(job.folder).mkdir(parents=True)
    try:
        try:
            found = _trained(job)
        except NonFinite as error:
            found = {"status": "diverged", "reason": error.found}
        except UnlatchError as error:
            found = {"status": "failed", "reason": str(error)}
        except Exception as error:  # whatever it is, the other runs have nothing to do with it
            found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        return {**job.key, **found, "curve": _curve(job.folder), **clock.read(), "versions": versions()}
    finally:
        shutil.rmtree(job.folder, ignore_errors=True)


def _trained(job: Job) -> dict[str, Any]:
    config = job.config
    data = loaders(config, samples(config))
    probe, without = _probe(job)
    options = SessionOptions(job.folder, silent=True, probe_every=probe, recalibrate=job.recalibrate)
    with RunFolder.at(job.folder):
        prepared = prepare(config, data[0])
        if config.run.processes == 1:
            summary = train_session(prepared, options, data)
        else:
            with Ranks(config.run.processes, threads=config.run.threads) as ranks:
                summary = ranks.run(train_session, prepared, options)[0]
    again = {key: value for key, value in summary.items() if key.startswith("recalibrated_")}
    kept = ("method_in_full", "split", "microbatches", "steps", "samples_per_second", "bubble", "signal", "remarks")
    return {
        "status": summary["status"],
        "method": summary["method"],
        "evaluation": {**summary["evaluation"], **again},
        "train_loss": summary["train_loss"],
        **{key: summary[key] for key in kept},
        "stages": [{key: stage[key] for key in _STAGE} for stage in summary["stages"]],
        "gradients": _gradients(job.folder) if probe else None,
        "without_probe": without,
    }


def samples(config: Config) -> tuple[TensorData, TensorData]:
    """What a run trains and is evaluated on; read once by each process for all runs that ask for the same."""
    return _samples(config.model_dump_json(include={"model": {"name"}, "data": True}))


@lru_cache(maxsize=1)
def _samples(settings: str) -> tuple[TensorData, TensorData]:
    return data_parts(Config.model_validate_json(settings))


def _probe(job: Job) -> tuple[int, str | None]:
    """How often gradients are compared; where they cannot be, 0 and why."""
    if not job.probe or job.config.run.processes > 1:
        return 0, "on ranks" if job.probe else None
    try:
        get(job.config.method.name, **job.config.method.options).probing(job.probe)
    except ConfigError as error:
        return 0, str(error)
    return job.probe, None


def _curve(folder: str) -> list[dict[str, float]]:
    """Loss, speed and results after every epoch."""
    return [
        {"epoch": row["epoch/number"], "train_loss": row["train/epoch_loss"]}
        | {"samples_per_second": row["train/samples_per_second"]}
        | {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}
        for row in metrics.read(folder)
        if "epoch/number" in row
    ]


def _gradients(folder: str) -> list[dict[str, Any]]:
    """Per stage and yardstick, what was found at the updates that were looked at."""
    by_place: dict[tuple[int, str], list[Comparison]] = {}
    for one in read_probe(folder):
        by_place.setdefault((one.stage, one.reference), []).append(one)
    return [
        {"stage": stage, "reference": reference, "update": [one.update for one in found]}
        | {name: [float(f"{getattr(one, name):.4g}") for one in found] for name in _COMPARED}
        for (stage, reference), found in sorted(by_place.items())
    ]


class _Clock:
    """Time, and how busy others kept the machine meanwhile: a speed counts only where nobody else did."""

    def __init__(self) -> None:
        self._wall, self._own, self._all = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        own, everybody = os.times(), psutil.cpu_times()
        # Waiting for disks, or for another guest of the host, is no work.
        busy = everybody.user + everybody.nice + everybody.system
        return time.perf_counter(), sum(own[:4]), busy

    def read(self) -> dict[str, float]:
        wall, own, everybody = self._now()
        seconds = wall - self._wall
        others = max(0.0, (everybody - self._all) - (own - self._own))
        return {"seconds": round(seconds, 3), "others_busy": round(others / max(seconds, 1e-9), 3)}
