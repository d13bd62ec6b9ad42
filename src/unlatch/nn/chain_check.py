"""Find, before anything runs, why a chain of blocks cannot be trained in separate stages.

Some faults show in the modules alone: parameters in no block, weights or modules in two stages. Others show only in a
forward: a tensor that reaches a later stage by another way than the chain, or a model that does more than its blocks.
These need a sample. Nothing of the model is changed by looking.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..errors import PlanError, ShapeMismatch
from .chain import Block, Model, as_module, stage_of_blocks
from .foreign import foreign
from .randomness import replayable
from .statistics import frozen_statistics
from .tree import Tree, batch_size, flatten, map_tensors, unflatten

__all__ = ["Tie", "check_chain", "check_own_loss", "one_argument", "ties"]

_ROWS = 2


def check_chain(blocks: Sequence[Block], model: Model, starts: Sequence[int], sample: Tree = None) -> None:
    """Raise `PlanError`, with the names of the culprits, if stages that start at `starts` would not compute the model.

    **Arguments:**

    - `blocks`: the chain of `model`.
    - `model`: the model, for the original names and for its own forward.
    - `starts`: position of the first block of each stage.
    - `sample`: an input of the model. A few rows of it are run through the blocks in evaluation mode to find tensors
        that pass a cut unseen, and operations outside of the blocks. Without it only the modules are inspected.

    >>> from .chain import chain
    >>> shared = nn.BatchNorm1d(2, affine=False)
    >>> model = nn.Sequential(shared, nn.ReLU(), shared)
    >>> check_chain(chain(model), model, [0])
    >>> check_chain(chain(model), model, [0, 2])
    Traceback (most recent call last):
    ...
    unlatch.errors.PlanError: module BatchNorm1d is shared by block '0' (stage 0) and block '2' (stage 1)...
    """
    root = as_module(model)
    stages = stage_of_blocks(len(blocks), starts)
    _check_materialised(root)
    _check_coverage(blocks, root)
    _check_sharing(blocks, root, stages)
    if sample is not None:
        with _untouched([root, *(block.module for block in blocks)]):
            few = _rows(sample, 0)
            with replayable(0, 0, 0):
                output = _check_connections(blocks, stages, few)
            forward = _own_forward(root)
            if forward is not None:
                with replayable(0, 0, 0):
                    expected = _run(forward, f"{type(root).__name__}.forward", map_tensors(Tensor.clone, few))
                _compare(root, expected, output)
            _check_memory(blocks, stages, few, _rows(sample, 1))


def check_own_loss(root: nn.Module, x: Tree, y: Tree) -> None:
    """Raise `PlanError` if the loss that is computed here for a model from elsewhere is not the one it computes itself.

    **Arguments:** `x`, `y`: a batch; a few rows of it are tried.
    """
    from_elsewhere = foreign(root)
    if from_elsewhere is None or from_elsewhere.loss is None:
        return
    x, y = _rows(x, 0), _rows(y, 0)
    try:
        with _untouched([root]), torch.no_grad():
            total, count = from_elsewhere.loss(from_elsewhere.output(x), y)
            expected = from_elsewhere.own_loss(x, y)
    except Exception as error:
        shown = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise PlanError(f"the loss of {type(root).__name__} fails on labels {shown}: {error}") from error
    # The model may compute in single precision whatever it is given.
    if expected is not None and count and not _close(expected.float(), (total / count).float()):
        raise PlanError(
            f"{type(root).__name__} computes another loss than is known for its kind: {float(expected)} itself, "
            f"{float(total / count)} here; pass that loss as loss_fn, a function of output and labels"
        )


def _check_materialised(root: nn.Module) -> None:
    lazy = [
        name
        for name, tensor in (*root.named_parameters(), *root.named_buffers())
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
    ]
    if lazy:
        raise PlanError(f"{_quote(lazy)} not initialised yet: run the model once on a sample before it is cut")


def _check_coverage(blocks: Sequence[Block], root: nn.Module) -> None:
    covered = {id(parameter) for block in blocks for parameter in block.module.parameters()}
    missing = [name for name, parameter in root.named_parameters() if id(parameter) not in covered]
    if missing:
        raise PlanError(
            f"{_quote(missing)} in no block and would not be trained: the blocks must hold every parameter of the model"
        )


class Tie(NamedTuple):
    """Two blocks, `first` before `second`, that must lie in one stage because of `what` they share."""

    first: int
    second: int
    what: str


def ties(blocks: Sequence[Block], model: Model | None = None) -> list[Tie]:
    """Find the blocks that share memory or modules with state. A weight in common is none of it: `chain` sees to that.

    **Arguments:**

    - `blocks`: the chain.
    - `model`: for the original names of parameters; without it, names inside the block.

    >>> from .chain import chain
    >>> shared = nn.BatchNorm1d(2, affine=False)
    >>> ties(chain([shared, nn.ReLU(), shared]))  # doctest: +ELLIPSIS
    [Tie(first=0, second=2, what='module BatchNorm1d'), Tie(...), Tie(...), Tie(...)]
    """
    names = {id(one): name for name, one in as_module(model).named_parameters()} if model is not None else {}
    found: list[Tie] = []
    owners: dict[int, tuple[int, str, nn.Parameter]] = {}
    for index, block in enumerate(blocks):
        for local, parameter in block.module.named_parameters():
            name = names.get(id(parameter), f"{block.name}.{local}")
            # Two Parameters over the same memory are tied as well; memory that does not exist (meta) has address 0.
            first, other, owner = owners.setdefault(parameter.data_ptr() or id(parameter), (index, name, parameter))
            if first != index and owner is not parameter:
                frozen = next((n for n, p in ((other, owner), (name, parameter)) if not p.requires_grad), None)
                state = f" ('{frozen}' is frozen)" if frozen is not None else ""
                found.append(Tie(first, index, f"the memory of two parameters, '{other}' and '{name}'{state}"))
    users: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for local, module in block.module.named_modules():
            first = users.setdefault(id(module), index)
            if first != index and not _stateless(module):
                kind = type(module).__name__
                found.append(Tie(first, index, f"module '{local}' ({kind})" if local else f"module {kind}"))
    # A module whose weights are carried is another one in each block, but with the same buffers.
    users = {}
    for index, block in enumerate(blocks):
        for local, buffer in block.module.named_buffers():
            first = users.setdefault(id(buffer), index)
            if first != index:
                found.append(Tie(first, index, f"buffer '{local.removeprefix('block.')}'"))
    return found


def _check_sharing(blocks: Sequence[Block], root: nn.Module, stages: Sequence[int]) -> None:
    for first, second, what in ties(blocks, root):
        if stages[first] != stages[second]:
            raise PlanError(
                f"{what} is shared by {_place(blocks, stages, first)} and {_place(blocks, stages, second)}: what is "
                "shared must lie in one stage; use separate ones, or choose a split that keeps these blocks together"
            )


def _stateless(module: nn.Module) -> bool:
    """Whether sharing cannot matter: torch's own modules keep state in parameters and buffers only."""
    own = all(type(part).__module__.startswith("torch.nn.") for part in module.modules())
    return own and next(module.parameters(), None) is None and next(module.buffers(), None) is None


