"""All that is under way in a run, as one tree of tensors and plain values.

Each rank has its part. For a file the parts become one whole that does not say which rank held what, so that it can be
shared out among any number of ranks again.
"""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ..errors import CheckpointMismatch
from ..io.checkpoint import Checkpoint
from ..nn.tree import flatten, unflatten

__all__ = ["packed", "random_state", "restore_random", "share", "unpacked", "whole"]

#: What `Run.state` returns.
State: TypeAlias = Mapping[str, Any]

_FILE = "exact"
_IN_MODEL = "model/"


def whole(parts: Sequence[State], leader: int = 0) -> dict[str, Any]:
    """One state of all ranks' states. **Arguments:** `leader`: the rank that cuts batches, and so counts them."""
    behind: dict[int, dict[int, int]] = {}
    for part in parts:
        for micro, late in part["recorder"]["behind"].items():
            behind.setdefault(micro, {}).update(late)
    return {
        **parts[leader],
        "stations": {index: station for part in parts for index, station in part["stations"].items()},
        "rounding": {index: lost for part in parts for index, lost in part["rounding"].items()},
        "losses": {micro: loss for part in parts for micro, loss in part["losses"].items()},
        "counts": {micro: count for part in parts for micro, count in part["counts"].items()},
        "mail": [message for part in parts for message in part["mail"]],
        "recorder": {"seen": [seen for part in parts for seen in part["recorder"]["seen"]], "behind": behind},
    }


def share(state: State, stations: Container[int], leads: bool) -> dict[str, Any]:
    """The part of one rank. **Arguments:** `stations`: it holds these; `leads`: it is fed, and keeps what waits."""
    seen = [one for one in state["recorder"]["seen"] if one[0] in stations]
    behind = {m: {s: n for s, n in late.items() if s in stations} for m, late in state["recorder"]["behind"].items()}
    return {
        **state,
        "stations": {index: station for index, station in state["stations"].items() if index in stations},
        "rounding": {index: lost for index, lost in state.get("rounding", {}).items() if index in stations},
        "mail": [message for message in state["mail"] if message["stage"] in stations],
        "recorder": {"seen": seen, "behind": behind},
        "joining": state["joining"] if leads else [(None, None)] * len(state["joining"]),
    }


# ------------------------------------------------------------------------ files


def packed(model: Mapping[str, torch.Tensor], state: State, facts: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint of the model and of a whole state, with `facts` beside it. Each tensor is stored once."""
    tensors, structure = flatten(dict(state))
    names = {id(t): _IN_MODEL + name for name, t in model.items()}
    stored: dict[str, torch.Tensor] = {}
    for t in tensors:
        if id(t) not in names:
            name = names[id(t)] = str(len(stored))
            stored[name] = t
    orders = {names[id(t)]: order for t in tensors if (order := _memory_order(t)) is not None}
    tree = {"structure": structure, "tensors": [names[id(t)] for t in tensors], "orders": orders}
    return Checkpoint(model, {**facts, _FILE: tree}, {_FILE: stored})


def _memory_order(t: torch.Tensor) -> list[int] | None:
    """The dimensions by falling stride, if a tensor is dense in that order and not in its own.

    What is computed from a tensor may depend on how it lies in memory, to the last bit.
    """
    if t.is_contiguous():
        return None
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda d: (-strides[d], d))
    return order if t.permute(order).is_contiguous() else None


def unpacked(content: Checkpoint) -> dict[str, Any]:
    """The state that `packed` put into a checkpoint."""
    tree = content.state[_FILE]
    found = {**content.extra.get(_FILE, {}), **{_IN_MODEL + name: t for name, t in content.model.items()}}
    for name, order in tree["orders"].items():
        found[name] = found[name].permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
    if missing := [name for name in tree["tensors"] if name not in found]:
        raise CheckpointMismatch(f"state.json: {_FILE}.tensors: there is no tensor {missing[0]!r}")
    state: dict[str, Any] = unflatten(tree["structure"], [found[name] for name in tree["tensors"]])
    return state


# ------------------------------------------------------------------------ random numbers


def random_state() -> dict[str, Any]:
    """What the random numbers of this process continue from: those of Python, NumPy and torch, as JSON holds it."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Continue with the random numbers of the process whose `random_state` this is."""
    version, numbers, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
