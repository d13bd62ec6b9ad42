"""Going backward through reversible blocks without anything kept from the forward.

A run of reversible blocks is taken apart into units (couplings, permutations, modules with an `inverse`). Backward
visits them from the top: each turns its output and the gradient of it into its input and the gradient of that, and its
graph is freed before the next one starts. So the memory of a run does not depend on its length.

| unit | cost of going backward |
|---|---|
| `Coupling` | one evaluation of the branch, one backward |
| `Permutation` | moving elements |
| any other module with `inverse` | one inverse, one forward, one backward |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ConfigError, PlanError
from .branch import draw_seed
from .carry import Carrier
from .chain import Block, StageChain
from .coupling import Coupling
from .permutation import Permutation
from .statistics import frozen_statistics
from .tree import Tree, flatten, unflatten

__all__ = [
    "Pass",
    "Segment",
    "Unit",
    "checked_pass",
    "differentiate",
    "draw_seeds",
    "invert",
    "invert_and_differentiate",
    "is_reversible",
    "segments",
    "units",
]

Params: TypeAlias = Mapping[str, Tensor]
Pass: TypeAlias = Literal["forward", "backward"]


class Unit(NamedTuple):
    """A smallest reversible part: parameter names of `module` get `prefix` in the block it was taken from."""

    prefix: str
    module: nn.Module

    def own(self, params: Params | None) -> dict[str, Tensor] | None:
        """The tensors of `params` that replace parameters of this unit."""
        if params is None:
            return None
        names = (name for name, _ in self.module.named_parameters(remove_duplicate=False))
        return {name: params[self.prefix + name] for name in names if self.prefix + name in params}


class Segment(NamedTuple):
    """Consecutive blocks of a chain that are all reversible, or all not."""

    reversible: bool
    blocks: tuple[Block, ...]


def is_reversible(module: nn.Module) -> bool:
    """Whether a module declares that it can be inverted: it has a method `inverse`, or is a sequence of such modules.

    Whether the inverse is right is for `check_inverse` to find out.

    >>> is_reversible(nn.Sequential(Coupling(nn.Tanh()), Coupling(nn.ReLU()))), is_reversible(nn.Tanh())
    (True, False)
    """
    parts = _parts(module)
    if parts is not None and all(is_reversible(part) for _, part in parts):
        return True
    return callable(getattr(module, "inverse", None))


def segments(blocks: Iterable[Block]) -> list[Segment]:
    """Group blocks into longest runs of reversible and of other ones.

    >>> from unlatch.nn.chain import chain
    >>> model = nn.Sequential(nn.Flatten(), Coupling(nn.Tanh()), Coupling(nn.Tanh()), nn.Flatten())
    >>> [(part.reversible, len(part.blocks)) for part in segments(chain(model))]
    [(False, 1), (True, 2), (False, 1)]
    """
    found: list[Segment] = []
    for block in blocks:
        reversible = is_reversible(block.module) and not isinstance(block.module, Carrier)
        if found and found[-1].reversible == reversible:
            found[-1] = Segment(reversible, (*found[-1].blocks, block))
        else:
            found.append(Segment(reversible, (block,)))
    return found


def units(module: nn.Module, prefix: str = "") -> list[Unit]:
    """Take a reversible module apart; `PlanError` if a part is not reversible.

    >>> [unit.prefix for unit in units(nn.Sequential(Coupling(nn.Tanh()), Coupling(nn.ReLU())))]
    ['0.', '1.']
    """
    if not is_reversible(module):
        raise PlanError(
            f"block '{prefix.rstrip('.') or type(module).__name__}' ({type(module).__name__}) is not reversible: use a "
            "Coupling, or give it a method inverse()"
        )
    parts = _parts(module)
    if parts is None or not all(is_reversible(part) for _, part in parts):
        return [Unit(prefix, module)]
    return [unit for name, part in parts for unit in units(part, f"{prefix}{name}.")]


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Named modules whose composition the module is, or `None` if it is more than a composition."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return [(name, part) for name, part in module._modules.items() if part is not None]
    if isinstance(module, StageChain):
        return [(f"blocks.{index}", part) for index, part in enumerate(module.blocks)]
    if isinstance(module, Carrier) and module.passes_by:
        return [("block", module.block)]
    return None


def _passed(module: nn.Module) -> bool:
    """Whether the state of a reversible module has something beside it that passes by."""
    first = module.blocks[0] if isinstance(module, StageChain) else module
    return isinstance(first, Carrier)


def checked_pass(bn: Pass) -> Pass:
    """`bn` if it is `"forward"` or `"backward"`, else `ConfigError`."""
    if bn not in get_args(Pass):
        raise ConfigError(
            f"bn says which pass updates running statistics: expected 'forward' or 'backward', got {bn!r}"
        )
    return bn


def draw_seeds(parts: Sequence[Unit]) -> list[int | None]:
    """The seeds that a forward through these units draws, in its order."""
    return [draw_seed(unit.module.f) if isinstance(unit.module, Coupling) else None for unit in parts]


@torch.no_grad()
def invert(block: nn.Module, state: Tree, *, params: Params | None = None) -> Tree:
    """The input that gives the output `state`. Running statistics do not change.

    **Arguments:**

    - `block`: a reversible module; torch's generator must stand where it stood before its forward.
    - `state`: its output.
    - `params`: tensors to use instead of its own parameters, by name.

    >>> block = nn.Sequential(Coupling(nn.Linear(2, 2)), Coupling(nn.Tanh()))
    >>> x = (torch.randn(1, 2), torch.randn(1, 2))
    >>> torch.allclose(invert(block, block(x))[0], x[0], atol=1e-6)
    True
    """
    parts = units(block)
    if _passed(block):
        return {**state, "x": _invert_all(parts, state["x"], params)}
    return _invert_all(parts, state, params)


def _invert_all(parts: Sequence[Unit], state: Tree, params: Params | None) -> Tree:
    for unit, seed in reversed(list(zip(parts, draw_seeds(parts), strict=True))):
        state = _invert_unit(unit, state, seed, unit.own(params))
    return state


def _invert_unit(unit: Unit, state: Tree, seed: int | None, params: dict[str, Tensor] | None) -> Tree:
    if isinstance(unit.module, Coupling):
        return unit.module.inverse_seeded(state, seed, params)
    with frozen_statistics(unit.module):
        if params is None:
            return unit.module.inverse(state)  # type: ignore[operator]
        return functional_call(_Inverse(unit.module), {f"module.{k}": v for k, v in params.items()}, (state,))


class _Inverse(nn.Module):
    """`functional_call` only replaces parameters around a `forward`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: Tree) -> Tree:
        return self.module.inverse(state)