def _check_connections(blocks: Sequence[Block], stages: Sequence[int], sample: Tree) -> Tree:
    """Run the blocks cut off from each other; what autograd still finds of an earlier stage came by another way."""
    owners: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for parameter in block.module.parameters():
            owners.setdefault(id(parameter), index)
    inputs: dict[int, int] = {}
    alive: list[Tensor] = []  # an id stays unique only while its tensor lives
    x = sample
    for index, block in enumerate(blocks):
        tensors, structure = flatten(map_tensors(_as_leaf, x))
        alive += tensors
        inputs |= {id(tensor): index for tensor in tensors}
        # The block gets copies, for it may write into its input, which a leaf forbids.
        x = _run(block.module, f"block '{block.name}'", unflatten(structure, [tensor.clone() for tensor in tensors]))
        # A stored activation also leads to the parameters that made it: name the activation first.
        for leaf in sorted(_leaves(flatten(x)[0]), key=lambda leaf: id(leaf) not in inputs):
            source = inputs.get(id(leaf), owners.get(id(leaf), index))
            if stages[source] == stages[index]:
                continue
            what = "a tensor" if id(leaf) in inputs else "a parameter"
            raise PlanError(
                f"{_place(blocks, stages, index)} uses {what} of {_place(blocks, stages, source)} that does not "
                "come through the chain: pass it along in a tuple or dict, or choose a split that keeps these together"
            )
    return x


def _check_memory(blocks: Sequence[Block], stages: Sequence[int], sample: Tree, other: Tree) -> None:
    """Let another batch pass, then ask each stage again, the last first: whatever it reads elsewhere is now different.

    This also finds what autograd does not see, such as a mask that a block leaves behind for a later one.
    """
    answers = _answers(blocks, range(len(blocks)), sample)
    _answers(blocks, range(len(blocks)), other)
    for stage in reversed(range(stages[-1] + 1)):
        span = range(stages.index(stage), len(stages) - list(reversed(stages)).index(stage))
        x = answers[span.start - 1] if span.start else sample
        for index, answer in zip(span, _answers(blocks, span, x), strict=True):
            if not _same(answer, answers[index]):
                raise PlanError(
                    f"{_place(blocks, stages, index)} answers the same input differently after another batch: it uses "
                    "something kept outside of the chain; pass it along in a tuple or dict, or keep it in one stage"
                )


