"""From settings to a prepared run: everything its ranks must agree on, decided once and sent to all of them."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import data, models
from ..advise.advice import Advice
from ..config import Config
from ..data.loader import Loader
from ..data.tensors import TensorData
from ..errors import CheckpointMismatch, ConfigError
from ..methods import Method, get
from ..nn.chain import chain
from ..nn.device import check_device
from ..nn.tree import Tree
from ..plan import Plan, read_plan
from ..train import Run, parallelize
from ..train.compile_options import read_compile
from ..transport.lanes import check_transport
from .continuing import Continued

__all__ = ["PreparedRun", "build_model", "data_parts", "loaders", "make_run", "model_options", "prepare", "updates_in"]


@dataclass(frozen=True)
class PreparedRun:
    """A run with every open choice made: which cut, how many micro-batches, how many updates.

    **Arguments:**

    - `method`: with nothing left on `"auto"`.
    - `plan`: where the model is cut.
    - `model_options`: arguments of the model's builder, those that follow from the data included.
    - `batches`: batches per epoch.
    - `advice`: what the delays cost.
    - `notes`: what the user should know about these choices.
    """

    config: Config
    method: Method
    plan: Plan
    model_options: dict[str, Any]
    batches: int
    advice: Advice
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Steps in one epoch: batches of the loader, or of several of them joined."""
        return math.ceil(self.batches / self.method.joined)


def updates_in(steps: int, epochs: int, accumulate: int) -> int:
    """Updates of a whole run; what is left of an accumulation at the end makes one of its own.

    >>> updates_in(steps=5, epochs=2, accumulate=4)
    3
    """
    return math.ceil(steps * epochs / accumulate)


def data_parts(config: Config) -> tuple[TensorData, TensorData]:
    """The samples to train and to evaluate on that the settings ask for."""
    asked = config.data
    return data.load(asked.name, asked.dir, train_size=asked.subset, holdout=asked.holdout, **asked.options)


def loaders(config: Config, parts: tuple[TensorData, TensorData] | None = None) -> tuple[Loader, Loader]:
    """The training and the test batches that the settings ask for.

    **Arguments:** `parts`: the samples, if they are at hand; read otherwise.
    """
    asked = config.data
    train, test = parts or data_parts(config)
    augment = train.augment is not None if asked.augment is None else asked.augment
    common: dict[str, Any] = {
        "batch_size": asked.batch_size,
        "channels_last": config.model.channels_last,
        "pin_memory": check_device(config.run.device).type != "cpu",
    }
    return (
        Loader(train, shuffle=True, seed=config.run.seed, augment=augment, drop_last=asked.drop_last, **common),
        Loader(test, **common),
    )


def build_model(config: Config, options: dict[str, Any]) -> nn.Module:
    """The model with its initial weights: a function of the seed, so that every rank builds the same one."""
    torch.manual_seed(config.run.seed)
    model = models.build(config.model.name, **options)
    # torch's overloads know no memory_format without a dtype.
    return model.to(memory_format=torch.channels_last) if config.model.channels_last else model  # type: ignore[call-overload]


def model_options(config: Config, train: Loader) -> dict[str, Any]:
    """Arguments of the model's builder: what follows from the data, unless the settings say otherwise."""
    suited = models.options_for(config.model.name, train.data.sample_shape, train.data.classes)
    return suited | config.model.options


