"""Optimizers by name: which exist, what they accept, and a factory that makes one per stage."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ConfigError
from ..lookup import import_function
from ..problems import hint

__all__ = ["OptimizerFactory", "check_options", "defaults", "find"]

# Needs a closure that evaluates the whole model again, which no stage can do on its own.
_WHOLE_MODEL = {"LBFGS"}


def find(name: str) -> type[torch.optim.Optimizer]:
    """The optimizer class called `name` in `torch.optim`, or a user's `package.module:Class`.

    >>> find("AdamW").__name__
    'AdamW'
    """
    if ":" in name:
        found: Any = import_function("optimizer.name", name)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise ConfigError(f"optimizer.name: {name!r} is not a torch.optim.Optimizer class")
        return found
    known = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name in _WHOLE_MODEL:
        raise ConfigError(f"optimizer.name: {name} evaluates the whole model at each step, so it cannot work per stage")
    if name not in known:
        raise ConfigError(f"optimizer.name: torch.optim has no class {name!r}{hint(name, set(known) - _WHOLE_MODEL)}")
    return known[name]


def defaults(name: str) -> dict[str, Any]:
    """What Unlatch sets where the user is silent: Nesterov for SGD, since delays need it, else torch's learning rate.

    >>> defaults("SGD")
    {'lr': 0.1, 'momentum': 0.9, 'nesterov': True}
    >>> defaults("AdamW")
    {'lr': 0.001}
    """
    if name == "SGD":
        return {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    rate = inspect.signature(find(name)).parameters.get("lr")
    known = rate is not None and isinstance(rate.default, int | float)
    return {"lr": float(rate.default)} if rate is not None and known else {}


def check_options(name: str, options: Iterable[str]) -> None:
    """Refuse options that the optimizer does not take.

    >>> check_options("Adam", ["lr", "betas"])
    """
    parameters = inspect.signature(find(name)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    accepted = [key for key in parameters if key not in ("params", "named")]
    for option in options:
        if option not in accepted:
            raise ConfigError(f"optimizer.{option}: {name} takes no {option!r}{hint(option, accepted)}")


@dataclass(frozen=True)
class OptimizerFactory:
    """`optimizer=` for `parallelize`: called once per stage with that stage's parameters.

    Holds text and numbers only, so it can be pickled to any process.

    >>> parameters = [torch.nn.Parameter(torch.zeros(1))]
    >>> OptimizerFactory("SGD", {"lr": 0.5})(parameters).param_groups[0]["lr"]
    0.5
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, params: Iterable[Any], named: Iterable[tuple[str, Any]] = ()) -> torch.optim.Optimizer:
        make: Any = find(self.name)
        wants_names = "named" in inspect.signature(make).parameters
        try:
            made: torch.optim.Optimizer = make(named if wants_names else params, **self.options)
        except (TypeError, ValueError) as error:
            other = '; "unlatch.optim:MuonAdamW" leaves the rest to AdamW' if self.name == "Muon" else ""
            said = f"torch refuses {self.name} with {dict(self.options)}: {error}"
            raise ConfigError(f"optimizer: {said}{other}") from error
        return made
