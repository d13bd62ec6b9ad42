"""Placement without neighbourhood: any task on any device, which balances better and sends more.

Because slots absorb every dependency, tasks are items to be packed into bins: the longest first, each into the emptiest
bin (LPT); and first-fit decreasing for the smallest capacity that works (MULTIFIT). The better of the two is taken.
Where D is divisible, F and G are packed so and the D's are poured on top.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, gcd, lcm

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError
from ...plan.layer_costs import LayerCost, as_chain
from ...plan.layerpipe import PlannedTasks, assemble
from ...plan.tasks import Item, Mode, Task, chain_items, check_mode

__all__ = ["first_fit", "grain", "longest_first", "lower_bound", "place_items", "plan_list"]

Vector = NDArray[np.float64]
Choice = NDArray[np.intp]
_ROUNDS = 24


def plan_list(costs: Sequence[LayerCost], devices: int, mode: str = "atomic") -> PlannedTasks:
    """The best placement that list scheduling finds.

    **Arguments:** as in `plan_layerpipe`.

    **Returns:** a plan that is `proven` if it reaches the lower bound.

    >>> plan = plan_list([LayerCost("", 1, 1, 1)] * 4, 4)
    >>> plan.initiation_interval, plan.contiguous, plan.proven
    (Fraction(3, 1), False, True)
    """
    if devices < 1:
        raise PlanError(f"expected at least 1 device, got {devices}")
    chain = as_chain(costs)
    how = check_mode(mode)
    items = chain_items(chain, how)
    whole = [number for number, item in enumerate(items) if not item.divisible]
    sizes = [items[number].size for number in whole]
    candidates = (longest_first(sizes, devices), first_fit(sizes, devices))
    plans = [place_items(chain, devices, how, items, dict(zip(whole, homes, strict=True))) for homes in candidates]
    return min(plans, key=lambda plan: (plan.initiation_interval, plan.communication_bytes))


def longest_first(sizes: Sequence[Fraction], devices: int) -> list[int]:
    """LPT: the device of each item.

    >>> longest_first([Fraction(2), Fraction(3), Fraction(1)], 2)
    [1, 0, 1]
    """
    scale = lcm(*(size.denominator for size in sizes))
    whole = [int(size * scale) for size in sizes]
    homes = [0] * len(sizes)
    bins = [(0, device) for device in range(devices)]
    for number in sorted(range(len(sizes)), key=lambda n: (-whole[n], n)):
        load, device = bins[0]
        homes[number] = device
        heapq.heapreplace(bins, (load + whole[number], device))
    return homes


def first_fit(sizes: Sequence[Fraction], devices: int) -> list[int]:
    """MULTIFIT: first-fit decreasing into bins of the smallest capacity at which it succeeds, in floating point.

    >>> first_fit([Fraction(n) for n in (3, 3, 2, 2, 2)], 2)
    [0, 0, 1, 1, 1]
    """
    best = longest_first(sizes, devices)
    items = np.array([float(size) for size in sizes])
    order = np.argsort(-items, kind="stable")
    high = float(np.bincount(best, items).max(initial=0.0))
    low = max(float(items.sum()) / devices, float(items.max(initial=0.0)))
    for _ in range(_ROUNDS):
        if high - low <= 1e-12 * high:
            break
        capacity = (low + high) / 2
        homes = _first_fit_decreasing(items, order, devices, capacity * (1 + 1e-12))
        if homes is None:
            low = capacity
        else:
            best, high = homes, float(np.bincount(homes, items).max())
    return best


def place_items(
    chain: Sequence[LayerCost], devices: int, mode: Mode, items: Sequence[Item], homes: dict[int, int]
) -> PlannedTasks:
    """A plan from the devices of all items that are not divisible; the others are poured over the loads."""
    loads = [Fraction(0)] * devices
    for number, home in homes.items():
        loads[home] += items[number].size
    total = sum((item.size for item in items), Fraction(0))
    level = max(*loads, total / devices)
    tasks = []
    device = 0
    for number, item in enumerate(items):
        if number in homes:
            tasks += [Task(kind, layer, homes[number], Fraction(1)) for kind, layer in item.tasks]
            continue
        rest = item.size
        kind, layer = item.tasks[0]
        if rest == 0:
            tasks.append(Task(kind, layer, device, Fraction(1)))
        while rest > 0:
            while loads[device] == level:
                device += 1
            share = min(rest, level - loads[device])
            loads[device] += share
            rest -= share
            tasks.append(Task(kind, layer, device, share / item.size))
    return assemble(chain, devices, mode, tasks, in_a_row=False, proven=level == lower_bound(items, devices))


def lower_bound(items: Sequence[Item], devices: int) -> Fraction:
    """No placement has a smaller largest load.

    It is at least an even share, rounded up to what whole items can add up to; and of any `k P + 1` whole items some
    device has `k + 1`.

    >>> lower_bound([Item((), Fraction(3), False)] * 3, 2)
    Fraction(6, 1)
    """
    even = sum((item.size for item in items), Fraction(0)) / devices
    if not any(item.divisible for item in items):
        step = grain(items)
        even = ceil(even / step) * step
    whole = sorted((item.size for item in items if not item.divisible), reverse=True)
    crowded = [sum(whole[most - k : most + 1], Fraction(0)) for k, most in enumerate(range(0, len(whole), devices))]
    return max(even, *crowded)


def grain(items: Sequence[Item]) -> Fraction:
    """The largest number of which all sizes are multiples.

    >>> grain([Item((), Fraction(3, 2), False), Item((), Fraction(1), False)])
    Fraction(1, 2)
    """
    scale = lcm(*(item.size.denominator for item in items))
    return Fraction(gcd(*(int(item.size * scale) for item in items)), scale)


def _first_fit_decreasing(items: Vector, order: Choice, devices: int, capacity: float) -> list[int] | None:
    room = np.full(devices, capacity)
    homes = np.zeros(len(items), dtype=np.intp)
    for number in order:
        fits = room >= items[number]
        place = int(fits.argmax())
        if not fits[place]:
            return None
        room[place] -= items[number]
        homes[number] = place
    return homes.tolist()