def invert_and_differentiate(
    block: nn.Module,
    y_state: Tree,
    grad_state: Tree,
    *,
    params: Params | None = None,
    inverse_params: Params | None = None,
    bn: Pass = "forward",
) -> tuple[Tree, Tree]:
    """Take a reversible block, or a sequence of them, backward from its output alone.

    Call it under the autocast setting of the forward, in the same training mode, and with torch's generator where it
    stood before the forward (`replayable` around both does that).

    **Arguments:**

    - `block`: a reversible module, see `is_reversible`.
    - `y_state`: its output; left as it is.
    - `grad_state`: the gradient of the loss with respect to the output.
    - `params`: leaf tensors to use instead of the block's own parameters, by name; gradients add up in *their* `.grad`.
      By default they add up in the `.grad` of the block's parameters.
    - `inverse_params`: tensors to invert with, where these differ from those to differentiate with. Costs a second
      evaluation of each branch.
    - `bn`: the pass that updates running statistics. With `"forward"` they do not change here; with `"backward"` they
      change here, once, and the caller ran the forward inside `frozen_statistics`.

    **Returns:** the reconstructed input and the gradient of the loss with respect to it.

    >>> block = Coupling(nn.Linear(2, 2))
    >>> x = (torch.randn(1, 2), torch.randn(1, 2))
    >>> y = block(x)
    >>> x_again, grad_x = invert_and_differentiate(block, y, (torch.ones(1, 2), torch.zeros(1, 2)))
    >>> torch.allclose(grad_x[0], block.f.weight.sum(0)), block.f.bias.grad
    (True, tensor([1., 1.]))
    """
    parts = units(block)
    seeds = draw_seeds(parts)
    passed = _passed(block)
    state, grad = (y_state["x"], grad_state["x"]) if passed else (y_state, grad_state)
    state, grad = differentiate(parts, seeds, state, grad, params=params, inverse_params=inverse_params, bn=bn)
    return ({**y_state, "x": state}, {**grad_state, "x": grad}) if passed else (state, grad)


def differentiate(
    parts: Sequence[Unit],
    seeds: Sequence[int | None],
    state: Tree,
    grad: Tree,
    *,
    params: Params | None = None,
    inverse_params: Params | None = None,
    bn: Pass = "forward",
) -> tuple[Tree, Tree]:
    """`invert_and_differentiate` for units whose seeds are known."""
    checked_pass(bn)
    for unit, seed in reversed(list(zip(parts, seeds, strict=True))):
        own, inverse_own = unit.own(params), unit.own(inverse_params)
        if isinstance(unit.module, Permutation):
            state, grad = unit.module.pull_back(state, grad)
            continue
        with frozen_statistics(unit.module) if bn == "forward" else nullcontext():
            if isinstance(unit.module, Coupling):
                state, grad = unit.module.pull_back(state, grad, seed=seed, params=own, inverse_params=inverse_own)
            else:
                state, grad = _pull_back(unit, state, grad, own, inverse_own if inverse_params is not None else own)
    return state, grad


def _pull_back(
    unit: Unit, state: Tree, grad: Tree, params: dict[str, Tensor] | None, inverse_params: dict[str, Tensor] | None
) -> tuple[Tree, Tree]:
    """The general case: invert without a graph, then forward with one, then backward."""
    with torch.no_grad():
        x_state = _invert_unit(unit, state, None, inverse_params)
    tensors, structure = flatten(x_state)
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors]
    with torch.enable_grad():
        # Copies: torch forbids in-place operations on leaves, and the module may use them.
        inputs = unflatten(structure, [leaf.clone() for leaf in leaves])
        out = unit.module(inputs) if params is None else functional_call(unit.module, params, (inputs,))
    pairs = [(y, g) for y, g in zip(flatten(out)[0], flatten(grad)[0], strict=True) if y.requires_grad]
    weights = unit.module.parameters() if params is None else params.values()
    wanted = [t for t in (*leaves, *weights) if t.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g.to(y.dtype) for y, g in pairs], inputs=wanted)
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return unflatten(structure, [leaf.detach() for leaf in leaves]), unflatten(structure, grads)
