"""A training-mode forward that leaves no trace in running statistics.

Methods that recompute run each micro-batch twice; batch norm must count it once. Inside `frozen_statistics` batch norm
normalises with batch statistics as always in training, but its running averages and its counter stay. Every other
buffer that a forward might change (instance norm, spectral norm, code books, counters) is replaced by a throw-away copy
for the duration, so the original is neither written nor marked as changed for autograd.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["frozen_statistics"]


class frozen_statistics:  # noqa: N801 - used like a function
    """A context, built once per stage and used many times, in which no buffer of `module` changes.

    State that a module keeps outside of its buffers (plain attributes) is not covered.

    **Arguments:** `tracking`: let batch norm go on tracking, in throw-away copies as well, so that autograd saves just
    what it would outside.

    >>> import torch
    >>> norm = nn.BatchNorm1d(3)
    >>> frozen = frozen_statistics(norm)
    >>> with frozen:
    ...     y = norm(torch.randn(8, 3))
    >>> int(norm.num_batches_tracked)
    0
    """

    __slots__ = ("_depth", "_norms", "_owners", "_saved")

    def __init__(self, module: nn.Module, *, tracking: bool = False) -> None:
        self._norms: list[nn.Module] = []
        self._owners: list[nn.Module] = []
        for part in module.modules():
            if _obeys_flag(part) and not tracking:
                if part.track_running_stats:
                    self._norms.append(part)
            elif any(buffer is not None for buffer in part._buffers.values()):
                self._owners.append(part)
        self._saved: list[dict[str, Tensor | None]] = []
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for norm in self._norms:
            # nn.Module.__setattr__ searches parameters and buffers first; a deep network would feel it.
            norm.__dict__["track_running_stats"] = False
        copies: dict[int, Tensor] = {}
        for owner in self._owners:
            self._saved.append(dict(owner._buffers))
            for name, buffer in owner._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                owner._buffers[name] = copies[id(buffer)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        for norm in self._norms:
            norm.__dict__["track_running_stats"] = True
        for owner, buffers in zip(self._owners, self._saved, strict=True):
            owner._buffers.update(buffers)
        self._saved.clear()


def _obeys_flag(module: nn.Module) -> bool:
    """Whether torch's own batch norm code runs: it ignores running statistics in training if the flag is off."""
    return isinstance(module, _BatchNorm) and type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
