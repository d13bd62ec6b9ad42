"""Planners of methods that place work in a way of their own, as `unlatch plan --method NAME` asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..plan.layer_costs import LayerCost
from ..schedule.channel import FREE, Channel

__all__ = ["Placement", "PlanRequest", "Planner", "figures", "number"]


@dataclass(frozen=True)
class PlanRequest:
    """What to place where.

    **Arguments:**

    - `channel`: between any two devices.
    - `flags`: of the planner, by name, as far as they were given.
    - `costs`: of the layers.
    - `linear`: which layers are linear maps, where it is known.
    """

    devices: int
    channel: Channel = FREE
    flags: Mapping[str, Any] = field(default_factory=dict)
    costs: Sequence[LayerCost] = ()
    linear: Sequence[bool] | None = None


@dataclass(frozen=True)
class Placement:
    """A plan: `answer` for a file that training follows, `lines` for people."""

    answer: dict[str, Any]
    lines: list[str]


class Planner(ABC):
    """Places the work of a network on devices for one method."""

    #: Flags of `unlatch plan` that belong to it, without dashes.
    flags: ClassVar[tuple[str, ...]] = ()

    def check(self, request: PlanRequest) -> None:
        """Refuse, before anything is measured, a request that would be ignored in part; its costs are not known yet."""
        return

    @abstractmethod
    def plan(self, request: PlanRequest) -> Placement:
        """The best placement it finds."""


def figures(answer: Mapping[str, Any]) -> list[str]:
    """How good a plan is, in words, and whether training can follow it."""
    idle = answer["devices"] - answer["busy_devices"]
    lines = [
        f"initiation interval {number(answer['initiation_interval'])}, "
        f"utilisation {float(answer['utilisation']):.1%}, "
        f"{number(answer['communication_bytes'])} bytes between devices per batch",
        *([f"{idle} of {answer['devices']} devices would gain nothing and stay idle"] if idle else []),
        f"delays per layer: {', '.join(map(str, answer['delays']))}",
        *([answer["note"]] if "note" in answer else []),
    ]
    if "analysis" in answer:
        lines.append(f"for analysis only, `unlatch train --plan` refuses it: {answer['analysis']}")
    return lines


def number(value: float) -> str:
    """A number of any size.

    >>> number(1234567.0)
    '1.23457e+06'
    """
    return f"{float(value):,.6g}"
