"""Nested tuples, lists and dicts of tensors: what may pass from one block to the next.

A tree is taken apart into its tensors and a *structure* made of plain lists and strings, which JSON carries unchanged,
so that the other side of a wire can put the same tree together again. `None`, booleans, numbers and strings may stand
beside tensors; they are part of the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from reprlib import repr as shorten
from typing import Any, TypeAlias

from torch import Tensor

from ..errors import ShapeMismatch

__all__ = [
    "Structure",
    "Tree",
    "aligned",
    "batch_size",
    "copied",
    "flatten",
    "leaves",
    "map_tensors",
    "split_batch",
    "tree_bytes",
    "unflatten",
]

Tree: TypeAlias = Any
Structure: TypeAlias = str | list[Any]

_TENSOR = "tensor"
# Where torch's own memory begins: at a multiple of so many bytes.
_ALIGNMENT = 64
_CONSTANTS = (bool, int, float, str, type(None))


def flatten(tree: Tree) -> tuple[list[Tensor], Structure]:
    """Take a tree apart into its tensors, left to right, and its structure.

    >>> import torch
    >>> tensors, structure = flatten({"a": torch.zeros(2), "b": (torch.ones(3), None)})
    >>> len(tensors), structure
    (2, ['dict', ['a', 'tensor'], ['b', ['tuple', 'tensor', ['constant', None]]]])
    """
    tensors: list[Tensor] = []
    return tensors, _describe(tree, tensors)


def _describe(tree: Tree, tensors: list[Tensor]) -> Structure:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _TENSOR
    kind = type(tree)
    if kind is tuple or kind is list:
        return [kind.__name__, *(_describe(child, tensors) for child in tree)]
    if kind is dict:
        _check_keys(tree)
        return ["dict", *([key, _describe(child, tensors)] for key, child in tree.items())]
    if kind in _CONSTANTS:
        return ["constant", tree]
    raise _no_tree(kind)


def _check_keys(tree: dict[Any, Tree]) -> None:
    for key in tree:
        if type(key) not in _CONSTANTS:
            raise ShapeMismatch(f"a dict between blocks needs plain keys (str, int, ...), got key {key!r}")


def _no_tree(kind: type) -> ShapeMismatch:
    return ShapeMismatch(
        f"only tensors and nested tuple, list and dict of tensors can pass between blocks, got {kind.__qualname__}; "
        "return a plain tuple or dict instead"
    )


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Tree:
    """Put a tree together again: the inverse of `flatten`.

    >>> import torch
    >>> unflatten(["tuple", "tensor", ["constant", 7]], [torch.zeros(1)])
    (tensor([0.]), 7)
    """
    if structure == _TENSOR and len(tensors) == 1:
        return tensors[0]
    remaining = iter(tensors)
    try:
        tree = _assemble(structure, remaining)
    except StopIteration:
        raise ShapeMismatch(f"{len(tensors)} tensors are too few for the structure {shorten(structure)}") from None
    except (IndexError, KeyError, TypeError, ValueError, RecursionError):
        # It may have come over a wire or from a file.
        raise ShapeMismatch(f"{shorten(structure)} is not the structure of a tree") from None
    if next(remaining, None) is not None:
        raise ShapeMismatch(f"{len(tensors)} tensors are too many for the structure {shorten(structure)}")
    return tree


def _assemble(structure: Structure, tensors: Iterator[Tensor]) -> Tree:
    if isinstance(structure, str):
        if structure != _TENSOR:
            raise ValueError("of no known kind")
        return next(tensors)
    kind, children = structure[0], structure[1:]
    # Comprehensions, not generator expressions: StopIteration must get through when tensors run out.
    if kind == "tuple":
        return tuple([_assemble(child, tensors) for child in children])
    if kind == "list":
        return [_assemble(child, tensors) for child in children]
    if kind == "dict":
        return {key: _assemble(child, tensors) for key, child in children}
    if kind == "constant" and len(children) == 1 and type(children[0]) in _CONSTANTS:
        return children[0]
    raise ValueError("of no known kind")


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply `function` to every tensor and keep everything else.

    >>> import torch
    >>> map_tensors(lambda t: t + 1, (torch.zeros(1), [torch.ones(1)]))
    (tensor([1.]), [tensor([2.])])
    """
    if isinstance(tree, Tensor):
        return function(tree)
    kind = type(tree)
    if kind is tuple:
        return tuple([map_tensors(function, child) for child in tree])
    if kind is list:
        return [map_tensors(function, child) for child in tree]
    if kind is dict:
        _check_keys(tree)
        return {key: map_tensors(function, child) for key, child in tree.items()}
    if kind in _CONSTANTS:
        return tree
    raise _no_tree(kind)


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, left to right, without its structure.

    >>> import torch
    >>> len(leaves({"a": torch.zeros(2), "b": (torch.ones(3), None)}))
    2
    """
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Tree, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for child in tree:
            _collect(child, found)
    elif isinstance(tree, dict):
        for child in tree.values():
            _collect(child, found)


def copied(tree: Tree) -> Tree:
    """The same with a detached copy of every tensor; tensors that were the same part of one memory still are.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> one, other = copied((x, x))
    >>> one is x, one is other
    (False, True)
    """
    known: dict[tuple[Any, ...], Tensor] = {}

    def copy(t: Tensor) -> Tensor:
        key = (t.data_ptr(), t.shape, t.stride(), t.dtype)
        if t.numel() == 0 or key not in known:
            known[key] = t.detach().clone()
        return known[key]

    return map_tensors(copy, tree)


def aligned(t: Tensor) -> Tensor:
    """The same values where torch would have put them: matrix products may depend on it in the last bit.

    >>> import torch
    >>> x = torch.zeros(100)
    >>> aligned(x) is x, aligned(x[3:]).storage_offset()
    (True, 0)
    """
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone()


def tree_bytes(tree: Tree) -> int:
    """Bytes of all elements: what sending the tree costs.

    >>> import torch
    >>> tree_bytes([torch.zeros(2, 3), torch.zeros(4, dtype=torch.bool)])
    28
    """
    return sum([tensor.nbytes for tensor in leaves(tree)])


def batch_size(tree: Tree) -> int:
    """The number of samples: the common size of dimension 0.

    >>> import torch
    >>> batch_size((torch.zeros(8, 3), torch.zeros(8)))
    8
    """
    tensors = [tree] if isinstance(tree, Tensor) else flatten(tree)[0]
    if not tensors:
        raise ShapeMismatch("a batch needs at least one tensor, got none")
    size = -1
    for position, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            raise ShapeMismatch(f"tensor {position} of the batch has no dimension 0 that could count samples")
        if position == 0:
            size = tensor.shape[0]
        elif tensor.shape[0] != size:
            raise ShapeMismatch(
                f"every tensor of a batch must have the same number of samples: tensor 0 has {size} "
                f"{tuple(tensors[0].shape)}, tensor {position} has {tensor.shape[0]} {tuple(tensor.shape)}"
            )
    return size


def split_batch(tree: Tree, pieces: int) -> list[Tree]:
    """Cut a batch into `pieces` micro-batches whose sizes differ by at most one; fewer if there are fewer samples.

    The pieces are views.

    >>> import torch
    >>> [batch_size(piece) for piece in split_batch(torch.zeros(7, 2), 3)]
    [3, 2, 2]
    """
    size = batch_size(tree)
    if pieces < 1:
        raise ShapeMismatch(f"a batch can be cut into 1 or more micro-batches, not {pieces}")
    if size == 0:
        raise ShapeMismatch("a batch needs at least one sample, got none")
    pieces = min(pieces, size)
    if pieces == 1:
        return [tree]
    tensors, structure = flatten(tree)
    columns = [tensor.tensor_split(pieces) for tensor in tensors]
    return [unflatten(structure, row) for row in zip(*columns, strict=True)]
