"""Every model is the composition of its blocks, and blocks leave their inputs alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unlatch import models
from unlatch.models import GPT, MLP, VGG, Chain, CifarResNet, ResNet, WideResNet

IMAGE = (2, 3, 16, 16)


def image() -> Tensor:
    return torch.randn(IMAGE)


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 6))


CASES: dict[str, tuple[Callable[[], Chain], Callable[[], Tensor]]] = {
    "mlp": (lambda: MLP((768, 12, 12, 10), dropout=0.3, batch_norm=True), image),
    "mlp-tanh": (lambda: MLP((768, 12, 10), activation="tanh"), image),
    "cifar-pad": (lambda: CifarResNet(14, width=4), image),
    "cifar-conv": (lambda: CifarResNet(8, width=4, shortcut="conv", stem_stride=2), image),
    "resnet-basic": (lambda: ResNet((1, 2, 1, 1), classes=10, width=4), image),
    "resnet-bottleneck": (lambda: ResNet((2, 1, 1, 1), bottleneck=True, classes=10, width=4, stem="small"), image),
    "wide": (lambda: WideResNet(16, 1, dropout=0.2), image),
    "vgg": (lambda: VGG(11), image),
    "gpt": (lambda: GPT(vocabulary=11, context=8, depth=2, width=8, heads=2, dropout=0.1), tokens),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Chain, Tensor]:
    build, sample = CASES[request.param]
    return build(), sample()


def name_of(model: nn.Module, block: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is block)


def test_forward_is_the_composition_of_the_blocks(case: tuple[Chain, Tensor]) -> None:
    model, x = case
    model.eval()
    h = x
    for block in model.blocks():
        h = block(h)
    assert torch.equal(h, model(x))


def test_output_has_ten_classes(case: tuple[Chain, Tensor]) -> None:
    model, x = case
    out = model(x)
    assert out.shape == ((2, 6, 11) if isinstance(model, GPT) else (2, 10))


def test_every_parameter_and_buffer_is_in_exactly_one_block(case: tuple[Chain, Tensor]) -> None:
    model, _ = case
    in_blocks = [t for block in model.blocks() for t in (*block.parameters(), *block.buffers())]
    in_model = [*model.parameters(), *model.buffers()]
    assert len(in_blocks) == len(in_model)
    assert {id(t) for t in in_blocks} == {id(t) for t in in_model}


def test_blocks_have_distinct_names_in_the_model(case: tuple[Chain, Tensor]) -> None:
    model, _ = case
    names = [name_of(model, block) for block in model.blocks()]
    assert len(set(names)) == len(names)
    assert "" not in names
    # What is saved under these names is all that is saved.
    assert all(any(key.startswith(name + ".") for name in names) for key in model.state_dict())


def changed_inputs(blocks: list[nn.Module], x: Tensor, training: bool) -> list[int]:
    """Positions of the blocks that change their input in place."""
    changed = []
    for i, block in enumerate(blocks):
        block.train(training)
        before, version = x.clone(), x._version
        out = block(x)
        if not torch.equal(before, x) or x._version != version:
            changed.append(i)
        x = out.detach()
    return changed


@pytest.mark.parametrize("training", [True, False])
def test_no_block_changes_its_input(case: tuple[Chain, Tensor], training: bool) -> None:
    model, x = case
    assert changed_inputs(model.blocks(), x, training) == []


def test_the_check_for_changed_inputs_can_fail() -> None:
    blocks = [nn.Linear(4, 4), nn.ReLU(inplace=True)]
    assert changed_inputs(blocks, torch.randn(3, 4), True) == [1]


def test_kept_inputs_give_the_same_gradients_when_run_again(case: tuple[Chain, Tensor]) -> None:
    """A method that recomputes runs a block a second time on the input it kept, after others have run."""
    model, x = case
    model.eval()
    kept, h = [], x
    for block in model.blocks():
        kept.append(h)
        h = block(h.detach() if h.is_floating_point() else h)
    whole = model(x)
    whole.sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    cotangent = torch.ones_like(whole)
    for block, given in zip(reversed(model.blocks()), reversed(kept), strict=True):
        given = given.detach().requires_grad_(given.is_floating_point())
        block(given).backward(cotangent)
        cotangent = given.grad
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(again) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("name", ["cifar-pad", "cifar-conv", "resnet-basic", "wide", "vgg"])
def test_channels_last_passes_through(name: str) -> None:
    build, sample = CASES[name]
    model, x = build().double().eval(), sample().double()
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    for block in model.blocks()[:-1]:
        x = block(x)
        assert x.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model.blocks()[-1](x), expected, rtol=1e-10, atol=1e-10)


def test_building_twice_from_one_seed_gives_the_same_weights() -> None:
    for build, _ in CASES.values():
        torch.manual_seed(5)
        first = build().state_dict()
        torch.manual_seed(5)
        second = build().state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)


LARGE = ("wrn28-10", "resnet34", "resnet50", "resnet110", "revnet18", "revnet34", "revnet50")


@pytest.mark.parametrize("name", [n for n in models.names() if n not in LARGE])
def test_named_models_suit_digits_or_text(name: str) -> None:
    text = name.endswith("gpt")
    shape, classes = ((8,), 11) if text else ((1, 8, 8), 10)
    model = models.build(name, **models.options_for(name, shape, classes))
    x = torch.randint(0, 11, (2, 8)) if text else torch.randn(2, 1, 8, 8)
    assert model(x).shape[-1] == classes
