"""Weights of the past from a moving average of the updates, instead of a stash of old versions (LayerPipe2).

With u the applied decrease per update, W(t-d) = W(t) + sum of the last d values of u. An exponential average ubar of u
stands in for their mean: What(t-d) = W(t) + d ubar(t). An average with beta = (d-1)/(d+1) looks back as far as a window
of d updates does in the mean, (d-1)/2, which makes the result exact for constant and for evenly growing updates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CheckpointMismatch, ConfigError

__all__ = ["UpdateAverage"]


class UpdateAverage:
    """A bias-corrected average of the applied updates, one buffer per parameter, whatever the delay.

    Call `before_step` and `after_step` around every `optimizer.step()`.

    **Arguments:**

    - `delay`: how many updates back the reconstruction reaches (the largest, if calls of `past` ask for less).
    - `beta`: decay of the average; (delay-1)/(delay+1) if None.

    >>> w = torch.nn.Parameter(torch.tensor([10.0]))
    >>> average = UpdateAverage(2)
    >>> for _ in range(4):
    ...     average.before_step([w])
    ...     w.data -= 1.5
    ...     average.after_step([w])
    >>> average.past([w])  # two updates of 1.5 ago
    [tensor([7.])]
    """

    def __init__(self, delay: int, beta: float | None = None) -> None:
        if delay < 0:
            raise ConfigError(f"moving average for a delay of {delay} updates: expected 0 or more")
        self.delay = delay
        self.beta = (delay - 1) / (delay + 1) if beta is None and delay else beta or 0.0
        if not 0.0 <= self.beta < 1.0:
            raise ConfigError(f"moving average with beta={self.beta}: expected 0 <= beta < 1")
        self._sum: list[Tensor] = []
        self._updates = 0

    @torch.no_grad()
    def before_step(self, params: Sequence[Tensor]) -> None:
        """Enter the weights as they are; with `after_step` this adds their decrease, without a copy of the old ones."""
        if not self.delay or not params:
            return
        if not self._sum:
            self._sum = [torch.zeros_like(p, requires_grad=False) for p in params]
        torch._foreach_mul_(self._sum, self.beta)
        torch._foreach_add_(self._sum, list(params), alpha=1.0 - self.beta)

    @torch.no_grad()
    def after_step(self, params: Sequence[Tensor]) -> None:
        """Take the new weights out again: what remains is the average of the decreases."""
        if not self.delay or not params:
            return
        torch._foreach_sub_(self._sum, list(params), alpha=1.0 - self.beta)
        self._updates += 1

    @torch.no_grad()
    def past(
        self, params: Sequence[Tensor], delay: int | None = None, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """The weights `delay` updates ago; never further back than the first ones.

        **Returns:** for delay 0, and before the first update, `params` themselves; otherwise tensors of their own,
        `out` if given.
        """
        reach = min(self.delay if delay is None else delay, self._updates)
        if reach <= 0:
            return list(params)
        result = [torch.empty_like(p, requires_grad=False) for p in params] if out is None else list(out)
        torch._foreach_copy_(result, list(params))
        torch._foreach_add_(result, self._sum, alpha=reach / (1.0 - self.beta**self._updates))
        return result

    def state_dict(self) -> dict[str, list[Tensor]]:
        """What an exact resume must restore."""
        return {"sum": [t.clone() for t in self._sum], "updates": [torch.tensor(self._updates)]}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Take over what another average's `state_dict` returned."""
        if not {"sum", "updates"} <= state.keys():
            raise CheckpointMismatch(f"moving average of updates: expected 'sum' and 'updates', got {sorted(state)}")
        self._sum = [t.clone() for t in state["sum"]]
        self._updates = int(state["updates"][0])
