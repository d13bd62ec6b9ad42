"""Going backward from the output alone: the gradients of the stored graph, at the cost of one branch evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import ConfigError, PlanError
from unlatch.nn.chain import StageChain, chain
from unlatch.nn.inverse_check import relative_error
from unlatch.nn.randomness import replayable
from unlatch.nn.reversible import Coupling, Merge, RevBlock, SpaceToDepth, Split, invert_and_differentiate
from unlatch.nn.statistics import frozen_statistics
from unlatch.nn.tree import Tree, flatten, map_tensors

Streams = tuple[Tensor, Tensor]


def pair(*shape: int, dtype: torch.dtype = torch.float64) -> Streams:
    return torch.randn(*shape, dtype=dtype), torch.randn(*shape, dtype=dtype)


def conv_branch(width: int, dropout: float = 0.0) -> nn.Module:
    """In-place on its input, with batch norm and, if asked for, dropout."""
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
    )


class Affine(nn.Module):
    """A module with an inverse of its own that works in place on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, state: Streams) -> Streams:
        self.norm(state[0].detach().flatten(1)[:, :3])
        return state[0].mul_(self.scale), state[1] + state[0]

    def inverse(self, state: Streams) -> Streams:
        return state[0] / self.scale, state[1] - state[0]


def stored_graph(block: nn.Module, x: Tree, grad: Callable[[Tree], Tree]) -> tuple[Tree, Tree, Tree, dict[str, Tensor]]:
    """Output, its gradient, and autograd's gradients of the input and of the parameters, which are then cleared."""
    leaves = map_tensors(lambda t: t.detach().clone().requires_grad_(), x)
    y = block(map_tensors(Tensor.clone, leaves))
    grad_y = grad(y)
    torch.autograd.backward(flatten(y)[0], flatten(grad_y)[0])
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    for parameter in block.parameters():
        parameter.grad = None
    return map_tensors(Tensor.detach, y), grad_y, map_tensors(lambda t: t.grad, leaves), found


def random_grad(y: Tree) -> Tree:
    return map_tensors(lambda t: torch.randn_like(t), y)


def gradients(block: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in block.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], true: dict[str, Tensor], tol: float = 1e-12) -> None:
    assert list(found) == list(true)
    for name in true:
        scale = max(1.0, float(true[name].abs().max()))
        assert float((found[name] - true[name]).abs().max()) < tol * scale, name


MODULES: dict[str, Callable[[], nn.Module]] = {
    "coupling": lambda: Coupling(conv_branch(4)),
    "revblock": lambda: RevBlock(conv_branch(4), nn.Conv2d(4, 4, 1)),
    "run": lambda: nn.Sequential(*(Coupling(conv_branch(4, dropout=0.4)) for _ in range(5))),
    "stage": lambda: StageChain(chain(nn.Sequential(RevBlock(nn.Tanh(), conv_branch(4)), Coupling(conv_branch(4))))),
    "generic": Affine,
    "mixed": lambda: nn.Sequential(
        Coupling(conv_branch(4)), Affine(), SpaceToDepth(2), Coupling(conv_branch(16)), Merge()
    ),
}


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_equal_the_stored_graph(kind: str) -> None:
    block = MODULES[kind]().double()
    x = pair(3, 4, 6, 6)
    with replayable(0, 0, 0):
        y, grad_y, true_grad_x, true = stored_graph(block, x, random_grad)
    with replayable(0, 0, 0):
        x_again, grad_x = invert_and_differentiate(block, y, grad_y)
    assert relative_error(x_again, x) < 1e-13
    assert relative_error(grad_x, true_grad_x) < 1e-12
    assert_close(gradients(block), true)


def test_a_tensor_goes_in_and_out_of_a_network_that_is_reversible_as_a_whole() -> None:
    run = nn.Sequential(Split(), Coupling(conv_branch(2)), SpaceToDepth(2), Coupling(conv_branch(8)), Merge()).double()
    x = torch.randn(3, 4, 4, 4, dtype=torch.float64)
    y, grad_y, true_grad_x, true = stored_graph(run, x, random_grad)
    x_again, grad_x = invert_and_differentiate(run, y, grad_y)
    assert relative_error(x_again, x) < 1e-13
    assert relative_error(grad_x, true_grad_x) < 1e-12
    assert_close(gradients(run), true)


