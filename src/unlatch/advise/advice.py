"""Whether a method's delays suit the optimizer: the stability advisor applied to a run."""

from __future__ import annotations

from ..methods import Method
from ..runtime.updating import Optimizer
from ..schedule.stability import Advice, advise

__all__ = ["advise_method"]


def advise_method(
    method: Method, stages: int, optimizer: Optimizer | None, batch_size: int | None = None
) -> Advice | None:
    """What the linear recursion says about this method under this optimizer.

    **Returns:** `None` where it has nothing to say: no optimizer, or one without momentum it knows of.

    >>> import torch
    >>> from unlatch import methods
    >>> heavy_ball = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    >>> advise_method(methods.FDG(microbatches=1), 4, heavy_ball).warning is None
    False
    """
    if optimizer is None:
        return None
    group = optimizer.param_groups[0]
    adaptive = "betas" in group
    momentum = group["betas"][0] if adaptive else group.get("momentum")
    if momentum is None:
        return None
    chosen = method.rules().forward.prediction
    return advise(
        method.gaps(stages),
        momentum=float(momentum),
        nesterov=bool(group.get("nesterov", False)),
        predictor=None if chosen is None else chosen.name,
        alpha=1.0 if chosen is None else chosen.regulator.alpha,
        microbatches=method.per_update,
        batch_size=batch_size,
        nesterov_available=not adaptive,
    )
