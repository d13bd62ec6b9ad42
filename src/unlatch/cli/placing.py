"""What `unlatch plan` is asked for, and who answers: the planner of a method, or all methods ranked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..advise.ranking import USUAL, plan_auto
from ..errors import ConfigError
from ..methods import get, names
from ..methods.planner import Placement, Planner, PlanRequest
from ..schedule.channel import Channel
from ..schedule.machine import Machine
from .planning import Layers

__all__ = ["Wish", "place"]

_AUTO = "auto"


@dataclass(frozen=True)
class Wish:
    """What to plan and how; `flags` are those that belong to one planner or to `auto`, as far as they were given."""

    method: str
    devices: int
    machine: Machine
    flags: dict[str, Any]

    @property
    def channel(self) -> Channel:
        assert isinstance(self.machine.channel, Channel)
        return self.machine.channel

    @property
    def planner(self) -> Planner | None:
        """That of the method; `None` for `auto`."""
        return None if self.method == _AUTO else _planners()[self.method]

    @property
    def request(self) -> PlanRequest:
        """For the planner; the costs are yet to come."""
        return PlanRequest(self.devices, self.channel, self.flags)

    def check(self) -> Wish:
        """Refuse what would be ignored."""
        owners = {name: planner.flags for name, planner in _planners().items()} | {_AUTO: ("memory",)}
        if self.method not in owners:
            *others, last = owners
            raise ConfigError(f"--method is {', '.join(others)} or {last}, got {self.method!r}")
        for flag in self.flags:
            if flag not in owners[self.method]:
                owner = next(name for name, flags in owners.items() if flag in flags)
                raise ConfigError(f"--{flag} belongs to --method {owner}, not to {self.method}: leave one of them out")
        memory = self.flags.get("memory")
        if memory is not None and not 0 < memory < math.inf:
            raise ConfigError(f"--memory is a number of bytes above 0, got {memory}")
        if self.planner is not None:
            self.planner.check(self.request)
        return self


def _planners() -> dict[str, Planner]:
    found = {name: get(name).planner for name in names()}
    return {name: planner for name, planner in found.items() if planner is not None}


def place(wish: Wish, layers: Layers) -> Placement:
    """The best placement of these layers, or the ranking."""
    if wish.planner is not None:
        return wish.planner.plan(replace(wish.request, costs=layers.costs, linear=layers.linear))
    ranked = plan_auto(
        layers.costs,
        wish.devices,
        memory_limit=wish.flags.get("memory"),
        batch_size=layers.batch,
        machine=wish.machine,
        linear=layers.linear,
        moved_by=USUAL if layers.optimizer is None else layers.optimizer,
        update=layers.update or 0.0,
    )
    return Placement(ranked.to_json(), ranked.table())
