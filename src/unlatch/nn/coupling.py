"""Additive couplings: blocks that can be inverted whatever their branch computes.

A two-stream state is a tuple `(x, x~)`. One coupling changes one stream by a function of the other and swaps them:

    y  = x~ + f(x)        y~ = x
    x  = y~               x~ = y - f(y~)

The user writes the branch f once; inverse and gradient follow. Both need f at the same point, so one evaluation of f
serves for both, and the gradients do not depend on x~ at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import ConfigError, PlanError
from .branch import as_stream, draw_seed, evaluate_branch
from .statistics import frozen_statistics

__all__ = ["Coupling", "RevBlock", "Streams"]

Streams: TypeAlias = tuple[Tensor, Tensor]


class Coupling(nn.Module):
    """Map the streams `(x, x~)` to `(x~ + f(x), x)`.

    **Arguments:**

    - `f`: any module from one tensor to one tensor of the same shape. Dropout, batch norm and in-place operations are
      allowed. It must not depend on state of its own other than buffers.

    >>> block = Coupling(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> x = (torch.randn(2, 3), torch.randn(2, 3))
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(block.inverse(block(x)), x))
    True
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        if not isinstance(f, nn.Module):
            raise ConfigError(
                f"the branch of a coupling must be an nn.Module, which holds its parameters, got {type(f).__name__}: "
                "put a function into the forward() of a module"
            )
        self.f = f

    def forward(self, state: Streams) -> Streams:
        return self.forward_seeded(state, draw_seed(self.f))

    def inverse(self, state: Streams) -> Streams:
        """The input that gives the output `state`. Running statistics do not change.

        In training mode with dropout, the generator must stand where it stood before the forward.
        """
        return self.inverse_seeded(state, draw_seed(self.f))

    def forward_seeded(self, state: Streams, seed: int | None) -> Streams:
        """`forward` with the random numbers of `seed`."""
        x, carried = _streams(state)
        return carried + evaluate_branch(self.f, x, carried, seed=seed).to(carried.dtype), x

    def inverse_seeded(self, state: Streams, seed: int | None, params: Mapping[str, Tensor] | None = None) -> Streams:
        """`inverse` with the random numbers of `seed` and, if given, other `params` (names as in the coupling)."""
        y, x = _streams(state)
        with frozen_statistics(self.f):
            out = evaluate_branch(self.f, x, y, seed=seed, params=_of_branch(params))
        return x, y - out.to(y.dtype)

    def pull_back(
        self,
        state: Streams,
        grad: Streams,
        *,
        seed: int | None,
        params: Mapping[str, Tensor] | None = None,
        inverse_params: Mapping[str, Tensor] | None = None,
    ) -> tuple[Streams, Streams]:
        """From output and its gradient to input and its gradient, with one evaluation of the branch and one backward.

        Gradients add up in the `.grad` of `params`, by default the coupling's own parameters. With `inverse_params` the
        input is computed with those instead, which costs a second evaluation of the branch.
        """
        y, x = (stream.detach() for stream in _streams(state))
        grad_y, grad_x = grad
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            out = evaluate_branch(self.f, leaf, y, seed=seed, params=_of_branch(params))
        if inverse_params is None:
            carried = y - out.detach().to(y.dtype)
        else:
            with torch.no_grad():
                carried = self.inverse_seeded((y, x), seed, inverse_params)[1]
        if out.requires_grad:
            weights = self.f.parameters() if params is None else params.values()
            wanted = [leaf, *(weight for weight in weights if weight.requires_grad)]
            torch.autograd.backward(out, grad_y.to(out.dtype), inputs=wanted)
        return (x, carried), (grad_x if leaf.grad is None else grad_x + leaf.grad, grad_y)


class RevBlock(nn.Sequential):
    """Two couplings in a row, the block of RevNet and of reversible transformers: `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`.

    **Arguments:**

    - `f`, `g`: branches; in a transformer attention and MLP, each with its norm.

    >>> block = RevBlock(nn.Linear(3, 3), nn.Tanh())
    >>> x2, x1 = torch.randn(2, 3), torch.randn(2, 3)
    >>> y2, y1 = block((x2, x1))
    >>> torch.equal(y1, x1 + block.f.f(x2)), torch.equal(y2, x2 + torch.tanh(y1))
    (True, True)
    """

    f: Coupling
    g: Coupling

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__(OrderedDict(f=Coupling(f), g=Coupling(g)))

    def inverse(self, state: Streams) -> Streams:
        """The input that gives the output `state`; see `Coupling.inverse`."""
        first, second = draw_seed(self.f.f), draw_seed(self.g.f)
        return self.f.inverse_seeded(self.g.inverse_seeded(state, second), first)


def _streams(state: Any) -> Streams:
    if not isinstance(state, tuple | list) or len(state) != 2:
        got = f"{len(state)} parts" if isinstance(state, tuple | list) else type(state).__name__
        raise PlanError(
            f"a coupling needs two streams, a tuple (x, x~), got {got}: put Split() before the first coupling"
        )
    return as_stream(state[0]), as_stream(state[1])


def _of_branch(params: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    return None if params is None else {name.removeprefix("f."): tensor for name, tensor in params.items()}
