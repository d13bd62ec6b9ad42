"""What passes from one block to a later one beside the state: skips by name, and weights that blocks share.

A block may want a tensor that an earlier one made (a U-Net's skip), or a weight that an earlier one owns (tied
embeddings). All blocks in between then pass on more than they use. They are wrapped for that:

    first use                                                                           last use
    embed ------------ layer 1 ------------ layer 2 ------------ ... ------------ head
            {"x": state, "carried": {"embed.weight": weight}}

so that the rest of the library sees ordinary blocks with a dict between them. Whatever crosses a cut is a tensor of the
state: it is sent, kept and differentiated like all others, and its gradient comes back the same way. So a weight that
is used in several stages gets the gradient of the chain rule, under every method that sends gradients. It is trained
where it is used first, and has one version per micro-batch everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import PlanError
from .tree import Tree

__all__ = ["Add", "Carrier", "Recall", "Remember", "carried_shapes", "carrying", "leaving_weights"]


class Remember(nn.Module):
    """A block whose output is also remembered, under a name, for a later block that `Recall`s it.

    For models whose `blocks()` would otherwise have to pass a skip through every block in between.

    >>> import torch
    >>> from unlatch.nn.chain import StageChain, chain
    >>> double = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(double.weight, 2.0)
    >>> blocks = chain([Remember(nn.Identity(), "start"), double, Recall(Add(), "start")])
    >>> StageChain(blocks)(torch.ones(1, 1))
    tensor([[3.]], grad_fn=<AddBackward0>)
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        super().__init__()
        self.block, self.remembers = block, name

    def forward(self, x: Tree) -> Tree:
        return self.block(x)


class Recall(nn.Module):
    """A block of two inputs: what comes from the block before it, and what was remembered under a name.

    **Arguments:** `block`: called with both, in this order.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        super().__init__()
        self.block, self.recalls = block, name

    def forward(self, x: Tree, *remembered: Tree) -> Tree:
        if not remembered:
            raise PlanError(
                f"'{self.recalls}' is recalled by a block that was called by itself: only a chain of blocks carries "
                "what was remembered; write the model's own forward with the plain modules"
            )
        return self.block(x, *remembered)


class Add(nn.Module):
    """The sum of what comes from the block before and what was remembered: the usual residual skip."""

    def forward(self, x: Tensor, remembered: Tensor) -> Tensor:
        return x + remembered


class _Tied(NamedTuple):
    """Where a module holds a weight: the module that has it, by its path, and the weight's name there."""

    owner: str
    name: str


class Carrier(nn.Module):
    """A block with what passes by it.

    **Arguments:**

    - `block`: the block itself, without the weights that it gets from others.
    - `arriving`, `leaving`: names of what comes in and goes out beside the state.
    - `begins`: names of what is the state itself when it comes in, and is carried from here on.
    - `shows`: by name, the weights of this block that later ones use.
    - `borrows`: by name, places in this block where it uses a weight of an earlier one.
    """

    def __init__(
        self,
        block: nn.Module,
        arriving: Sequence[str],
        leaving: Sequence[str],
        begins: Sequence[str],
        shows: Mapping[str, _Tied],
        borrows: Mapping[str, Sequence[_Tied]],
    ) -> None:
        super().__init__()
        self.block = block
        self.arriving, self.leaving, self._begins = tuple(arriving), tuple(leaving), tuple(begins)
        self._shows, self._borrows = dict(shows), {name: tuple(places) for name, places in borrows.items()}

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of the weights that go out from here."""
        return tuple(self._shows)

    def weight(self, name: str) -> nn.Parameter:
        """A weight of this block that later ones use."""
        owner, attribute = self._shows[name]
        found: nn.Parameter = getattr(self.block.get_submodule(owner), attribute)
        return found

    @property
    def borrowers(self) -> list[nn.Module]:
        """Modules of this block that use a weight of an earlier one."""
        return [self.block.get_submodule(owner) for places in self._borrows.values() for owner, _ in places]

    @property
    def passes_by(self) -> bool:
        """Whether the block has nothing to do with what is carried."""
        uses = self._borrows or isinstance(self.block, Recall)
        return self.arriving == self.leaving and not self._begins and not uses

    def forward(self, state: Tree) -> Tree:
        x, carried = (state["x"], dict(state["carried"])) if self.arriving else (state, {})
        carried |= dict.fromkeys(self._begins, x)
        with self._lent(carried):
            x = self.block(x, carried[self.block.recalls]) if isinstance(self.block, Recall) else self.block(x)
        carried |= {name: self.weight(name) for name in self._shows}
        return {"x": x, "carried": {name: carried[name] for name in self.leaving}} if self.leaving else x

    @contextmanager
    def _lent(self, carried: Mapping[str, Any]) -> Iterator[None]:
        """Let the block find borrowed weights where it looks for its own."""
        places = [
            (self.block.get_submodule(owner), attribute, carried[name])
            for name, listed in self._borrows.items()
            for owner, attribute in listed
        ]
        for module, attribute, weight in places:
            # A plain attribute, found before torch looks for a parameter.
            module.__dict__[attribute] = weight
        try:
            yield
        finally:
            for module, attribute, _ in places:
                del module.__dict__[attribute]


def carrying(blocks: Sequence[tuple[str, nn.Module]]) -> list[nn.Module]:
    """The modules of a chain, wrapped where something passes by them.

    **Arguments:** `blocks`: names and modules, in order.

    >>> head = nn.Linear(3, 3, bias=False)
    >>> shared = [("embed", nn.Embedding(3, 3)), ("act", nn.Tanh()), ("head", head)]
    >>> head.weight = shared[0][1].weight
    >>> [type(module).__name__ for module in carrying(shared)]
    ['Carrier', 'Carrier', 'Carrier']
    """
    first, last = _skips(blocks)
    # Right after the block that makes it, what is remembered is the state: it needs no place beside it.
    beside = {name: position + 1 for name, position in first.items()}
    owners, places = _ties(blocks)
    for name, users in places.items():
        beside[name], last[name] = owners[name][0], max(users)
    found = []
    for position, (_, module) in enumerate(blocks):
        arriving = [name for name in beside if beside[name] < position <= last[name]]
        leaving = [name for name in beside if beside[name] <= position < last[name]]
        begins = [name for name in first if beside[name] == position]
        if not arriving and not leaving and not begins:
            found.append(module)
            continue
        shows = {name: place for name, (owner, place) in owners.items() if owner == position}
        borrows = {name: users[position] for name, users in places.items() if position in users}
        found.append(Carrier(_without(module, borrows), arriving, leaving, begins, shows, borrows))
    return found


def leaving_weights(modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Weights of a run of blocks that later ones use: what leaves it must not be changed by the next update."""
    last = modules[-1] if modules else None
    if not isinstance(last, Carrier):
        return {}
    own = {name: module.weight(name) for module in modules if isinstance(module, Carrier) for name in module.shown}
    return {name: own[name] for name in last.leaving if name in own}


