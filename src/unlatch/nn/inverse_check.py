"""Whether what is declared reversible really is: found out on one sample, before training."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..errors import PlanError
from .chain import Block, Model, chain
from .inversion import draw_seeds, invert, is_reversible, units
from .randomness import replayable
from .statistics import frozen_statistics
from .tree import Tree, flatten, map_tensors

__all__ = ["check_blocks", "check_inverse", "check_reversible", "relative_error"]


def relative_error(found: Tree, true: Tree) -> float:
    """The largest distance of two tensors over the norm of the true one, over all tensors of a tree.

    >>> relative_error((torch.tensor([3.0, 4.5]),), (torch.tensor([3.0, 4.0]),))
    0.1
    """
    error = 0.0
    for x, y in zip(flatten(found)[0], flatten(true)[0], strict=True):
        exact = y.detach().double()
        norm = float(torch.linalg.vector_norm(exact))
        distance = float(torch.linalg.vector_norm(x.detach().double() - exact))
        relative = distance / norm if norm > 0 else distance
        if math.isnan(relative):
            return math.inf
        error = max(error, relative)
    return error


@torch.no_grad()
def check_inverse(block: nn.Module, sample: Tree, tol: float | None = None, *, name: str | None = None) -> float:
    """Invert the output of a block on a sample and compare with the sample.

    The block is left as it was: buffers, random state and mode.

    **Arguments:**

    - `block`: a module that declares an inverse.
    - `sample`: an input of it.
    - `tol`: largest relative error allowed; by default 1e-3 in single precision, 1e-9 in double.
    - `name`: what to call the block in errors.

    **Returns:** the relative error.

    >>> from unlatch.nn.coupling import Coupling
    >>> check_inverse(Coupling(nn.Tanh()), (torch.randn(4, 2), torch.randn(4, 2))) < 1e-6
    True
    """
    name = name or type(block).__name__
    tensors, structure = flatten(sample)
    limit = _tolerance(tensors) if tol is None else tol
    replays, again = _forward_and_back(block, sample, name)
    found, found_structure = flatten(again)
    if found_structure != structure or [t.shape for t in found] != [t.shape for t in tensors]:
        raise PlanError(
            f"block '{name}' is declared reversible, but its inverse returns {_shapes(found)} for an input of "
            f"{_shapes(tensors)}: correct inverse(), or remove it so that the block's input is stored"
        )
    error = relative_error(again, sample)
    if not error <= limit:
        raise PlanError(
            f"block '{name}' is declared reversible, but inverse(forward(x)) differs from x by {error:.2e} (relative; "
            f"allowed {limit:.0e}): correct inverse(), or remove it so that the block's input is stored"
        )
    if not replays:
        raise PlanError(
            f"block '{name}' has an inverse of its own and draws random numbers in its forward, which cannot be "
            "replayed: put the random part into the branch of a Coupling"
        )
    return error


def check_reversible(model: Model, sample: Tree, tol: float | None = None) -> dict[str, float]:
    """Run a sample through a chain and check every block that declares an inverse.

    **Returns:** the relative error of each reversible block, by name. The first bad one raises `PlanError`.

    >>> list(check_reversible(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(1, 2)))
    []
    """
    return check_blocks(chain(model), sample, tol)


def check_blocks(blocks: Iterable[Block], sample: Tree, tol: float | None = None) -> dict[str, float]:
    """`check_reversible` for blocks that have names already."""
    errors: dict[str, float] = {}
    x = sample
    for name, block in blocks:
        if is_reversible(block):
            errors[name] = check_inverse(block, x, tol, name=name)
        with torch.no_grad(), frozen_statistics(block), replayable(0, 0, 0):
            x = block(map_tensors(Tensor.clone, x))
    return errors


def _forward_and_back(block: nn.Module, sample: Tree, name: str) -> tuple[bool, Tree]:
    """Whether the forward draws no other random numbers than its couplings' seeds, and the reconstructed sample."""
    try:
        with frozen_statistics(block):
            with replayable(0, 0, 0):
                draw_seeds(units(block))
                drawn = torch.get_rng_state()
            with replayable(0, 0, 0):
                output = block(map_tensors(Tensor.clone, sample))
                replays = torch.equal(drawn, torch.get_rng_state())
            with replayable(0, 0, 0):
                return replays, invert(block, output)
    except PlanError as error:
        raise PlanError(f"block '{name}': {error}") from error
    except Exception as error:
        raise PlanError(
            f"block '{name}' is declared reversible, but running it forward and back on {_shapes(flatten(sample)[0])} "
            f"failed with {type(error).__name__}: {error}"
        ) from error


def _tolerance(tensors: list[Tensor]) -> float:
    return 1e-9 if all(tensor.dtype == torch.float64 for tensor in tensors) else 1e-3


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
