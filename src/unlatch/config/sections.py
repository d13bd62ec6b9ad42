"""What can be set, section by section, with the defaults.

Sections whose keys are a matter of someone else (a model's options, a method's, an optimizer's) are open: unknown keys
are kept as `options` and checked by their owner. All others refuse unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..errors import ConfigError
from ..lookup import import_function
from ..problems import hint
from .lr import LRCurve, LRFactory
from .optimizer import OptimizerFactory, check_options, defaults

__all__ = ["Config", "Data", "LRSettings", "Method", "Model", "OptimizerSettings", "RunSettings", "Section", "sections"]

Fraction = Annotated[float, Field(ge=0, le=1)]
#: Counts beyond it are slips of the hand that would only show after a long wait.
Positive = Annotated[int, Field(gt=0, le=10**9)]


class Section(BaseModel):
    """Unknown keys are errors; values are not converted (TOML has types); nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class _OpenSection(Section):
    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The keys that belong to the owner of the section, as a new dictionary."""
        return dict(self.model_extra or {})


class Model(_OpenSection):
    """`[model]`: a built-in model by name or `package.module:function`, and the arguments of its builder."""

    name: str
    channels_last: bool = False


class Data(Section):
    """`[data]`: a data set by name or `package.module:function`, and how it is served."""

    name: str = "digits"
    dir: str | None = None
    batch_size: Positive = 64
    augment: bool | None = None  # None: what is usual for the data set
    subset: Positive | None = None  # the first so many training samples
    holdout: Positive | None = None  # so many training samples are evaluated on instead of the test samples
    drop_last: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("options")
    @classmethod
    def _no_settings(cls, options: dict[str, Any]) -> dict[str, Any]:
        taken = {"name": "name", "data_dir": "dir", "train_size": "subset", "holdout": "holdout"}
        for option in options.keys() & taken.keys():
            raise ValueError(f"{option} is a setting of its own: write it as data.{taken[option]}")
        return options


class Method(_OpenSection):
    """`[method]`: a method by name, and its options (checked by the method)."""

    name: str = "bp"


class OptimizerSettings(_OpenSection):
    """`[optimizer]`: a class of `torch.optim` or `package.module:Class`, and its options.

    SGD has Nesterov momentum 0.9 unless told otherwise; the others keep torch's defaults.
    """

    name: str = "SGD"
    lr: Annotated[float, Field(ge=0)] | None = None
    momentum: Annotated[float, Field(ge=0)] | None = None
    nesterov: bool | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("name", "SGD"), str):
            return given
        filled = _as_value_error(defaults, given.get("name", "SGD")) | given
        if "nesterov" not in given and (filled.get("momentum") == 0 or filled.get("dampening")):
            filled.pop("nesterov", None)
        return filled

    @model_validator(mode="after")
    def _accepted(self) -> OptimizerSettings:
        _as_value_error(check_options, self.name, self.arguments)
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Everything that is passed to the class."""
        given = self.model_dump(exclude={"name"}, exclude_none=True)
        return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


class LRSettings(Section):
    """`[lr]`: the learning rate over the run, as a factor of `optimizer.lr`; fractions are of all updates."""

    shape: Literal["constant", "onecycle", "cosine", "step"] = "onecycle"
    warmup: Fraction = 0.0  # of a onecycle: 0.2
    final: Fraction = 0.0
    milestones: tuple[Fraction, ...] = Field(default=(0.5, 0.75), strict=False)
    factor: Fraction = 0.1  # of a step: what remains at each milestone

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("shape", "onecycle") == "onecycle":
            return {"warmup": 0.2} | given
        return given

    def curve(self, total_updates: int) -> LRCurve:
        """The curve for a run of `total_updates` updates."""
        warmup = round(self.warmup * total_updates)
        return LRCurve(self.shape, total_updates, warmup, self.final, self.milestones, self.factor)


