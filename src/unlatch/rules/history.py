"""What predictors need to know of the last update beyond the optimizer's own state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import CheckpointMismatch, ConfigError

__all__ = ["History"]

KINDS = frozenset({"update", "gradient"})


class History:
    """The last applied update and the last gradient, each kept only if asked for, in buffers that are reused.

    Call `before_step` just before `optimizer.step()`, with the gradients in their final form, and `after_step` just
    after it, before they are cleared.

    **Arguments:**

    - `params`: the parameters of the stage, always in this order.
    - `needs`: of `"update"` (the decrease `W_{n-1} - W_n`) and `"gradient"`.

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> history = History([w], {"update"})
    >>> history.before_step([w])
    >>> w.data -= 0.25
    >>> history.after_step([w])
    >>> history.update
    [tensor([0.2500, 0.2500])]
    """

    def __init__(self, params: Sequence[Tensor], needs: Iterable[str] = ()) -> None:
        self.needs = frozenset(needs)
        if not self.needs <= KINDS:
            raise ConfigError(f"a history cannot keep {sorted(self.needs - KINDS)}: expected some of {sorted(KINDS)}")
        self._count = len(params)
        self._update: list[Tensor] = []
        self._gradient: list[Tensor] = []
        self._moved = [False] * self._count
        self._complete = False

    @property
    def update(self) -> list[Tensor] | None:
        """The last applied decrease of each parameter; None before the first update."""
        return self._update if self._complete and "update" in self.needs else None

    @property
    def gradient(self) -> list[Tensor | None] | None:
        """The gradient of the last update, None for parameters that had none; None before the first update."""
        if not (self._complete and "gradient" in self.needs):
            return None
        return [g if moved else None for g, moved in zip(self._gradient, self._moved, strict=True)]

    @torch.no_grad()
    def before_step(self, params: Sequence[Tensor]) -> None:
        """Record weights and gradients as they enter the update."""
        self._complete = False
        if "update" in self.needs and params:
            self._update = self._update or _empty_like(params)
            torch._foreach_copy_(self._update, list(params))
        if "gradient" in self.needs:
            self._gradient = self._gradient or _empty_like(params)
            pairs = [(b, p.grad) for b, p in zip(self._gradient, params, strict=True) if p.grad is not None]
            self._moved = [p.grad is not None for p in params]
            if pairs:
                torch._foreach_copy_([b for b, _ in pairs], [g for _, g in pairs])

    @torch.no_grad()
    def after_step(self, params: Sequence[Tensor]) -> None:
        """Turn the recorded weights into the update that was applied."""
        if "update" in self.needs and params:
            torch._foreach_sub_(self._update, list(params))
        self._complete = True

    def state_dict(self) -> dict[str, list[Tensor]]:
        """What an exact resume must restore; empty before the first update and where nothing is kept."""
        if not self._complete:
            return {}
        kept = {"update": self._update, "gradient": self._gradient}
        state = {kind: [t.clone() for t in kept[kind]] for kind in sorted(self.needs)}
        if "gradient" in state:
            state["moved"] = [torch.tensor(moved) for moved in self._moved]
        return state

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Take over what another history's `state_dict` returned."""
        for kind in self.needs if state else ():
            if len(state.get(kind, ())) != self._count:
                raise CheckpointMismatch(
                    f"history of the last {kind}: expected {self._count} tensors, got {len(state.get(kind, ()))}; "
                    "the checkpoint was written with another split or predictor, resume without loop state"
                )
        self._update = [t.clone() for t in state.get("update", ())]
        self._gradient = [t.clone() for t in state.get("gradient", ())]
        self._moved = [bool(t) for t in state.get("moved", [torch.tensor(False)] * self._count)]
        self._complete = bool(state)


def _empty_like(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(p, requires_grad=False) for p in params]
