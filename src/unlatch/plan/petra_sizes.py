"""How large the parts of a pipeline are, found from shapes alone: no data, no arithmetic, no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import PlanError
from ..nn.chain import Block, Model, chain, cut
from ..nn.inversion import segments
from ..nn.randomness import replayable
from ..nn.tree import Tree, flatten, map_tensors, tree_bytes

__all__ = ["StageSize", "stage_sizes"]


@dataclass(frozen=True)
class StageSize:
    """Bytes of one stage.

    **Arguments:**

    - `name`: of its first block.
    - `reversible`: whether all its blocks are.
    - `parameter_bytes`, `buffer_bytes`: of all parameters and of all other state.
    - `input_bytes`, `output_bytes`: of one micro-batch, all streams together.
    - `stream_bytes`: of the first tensor of the input, one stream.
    - `stored_bytes`: what must be kept per micro-batch under way if all that can be inverted is inverted: the inputs of
      its runs of blocks that are not reversible.
    """

    name: str
    reversible: bool
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    stream_bytes: int
    stored_bytes: int
    output_bytes: int


def stage_sizes(model: Model, sample: Tree, starts: Sequence[int] | None = None) -> list[StageSize]:
    """The sizes of all stages of a model.

    **Arguments:**

    - `model`: an `nn.Sequential`, a list of modules, or a module with `blocks()`, on any device.
    - `sample`: one micro-batch of inputs, of which only shapes and dtypes count, or its shape (of float32).
    - `starts`: positions of the blocks that start a stage; by default each block is a stage.

    >>> sizes = stage_sizes(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (32, 4))
    >>> [(size.parameter_bytes, size.input_bytes, size.output_bytes) for size in sizes]
    [(160, 512, 1024), (0, 1024, 1024)]
    """
    if isinstance(sample, tuple) and all(isinstance(size, int) for size in sample):
        sample = torch.empty(sample, device="meta")
    x = map_tensors(lambda tensor: tensor.to("meta"), sample)
    blocks = chain(model)
    sizes = []
    for part in cut(blocks, list(range(len(blocks))) if starts is None else starts):
        size, x = _measure(part, x)
        sizes.append(size)
    return sizes


def _measure(stage: list[Block], x: Tree) -> tuple[StageSize, Tree]:
    entered, stored = x, 0
    runs = segments(stage)
    for run in runs:
        stored += 0 if run.reversible else tree_bytes(x)
        for block in run.blocks:
            x = _shape_of_output(block, x)
    whole = nn.ModuleList(block.module for block in stage)
    size = StageSize(
        name=stage[0].name,
        reversible=all(run.reversible for run in runs),
        parameter_bytes=sum(parameter.nbytes for parameter in whole.parameters()),
        buffer_bytes=sum(buffer.nbytes for buffer in whole.buffers()),
        input_bytes=tree_bytes(entered),
        stream_bytes=flatten(entered)[0][0].nbytes,
        stored_bytes=stored,
        output_bytes=tree_bytes(x),
    )
    return size, x


def _shape_of_output(block: Block, x: Tree) -> Tree:
    state: dict[str, Tensor] = {**dict(block.module.named_parameters()), **dict(block.module.named_buffers())}
    shapes = {name: tensor.to("meta") for name, tensor in state.items()}
    try:
        with torch.no_grad(), replayable(0, 0, 0):
            return functional_call(block.module, shapes, (x,))
    except Exception as error:
        given = ", ".join(str(tuple(tensor.shape)) for tensor in flatten(x)[0])
        raise PlanError(f"block '{block.name}' cannot take an input of shape {given}: {error}") from error
