"""Convolutional models: sizes known from their papers, shapes, and blocks against their formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from unlatch import models
from unlatch.errors import ConfigError
from unlatch.models import VGG, CifarResNet, ResNet, WideResNet
from unlatch.models.residual import BasicBlock, Bottleneck, PadShortcut
from unlatch.models.wide_resnet import WideBlock


def size(name: str, **options: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in models.build(name, **options).parameters())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet8", {}, 75_290),
        ("resnet14", {}, 172_506),
        ("resnet20", {}, 269_722),
        ("resnet20", {"shortcut": "conv"}, 272_474),
        ("resnet32", {}, 464_154),
        ("resnet56", {}, 853_018),
        ("resnet110", {}, 1_727_962),
        ("resnet18", {}, 11_689_512),
        ("resnet34", {}, 21_797_672),
        ("resnet50", {}, 25_557_032),
        ("resnet18", {"classes": 10, "stem": "small"}, 11_173_962),
        ("wrn28-10", {}, 36_479_194),
        ("wrn28-10", {"classes": 100}, 36_536_884),
        # With the usual redundant biases 132,868,840 and 138,365,992.
        ("vgg11", {"classes": 1000, "head": "imagenet"}, 132_868_840 - 2_752),
        ("vgg16", {"classes": 1000, "head": "imagenet"}, 138_365_992 - 4_224),
    ],
)
def test_number_of_parameters(name: str, options: dict[str, object], expected: int) -> None:
    assert size(name, **options) == expected


@pytest.mark.parametrize(
    ("name", "count"), [("resnet20", 11), ("resnet56", 29), ("resnet110", 56), ("wrn28-10", 14), ("vgg16", 14)]
)
def test_number_of_blocks(name: str, count: int) -> None:
    with torch.device("meta"):
        model = models.build(name)
    assert len(model.blocks()) == count


def test_names_of_saved_weights_are_stable() -> None:
    with torch.device("meta"):
        keys = [key for key, _ in models.build("resnet8", shortcut="conv").named_parameters()]
    group = ["conv1.weight", "norm1.weight", "norm1.bias", "conv2.weight", "norm2.weight", "norm2.bias"]
    shortcut = ["shortcut.conv.weight", "shortcut.norm.weight", "shortcut.norm.bias"]
    assert keys == [
        *("stem.conv.weight", "stem.norm.weight", "stem.norm.bias"),
        *(f"layer1.0.{key}" for key in group),
        *(f"layer2.0.{key}" for key in group + shortcut),
        *(f"layer3.0.{key}" for key in group + shortcut),
        *("head.linear.weight", "head.linear.bias"),
    ]


def test_map_sizes_along_a_cifar_resnet() -> None:
    model, x = CifarResNet(14, width=4).eval(), torch.zeros(1, 3, 32, 32)
    shapes = []
    for block in model.blocks()[:-1]:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(4, 32, 32)] * 3 + [(8, 16, 16)] * 2 + [(16, 8, 8)] * 2


def test_map_sizes_along_an_imagenet_resnet() -> None:
    model, x = ResNet((1, 1, 1, 1), bottleneck=True, width=2).eval(), torch.zeros(1, 3, 64, 64)
    shapes = []
    for block in model.blocks()[:-1]:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(2, 16, 16), (8, 16, 16), (16, 8, 8), (32, 4, 4), (64, 2, 2)]


@pytest.mark.parametrize("shortcut", ["conv", "pad"])
@pytest.mark.parametrize("height", [1, 5, 7, 8])
def test_odd_maps_work_with_both_shortcuts(shortcut: str, height: int) -> None:
    model = CifarResNet(8, width=4, shortcut=shortcut, in_channels=1).eval()
    assert model(torch.zeros(2, 1, height, height)).shape == (2, 10)


def test_basic_block_follows_its_formula() -> None:
    block = BasicBlock(3, 5, stride=2, shortcut="pad").double().eval()
    for norm in (block.norm1, block.norm2):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def normed(h: torch.Tensor, n: torch.nn.BatchNorm2d) -> torch.Tensor:
        return (h - n.running_mean.view(-1, 1, 1)) / (n.running_var.view(-1, 1, 1) + n.eps).sqrt()

    h = normed(F.conv2d(x, block.conv1.weight, stride=2, padding=1), block.norm1).clamp(min=0)
    h = normed(F.conv2d(h, block.conv2.weight, padding=1), block.norm2)
    h[:, :3] += x.view(2, 3, 3, 2, 3, 2).mean((3, 5))
    torch.testing.assert_close(block(x), h.clamp(min=0), rtol=1e-12, atol=1e-12)


def test_pad_shortcut_without_stride_only_adds_channels() -> None:
    x = torch.randn(1, 2, 3, 3)
    out = PadShortcut(2, 4, stride=1)(x)
    assert torch.equal(out[:, :2], x)
    assert not out[:, 2:].any()


def test_stride_of_a_bottleneck_sits_on_its_3x3_convolution() -> None:
    block = Bottleneck(4, 2, stride=2)
    assert [c.stride[0] for c in (block.conv1, block.conv2, block.conv3)] == [1, 2, 1]


def test_wide_block_adds_its_own_input_where_shapes_agree() -> None:
    block = WideBlock(4, 4).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(1, 4, 5, 5)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("depth", [2, 9, 19, 21])
def test_cifar_depth_must_be_6n_plus_2(depth: int) -> None:
    with pytest.raises(ConfigError, match=rf"depth {depth} is not 6n\+2"):
        CifarResNet(depth)


def test_other_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"depth 20 is not 6n\+4"):
        WideResNet(20)
    with pytest.raises(ConfigError, match="expected one of 11, 16"):
        VGG(13)
    with pytest.raises(ConfigError, match="unknown head 'large'"):
        VGG(11, head="large")
    with pytest.raises(ConfigError, match="unknown stem 'big'"):
        ResNet((1, 1, 1, 1), stem="big")
    with pytest.raises(ConfigError, match="four numbers"):
        ResNet((1, 1, 1))
    with pytest.raises(ConfigError, match="unknown shortcut 'none'"):
        CifarResNet(8, shortcut="none")
