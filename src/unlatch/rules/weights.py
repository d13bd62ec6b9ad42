"""Which weights the products of a delayed backward see: the ones of its forward, or the newest.

A graph that is kept over an optimizer step would meet changed weights. Torch forbids it (in-place version check), and
cloning all weights for every forward would waste memory. Instead the weights that autograd saves are handed out through
saved-tensor hooks:

- `stash`: the graph holds the storage its forward used. An update that happens meanwhile first moves the parameter to
  fresh storage (`release`), and only if such a graph exists; otherwise nothing is ever copied.
- `latest`: the graph holds no weights; at backward it is given the newest ones.
- `average`: likewise, but it is given a reconstruction of the old ones.

All other saved tensors go through untouched and keep torch's check against in-place changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import StageFailed

__all__ = ["GivenWeights", "LatestWeights", "StashedWeights", "WeightRule", "weight_rule", "weights_at"]

Meter = Callable[[Tensor], None]


@contextmanager
def weights_at(params: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Run the body with `params` showing `values`; afterwards the true weights are back, bit for bit.

    Only pointers move, so the true storage cannot be altered by rounding.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> with weights_at([w], [torch.zeros(2)]):
    ...     float(w.detach().sum())
    0.0
    >>> float(w.detach().sum())
    2.0
    """
    true = [p.data for p in params]
    for p, value in zip(params, values, strict=True):
        p.data = value
    try:
        yield
    finally:
        for p, value in zip(params, true, strict=True):
            p.data = value


class WeightRule:
    """Hooks around a forward whose graph outlives an update. This base keeps torch's own behaviour."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)

    @contextmanager
    def recording(self, meter: Meter | None = None) -> Iterator[None]:
        """Run a forward whose graph will be used later; `meter` is shown every tensor that autograd saves."""
        if meter is None:
            yield
            return

        def pack(t: Tensor) -> _Saved:
            meter(t)
            return _Saved(t)

        with saved_tensors_hooks(pack, _Saved.get):
            yield

    def release(self) -> None:
        """Make the parameters safe to update in place although a recorded graph is still to be used."""


class _Saved:
    """A saved tensor that is not a weight, with the version torch would have checked."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise StageFailed(
                f"a tensor of shape {tuple(self.tensor.shape)} needed for the backward was modified in place after the "
                "forward saved it; use the out-of-place form of the operation that changes it"
            )
        return self.tensor


class StashedWeights(WeightRule):
    """Backward products use exactly the weights of the forward."""

    @contextmanager
    def recording(self, meter: Meter | None = None) -> Iterator[None]:
        storages = {p.untyped_storage().data_ptr() for p in self.params}

        def pack(t: Tensor) -> Tensor | _Saved:
            if meter is not None:
                meter(t)
            # Detached: some operations (convolutions) save the parameter itself, which `release` gives other storage.
            return t.detach() if t.untyped_storage().data_ptr() in storages else _Saved(t)

        def unpack(kept: Tensor | _Saved) -> Tensor:
            return kept.get() if isinstance(kept, _Saved) else kept

        with saved_tensors_hooks(pack, unpack):
            yield

    def release(self) -> None:
        for p in self.params:
            p.data = p.data.clone()


class LatestWeights(WeightRule):
    """Backward products use the newest weights, with the activations of the forward.

    This is what the public FDG code does by accident: a mixture, not the gradient of any one network.
    """

    def values(self) -> Sequence[Tensor]:
        """What a backward is given in place of the parameters."""
        return [p.data for p in self.params]

    @contextmanager
    def recording(self, meter: Meter | None = None) -> Iterator[None]:
        owners = {p.untyped_storage().data_ptr(): number for number, p in enumerate(self.params)}

        def pack(t: Tensor) -> Any:
            if meter is not None:
                meter(t)
            owner = owners.get(t.untyped_storage().data_ptr())
            return _Saved(t) if owner is None else (owner, t.size(), t.stride(), t.storage_offset())

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, _Saved):
                return kept.get()
            owner, size, stride, offset = kept
            shown: Tensor = self.values()[owner].as_strided(size, stride, offset)
            return shown

        with saved_tensors_hooks(pack, unpack):
            yield


class GivenWeights(LatestWeights):
    """Backward products use weights that are set before each backward: LayerPipe2's reconstruction of old ones."""

    given: Sequence[Tensor] = ()

    def values(self) -> Sequence[Tensor]:
        return self.given


RULES: dict[str, type[WeightRule]] = {
    "current": WeightRule,
    "stash": StashedWeights,
    "latest": LatestWeights,
    "average": GivenWeights,
}


def weight_rule(name: str, params: Sequence[Tensor]) -> WeightRule:
    """Build the rule called `name` for these parameters.

    >>> type(weight_rule("stash", [])).__name__
    'StashedWeights'
    """
    return RULES[name](params)
