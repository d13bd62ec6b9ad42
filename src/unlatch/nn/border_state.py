"""What passes from one stage to the next, as methods with local losses see it: one tensor that they learn from.

A head, or a guess of the gradient, needs one tensor of real numbers: the *main* one. Beside it may travel masks and
positions, tensors that a later block recalls, and weights that later stages use (`carry`). No gradient comes back for
these, but for the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..errors import ShapeMismatch
from .carry import Carrier
from .tree import Tree, flatten, unflatten

__all__ = ["BorderState", "read_state"]

#: Keys and positions that lead to a tensor.
Path: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class BorderState:
    """Where the tensors of a state are.

    **Arguments:**

    - `main`: the way to the tensor that a head or a guess looks at.
    - `weights`: by name, the ways to weights of earlier stages.

    >>> import torch
    >>> state = {"hidden": torch.zeros(2, 3), "mask": torch.ones(2, dtype=torch.bool)}
    >>> BorderState(("hidden",)).position(state), BorderState(("hidden",)).cotangent(state, torch.ones(2, 3))[1]
    (0, None)
    """

    main: Path = ()
    weights: Mapping[str, Path] = field(default_factory=dict)

    def position(self, state: Tree) -> int:
        """Of the main one among all tensors."""
        if isinstance(state, Tensor) and not self.main:
            return 0
        paths = [path for path, _ in _located(state)]
        if self.main not in paths:
            raise ShapeMismatch(
                f"the sample had a tensor at {_shown(self.main)} of the state between stages, this batch has "
                f"{', '.join(map(_shown, paths)) or 'none at all'}: all batches must be put together alike"
            )
        return paths.index(self.main)

    def tensor(self, state: Tree) -> Tensor:
        """The main one."""
        return flatten(state)[0][self.position(state)]

    def replaced(self, state: Tree, main: Tensor) -> Tree:
        """The state with another main tensor."""
        tensors, structure = flatten(state)
        tensors[self.position(state)] = main
        return unflatten(structure, tensors)

    def cotangent(self, state: Tree, gradient: Tensor) -> list[Tensor | None]:
        """One gradient per tensor of the state: none but that of the main one."""
        found: list[Tensor | None] = [None] * len(flatten(state)[0])
        found[self.position(state)] = gradient
        return found

    def weight_gradients(self, state: Tree, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """By name, what was found for weights that came with a state."""
        if not self.weights:
            return {}
        found = {path: g for (path, _), g in zip(_located(state), gradients, strict=True) if g is not None}
        return {name: found[path] for name, path in self.weights.items() if path in found}


def read_state(state: Tree, modules: Sequence[nn.Module], samples: int, where: str) -> BorderState:
    """Find out what is what in a state.

    **Arguments:**

    - `modules`: the blocks before it.
    - `samples`: in this state.
    - `where`: named in the error for a state with no main tensor, or several.
    """
    last = modules[-1]
    carried = last.leaving if isinstance(last, Carrier) else ()
    shown = {name for module in modules if isinstance(module, Carrier) for name in module.shown}
    inside = [path for path, t in _located(state) if _learns(t, samples) and (not carried or path[0] == "x")]
    if len(inside) != 1:
        what = (
            f"{state.dtype} of shape {tuple(state.shape)}"
            if isinstance(state, Tensor)
            else f"{type(state).__name__} with {len(inside)} such tensors"
        )
        raise ShapeMismatch(
            f"{where} takes {what} as input; a method with local losses needs one tensor of real numbers there, with "
            "a batch dimension and at least one more. Cut elsewhere (split=[...]), or use a method that sends "
            "gradients."
        )
    return BorderState(inside[0], {name: ("carried", name) for name in carried if name in shown})


def _learns(t: Tensor, samples: int) -> bool:
    return t.is_floating_point() and t.dim() > 1 and t.shape[0] == samples


def _located(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """All tensors with the ways to them, in the order of `flatten`."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, tuple | list):
        for position, child in enumerate(tree):
            yield from _located(child, (*path, position))
    elif isinstance(tree, dict):
        for key, child in tree.items():
            yield from _located(child, (*path, key))


def _shown(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path) or "the top"
