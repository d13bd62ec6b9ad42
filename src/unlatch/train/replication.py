"""Whether a run can have so many replicas, asked before anything is built."""

from __future__ import annotations

from ..errors import ConfigError, DataError, PlanError
from ..methods import Method
from ..nn.tree import Tree, batch_size
from ..plan import Plan

__all__ = ["check_replication", "ranks_per_replica"]


def ranks_per_replica(replicas: int, ranks: int, method: Method, sample: tuple[Tree, Tree] | None = None) -> int:
    """How many ranks each replica has; 1 if all of them are in one process.

    **Arguments:** `sample`: a batch, if one is known.

    >>> from ..methods import get
    >>> ranks_per_replica(2, 6, get("1f1b")), ranks_per_replica(2, 1, get("1f1b"))
    (3, 1)
    """
    method.check_replicas(replicas)
    if ranks > 1 and ranks % replicas:
        raise ConfigError(
            f"{ranks} ranks cannot be shared out among {replicas} replicas: every replica needs equally many; start "
            f"{replicas} x K processes for replicas on K ranks each, or choose a number of replicas that divides "
            f"{ranks}"
        )
    if replicas == 1:
        return ranks
    if sample is not None and batch_size(sample) < replicas:
        raise DataError(
            f"the sample has {batch_size(sample)} row(s) for {replicas} replicas: expected a batch like those that are "
            "trained on, with at least one row for each"
        )
    return max(1, ranks // replicas)


def check_replication(plan: Plan, replicas: int) -> None:
    """Raise `PlanError` if a plan says how many replicas there are, and others are asked for."""
    if plan.replicas and plan.replication != replicas:
        raise PlanError(
            f"the plan has {plan.replication} replica(s) of each stage, but replicas={replicas} was asked for: pass "
            f"replicas={plan.replication}"
        )