class RunSettings(Section):
    """`[run]`: how the model is cut, where it runs, and for how long."""

    stages: Positive = 1
    processes: Positive = 1  # 1: inline
    replicas: Positive = 1  # of the whole network, each on its share of the processes
    epochs: Positive = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # what torch takes
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: str = "auto"
    loss: str = "cross_entropy"
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    clip_norm_of: Literal["stage", "model"] = "stage"
    nonfinite: Literal["stop", "skip", "ignore"] = "stop"  # what to do about NaN and infinity
    messages: Literal["exact", "bf16", "int8"] = "exact"  # how states and gradients travel between stages
    compile: bool | str | dict[str, Any] = False  # by torch.compile: true, a backend, or a table of its arguments
    transport: Literal["auto", "gloo", "nccl"] = "auto"  # which way messages take between processes
    split: Literal["auto"] | tuple[str, ...] = "auto"
    plan: str | None = None  # a file that `unlatch plan` wrote, where it places tasks (method layerpipe)
    threads: Annotated[int, Field(gt=0, le=4096)] = 1  # per process
    out: str | None = None

    @field_validator("compile", mode="before")
    @classmethod
    def _compile_form(cls, asked: Any) -> Any:
        if not isinstance(asked, bool | str | dict):
            raise ValueError(f"expected true, false, the name of a backend or a table, got {asked!r}")
        return asked

    @field_validator("split", mode="before")
    @classmethod
    def _split_form(cls, split: Any) -> Any:
        names = isinstance(split, list | tuple) and all(isinstance(name, str) for name in split)
        if split != "auto" and not names:
            raise ValueError(f'expected "auto" or a list of the names of the blocks that start a stage, got {split!r}')
        return split if split == "auto" else tuple(split)

    @model_validator(mode="after")
    def _consistent(self) -> RunSettings:
        if self.processes > 1 and self.processes % self.replicas:
            raise ValueError(
                f"processes = {self.processes} but replicas = {self.replicas}: every replica needs equally many "
                "processes; make run.processes a multiple of run.replicas"
            )
        if self.replicas > 1 and self.processes > self.stages * self.replicas:
            raise ValueError(
                f"processes = {self.processes} but stages = {self.stages} and replicas = {self.replicas}: a process "
                f"needs at least one stage, so there are at most {self.stages * self.replicas}"
            )
        if self.replicas == 1 and self.processes > self.stages:
            raise ValueError(
                f"processes = {self.processes} but stages = {self.stages}: a process needs at least one stage; "
                "raise run.stages or lower run.processes"
            )
        if not isinstance(self.split, str) and len(self.split) != self.stages - 1:
            raise ValueError(
                f"split names {len(self.split)} blocks but stages = {self.stages}: "
                f"expected {self.stages - 1}, one for each stage after the first"
            )
        return self


class Config(Section):
    """All settings of a run.

    >>> config = Config(model=Model(name="mlp"))
    >>> config.optimizer.momentum, config.run.stages
    (0.9, 1)
    """

    model: Model
    data: Data = Field(default_factory=Data)
    method: Method = Field(default_factory=Method)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    lr: LRSettings = Field(default_factory=LRSettings)
    run: RunSettings = Field(default_factory=RunSettings)

    def optimizer_factory(self) -> OptimizerFactory:
        """The `optimizer` argument of `parallelize`."""
        return OptimizerFactory(self.optimizer.name, self.optimizer.arguments)

    def lr_factory(self, total_updates: int) -> LRFactory:
        """The `lr_scheduler` argument of `parallelize`, for a run of so many updates."""
        return LRFactory(self.lr.curve(total_updates))

    def loss_fn(self) -> Any:
        """The `loss_fn` argument of `parallelize`: a function of `torch.nn.functional` or `package.module:function`."""
        if ":" in self.run.loss:
            return import_function("run.loss", self.run.loss)
        losses = [name for name in vars(torch.nn.functional) if name.endswith(("loss", "entropy", "kl_div"))]
        if self.run.loss not in losses:
            raise ConfigError(
                f"run.loss: torch.nn.functional has no loss {self.run.loss!r}{hint(self.run.loss, losses)}"
            )
        return getattr(torch.nn.functional, self.run.loss)

    def dump(self) -> str:
        """The resolved settings as TOML text, defaults included; `load` reads it back as an equal config."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def sections() -> dict[str, type[BaseModel]]:
    """The sections by name.

    >>> list(sections())
    ['model', 'data', 'method', 'optimizer', 'lr', 'run']
    """
    found: dict[str, Any] = {name: info.annotation for name, info in Config.model_fields.items()}
    return found


def _as_value_error(check: Any, *arguments: Any) -> Any:
    # Pydantic collects ValueErrors with their path, and lets anything else escape without it.
    try:
        return check(*arguments)
    except ConfigError as error:
        raise ValueError(str(error)) from error
