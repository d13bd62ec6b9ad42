"""What a forward leaves behind for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from ..errors import CheckpointMismatch
from ..nn.split_backward import Pending
from ..nn.tree import Structure, Tree

__all__ = ["Kept", "MicroBatch", "Saved"]


class MicroBatch(Protocol):
    """What rules need to know of a micro-batch."""

    @property
    def id(self) -> int:
        """Counts micro-batches over the whole run."""

    @property
    def update(self) -> int:
        """The update that it contributes to."""


class Saved:
    """A tensor that autograd saved and that is not a weight, with the version torch would have checked."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version


@dataclass(slots=True)
class Kept:
    """One micro-batch at one stage between its forward and the end of its backward.

    **Arguments:**

    - `version`: updates that the weights of its forward had seen.
    - `inputs`, `spec`: the stage's input, taken apart.
    - `target`: at the last stage, what the loss compares with.
    - `nbytes`: what it takes, as measured.
    - `outputs`: ends of the graph, while there is one; `starts`: those that the first half of a backward began at.
    - `pending`: the second half of a backward, once the first is done.
    - `weights`: those of the forward, if they are kept.
    - `probe`: a few numbers of the input, to compare a reconstruction with.
    - `stamps`: torch's counters of in-place changes of the inputs.
    - `saved`: what a graph without weights holds, in the order of saving.
    """

    micro: MicroBatch
    version: int
    inputs: list[Tensor]
    spec: Structure
    target: Tree = None
    nbytes: int = 0
    outputs: list[Tensor] | None = None
    starts: tuple[int, ...] = ()
    pending: Pending | None = None
    weights: list[Tensor] | None = None
    probe: Tree = None
    stamps: tuple[int, ...] = ()
    saved: list[ref[Saved]] = field(default_factory=list)

    @property
    def has_graph(self) -> bool:
        """Whether a graph, or the rest of one, waits for its backward."""
        return self.outputs is not None or self.pending is not None

    @property
    def needs_old_weights(self) -> bool:
        """Whether the storage of the weights of its forward must stay as it is."""
        return self.has_graph or self.weights is not None

    def state(self) -> dict[str, Any]:
        """All of it but the micro-batch, and of a graph what it takes to make it again."""
        alive = [holder() for holder in self.saved]
        return {
            "version": self.version,
            "inputs": [t.detach() for t in self.inputs],
            "spec": self.spec,
            "target": self.target,
            "nbytes": self.nbytes,
            "weights": self.weights,
            "probe": self.probe,
            "graph": self.has_graph,
            "saved": [None if found is None else found.tensor.detach() for found in alive],
            "starts": self.starts,
            "pending": None if self.pending is None else self.pending.state(),
        }

    @classmethod
    def from_state(cls, micro: MicroBatch, state: dict[str, Any]) -> Kept:
        """What `state` described, still without its graph."""
        plain = ("version", "inputs", "spec", "target", "nbytes", "weights", "probe", "starts")
        if missing := [name for name in plain if name not in state]:
            raise CheckpointMismatch(f"state of {micro}: expected {', '.join(plain)}, and {missing[0]!r} is missing")
        kept = cls(micro, **{name: state[name] for name in plain})
        kept.stamps = stamps(kept.inputs)
        return kept


def stamps(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Torch's counters of in-place changes, which a tensor shares with all its views."""
    return tuple(0 if t.is_inference() else t._version for t in tensors)
