"""The proven optimum without neighbourhood, for small chains: a mixed-integer program solved by HiGHS.

Minimise c, where each whole item is on one device, each divisible one in parts on any, and no load exceeds c. The
solver works in floating point; intervals and loads are then computed exactly from where it puts the items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...lookup import import_extra
from ...plan.layer_costs import LayerCost, as_chain
from ...plan.layerpipe import PlannedTasks, assemble
from ...plan.tasks import Item, chain_items, check_mode
from .list_schedule import grain, lower_bound, place_items, plan_list

__all__ = ["plan_exact"]

Vector = NDArray[np.float64]


def plan_exact(
    costs: Sequence[LayerCost], devices: int, mode: str = "atomic", *, time_limit: float = 10.0
) -> PlannedTasks:
    """The best placement of all tasks on any devices, or the best found when time is up.

    **Arguments:**

    - `costs`, `devices`, `mode`: as in `plan_layerpipe`. A divisible D may lie on any number of devices.
    - `time_limit`: seconds for the solver.

    **Returns:** a plan whose `proven` tells whether no placement is better.

    >>> layers = [LayerCost(str(t), t, t, t) for t in (1, 2, 4, 3)]
    >>> plan = plan_exact(layers, 4)
    >>> plan.initiation_interval, plan.proven
    (Fraction(8, 1), True)
    """
    found = plan_list(costs, devices, mode)
    if found.proven:
        return found
    chain = as_chain(costs)
    how = check_mode(mode)
    items = chain_items(chain, how)
    homes, bound = _solve(items, devices, float(found.initiation_interval), time_limit)
    if homes is not None:
        plan = place_items(chain, devices, how, items, homes)
        if plan.initiation_interval < found.initiation_interval:
            found = plan
    # Loads of whole items lie a grain apart, so a bound need only exclude the next smaller one.
    below = float(found.initiation_interval) - (float(grain(items)) if how != "divisible" else 0.0)
    slack = 1e-7 * float(found.initiation_interval)
    proven = found.proven or bound > below + (slack if how != "divisible" else -slack)
    return assemble(chain, devices, how, found.tasks, in_a_row=False, proven=proven)


def _solve(items: Sequence[Item], devices: int, known: float, time_limit: float) -> tuple[dict[int, int] | None, float]:
    """The device of each whole item, and a value below which no placement can be.

    Items of one size are alike, so the unknowns are how many of each size a device has; divisible items are one
    pool of work.
    """
    groups: dict[Fraction, list[int]] = {}
    for number, item in enumerate(items):
        if not item.divisible:
            groups.setdefault(item.size, []).append(number)
    unit = float(max(item.size for item in items))
    pool = float(sum(item.size for item in items if item.divisible)) / unit
    sizes = np.array([float(size) / unit for size in groups] + [1.0])
    counts = np.array([float(len(numbers)) for numbers in groups.values()] + [pool])
    least = float(lower_bound(items, devices)) / unit
    result = _minimise(sizes, counts, devices, known / unit, least, time_limit)
    bound = result.mip_dual_bound * unit if result.mip_dual_bound is not None else 0.0
    if result.x is None:
        # Nothing is as good as what is known: a proof, unless time ran out.
        return None, known if result.status == 2 else bound
    shares = np.rint(result.x[:-1].reshape(len(sizes), devices)[:-1]).astype(int)
    homes: dict[int, int] = {}
    for row, numbers in zip(shares, groups.values(), strict=True):
        homes.update(zip(numbers, np.repeat(np.arange(devices), row).tolist(), strict=True))
    return homes, bound


def _minimise(sizes: Vector, counts: Vector, devices: int, known: float, least: float, time_limit: float) -> Any:
    """Unknowns: how many items of each size on each device (the last size is the pool), then the largest load."""
    what = "a placement that is proven best"
    solver = import_extra("scipy.optimize", "layerpipe", what)
    coo_array = import_extra("scipy.sparse", "layerpipe", what).coo_array
    kinds, last = len(sizes), len(sizes) * devices
    kind, place = np.divmod(np.arange(last), devices)
    once = coo_array((np.ones(last), (kind, np.arange(last))), shape=(kinds, last + 1))
    rows = np.concatenate([place, np.arange(devices)])
    columns = np.concatenate([np.arange(last), np.full(devices, last)])
    loads = coo_array((np.concatenate([sizes[kind], -np.ones(devices)]), (rows, columns)), (devices, last + 1))
    # Devices are alike, so they may be numbered by falling load.
    falling = np.zeros((devices - 1, last + 1))
    for p in range(devices - 1):
        falling[p, :last] = sizes[kind] * ((place == p + 1).astype(float) - (place == p))
    return solver.milp(
        np.eye(1, last + 1, last)[0],
        integrality=np.append(kind < kinds - 1, False).astype(int),
        bounds=solver.Bounds(
            np.append(np.zeros(last), least * (1 - 1e-9)), np.append(counts[kind], known * (1 + 1e-9))
        ),
        constraints=[
            solver.LinearConstraint(once, counts, counts),
            solver.LinearConstraint(loads, -math.inf, 0),
            solver.LinearConstraint(falling, -math.inf, 0),
        ],
        options={"time_limit": time_limit, "mip_rel_gap": 1e-9},
    )
