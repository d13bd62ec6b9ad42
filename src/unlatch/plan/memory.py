"""How much memory each device needs, counted before anything runs.

Of a stage, from the rules of the method (what is kept) and from its schedule (how many micro-batches are under way):

| part | bytes |
|---|---|
| `parameters`, `buffers` | of the module |
| `copies` | other versions of the parameters, as many as the rules need for their delay |
| `at_work` | the graph of one micro-batch; its input where it is not known what a graph takes |
| `queue` | what the rules keep of every further micro-batch between its forward and its backward |
| `gradients`, `optimizer` | as large as the parameters, and as many numbers per parameter as the optimizer keeps |
| `messages` | sent and not yet taken up, at most |

Only tensors that last are counted: not what a layer needs while it runs, nor what the framework itself takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import PlanError
from ..nn.chain import Block, Model, chain, cut
from ..nn.inversion import is_reversible
from ..nn.randomness import replayable
from ..nn.tree import Tree, flatten, map_tensors, tree_bytes
from ..schedule import Buffers, Schedule, steady_buffers
from ..schedule.entries import Route
from .layer_costs import LayerCost
from .layerpipe import PlannedTasks

__all__ = [
    "CORRECTED",
    "PAPER",
    "Counting",
    "Keeping",
    "StageMemory",
    "StageSize",
    "layer_sizes",
    "memory_table",
    "stage_memory",
    "stage_sizes",
    "task_memory",
]

GIGABYTE = 1e9


# ------------------------------------------------------------------- what is asked of the rules


class KeptActivation(Protocol):
    """What stays of a micro-batch between its forward and its backward; neither: what inverts keeps nothing."""

    @property
    def keeps_graph(self) -> bool: ...

    @property
    def keeps_input(self) -> bool: ...

    def at(self, index: int, count: int, module: Any = None) -> KeptActivation:
        """The rule that a stage really follows."""


class Keeping(Protocol):
    """The rules of a method, as far as they take memory."""

    @property
    def activation(self) -> KeptActivation: ...

    def weight_copies(self, late: int) -> int:
        """Tensors of the size of the weights besides these, where up to `late` updates come before a backward."""


# -------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class StageSize:
    """Bytes of one stage.

    **Arguments:**

    - `name`: of its first block.
    - `reversible`: whether all its blocks are.
    - `parameter_bytes`, `buffer_bytes`: of all parameters and of all other state.
    - `input_bytes`, `output_bytes`: of one micro-batch, all streams together.
    - `stream_bytes`: of the first tensor of the input, one stream.
    - `graph_bytes`: what autograd keeps of one micro-batch, if it is known.
    """

    name: str
    reversible: bool
    parameter_bytes: float
    buffer_bytes: float
    input_bytes: float
    stream_bytes: float
    output_bytes: float
    graph_bytes: float | None = None


def stage_sizes(model: Model, sample: Tree, starts: Sequence[int] | None = None) -> list[StageSize]:
    """The sizes of all stages of a model, from shapes alone: no data, no arithmetic, no memory.

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
        entered = x
        for block in part:
            x = _shape_of_output(block, x)
        whole = nn.ModuleList(block.module for block in part)
        sizes.append(
            StageSize(
                name=part[0].name,
                reversible=all(is_reversible(block.module) for block in part),
                parameter_bytes=sum(parameter.nbytes for parameter in whole.parameters()),
                buffer_bytes=sum(buffer.nbytes for buffer in whole.buffers()),
                input_bytes=tree_bytes(entered),
                stream_bytes=flatten(entered)[0][0].nbytes,
                output_bytes=tree_bytes(x),
            )
        )
    return sizes


def _shape_of_output(block: Block, x: Tree) -> Tree:
    state: dict[str, Tensor] = {**dict(block.module.named_parameters()), **dict(block.module.named_buffers())}
    shapes = {name: tensor.to("meta") for name, tensor in state.items()}
    try:
        with torch.no_grad(), replayable(0, 0, 0):
            return functional_call(block.module, shapes, (x,))
    except Exception as error:
        given = ", ".join(str(tuple(tensor.shape)) for tensor in flatten(x)[0])
        raise PlanError(f"block '{block.name}' cannot take an input of shape {given}: {error}") from error