def test_gradients_do_not_depend_on_the_carried_stream() -> None:
    block = Coupling(conv_branch(4)).double()
    (y, y_carried), grad = pair(3, 4, 6, 6), pair(3, 4, 6, 6)
    _, grad_x = invert_and_differentiate(block, (y, y_carried), grad)
    first = {name: tensor.clone() for name, tensor in gradients(block).items()}
    block.zero_grad()
    _, again = invert_and_differentiate(block, (torch.randn_like(y) * 1e3, y_carried), grad)
    assert torch.equal(grad_x[0], again[0])
    assert torch.equal(grad_x[1], again[1])
    assert all(torch.equal(tensor, first[name]) for name, tensor in gradients(block).items())


def test_a_branch_is_evaluated_twice_per_batch_in_total() -> None:
    calls: list[str] = []
    run = nn.Sequential(Coupling(conv_branch(4)), RevBlock(conv_branch(4), conv_branch(4)))
    branches = {"first": run[0].f, "f": run[1].f.f, "g": run[1].g.f}
    backwards: list[str] = []
    for name, branch in branches.items():
        branch.register_forward_hook(lambda module, args, out, name=name: calls.append(name))
        branch.register_full_backward_hook(lambda module, gi, go, name=name: backwards.append(name))
        branch[0].inplace = False  # full backward hooks do not allow a module to alter its input
    with torch.no_grad():
        y = run(pair(2, 4, 5, 5, dtype=torch.float32))
    invert_and_differentiate(run, y, pair(2, 4, 5, 5, dtype=torch.float32))
    assert calls == ["first", "f", "g", "g", "f", "first"]
    assert backwards == ["g", "f", "first"]


def test_graphs_are_freed_block_by_block() -> None:
    """O15: when a branch starts, nothing that another branch made is alive."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in made))
            inner = torch.tanh(self.linear(x))
            made.append(weakref.ref(inner))
            return inner * 2

    run = nn.Sequential(*(Coupling(Watched()) for _ in range(6)))
    with torch.no_grad():
        y = run(pair(2, 3, dtype=torch.float32))
    invert_and_differentiate(run, y, pair(2, 3, dtype=torch.float32))
    assert len(alive) == 12
    assert not any(alive)


def test_gradients_accumulate() -> None:
    block = Coupling(nn.Linear(3, 3)).double()
    y, grad = pair(2, 3), pair(2, 3)
    invert_and_differentiate(block, y, grad)
    once = {name: tensor.clone() for name, tensor in gradients(block).items()}
    invert_and_differentiate(block, y, grad)
    assert_close(gradients(block), {name: 2 * tensor for name, tensor in once.items()})


def test_inputs_are_left_as_they_are() -> None:
    block = nn.Sequential(Coupling(conv_branch(4)), Coupling(conv_branch(4))).double()
    y, grad = pair(3, 4, 5, 5), pair(3, 4, 5, 5)
    copies = [t.clone() for t in (*y, *grad)]
    x, grad_x = invert_and_differentiate(block, y, grad)
    assert all(torch.equal(a, b) for a, b in zip((*y, *grad), copies, strict=True))
    assert not any(t.requires_grad for t in (*x, *grad_x))


def test_works_under_no_grad_and_with_frozen_parameters() -> None:
    run = nn.Sequential(
        Coupling(nn.Linear(3, 3)), Coupling(nn.Linear(3, 3)), Affine(), Coupling(nn.Identity())
    ).double()
    run[0].requires_grad_(False)
    x = pair(2, 3)
    y, grad_y, true_grad_x, true = stored_graph(run, x, random_grad)
    with torch.no_grad():
        _, grad_x = invert_and_differentiate(run, y, grad_y)
    assert relative_error(grad_x, true_grad_x) < 1e-13
    assert set(gradients(run)) == {"1.f.weight", "1.f.bias", "2.scale"}
    assert_close(gradients(run), true)


def test_a_branch_that_ignores_its_input() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x)

    grad = pair(2, 3)
    _, grad_x = invert_and_differentiate(Coupling(Constant()), pair(2, 3), grad)
    assert torch.equal(grad_x[0], grad[1])
    assert torch.equal(grad_x[1], grad[0])


def test_other_parameters_receive_their_own_gradients() -> None:
    run = nn.Sequential(Coupling(nn.Linear(3, 3)), Affine(), RevBlock(nn.Linear(3, 3), nn.Tanh())).double()
    x = pair(4, 3)
    y, grad_y, true_grad_x, true = stored_graph(run, x, random_grad)
    old = {name: p.detach().clone().requires_grad_() for name, p in run.named_parameters()}
    with torch.no_grad():
        for parameter in run.parameters():
            parameter.add_(1.0)
    x_again, grad_x = invert_and_differentiate(run, y, grad_y, params=old)
    assert relative_error(x_again, x) < 1e-13
    assert relative_error(grad_x, true_grad_x) < 1e-12
    assert not gradients(run)
    assert_close({name: p.grad for name, p in old.items() if p.grad is not None}, true)


@pytest.mark.parametrize("generic", [False, True])
def test_inverse_and_gradient_may_use_different_parameters(generic: bool) -> None:
    """Inverse with the forward's weights, gradient with the current ones: delayed gradients with an exact input."""
    block = Affine() if generic else Coupling(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    block.double()
    x = pair(4, 3)
    with torch.no_grad():
        y = block(map_tensors(Tensor.clone, x))
    old = {name: p.detach().clone() for name, p in block.named_parameters()}
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.5)
    grad = pair(4, 3)
    _, _, true_grad_x, true = stored_graph(block, x, lambda _: grad)
    x_again, grad_x = invert_and_differentiate(block, y, grad, inverse_params=old)
    assert relative_error(x_again, x) < 1e-14
    assert relative_error(grad_x, true_grad_x) < 1e-13
    assert_close(gradients(block), true)