def prepare(config: Config, train: Loader | None = None, before: Continued | None = None) -> PreparedRun:
    """Read the data, build the model, measure it, cut it, and decide what was left open.

    Everything that can be wrong with the settings comes to light here, before any process is started.

    **Arguments:**

    - `train`: the training batches if they are at hand; read otherwise.
    - `before`: a checkpoint of the same run, whose measured choices are kept: measured again they might come out
      differently, and the run would not go on as it began.
    """
    where = check_device(config.run.device, int(os.environ.get("LOCAL_WORLD_SIZE", config.run.processes))).type
    check_transport(config.run.transport, where)
    compilation = read_compile(config.run.compile, where)
    loader = train or loaders(config)[0]
    options = model_options(config, loader)
    model = build_model(config, options)
    sample = loader.batch(0, 0)
    method = get(config.method.name, **config.method.options)
    # What is decided here is decided on the CPU, and the device left to the processes that will train.
    changes: dict[str, Any] = {"sample": sample, "distributed": False, "device": "cpu", "transport": "auto"}
    # Whether the method can be compiled is found out without a compiler, which this device may not need.
    changes["compile"] = "eager" if compilation is not None else False
    if before is not None:
        method, kept = _chosen_before(before, method)
        changes |= kept
    elif config.run.plan is not None:
        changes["plan"] = _given(config, model, method)
    with _said() as remarks:
        trial = _parallelize(config, model, method, **changes)
    # The plan shows its own note, and the advice has a place of its own.
    shown = {trial.plan.note, trial.advice.warning}
    notes = tuple(dict.fromkeys(note for note in [*trial.notes, *remarks] if note not in shown))
    return PreparedRun(config, trial.method, trial.plan, options, len(loader), trial.advice, notes)


def _chosen_before(before: Continued, method: Method) -> tuple[Method, dict[str, Any]]:
    """The method with nothing left on `"auto"`, and where the model is cut."""
    if before.saved.run is not None:
        # Functions among the options are in no file; then the settings name them once more.
        with suppress(CheckpointMismatch):
            made, plan = before.saved.run.made(before.checkpoint)
            return made, {"plan": replace(plan, source="")}
    loop = before.saved.loop.model_dump()
    if "joined" in loop:
        method = method.joining(loop["joined"])
    return method, {"split": loop["split"]} if loop.get("split") is not None else {}


def _given(config: Config, model: nn.Module, method: Method) -> Plan:
    plan = read_plan(str(config.run.plan), config.method.name)
    if plan.busy_devices != config.run.stages:
        raise ConfigError(
            f"run.plan: {plan.source} uses {plan.busy_devices} devices, but run.stages is {config.run.stages}"
        )
    return method.fit_plan(plan, chain(model), config.run.precision)


@contextmanager
def _said() -> Iterator[list[str]]:
    """What the library says in its log, as a list instead of lines that interrupt a table."""
    remarks: list[str] = []
    log = logging.getLogger("unlatch")

    def keep(record: logging.LogRecord) -> bool:
        remarks.append(record.getMessage())
        return False

    log.addFilter(keep)
    try:
        yield remarks
    finally:
        log.removeFilter(keep)


def make_run(prepared: PreparedRun, sample: tuple[Tree, Tree] | None = None, **changes: Any) -> Run:
    """The run itself, on whatever ranks this process is one of; `changes` replace arguments of `parallelize`."""
    config = prepared.config
    updates = updates_in(prepared.steps, config.run.epochs, prepared.method.accumulate)
    settings = {"plan": prepared.plan, "lr_scheduler": config.lr_factory(updates), "sample": sample}
    model = changes.pop("model", None) or build_model(config, prepared.model_options)
    method = changes.pop("method", prepared.method)
    with _said():  # what there is to say was said when it was prepared
        return _parallelize(config, model, method, **{**settings, **changes})


def _parallelize(config: Config, model: nn.Module, method: Method, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "stages": config.run.stages,
        "replicas": config.run.replicas,
        "loss_fn": config.loss_fn(),
        "optimizer": config.optimizer_factory(),
        "split": _split(config.run.split),
        "precision": config.run.precision,
        "device": config.run.device,
        "clip_grad_norm": config.run.clip_grad_norm,
        "clip_norm_of": config.run.clip_norm_of,
        "metrics": models.metrics_for(config.model.name),
        "seed": config.run.seed,
        "nonfinite": config.run.nonfinite,
        "messages": config.run.messages,
        "compile": config.run.compile,
        "transport": config.run.transport,
    }
    return parallelize(model, method, **{**settings, **changes})


def _split(split: str | Sequence[str]) -> str | list[str]:
    return split if isinstance(split, str) else list(split)
