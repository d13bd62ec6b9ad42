"""Small networks that predict the input of a stage from the raw data, built from the blocks that they stand for.

An automatic AuxNet takes the first block of the chain (the stem) and, of every run of blocks that keep one shape (a
resolution group), the first `depth`. These are copies with weights of their own, so any chain gives one, the output has
exactly the shape of the stage's input, and it passes through the same kind of last block.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import ShapeMismatch
from .border_state import BorderState, read_state
from .chain import Block
from .tree import Tree, batch_size, flatten, map_tensors

__all__ = [
    "Border",
    "Capacity",
    "capacity",
    "check_auxnet",
    "coarse_parts",
    "find_borders",
    "measure_blocks",
    "parallel_copy",
]

_ROWS = 2
_NEEDED = (
    "Pass one that fits (factory=...), a function of the Border to a module from the raw data (for tokens one that "
    "begins with an embedding) to Border.shape per sample."
)


@dataclass(frozen=True)
class Border:
    """Where a stage begins, for whoever builds a network that predicts its input.

    **Arguments:**

    - `stage`: the stage whose input is to be predicted, 1 or more.
    - `blocks`: the blocks before it, with the shape that each puts out (without the batch).
    - `shape`: of the stage's input, without the batch: of its main tensor, if there are several.
    - `sample`: two raw samples.
    - `non_negative`: whether the stage's input had no negative value on the sample.
    - `state`: the stage's input for the two samples.
    - `reading`: where its tensors are.
    """

    stage: int
    blocks: tuple[tuple[Block, tuple[int, ...]], ...]
    shape: tuple[int, ...]
    sample: Tree
    non_negative: bool
    state: Tree
    reading: BorderState


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def measure_blocks(blocks: Sequence[Block], sample: Tree) -> list[Tree]:
    """The output of every block for the first two samples, in evaluation mode.

    >>> [tuple(t.shape) for t in measure_blocks([Block("a", nn.Linear(4, 3))], torch.zeros(5, 4))]
    [(2, 3)]
    """
    outputs = []
    x = map_tensors(lambda t: t[:_ROWS].clone(), sample)
    for block in blocks:
        with _evaluating(block.module):
            x = block.module(map_tensors(torch.clone, x))
        outputs.append(x)
    return outputs


def find_borders(blocks: Sequence[Block], starts: Sequence[int], sample: Tree) -> list[Border]:
    """What every stage after the first takes in; an error if no tensor of real numbers is the main one there."""
    outputs = measure_blocks(blocks[: starts[-1]], sample)
    rows = map_tensors(lambda t: t[:_ROWS], sample)
    borders = []
    for stage, start in enumerate(starts[1:], start=1):
        before, modules = outputs[start - 1], [block.module for block in blocks[:start]]
        where = f"stage {stage} (block '{blocks[start].name}')"
        reading = read_state(before, modules, batch_size(rows), where)
        main = reading.tensor(before)
        known = tuple(
            (block, tuple(out.shape[1:]) if isinstance(out, Tensor) else ())
            for block, out in zip(blocks[:start], outputs[:start], strict=True)
        )
        borders.append(Border(stage, known, tuple(main.shape[1:]), rows, bool((main >= 0).all()), before, reading))
    return borders


def _chosen(blocks: Sequence[tuple[Block, tuple[int, ...]]], depth: int, *, stem: bool) -> list[nn.Module]:
    """Copies of the stem and of the first `depth` blocks of every run of equal shapes."""
    kept = [blocks[0][0].module] if stem else []
    run, taken = None, 0
    for block, shape in blocks[1:] if stem else blocks:
        if shape != run:
            run, taken = shape, 0
        if taken < depth:
            kept.append(block.module)
            taken += 1
    return [parallel_copy(module) for module in kept]


def parallel_copy(module: nn.Module) -> nn.Module:
    """A copy that shares nothing, in training mode and with all parameters trained."""
    twin = copy.deepcopy(module).train()
    for p in twin.parameters():
        p.requires_grad_()
        p.grad = None
    return twin


def coarse_parts(border: Border, starts: Sequence[int], depth: int, *, shared: bool) -> list[nn.Module]:
    """The parts of a network that predicts `border`, one per tap.

    **Arguments:**

    - `starts`: position of the first block of each stage.
    - `depth`: blocks per run of equal shapes.
    - `shared`: one part for each stage that is skipped, so that all stages can use one network and tap it at their own
      place; otherwise a single part.

    >>> blocks = [Block(str(i), nn.Linear(3, 3)) for i in range(5)]
    >>> border = find_borders(blocks, [0, 4], torch.zeros(2, 3))[0]
    >>> len(coarse_parts(border, [0, 4], 1, shared=False)[0])
    2
    """
    if not shared:
        return [nn.Sequential(*_chosen(border.blocks, depth, stem=True))]
    parts: list[nn.Module] = []
    for stage in range(border.stage):
        segment = border.blocks[starts[stage] : starts[stage + 1]]
        parts.append(nn.Sequential(*_chosen(segment, depth, stem=stage == 0)))
    return parts


def check_auxnet(net: object, border: Border, described: str = "the AuxNet") -> nn.Module:
    """The network itself if it puts out what the stage takes in; else an error with both shapes."""
    if not isinstance(net, nn.Module):
        raise ShapeMismatch(f"{described} of stage {border.stage} must be a torch.nn.Module, got {type(net).__name__}")
    try:
        with _evaluating(net):
            out = net(map_tensors(torch.clone, border.sample))
    except Exception as error:
        raise ShapeMismatch(
            f"{described} of stage {border.stage} fails on the raw data ({_described(border.sample)}), which it must "
            f"turn into {border.shape} per sample: {type(error).__name__}: {error}. {_NEEDED}"
        ) from error
    got = tuple(out.shape[1:]) if isinstance(out, Tensor) else type(out).__name__
    if got != border.shape or not out.is_floating_point():
        kind = f" of {out.dtype}" if isinstance(out, Tensor) and not out.is_floating_point() else ""
        raise ShapeMismatch(
            f"{described} of stage {border.stage} puts out {got}{kind} per sample, but the stage takes {border.shape}: "
            f"it must predict the stage's input exactly (see Border.shape). {_NEEDED}"
        )
    return net


def _described(tree: Tree) -> str:
    return ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in flatten(tree)[0])


@dataclass(frozen=True)
class Capacity:
    """How large an AuxNet is against the blocks that it stands for; FLOPs are those of one forward of one sample.

    >>> Capacity(10, 40, 100, 1000).parameter_ratio
    0.25
    >>> print(Capacity(10, 40, 100, 1000))
    10 parameters and 100 FLOPs per sample, 25 % and 10 % of the blocks it stands for
    """

    parameters: int
    replaced_parameters: int
    flops: int
    replaced_flops: int

    @property
    def parameter_ratio(self) -> float:
        return self.parameters / max(1, self.replaced_parameters)

    @property
    def flop_ratio(self) -> float:
        return self.flops / max(1, self.replaced_flops)

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters and {self.flops:,} FLOPs per sample, {100 * self.parameter_ratio:.0f} % "
            f"and {100 * self.flop_ratio:.0f} % of the blocks it stands for"
        )


def capacity(net: nn.Module, border: Border) -> Capacity:
    """Compare a network with what it stands for."""
    replaced = nn.Sequential(*(block.module for block, _ in border.blocks))
    return Capacity(
        _parameters(net), _parameters(replaced), _flops(net, border.sample), _flops(replaced, border.sample)
    )


def _parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def _flops(net: nn.Module, sample: Tree) -> int:
    counter = FlopCounterMode(display=False)
    with counter, _evaluating(net):
        net(map_tensors(torch.clone, sample))
    return int(counter.get_total_flops()) // batch_size(sample)