def layer_sizes(
    layers: Sequence[LayerCost], starts: Sequence[int], *, microbatches: int = 1, input_bytes: float = 0
) -> list[StageSize]:
    """The sizes of stages of layers, of which only costs are known; they count as reversible.

    **Arguments:**

    - `layers`: their costs for a whole batch.
    - `starts`: first layer of each stage.
    - `microbatches`: parts of a batch.
    - `input_bytes`: of one batch of data.

    >>> layers = [LayerCost(name, 1, 1, 1, activation_bytes=10, weight_bytes=100) for name in "abc"]
    >>> [(size.input_bytes, size.graph_bytes) for size in layer_sizes(layers, [0, 1], microbatches=2)]
    [(0.0, 0.0), (5.0, 10.0)]
    """
    inputs = [float(input_bytes), *(float(layer.activation_bytes) for layer in layers)]
    sizes = []
    for start, end in zip(starts, [*starts[1:], len(layers)], strict=True):
        entry = inputs[start] / microbatches
        kept = (_kept(layer, size) for layer, size in zip(layers[start:end], inputs[start:end], strict=True))
        sizes.append(
            StageSize(
                name=layers[start].name,
                reversible=True,
                parameter_bytes=sum(float(layer.weight_bytes) for layer in layers[start:end]),
                buffer_bytes=0,
                input_bytes=entry,
                stream_bytes=entry,
                output_bytes=inputs[end] / microbatches,
                graph_bytes=sum(kept) / microbatches,
            )
        )
    return sizes


def _kept(layer: LayerCost, entry: float) -> float:
    """What a layer keeps of a batch from its forward to its weight gradient."""
    return entry if layer.kept_bytes is None else float(layer.kept_bytes)


# ------------------------------------------------------------------------------- stages


@dataclass(frozen=True)
class Counting:
    """What is counted as input.

    **Arguments:**

    - `both_streams`: whether the input of a reversible stage, and of the last one, is two streams or one of them.
    - `stem`: the inputs of a first stage that is not reversible: `"stored"` like any other, `"reread"` from the data
      set, so never kept, or `"paper"`: kept only where all inputs are.
    """

    both_streams: bool = True
    stem: Literal["stored", "reread", "paper"] = "stored"


