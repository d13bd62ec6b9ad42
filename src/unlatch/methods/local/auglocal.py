"""AugLocal: the heads of decoupled greedy learning, built from layers that come later in the network itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ...errors import ConfigError
from ...nn.auxiliary import measure_blocks, parallel_copy
from ...nn.carry import Carrier
from ...nn.chain import Block
from ...nn.tree import Tree, flatten
from ...plan.layer_costs import LayerCost
from ...runtime.blueprint import Blueprint
from ..base import register
from ..options import Whole
from .greedy import DGL

__all__ = ["AugLocal"]


@register
@dataclass(frozen=True)
class AugLocal(DGL):
    """DGL whose heads foresee the rest of the network (Ma et al. 2024).

    The head of a stage is made of later blocks, chosen at even distances, with weights of its own. Heads get shorter
    linearly from the first stage to the last but one. Blocks that change the shape of the state are always taken,
    since a chain without them would not fit (inferred), and so is the last one, which puts out what the loss takes.

    **Arguments:**

    - `longest`, `shortest`: blocks of the heads of the first and of the last but one stage that keep the shape.

    >>> AugLocal(longest=4).lengths(4)
    [4, 2, 1]
    """

    longest: Whole = 3
    shortest: Whole = 1

    name = "auglocal"
    summary = "dgl whose heads are later layers of the network, fewer from stage to stage"
    # Later layers may need more: a mask, what an earlier block remembered, a weight of an earlier stage.
    heads_see_state = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None:
            raise ConfigError('auglocal builds its heads from the network: for a head of your own use "dgl"')
        if self.shortest > self.longest:
            raise ConfigError(
                f"auglocal: heads get shorter from stage to stage: expected shortest <= longest, got {self.shortest} "
                f"and {self.longest}"
            )

    def lengths(self, stages: int) -> list[int]:
        """Blocks that keep the shape in the head of each stage but the last."""
        steps = max(1, stages - 2)
        return [round(self.longest + (self.shortest - self.longest) * k / steps) for k in range(stages - 1)]

    def head_cost(self, layers: Sequence[LayerCost], starts: Sequence[int], stage: int) -> float:
        """An estimate, as copies of layers: states of the same number of bytes count as of one shape."""
        first = starts[stage + 1]
        sizes = [layer.activation_bytes for layer in layers[first - 1 :]]
        return sum(float(layers[first + n].work) for n in _later(sizes, self.lengths(len(starts))[stage]))

    def head_maker(self, stage: int, blueprint: Blueprint) -> Callable[..., nn.Module] | None:
        assert blueprint.sample is not None, "networks beside the stages were built from a sample"
        outputs = measure_blocks(blueprint.blocks, blueprint.sample[0])
        first = blueprint.plan.starts[stage + 1]
        later = later_blocks(blueprint.blocks[first:], outputs[first - 1 :], self.lengths(blueprint.stages)[stage])
        return lambda border, output: _with_own_weights(later)


def later_blocks(blocks: Sequence[Block], states: Sequence[Tree], keeping: int) -> list[nn.Module]:
    """All blocks that change the shape of the state, the last one, and `keeping` others at even distances.

    **Arguments:** `states`: the input of the first block, and the output of each.

    >>> import torch
    >>> chain = [Block(str(n), nn.Linear(4, 4)) for n in range(6)] + [Block("head", nn.Linear(4, 2))]
    >>> sizes = [torch.zeros(1, 4)] * 7 + [torch.zeros(1, 2)]
    >>> later_blocks(chain, sizes, 2) == [chain[0].module, chain[3].module, chain[6].module]
    True
    """
    return [blocks[n].module for n in _later([_form(state) for state in states], keeping)]


def _form(state: Tree) -> tuple[object, ...]:
    tensors, structure = flatten(state)
    return structure, [tensor.shape for tensor in tensors]


def _later(shapes: Sequence[object], keeping: int) -> list[int]:
    """Which of the blocks between these states `later_blocks` takes."""
    last = len(shapes) - 2
    same = [n for n in range(last) if shapes[n] == shapes[n + 1]]
    count = min(keeping, len(same))
    chosen = {same[n * len(same) // count] for n in range(count)}
    return [n for n in range(last + 1) if n == last or n not in same or n in chosen]


def _with_own_weights(modules: Sequence[nn.Module]) -> nn.Module:
    """Copies that start from weights of their own, as far as their layers know how to draw them."""
    net = nn.Sequential(*map(parallel_copy, modules))
    # What borrows a weight cannot draw it, and is given it with the state.
    borrowers = {id(module) for carrier in net if isinstance(carrier, Carrier) for module in carrier.borrowers}
    for module in net.modules():
        # Of its class: a module that stands for another may pass on what it is asked for, to the network's own.
        draw = getattr(type(module), "reset_parameters", None)
        if callable(draw) and id(module) not in borrowers:
            draw(module)
    return net
