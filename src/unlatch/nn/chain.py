"""A model as a chain of named blocks, and a stage as a run of consecutive blocks.

Nothing is traced or rewritten: the user says where the model may be cut, by an `nn.Sequential`, a list of modules, or a
method `blocks()` that lists modules whose composition is the model. Blocks keep the names they have inside the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from ..errors import PlanError
from ..lookup import did_you_mean
from .carry import Recall, Remember, carrying, leaving_weights
from .foreign import foreign
from .offer import how_to_cut
from .tree import Tree, flatten, map_tensors, unflatten

__all__ = [
    "Block",
    "Model",
    "StageChain",
    "aliases",
    "as_module",
    "chain",
    "cut",
    "name_in_model",
    "original_names",
    "stage_of_blocks",
    "stage_starts",
    "state_names",
]

Model: TypeAlias = nn.Module | Sequence[nn.Module]


class Block(NamedTuple):
    """One link of the chain: the smallest part that is never cut."""

    name: str
    module: nn.Module


def as_module(model: Model) -> nn.Module:
    """The model itself, or `nn.Sequential` of a list of modules: the owner of all original names.

    >>> list(as_module([nn.Linear(1, 1)]).state_dict())
    ['0.weight', '0.bias']
    """
    if isinstance(model, nn.Module):
        return model
    for index, part in enumerate(model):
        if not isinstance(part, nn.Module):
            raise PlanError(f"a list of blocks must hold nn.Module only, got {type(part).__name__} at position {index}")
    return nn.Sequential(*model)


def chain(model: Model) -> list[Block]:
    """List the blocks of a model.

    **Arguments:**

    - `model`: an `nn.Sequential`, a list of modules, a module with a method `blocks()`, or a model of `transformers`.

    **Returns:**

    Blocks in order. A block has the name under which the model holds it; one made on the fly by `blocks()` is called
    `block<position>`, and all its parameters and buffers must belong to the model. Blocks that others reach across, by
    a weight in common or by `unlatch.nn.Remember`, pass on what these need (`unlatch.nn.carry`).

    >>> [block.name for block in chain(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))]
    ['0', '1']
    """
    listed = getattr(model, "blocks", None)
    if isinstance(model, nn.Module) and callable(listed) and not isinstance(listed, nn.Module):
        blocks = _named_blocks(model, list(listed()))
    elif isinstance(model, nn.Sequential | nn.ModuleList):
        blocks = [Block(name, part) for name, part in model._modules.items() if part is not None]
    elif (from_elsewhere := foreign(model)) is not None:
        blocks = [Block(name, part) for name, part in from_elsewhere.blocks()]
    elif isinstance(model, nn.Module):
        raise PlanError(f"{type(model).__name__} does not say where it can be cut: {how_to_cut(model)}")
    else:
        as_module(model)
        blocks = [Block(str(index), part) for index, part in enumerate(model)]
    if not blocks:
        raise PlanError(f"{type(model).__name__} has no blocks: at least one is needed")
    return [Block(block.name, module) for block, module in zip(blocks, carrying(blocks), strict=True)]


def _named_blocks(model: nn.Module, parts: list[nn.Module]) -> list[Block]:
    registered = {id(module): name for name, module in model.named_modules()}
    blocks: list[Block] = []
    taken: set[str] = set()
    for index, part in enumerate(parts):
        if not isinstance(part, nn.Module):
            raise PlanError(f"blocks() must list nn.Module only, got {type(part).__name__} at position {index}")
        # A block that remembers or recalls goes by the name of what it wraps.
        known = part if id(part) in registered or not isinstance(part, Remember | Recall) else part.block
        name = registered.get(id(known), f"block{index}") or type(model).__name__
        if name in taken:
            name = f"{name}@{index}"
        taken.add(name)
        if id(part) not in registered:
            state_names(part, model)
        blocks.append(Block(name, part))
    return blocks


def state_names(part: nn.Module, model: Model) -> dict[str, str]:
    """Original names of what a part of a model holds.

    **Arguments:**

    - `part`: a block, a `StageChain`, or any module made of the model's modules.
    - `model`: the model that the part was cut from.

    **Returns:**

    For every key of `part.state_dict()`, the key of `model.state_dict()`. A tensor that the model holds under several
    names goes by the first of them; `aliases` gives the others.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1, bias=False)))
    >>> state_names(model[1], model)
    {'0.weight': '1.0.weight'}
    """
    root = as_module(model)
    owners = {id(module): name for name, module in root.named_modules()}
    tensors = _first_names(root)
    local_owners = dict(part.named_modules(remove_duplicate=False))
    local_tensors = dict(_all_tensors(part))
    names: dict[str, str] = {}
    for key in part.state_dict():
        name = tensors.get(id(local_tensors.get(key)))
        # What is no tensor of its own (extra state) is found through the module that writes it.
        owner, rest = key, ""
        while name is None and owner:
            owner, _, last = owner.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
            if owner in local_owners and id(local_owners[owner]) in owners:
                prefix = owners[id(local_owners[owner])]
                name = f"{prefix}.{rest}" if prefix else rest
        if name is None:
            raise PlanError(
                f"'{key}' of block {type(part).__name__} is not a parameter or buffer of {type(root).__name__}: "
                "blocks() must list modules that the model holds; make them in __init__, as attributes"
            )
        names[key] = name
    return names


def _all_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _first_names(root: nn.Module) -> dict[int, str]:
    keys = root.state_dict().keys()
    names: dict[int, str] = {}
    for name, tensor in _all_tensors(root):
        if name in keys:
            names.setdefault(id(tensor), name)
    return names


def aliases(model: Model) -> dict[str, str]:
    """Further names of shared tensors: each later key of `model.state_dict()` for the same tensor -> the first.

    >>> shared = nn.Linear(2, 2, bias=False)
    >>> aliases(nn.Sequential(shared, shared))
    {'1.weight': '0.weight'}
    """
    root = as_module(model)
    first = _first_names(root)
    keys = root.state_dict().keys()
    named = ((name, first.get(id(tensor), name)) for name, tensor in _all_tensors(root) if name in keys)
    return {name: original for name, original in named if name != original}


def stage_starts(blocks: Sequence[Block], split: Sequence[str]) -> list[int]:
    """Translate names of the blocks that start a stage into positions. The first block always starts stage 0.

    >>> blocks = chain([nn.Identity() for _ in range(5)])
    >>> stage_starts(blocks, ["2", "3"])
    [0, 2, 3]
    """
    if isinstance(split, str):
        raise PlanError(f"split must be a list of block names, got the single text {split!r}; write [{split!r}]")
    names = [block.name for block in blocks]
    starts = [0]
    for position, name in enumerate(split):
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise PlanError(f"no block is called '{name}'.{hint} The blocks are: {', '.join(names)}")
        index = names.index(name)
        if index == 0 and position == 0:
            continue
        if index <= starts[-1]:
            raise PlanError(
                f"block '{name}' cannot start a stage after '{names[starts[-1]]}' (split {list(split)}): "
                "list each start once, in the order of the model"
            )
        starts.append(index)
    return starts


def stage_of_blocks(count: int, starts: Sequence[int]) -> list[int]:
    """The stage of each of `count` blocks.

    >>> stage_of_blocks(5, [0, 2, 3])
    [0, 0, 1, 2, 2]
    """
    valid = len(starts) > 0 and starts[0] == 0 and all(a < b for a, b in pairwise(starts))
    if not valid or starts[-1] >= count:
        raise PlanError(
            f"stages must start at 0 and at growing positions below {count} (the number of blocks), got {list(starts)}"
        )
    stages = []
    for stage, (start, end) in enumerate(zip(starts, [*starts[1:], count], strict=True)):
        stages += [stage] * (end - start)
    return stages


def cut(blocks: Sequence[Block], starts: Sequence[int]) -> list[list[Block]]:
    """The blocks of each stage.

    >>> [len(part) for part in cut(chain([nn.Identity() for _ in range(5)]), [0, 2, 3])]
    [2, 1, 2]
    """
    parts: list[list[Block]] = [[] for _ in starts]
    for block, stage in zip(blocks, stage_of_blocks(len(blocks), starts), strict=True):
        parts[stage].append(block)
    return parts


class StageChain(nn.Module):
    """Run consecutive blocks in order; the input may be any tree of tensors.

    A stage keeps its input for later, so blocks that write into it (`nn.ReLU(inplace=True)` right after a cut) get a
    copy. Whether they do is found out on the first call in training and in evaluation mode.

    **Arguments:** `model`: that the blocks are from, if parameters are to be known by their names there.

    >>> import torch
    >>> stage = StageChain(chain(nn.Sequential(nn.ReLU(inplace=True), nn.Flatten())))
    >>> x = torch.tensor([[-1.0]])
    >>> stage(x), x
    (tensor([[0.]]), tensor([[-1.]]))
    """

    def __init__(self, blocks: Sequence[Block], model: Model | None = None) -> None:
        super().__init__()
        self.names = [block.name for block in blocks]
        self.blocks = nn.ModuleList(block.module for block in blocks)
        self.original = state_names(self, model) if model is not None else {}
        #: Weights of this stage that go up with the state, by the name that they are carried under.
        self.leaving_weights = leaving_weights([block.module for block in blocks])
        self._writes_input: dict[bool, bool] = {}

    def forward(self, x: Tree) -> Tree:
        writes = self._writes_input.get(self.training)
        if writes is None:
            return self._forward_and_learn(x)
        if writes:
            x = map_tensors(Tensor.clone, x)
        elif not isinstance(x, Tensor):
            x = map_tensors(_itself, x)  # fresh containers: a block may write into a dict that it is given
        return self.compose(x)

    def compose(self, x: Tree) -> Tree:
        """The blocks one after the other, on a tree that they may write into."""
        for name, block in zip(self.names, self.blocks, strict=True):
            try:
                x = block(x)
            except PlanError as error:
                raise PlanError(f"block '{name}': {error}") from error
        if self.leaving_weights:
            copies = {name: x["carried"][name].clone() for name in self.leaving_weights}
            x = {"x": x["x"], "carried": {**x["carried"], **copies}}
        return x

    def _forward_and_learn(self, x: Tree) -> Tree:
        tensors, structure = flatten(x)
        copies = [tensor.clone() for tensor in tensors]
        x = unflatten(structure, copies)
        watched = [copy for copy in copies if not copy.is_inference()]
        before = [copy._version for copy in watched]
        x = self.compose(x)
        if len(watched) == len(copies):
            self._writes_input[self.training] = [copy._version for copy in watched] != before
        return x


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def original_names(part: nn.Module, model: Model) -> dict[str, str]:
    """As `state_names`, also of a `StageChain` that was copied since it was cut from the model."""
    return part.original if isinstance(part, StageChain) and part.original else state_names(part, model)


def name_in_model(part: nn.Module, name: str) -> str:
    """What a parameter of a part is called in the whole model, as far as its blocks go by their names there.

    >>> stage = StageChain(chain(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))[1:])
    >>> [name_in_model(stage, name) for name, _ in stage.named_parameters()]
    ['1.weight', '1.bias']
    """
    if not isinstance(part, StageChain):
        return name
    if name in part.original:
        return part.original[name]
    _, number, rest = name.split(".", 2)
    return f"{part.names[int(number)]}.{rest}"