def test_shared_parameters_add_up() -> None:
    shared = nn.Linear(3, 3)
    run = nn.Sequential(Coupling(shared), Coupling(nn.Sequential(shared, nn.Tanh()))).double()
    y, grad_y, true_grad_x, true = stored_graph(run, pair(2, 3), random_grad)
    _, grad_x = invert_and_differentiate(run, y, grad_y)
    assert relative_error(grad_x, true_grad_x) < 1e-13
    assert_close(gradients(run), true)


# ---------------------------------------------------------------------------------------------------------- statistics


def statistics(block: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in block.named_buffers()}


@pytest.mark.parametrize("bn", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["coupling", "generic", "mixed"])
def test_statistics_change_once_per_batch_in_the_chosen_pass(kind: str, bn: str) -> None:
    torch.manual_seed(0)
    block, reference = MODULES[kind]().double(), MODULES[kind]().double()
    reference.load_state_dict(block.state_dict())
    x = pair(3, 4, 6, 6)
    with torch.no_grad():
        reference(map_tensors(Tensor.clone, x))
    fresh, expected = statistics(block), statistics(reference)
    with torch.no_grad():
        if bn == "forward":
            y = block(map_tensors(Tensor.clone, x))
        else:
            with frozen_statistics(block):
                y = block(map_tensors(Tensor.clone, x))
    after_forward = statistics(block)
    invert_and_differentiate(block, y, map_tensors(torch.ones_like, y), bn=bn)
    after_backward = statistics(block)
    changed_forward = any(not torch.equal(fresh[name], after_forward[name]) for name in fresh)
    changed_backward = any(not torch.equal(after_forward[name], after_backward[name]) for name in fresh)
    assert (changed_forward, changed_backward) == (bn == "forward", bn == "backward")
    for name, tensor in expected.items():
        assert torch.allclose(after_backward[name], tensor, rtol=1e-12, atol=1e-14), name


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 'forward' or 'backward', got 'both'"):
        invert_and_differentiate(Coupling(nn.Tanh()), pair(1, 1), pair(1, 1), bn="both")  # type: ignore[arg-type]


def test_a_part_that_is_not_reversible_is_named() -> None:
    with pytest.raises(PlanError, match=r"'Sequential'.*not reversible"):
        invert_and_differentiate(nn.Sequential(Coupling(nn.Tanh()), nn.Tanh()), pair(1, 1), pair(1, 1))


# ----------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("kind", ["run", "revblock"])
def test_streams_stay_in_single_precision_under_autocast(kind: str) -> None:
    block = MODULES[kind]()
    x = pair(3, 4, 6, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), replayable(0, 0, 0):
        y, grad_y, true_grad_x, true = stored_graph(block, x, random_grad)
    inner: list[torch.dtype] = []
    for module in block.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, args, out: inner.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16), replayable(0, 0, 0):
        x_again, grad_x = invert_and_differentiate(block, y, grad_y)
    assert set(inner) == {torch.bfloat16}
    assert {t.dtype for t in (*y, *x_again, *grad_x)} == {torch.float32}
    # A stream in bfloat16 would be wrong by its rounding, 4e-3, at each of the blocks.
    assert relative_error(x_again, x) < 1e-2
    assert relative_error(grad_x, true_grad_x) < 2e-2
    assert_close(gradients(block), true, tol=5e-2)


def test_half_precision_streams_are_promoted() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        state = Split()(torch.randn(2, 4, 3, 3).bfloat16())
        y = Coupling(nn.Tanh())((torch.randn(2).bfloat16(), torch.randn(2).bfloat16()))
    assert {t.dtype for t in (*state, *y)} == {torch.float32}
