"""Evaluating a residual branch so that it can be evaluated again, later, with the same result.

The inverse of a coupling evaluates its branch a second time. Three things would make the second result differ or damage
the streams, and all are settled here:

- *Random numbers.* Each evaluation in training mode draws one seed from torch's generator and runs on numbers of its
  own made from it. Whatever a branch draws, the outer generator advances by one draw. So a run of n couplings can
  replay its masks in any order: restore the outer generator, draw n seeds, use them backwards. Nothing is kept per
  block.
- *In-place operations.* The branch gets a copy of its stream; the stream itself is also an output.
- *Precision.* Under autocast a branch may compute in half precision, but streams are kept in float32: the rounding
  error of one addition in bfloat16 would come back magnified by every inverse below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import PlanError
from .device import device_of
from .randomness import replayable

__all__ = ["as_stream", "draw_seed", "evaluate_branch"]

_HALVES = (torch.bfloat16, torch.float16)


def draw_seed(branch: nn.Module) -> int | None:
    """One draw from torch's CPU generator, or `None` in evaluation mode, where nothing is drawn.

    >>> draw_seed(nn.Dropout().eval()) is None
    True
    """
    if not branch.training:
        return None
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def as_stream(x: Tensor) -> Tensor:
    """`x` as a stream of a reversible network: float32 where autocast made it half precision.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     as_stream(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.float() if x.dtype in _HALVES and torch.is_autocast_enabled(x.device.type) else x


def evaluate_branch(
    branch: nn.Module, x: Tensor, like: Tensor, *, seed: int | None, params: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Evaluate a branch of a coupling.

    **Arguments:**

    - `branch`: any module from one tensor to one tensor.
    - `x`: the stream it reads; never modified.
    - `like`: the stream its result is added to, which has the same shape.
    - `seed`: from `draw_seed`; the same seed gives the same dropout masks.
    - `params`: tensors to use instead of the branch's own parameters, by name.

    **Returns:** the result in the dtype in which the branch computed it.
    """
    randomness: AbstractContextManager[None] = (
        nullcontext() if seed is None else replayable(seed, 0, 0, device_of(x))
    )
    guarded = x.clone()
    with randomness:
        out = branch(guarded) if params is None else functional_call(branch, dict(params), (guarded,))
    if not isinstance(out, Tensor) or out.shape != like.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise PlanError(
            f"the branch {type(branch).__name__} of a coupling must return a tensor of the shape {tuple(like.shape)} "
            f"of the stream it is added to, got {got}: change width or size outside of couplings (SpaceToDepth, or a "
            "block that is not reversible)"
        )
    return out
