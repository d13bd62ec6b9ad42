"""Cuts inside of blocks: the same network bit for bit, under the same names, wherever it is cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlatch
from part_jobs import SKIP, STREAM, begun, gpt, pictures, resnet, texts, trained
from unlatch.errors import PlanError, ShapeMismatch
from unlatch.models.gpt import CausalBlock, next_token_loss
from unlatch.models.residual import BasicBlock, Bottleneck
from unlatch.models.resnet import ResNet
from unlatch.models.wide_resnet import WideBlock, WideResNet
from unlatch.nn import Divisible, StageChain, chain, in_parts
from unlatch.plan import BlockCost, make_plan
from unlatch.plan.finer import finer_plan, whole_costs

BLOCKS: dict[str, tuple[Callable[[], Divisible], tuple[int, ...]]] = {
    "basic": (partial(BasicBlock, 3, 3), (2, 3, 6, 6)),
    "basic, strided": (partial(BasicBlock, 3, 5, stride=2), (2, 3, 7, 7)),
    "basic, padded": (partial(BasicBlock, 3, 5, stride=2, shortcut="pad"), (2, 3, 7, 7)),
    "bottleneck": (partial(Bottleneck, 3, 2, stride=2), (2, 3, 6, 6)),
    "wide": (partial(WideBlock, 3, 5, dropout=0.3), (2, 3, 6, 6)),
    "wide, same width": (partial(WideBlock, 3, 3, dropout=0.3), (2, 3, 6, 6)),
    "causal": (partial(CausalBlock, 8, 2, dropout=0.3), (2, 5, 8)),
}


def passed(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradient of the input and of all weights, and buffers, in training mode."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("name", BLOCKS)
def test_parts_compose_to_the_block_bit_for_bit(name: str) -> None:
    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    whole = make()
    divided = copy.deepcopy(whole)
    x = torch.randn(shape)
    stage = StageChain(in_parts(chain([divided])))
    assert len(stage.blocks) > 1
    for a, b in zip(passed(whole, x), passed(stage, x), strict=True):
        assert torch.equal(a, b)
    for (key, p), q in zip(whole.named_parameters(), divided.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad), key
    for (key, p), q in zip(whole.named_buffers(), divided.buffers(), strict=True):
        assert torch.equal(p, q), key


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet((1, 1, 1, 1), bottleneck=True, classes=3, in_channels=1, width=2, stem="small")


def wide() -> nn.Module:
    torch.manual_seed(0)
    return WideResNet(10, 1, classes=3, in_channels=1)


MODELS = {"cifar": resnet, "bottleneck": small_resnet, "wide": wide, "gpt": gpt}


def inside(model: nn.Module) -> list[str]:
    return [block.name for block in in_parts(chain(model)) if ":" in block.name]


@pytest.mark.parametrize("name", MODELS)
def test_cut_in_every_place_it_trains_as_plain_torch_does(name: str) -> None:
    data = texts(2) if name == "gpt" else [(x, y % 3) for x, y in pictures(2)]
    loss = next_token_loss if name == "gpt" else cross_entropy
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    expected, places = model.state_dict(), inside(model)
    assert len(places) >= 2
    for place in places:
        with unlatch.parallelize(
            MODELS[name](),
            "bp",
            stages=2,
            loss_fn=loss,
            optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            split=[place],
        ) as run:
            for x, y in data:
                run.step(x, y)
            found = run.module().state_dict()
        assert list(found) == list(expected)
        for key, tensor in expected.items():
            assert torch.equal(tensor, found[key]), (place, key)


def test_only_what_is_cut_is_taken_apart() -> None:
    model = resnet()
    names = [block.name for block in chain(model)]
    assert [block.name for block in in_parts(chain(model), ["layer2.0:1"])] == [
        *names[: names.index("layer2.0") + 1],
        "layer2.0:1",
        *names[names.index("layer2.0") + 1 :],
    ]
    assert [block.name for block in in_parts(chain(model), ["layer2.0"])] == names


def test_names_that_are_no_part_of_a_block_are_refused() -> None:
    with pytest.raises(PlanError, match=r"no block is called 'layer2\.0:2'"):
        begun("bp", "layer2.0:2")
    with pytest.raises(PlanError, match="no block is called 'stem:1'"):
        begun("bp", "stem:1")


def test_methods_that_learn_from_one_tensor_refuse_a_skip_beside_it() -> None:
    with pytest.raises(ShapeMismatch, match="needs one tensor of real numbers"):
        begun("dgl", SKIP)
    losses, _ = trained("dgl", STREAM)
    assert losses[-1] is not None


@pytest.mark.parametrize("method", ["pipedream", "dtrp"])
def test_a_checkpoint_goes_on_and_fits_the_whole_network(tmp_path, method: str) -> None:  # type: ignore[no-untyped-def]
    data = pictures(4)
    with begun(method, SKIP) as run:
        for x, y in data[:2]:
            run.step(x, y)
        run.save(tmp_path / "saved")
        for x, y in data[2:]:
            run.step(x, y)
        run.flush()
        expected = {name: t.clone() for name, t in run.module().state_dict().items()}
    with begun(method, SKIP) as again:
        again.load(tmp_path / "saved")
        for x, y in data[2:]:
            again.step(x, y)
        again.flush()
        for name, tensor in again.module().state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    # Another cut has the batches under way finished where they were, then goes on by names.
    with begun(method, "layer3.0") as other:
        other.load(tmp_path / "saved")
        other.step(*data[2])


# ------------------------------------------------------------------------------- planning


def cost(name: str, seconds: float, size: int) -> BlockCost:
    return BlockCost(name, seconds, seconds, seconds, size, 0, 0)


def costs_of(blocks: list[unlatch.nn.Block]) -> list[BlockCost]:
    """Two tensors leave the first part of a block, one leaves everything else."""
    return [cost(block.name, 1.0, 200 if f"{block.name}:1" in {b.name for b in blocks} else 100) for block in blocks]


def test_a_finer_cut_is_taken_where_it_is_more_even_and_messages_are_cheap() -> None:
    blocks = chain(nn.Sequential(*[BasicBlock(2, 2) for _ in range(3)]))
    costs = costs_of(in_parts(blocks))
    whole = make_plan(blocks, 2, costs=whole_costs(blocks, costs))
    assert [float(load) for load in whole.loads] == [6.0, 12.0]
    found = finer_plan(whole, blocks, costs, seconds_per_byte=0.0)
    assert found.split == ("1:1",)
    assert found.blocks == ("0", "1", "1:1", "2")
    assert [float(load) for load in found.loads] == [9.0, 9.0]
    assert found.border_bytes == (200,)
    # A hundred bytes more cost each side as much as the cut saves.
    assert finer_plan(whole, blocks, costs, seconds_per_byte=0.03) == whole
    assert finer_plan(whole, blocks, costs, seconds_per_byte=0.02).split == ("1:1",)


def test_an_even_plan_of_whole_blocks_is_kept() -> None:
    blocks = chain(nn.Sequential(*[BasicBlock(2, 2) for _ in range(4)]))
    costs = costs_of(in_parts(blocks))
    whole = make_plan(blocks, 2, costs=whole_costs(blocks, costs))
    assert finer_plan(whole, blocks, costs, seconds_per_byte=0.0) is whole


def test_what_is_planned_is_what_is_run() -> None:
    """One large block: no cut between blocks comes near to the one inside of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(0, 0), BasicBlock(24, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, y = torch.randn(8, 24, 24, 24), torch.randint(24, (8,))
    with unlatch.parallelize(
        model,
        "pipedream",
        stages=2,
        loss_fn=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        sample=(x, y),
    ) as run:
        assert run.plan.split == ("1:1",)
        assert run.plan.balance > 0.6
        run.step(x, y)
        run.flush()
        assert list(run.module().state_dict()) == list(model.state_dict())
    with unlatch.parallelize(
        model, "dgl", stages=2, loss_fn=cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.01), sample=(x, y)
    ) as local:
        assert local.plan.split is not None
        assert not any(":" in name for name in local.plan.split)
