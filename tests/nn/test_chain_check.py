"""What cannot be cut is refused by name, and looking changes nothing."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import PlanError
from unlatch.nn import chain, check_chain


class Listed(nn.Module):
    """A model with blocks() and no forward of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


class Save(nn.Module):
    """Keeps its output in a place that a later block reads: a skip outside of the chain."""

    def __init__(self, shelf: dict[str, Tensor]) -> None:
        super().__init__()
        self.shelf = shelf
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.shelf["x"] = self.layer(x)
        return self.shelf["x"]


class Load(nn.Module):
    def __init__(self, shelf: dict[str, Tensor]) -> None:
        super().__init__()
        self.shelf = shelf

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shelf["x"]


def check(model: nn.Module | list[nn.Module], starts: list[int], sample: object = None) -> None:
    check_chain(chain(model), model, starts, sample)


def test_sound_models_pass() -> None:
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(4, 2))
    for starts in ([0], [0, 2], [0, 1, 2, 3, 4]):
        check(model, starts, x)
        check(list(model), starts, x)
    tokens = torch.randint(0, 5, (3, 7))
    check(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), [0, 1], tokens)


def test_uncovered_parameters() -> None:
    class Forgets(Listed):
        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 2))
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(2, 2)

    with pytest.raises(PlanError, match=r"'scale', 'head\.weight', 'head\.bias' are in no block"):
        check(Forgets(), [0])


def test_tied_weights_may_be_cut_apart() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    check(model, [0], torch.randn(3, 2))
    check(model, [0, 1, 2], torch.randn(3, 2))


@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_two_parameters_over_one_memory(frozen: int | None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    said = r"the memory of two parameters, '0\.weight' and '1\.weight'"
    if frozen is not None:
        model[frozen].weight.requires_grad_(False)
        said += rf" \('{frozen}\.weight' is frozen\)"
    check(model, [0])
    with pytest.raises(PlanError, match=said):
        check(model, [0, 1])


def test_a_frozen_weight_is_shared_by_stages_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    check(model, [0, 1, 2], torch.randn(3, 2))
    assert [type(block.module) for block in chain(model)] == [nn.Linear, nn.Tanh, nn.Linear]


def test_module_in_two_stages() -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    with pytest.raises(PlanError, match=r"BatchNorm1d is shared by block '0' \(stage 0\) and block '2' \(stage 1\)"):
        check([norm, nn.ReLU(), norm], [0, 2])
    trained = nn.BatchNorm1d(2)
    with pytest.raises(PlanError, match=r"buffer 'running_mean' is shared by block '0' \(stage 0\) and block '2'"):
        check([trained, nn.ReLU(), trained], [0, 2])
    inner = [nn.Sequential() for _ in range(2)]
    for part in inner:
        part.add_module("norm", norm)
    with pytest.raises(PlanError, match=r"module 'norm' \(BatchNorm1d\) is shared by"):
        check(inner, [0, 1])
    shelf: dict[str, Tensor] = {}
    own = Load(shelf)
    with pytest.raises(PlanError, match="Load is shared by"):
        check([own, nn.ReLU(), own], [0, 1])
    check([norm, nn.ReLU(), norm], [0])


def test_shared_activation_is_fine() -> None:
    relu = nn.ReLU()
    check([nn.Linear(2, 2), relu, nn.Linear(2, 2), relu], [0, 2], torch.randn(3, 2))


def test_skip_across_a_cut() -> None:
    shelf: dict[str, Tensor] = {}
    model = [nn.Linear(4, 4), Save(shelf), nn.Linear(4, 4), Load(shelf)]
    x = torch.randn(5, 4)
    check(model, [0, 1], x)
    check(model, [0], x)
    for starts in ([0, 2], [0, 3]):
        with pytest.raises(PlanError, match=r"block '3' \(stage 1\) uses a tensor of block '1' \(stage 0\)"):
            check(model, starts, x)


class KeepMask(nn.Module):
    """Leaves a mask behind, which autograd does not see."""

    def __init__(self, shelf: dict[str, Tensor]) -> None:
        super().__init__()
        self.shelf = shelf

    def forward(self, x: Tensor) -> Tensor:
        self.shelf["mask"] = x > 0
        return x * 2


class UseMask(nn.Module):
    def __init__(self, shelf: dict[str, Tensor]) -> None:
        super().__init__()
        self.shelf = shelf

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shelf["mask"]


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_mask_left_behind_for_a_later_stage(rows: int) -> None:
    shelf: dict[str, Tensor] = {}
    model = [KeepMask(shelf), nn.Linear(4, 4), UseMask(shelf), nn.Tanh()]
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    check(model, [0], x)
    check(model, [0, 3], x)
    for starts in ([0, 1], [0, 2], [0, 1, 2, 3]):
        with pytest.raises(PlanError, match=r"block '2' \(stage \d\) answers the same input differently"):
            check(model, starts, x)


def test_noise_in_evaluation_is_no_fault() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    class Noisy(Listed):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    check(Noisy(Noise(), nn.Linear(4, 4), Noise()), [0, 1, 2], torch.randn(5, 4))


def test_parameter_reached_behind_the_chain() -> None:
    class Head(nn.Module):
        def __init__(self, embedding: nn.Embedding) -> None:
            super().__init__()
            self.hidden = [embedding]  # a list hides it from nn.Module

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.hidden[0].weight.T

    embedding = nn.Embedding(5, 4)
    model = [embedding, nn.Linear(4, 4), Head(embedding)]
    tokens = torch.randint(0, 5, (2, 3))
    check(model, [0], tokens)
    with pytest.raises(PlanError, match=r"block '2' \(stage 1\) uses a parameter of block '0' \(stage 0\)"):
        check(model, [0, 1], tokens)


def test_operation_outside_of_the_blocks() -> None:
    class Scaled(Listed):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return 2 * x

    class Faithful(Listed):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Pair(Listed):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return self.layers[0](x), None

    class WithTargets(Listed):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.layers[0](x) - y).sum()

    x = torch.randn(3, 4)
    check(Faithful(nn.Linear(4, 4), nn.Linear(4, 4)), [0, 1], x)
    with pytest.raises(PlanError, match=r"Scaled\.forward and the composition of its blocks\(\) differ on the sample"):
        check(Scaled(nn.Linear(4, 4)), [0], x)
    with pytest.raises(PlanError, match=r"the model returns .*tuple"):
        check(Pair(nn.Linear(4, 4)), [0], x)
    check(WithTargets(nn.Linear(4, 4)), [0], x)


def test_sequential_with_another_forward() -> None:
    class Odd(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    with pytest.raises(PlanError, match="differ"):
        check(Odd(nn.Linear(2, 2)), [0], torch.randn(3, 2))


def test_block_that_fails_is_named() -> None:
    with pytest.raises(PlanError, match=r"block '1' fails on its input tensor of \(2, 4\) torch\.float32"):
        check([nn.Linear(3, 4), nn.Linear(3, 4)], [0], torch.randn(6, 3))


def test_lazy_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch warn about lazy modules
        lazy = nn.LazyLinear(3)
    with pytest.raises(PlanError, match=r"'0\.weight', '0\.bias' are not initialised"):
        check([lazy], [0])


def test_looking_changes_nothing() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + torch.rand(()) * 0

    class Noisy(Listed):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Noisy(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Counter(), nn.Linear(4, 2))
    model.train()
    model.layers[1].eval()
    model(torch.randn(4, 4)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    check(model, [0, 2], x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None
    with torch.no_grad():
        check(model, [0, 2], x)