#: As in PETRA's table of memory, with its two slips: one stream for reversible stages, the stem in two of four rows.
PAPER = Counting(both_streams=False, stem="paper")
CORRECTED = Counting()


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one stage holds, part by part as at the top of this file; `in_flight`: micro-batches under way."""

    name: str
    in_flight: int
    parameters: float
    buffers: float
    at_work: float
    queue: float
    copies: float
    gradients: float
    optimizer: float
    messages: float

    @property
    def kept(self) -> float:
        """What a method decides upon: all but gradients, optimizer and messages."""
        return self.parameters + self.buffers + self.at_work + self.queue + self.copies

    @property
    def total(self) -> float:
        return self.kept + self.gradients + self.optimizer + self.messages


def stage_memory(
    sizes: Sequence[StageSize],
    rules: Keeping,
    schedule: Schedule,
    *,
    microbatches: int = 1,
    accumulate: int = 1,
    delays: Sequence[int] | None = None,
    optimizer_slots: int = 1,
    message_bytes: Callable[[Route], float] | None = None,
    counting: Counting = CORRECTED,
    under_way: Buffers | None = None,
) -> list[StageMemory]:
    """What each stage holds.

    **Arguments:**

    - `sizes`: from `stage_sizes` or `layer_sizes`, for one micro-batch.
    - `rules`, `schedule`: of the method.
    - `microbatches`, `accumulate`: parts of a batch, and batches per update.
    - `delays`: per stage, micro-batches by which gradients are late, if not as the schedule says.
    - `optimizer_slots`: numbers that the optimizer keeps per weight: 0 for plain SGD, 1 with momentum, 2 for Adam.
    - `message_bytes`: of one message on a route; by default the tensors at the border that it crosses first.
    - `counting`: what counts as input.
    - `under_way`: micro-batches and messages under way, if they are known: to find them out takes long for a thousand
      stages.

    >>> from types import SimpleNamespace
    >>> from ..schedule import ticked
    >>> keeps_inputs = SimpleNamespace(keeps_graph=False, keeps_input=True, at=lambda index, count: keeps_inputs)
    >>> rules = SimpleNamespace(activation=keeps_inputs, weight_copies=lambda late: late)
    >>> sizes = stage_sizes(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), (32, 4))
    >>> [(stage.queue, stage.copies) for stage in stage_memory(sizes, rules, ticked(2))]
    [(1024, 160), (0, 0)]
    """
    count = len(sizes)
    if schedule.stages != count:
        raise PlanError(f"the schedule is for {schedule.stages} stages, but there are sizes of {count}")
    late = [schedule.lateness(stage) for stage in range(count)] if delays is None else delays
    if len(late) != count:
        raise PlanError(f"{len(late)} delays were given for {count} stages: expected one for each")
    if under_way is None:
        under_way = steady_buffers(schedule, microbatches, accumulate)
    messages = [0.0] * count
    for route, number in under_way.room.items():
        border = sizes[min(route[1], route[2])].output_bytes
        messages[route[2]] += number * (border if message_bytes is None else message_bytes(route))
    found = []
    for stage, (size, in_flight) in enumerate(zip(sizes, under_way.in_flight, strict=True)):
        rule = rules.activation.at(stage, count)
        graph, entry = size.graph_bytes, _input(size, counting, last=stage == count - 1)
        found.append(
            StageMemory(
                name=size.name,
                in_flight=in_flight,
                parameters=size.parameter_bytes,
                buffers=size.buffer_bytes,
                at_work=entry if graph is None else graph,
                queue=max(0, in_flight - 1) * _queued(size, rule, entry, counting, first=stage == 0),
                copies=rules.weight_copies(math.ceil(late[stage] / (microbatches * accumulate))) * size.parameter_bytes,
                gradients=size.parameter_bytes,
                optimizer=optimizer_slots * size.parameter_bytes,
                messages=messages[stage],
            )
        )
    return found


def _input(size: StageSize, counting: Counting, *, last: bool) -> float:
    one = (size.reversible or last) and not counting.both_streams
    return size.stream_bytes if one else size.input_bytes


def _queued(size: StageSize, rule: KeptActivation, entry: float, counting: Counting, *, first: bool) -> float:
    """Bytes kept of each micro-batch under way."""
    if rule.keeps_graph and size.graph_bytes is not None:
        return size.graph_bytes
    keeps = rule.keeps_graph or rule.keeps_input
    if first and not size.reversible and (counting.stem == "reread" or (counting.stem == "paper" and not keeps)):
        return 0
    return entry if keeps or not size.reversible else 0


def memory_table(rows: Mapping[str, Sequence[StageMemory]]) -> str:
    """What is kept under several settings, and what each saves against the first.

    >>> from dataclasses import replace
    >>> all_kept = StageMemory("", 2, 1e9, 0, 1e9, 1e9, 1e9, 0, 0, 0)
    >>> print(memory_table({"all": [all_kept], "no copies": [replace(all_kept, copies=0)]}))
    | kept | GB | saving |
    |---|---|---|
    | all | 4.0 | 0.0 % |
    | no copies | 3.0 | 25.0 % |
    """
    totals = {name: sum(stage.kept for stage in stages) for name, stages in rows.items()}
    most = next(iter(totals.values()))
    lines = ["| kept | GB | saving |", "|---|---|---|"]
    for name, total in totals.items():
        lines.append(f"| {name} | {total / GIGABYTE:.1f} | {100 * (1 - total / most):.1f} % |")
    return "\n".join(lines)


# -------------------------------------------------------------------------------- tasks


def task_memory(
    planned: PlannedTasks,
    rules: Keeping,
    schedule: Schedule,
    devices: Sequence[int],
    *,
    message_bytes: Callable[[Route], float],
    per_update: int = 1,
    optimizer_slots: int = 1,
    input_bytes: float = 0,
) -> list[float]:
    """Bytes on each device where tasks are placed one by one.

    Weights and their versions are where the forward runs, activations where the weight gradient is computed.

    **Arguments:**

    - `planned`: for the costs of one micro-batch.
    - `schedule`, `devices`: of its tasks, and the device of each station there.
    - `per_update`: micro-batches per update.
    - `optimizer_slots`, `message_bytes`: as in `stage_memory`.
    - `input_bytes`: of one micro-batch of data.
    """
    where = {(task.kind, task.layer): task.device for task in planned.tasks}
    inputs = [float(input_bytes), *(float(layer.activation_bytes) for layer in planned.layers)]
    found = [0.0] * planned.devices
    for layer, cost in enumerate(planned.layers):
        copies = rules.weight_copies(math.ceil(planned.delays.weight_stash[layer] / per_update))
        found[where["F", layer]] += float(cost.weight_bytes) * (2 + optimizer_slots + copies)
        found[where["G", layer]] += (planned.delays.activation[layer] + 1) * _kept(cost, inputs[layer])
    for route, number in steady_buffers(schedule).room.items():
        sender, receiver = devices[route[1]], devices[route[2]]
        found[receiver] += number * message_bytes(route) if sender != receiver else 0.0
    return found