@torch.no_grad()
def _answers(blocks: Sequence[Block], span: range, x: Tree) -> list[Tree]:
    found = []
    for index in span:
        with replayable(0, index, 0):
            x = _run(blocks[index].module, f"block '{blocks[index].name}'", map_tensors(Tensor.clone, x))
        found.append(x)
    return found


def _same(one: Tree, other: Tree) -> bool:
    tensors, structure = flatten(one)
    others, other_structure = flatten(other)
    if structure != other_structure:
        return False
    return all(a.shape == b.shape and _close(a, b) for a, b in zip(tensors, others, strict=True))


def one_argument(x: Tree) -> str:
    """What to say of a block that fails on `x`, if it is given more than a tensor.

    >>> one_argument(torch.zeros(1))
    ''
    """
    if isinstance(x, Tensor):
        return ""
    return (
        f". A block takes all that the block before it returns, here a {type(x).__name__}, as its one argument: put a "
        "module between them, or around it, that takes it apart"
    )


def _run(module: Callable[[Tree], Tree], name: str, x: Tree) -> Tree:
    try:
        y = module(x)
    except Exception as error:
        tensors, structure = flatten(x)
        given = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]
        hint = one_argument(x)
        raise PlanError(f"{name} fails on its input {structure} of {', '.join(given)}: {error}{hint}") from error
    try:
        flatten(y)
    except ShapeMismatch as error:
        raise PlanError(f"{name} returns what cannot be passed on: {error}") from error
    return y


def _own_forward(root: nn.Module) -> Callable[[Tree], Tree] | None:
    """What the model computes by itself, from one input as the blocks do, if it does."""
    from_elsewhere = foreign(root)
    if from_elsewhere is not None:
        return from_elsewhere.output
    if type(root).forward in (nn.Module.forward, nn.Sequential.forward, nn.ModuleList.forward):
        return None
    try:
        inspect.signature(root.forward).bind(None)
    except TypeError:
        return None
    return root


def _compare(root: nn.Module, expected: Tree, got: Tree) -> None:
    said = f"{type(root).__name__}.forward and the composition of its blocks() differ"
    advice = "every operation of the model must be inside a block; or pass the list of blocks instead of the model"
    wanted, wanted_structure = flatten(expected)
    tensors, structure = flatten(got)
    if wanted_structure != structure:
        raise PlanError(f"{said}: the model returns {wanted_structure}, the blocks {structure}; {advice}")
    for one, other in zip(wanted, tensors, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            raise PlanError(
                f"{said}: the model returns {tuple(one.shape)} {one.dtype}, "
                f"the blocks {tuple(other.shape)} {other.dtype}; {advice}"
            )
        if not _close(one, other):
            worst = (one - other).abs().max().item() if one.is_floating_point() else "integers"
            raise PlanError(f"{said} on the sample (largest difference: {worst}); {advice}")


def _close(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()) or one.numel() == 0:
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    scale = float(one.detach().abs().max().nan_to_num(0.0, 0.0))
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaf variables that the outputs depend on."""
    seen: set[object] = set()
    todo = [output.grad_fn for output in outputs]
    yield from (output for output in outputs if output.grad_fn is None and output.requires_grad)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        todo += [following for following, _ in node.next_functions]


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _rows(sample: Tree, part: int) -> Tree:
    """The first (0) or the next (1) few rows of the sample; of a small sample everything, or everything upside down."""
    try:
        enough = batch_size(sample) >= 2 * _ROWS
    except ShapeMismatch:
        enough = False
    if enough:
        return map_tensors(lambda tensor: tensor[part * _ROWS : (part + 1) * _ROWS], sample)
    return map_tensors(lambda tensor: tensor.flip(0) if tensor.dim() else tensor, sample) if part else sample


@contextmanager
def _untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode with gradients recorded; afterwards mode, buffers and random state are as they were."""
    parts = {part: part.training for module in modules for part in module.modules()}
    frozen = frozen_statistics(nn.ModuleList(modules))
    try:
        for part in parts:
            part.training = False
        with torch.enable_grad(), frozen:
            yield
    finally:
        for part, training in parts.items():
            part.training = training


def _place(blocks: Sequence[Block], stages: Sequence[int], index: int) -> str:
    return f"block '{blocks[index].name}' (stage {stages[index]})"


def _quote(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:8])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"parameter{'s' if len(names) > 1 else ''} {shown}{more} {'are' if len(names) > 1 else 'is'}"
