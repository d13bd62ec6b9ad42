"""Reversible models: sizes and places of non-reversible blocks as published, inverses right, gradients right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import ConfigError, ShapeMismatch
from unlatch.models.irevnet import IRevNet
from unlatch.models.rev_transformer import RevGPT, RevViT
from unlatch.models.reversible import REVERSIBLE_MODELS
from unlatch.models.revnet import RevNet, revnet18, revnet34, revnet50, revnet_cifar, revnet_fixed
from unlatch.models.revnet_blocks import BasicDown, BottleneckDown
from unlatch.nn.chain import chain
from unlatch.nn.inverse_check import check_reversible
from unlatch.nn.reversible import is_reversible, reversible

SMALL = {"classes": 10, "stem": "small"}


@pytest.mark.parametrize(
    ("make", "options", "thousands"),
    [
        (revnet18, {}, 12_216),
        (revnet34, {}, 22_328),
        (revnet50, {}, 30_422),
        (revnet18, SMALL, 11_186),
        (revnet34, SMALL, 21_298),
        (revnet50, SMALL, 26_350),
    ],
)
def test_parameter_counts(make, options: dict[str, object], thousands: int) -> None:  # type: ignore[no-untyped-def]
    with torch.device("meta"):
        model = make(**options)
    assert round(sum(p.numel() for p in model.parameters()) / 1000) == thousands


@pytest.mark.parametrize(
    ("make", "stages", "plain"),
    [
        (revnet18, 10, [1, 4, 6, 8]),
        (revnet34, 18, [1, 5, 9, 15]),
        (revnet50, 18, [1, 2, 5, 9, 15]),
    ],
)
def test_which_stages_are_not_reversible(make, stages: int, plain: list[int]) -> None:  # type: ignore[no-untyped-def]
    """Counted from 1; the last stage holds the loss and is neither."""
    with torch.device("meta"):
        blocks = make().blocks()
    assert len(blocks) == stages
    assert [j for j, block in enumerate(blocks[:-1], 1) if not is_reversible(block)] == plain
    assert not is_reversible(blocks[-1])


def test_shapes_on_imagenet() -> None:
    with torch.device("meta"):
        model, x = revnet50(), torch.zeros(2, 3, 224, 224)
    shapes = []
    for block in model.blocks():
        x = block(x)
        shapes.append(tuple(x.shape) if isinstance(x, Tensor) else [tuple(stream.shape) for stream in x])
    assert shapes[0] == [(2, 64, 56, 56)] * 2
    assert shapes[1] == [(2, 256, 56, 56)] * 2
    assert shapes[16] == [(2, 2048, 7, 7)] * 2
    assert shapes[17] == (2, 1000)


def test_every_convolution_has_a_bias_and_the_last_relu_is_inside_the_branch() -> None:
    for model in (revnet_cifar(8), RevNet((2, 2), bottleneck=True, width=4, stem="small")):
        assert all(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d))
        for block in model.blocks():
            if hasattr(block, "inverse"):
                assert isinstance(list(block.f.children())[-1], nn.ReLU)


def test_basic_down_follows_its_formula() -> None:
    block = BasicDown(3, 6).double()
    x, carried = torch.randn(2, 4, 3, 6, 6, dtype=torch.float64)
    y, y_carried = block((x, carried))
    middle = block.norm1(block.conv1(x)).relu()
    assert torch.allclose(y_carried, middle)
    assert torch.allclose(y, block.norm2(block.conv2(middle)).relu() + block.shortcut(carried))
    assert y.shape == y_carried.shape == (4, 6, 3, 3)


def test_bottleneck_down_follows_its_formula() -> None:
    block = BottleneckDown(3, 2).double()
    x, carried = torch.randn(2, 4, 3, 6, 6, dtype=torch.float64)
    y, y_carried = block((x, carried))
    assert torch.allclose(y, block.f(x) + block.carried_shortcut(carried))
    assert torch.allclose(y_carried, block.shortcut(x))


def test_zero_init_makes_branches_vanish() -> None:
    for bottleneck in (False, True):
        model = RevNet((2,), bottleneck=bottleneck, width=4, stem="small", zero_init=True)
        branch = model.blocks()[2].f
        assert not branch(torch.randn(2, 16 if bottleneck else 4, 6, 6)).any()


IMAGES = {
    "revnet8": {"in_channels": 1},
    "revnet14": {"in_channels": 1, "width": 8},
    "revnet20": {"in_channels": 3, "width": 4},
    "revnet18": {"in_channels": 1, "classes": 10, "stem": "small"},
    "revnet50": {"in_channels": 3, "classes": 10, "stem": "small"},
    "revnet-fixed": {"in_channels": 1, "width": 8, "depth": 3},
    "irevnet": {"in_channels": 1, "width": 4},
    "rev-vit": {"in_channels": 1, "image": 8, "patch": 2, "depth": 2, "width": 16, "dropout": 0.1},
}


@pytest.mark.parametrize("name", IMAGES)
def test_models_for_images_work_on_digits(name: str) -> None:
    model = REVERSIBLE_MODELS[name](**IMAGES[name])
    x = torch.randn(4, IMAGES[name]["in_channels"], 8, 8)  # type: ignore[call-overload]
    model(x).sum().backward()
    assert model(x).shape == (4, 10)
    assert all(p.grad is not None for p in model.parameters())
    errors = check_reversible(model, x)
    assert list(errors) == [block.name for block in chain(model) if is_reversible(block.module)]
    assert max(errors.values()) < 1e-5


def gradients(model: nn.Module, module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    module(x).tanh().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["revnet14", "irevnet", "rev-vit", "rev-gpt"])
def test_memory_constant_training_gives_the_same_gradients(name: str) -> None:
    if name == "rev-gpt":
        model: nn.Module = RevGPT(vocabulary=7, context=6, depth=3, width=8, heads=2, dropout=0.2)
        x = torch.randint(0, 7, (3, 6))
    else:
        model = REVERSIBLE_MODELS[name](**IMAGES[name])
        x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    model.double()
    true, found = gradients(model, model, x), gradients(model, reversible(model), x)
    assert set(true) == set(found) == {name for name, _ in model.named_parameters()}
    for parameter, grad in true.items():
        assert float((found[parameter] - grad).abs().max()) < 1e-11 * max(1.0, float(grad.abs().max())), parameter


@pytest.mark.parametrize(
    ("model", "reversible_blocks"),
    [
        (revnet_fixed(6, width=4), 6),
        (IRevNet((2, 2, 2), width=4), 6),
        (RevGPT(depth=3, width=8), 3),
        (RevViT(depth=3), 3),
    ],
    ids=["fixed", "irevnet", "gpt", "vit"],
)
def test_only_stem_and_head_are_not_reversible(model: nn.Module, reversible_blocks: int) -> None:
    flags = [is_reversible(block.module) for block in chain(model)]
    assert flags == [False, *[True] * reversible_blocks, False]


def test_both_streams_of_a_transformer_start_equal() -> None:
    for embed, x in (
        (RevViT(image=8).embed, torch.randn(2, 3, 8, 8)),
        (RevGPT().embed, torch.ones(2, 5, dtype=torch.long)),
    ):
        first, second = embed(x)
        assert torch.equal(first, second)


def test_reversible_gpt_is_causal() -> None:
    model = RevGPT(vocabulary=7, context=6, depth=2, width=8, heads=2).eval()
    tokens = torch.zeros(1, 6, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 4] = 3
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :4], b[:, :4])
    assert not torch.equal(a[:, 4:], b[:, 4:])


def test_streams_between_blocks_are_in_single_precision_under_autocast() -> None:
    model = RevNet((2, 2), width=4, stem="small", classes=10)
    x = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for block in model.blocks()[:-1]:
            x = block(x)
            assert {stream.dtype for stream in x} == {torch.float32}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: revnet_cifar(19), "depth 19 is not 6n"),
        (lambda: revnet_cifar(8, stem_stride=3), "stem_stride must be 1 .* or 2 .*, got 3"),
        (lambda: RevNet((2, 0)), "got 0 in group 2"),
        (lambda: IRevNet((0,)), "got 0 in group 1"),
        (lambda: revnet18(stem="big"), "unknown stem 'big'"),
        (lambda: RevViT(image=9, patch=2), "9x9 cannot be cut"),
        (lambda: RevGPT(width=10, heads=4), "width 10 cannot be shared by 4 heads"),
    ],
)
def test_bad_options(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_stem_of_stride_two_halves_all_maps() -> None:
    x = torch.zeros(1, 3, 16, 16)
    full, half = revnet_cifar(8, width=4).stem(x), revnet_cifar(8, width=4, stem_stride=2).stem(x)
    assert full[0].shape == (1, 4, 16, 16)
    assert half[0].shape == half[1].shape == (1, 4, 8, 8)


def test_bad_inputs_of_transformers() -> None:
    with pytest.raises(ShapeMismatch, match="positions for 4: build it with image=12"):
        RevViT(image=8)(torch.zeros(1, 3, 12, 12))
    with pytest.raises(ShapeMismatch, match="9 tokens came, the model takes at most 8"):
        RevGPT(context=8)(torch.zeros(1, 9, dtype=torch.long))