def carried_shapes(modules: Sequence[nn.Module]) -> set[tuple[int, ...]]:
    """The shapes of all weights that pass from block to block.

    >>> blocks = [("embed", nn.Embedding(3, 2)), ("head", nn.Linear(2, 3, bias=False))]
    >>> blocks[1][1].weight = blocks[0][1].weight
    >>> carried_shapes(carrying(blocks))
    {(3, 2)}
    """
    carriers = [module for module in modules if isinstance(module, Carrier)]
    return {tuple(carrier.weight(name).shape) for carrier in carriers for name in carrier.shown}


def _skips(blocks: Sequence[tuple[str, nn.Module]]) -> tuple[dict[str, int], dict[str, int]]:
    """Where each name is remembered, and where it is recalled for the last time."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, (block, module) in enumerate(blocks):
        if isinstance(module, Recall):
            recalled = module.recalls
            if recalled not in first:
                known = ", ".join(map(repr, first)) or "nothing"
                raise PlanError(
                    f"block '{block}' recalls '{recalled}', which no block before it remembers: before it, {known} is "
                    "remembered; wrap the block that makes it as Remember(block, name)"
                )
            last[recalled] = position
        elif isinstance(module, Remember):
            remembered = module.remembers
            if remembered in first:
                raise PlanError(
                    f"'{remembered}' is remembered by blocks '{blocks[first[remembered]][0]}' and '{block}': give each "
                    "a name of its own"
                )
            first[remembered] = position
    unused = [name for name in first if name not in last]
    if unused:
        raise PlanError(
            f"block '{blocks[first[unused[0]]][0]}' remembers '{unused[0]}', which no later block recalls: wrap the "
            "block that needs it as Recall(block, name), or leave Remember out"
        )
    return first, last


def _ties(
    blocks: Sequence[tuple[str, nn.Module]],
) -> tuple[dict[str, tuple[int, _Tied]], dict[str, dict[int, list[_Tied]]]]:
    """Trained weights of several blocks: where each is used first, and all later blocks with their places.

    Frozen ones are the same everywhere without being carried.
    """
    owners: dict[int, tuple[int, str, _Tied]] = {}
    shared: dict[str, tuple[int, _Tied]] = {}
    places: dict[str, dict[int, list[_Tied]]] = {}
    for position, (block, module) in enumerate(blocks):
        for path, parameter in module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            place = _Tied(*path.rpartition(".")[::2])
            first, name, owner = owners.setdefault(id(parameter), (position, f"{block}.{path}", place))
            if first != position:
                shared[name] = first, owner
                places.setdefault(name, {}).setdefault(position, []).append(place)
    return shared, places


def _without(module: nn.Module, borrows: Mapping[str, Sequence[_Tied]]) -> nn.Module:
    """The same module without some of its weights: what holds them is copied, all else is shared."""
    for places in borrows.values():
        for owner, attribute in places:
            module = _shadow(module, owner.split(".") if owner else [], attribute)
    return module


def _shadow(module: nn.Module, path: Sequence[str], attribute: str) -> nn.Module:
    twin = copy.copy(module)
    if path:
        twin._modules = dict(module._modules)
        inner = module._modules[path[0]]
        assert inner is not None
        twin._modules[path[0]] = _shadow(inner, path[1:], attribute)
    else:
        twin._parameters = {name: p for name, p in module._parameters.items() if name != attribute}
    return twin
