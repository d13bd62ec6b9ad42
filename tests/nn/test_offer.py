"""A module that does not say where it can be cut is offered the `blocks()` that its forward suggests."""

from __future__ import annotations

import copy
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unlatch
from unlatch.errors import PlanError
from unlatch.nn import Apply, StageChain, chain

x = torch.zeros(1)  # a name that forwards use for something else


def layers(count=3, width=6):
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count))


class StemLayersHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(4, 6), layers(), nn.Linear(6, 2)

    def forward(self, x):
        """Walks through its layers."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FlattenBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm, self.body = nn.BatchNorm2d(3), nn.Sequential(nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x)))
        h = torch.flatten(h, 1)
        return self.body(h)


class ViewOfItsSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 3, 3), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).relu()
        return self.fc(x.view(x.size(0), -1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.layers, self.scale = nn.Linear(4, 6), layers(), nn.Parameter(torch.full((6,), 0.5))
        self.register_buffer("shift", torch.ones(6))

    def forward(self, inputs):
        x = torch.cat([self.up(inputs), self.shift.expand(len(inputs), 6)], 1)[:, :6] + self.shift
        for number, layer in enumerate(self.layers):
            x = x + layer(x) / (number + 1)
        return x * self.scale


class LongSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms, self.layers, self.head = (
            nn.ModuleList(nn.LayerNorm(4) for _ in range(2)),
            layers(2, 4),
            nn.Linear(4, 2),
        )
        self.deep = True

    def forward(self, x):
        for i in range(len(self.layers)):
            h = self.norms[i](x)
            if self.deep:
                h = self.layers[i](h)
            x = x + h
        mean = x.mean(0, keepdim=True)
        x = x - mean
        unused = self.head(x)  # noqa: F841
        return self.head(x)


class Helped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.tokens = nn.Linear(4, 4), nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 4)})

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.tokens.values():
            x = layer(x)
        x, _ = self._pair(x)
        return self.second(x)[:, :2]

    def _pair(self, x):
        return x, 1


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x):
        return self.net(x)


VECTOR, IMAGE = torch.randn(3, 4), torch.randn(3, 1, 4, 4)
CASES = [
    (StemLayersHead, VECTOR, 5),
    (FlattenBetween, IMAGE, 7),
    (ViewOfItsSize, IMAGE, 4),
    (Residual, VECTOR, 7),
    (LongSteps, VECTOR, 5),
    (Helped, VECTOR, 6),
    (Wrapper, VECTOR, 3),
]


def offered(model) -> str:
    """What the error wants to be pasted."""
    with pytest.raises(PlanError, match="does not say where it can be cut") as error:
        chain(model)
    said, _, text = str(error.value).partition("\n\n")
    assert f"paste it into {type(model).__name__}" in said
    return textwrap.dedent(text)


def pasted(kind, text):
    names = dict(globals())
    exec(text, names)
    return type(kind.__name__, (kind,), {"blocks": names["blocks"]})


@pytest.mark.parametrize(("kind", "batch", "count"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_offered_computes_what_forward_does(kind, batch, count):
    torch.manual_seed(0)
    text = offered(kind())
    model = pasted(kind, text)().eval()
    blocks = chain(model)
    assert len(blocks) == count, text
    with torch.no_grad():
        assert torch.equal(StageChain(blocks)(batch), model(batch))
    target = torch.zeros_like(model(batch)).detach()
    run = unlatch.parallelize(
        model,
        "pipedream",
        stages=2,
        loss_fn=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        sample=(batch, target),
    )
    first, later = model(batch), run.step(batch, target)
    for _ in range(5):
        later = run.step(batch, target)
    assert later.loss < F.mse_loss(first, target)


def test_the_text_is_what_one_would_write():
    assert offered(StemLayersHead()) == textwrap.dedent(
        """\
        def blocks(self):
            return [
                self.stem,
                *self.layers,
                self.head,
            ]"""
    )
    assert "    Apply(lambda h: torch.flatten(h, 1)),\n    " in offered(FlattenBetween())
    assert offered(FlattenBetween()).startswith("from unlatch.nn import Apply\n\ndef blocks(self):")
    walk = "*[Apply(lambda x, layer, number=number: x + layer(x) / (number + 1), layer) for (number, layer) in"
    assert walk in offered(Residual())


class SeveralInputs(nn.Module):
    def forward(self, x, mask=None):
        return x if mask is None else x * mask


class Remembers(nn.Module):
    def forward(self, x):
        self.last = x
        return x + 1


class Early(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class OnePiece(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return a + b


class Delegates(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self._begin(x))

    def _begin(self, x):
        return torch.tanh(self.first(x))


class Empty(nn.Module):
    pass


class Fails(nn.Module):
    def forward(self, x):
        for layer in self.missing:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (SeveralInputs, r"takes several inputs \(x, mask\); let them travel"),
        (Remembers, r"keeps something in itself \(self.last\)"),
        (Early, "returns in several places"),
        (OnePiece, "its forward is one piece"),
        (Delegates, r"leaves self.first to Delegates._begin; let forward itself call them"),
        (Empty, "it has no forward"),
        (Fails, r"self.missing cannot be looked up \(AttributeError"),
    ],
)
def test_where_it_is_not_obvious_it_says_why(kind, why):
    with pytest.raises(PlanError, match=rf"give it a method blocks\(\) .* Here it is not obvious which: .*{why}"):
        chain(kind())


def test_a_forward_without_source():
    names = {"nn": nn}
    exec("class Hidden(nn.Module):\n    def forward(self, x):\n        return x\n", names)
    with pytest.raises(PlanError, match=r"the source of Hidden.forward is not at hand"):
        chain(names["Hidden"]())


class NamedSo(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = layers(2, 4), nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_an_attribute_of_that_name_is_in_the_way():
    with pytest.raises(PlanError, match=r"its attribute `blocks` is a module, .* Rename it") as error:
        chain(NamedSo())
    assert "            *self.blocks,\n            self.head,\n" in str(error.value)


def test_a_nested_sequential_says_how_to_unwrap_it():
    def start(model, stages):
        return unlatch.parallelize(model, stages=stages, loss_fn=F.mse_loss, optimizer=torch.optim.SGD)

    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(PlanError, match=r"Block '0' is an nn.Sequential of 3: pass it instead of what wraps it"):
        start(nn.Sequential(inner), 2)
    assert start(inner, 2).plan.blocks == ("0", "1", "2")
    with pytest.raises(PlanError, match=r"can be listed part by part: '1' \(3 parts\)"):
        start(nn.Sequential(nn.Linear(4, 4), inner), 3)
    with pytest.raises(PlanError, match=r"The blocks are: 0, 1, 2\.$"):
        start(inner, 4)


def test_a_function_as_a_block_owns_what_it_uses():
    layer, weight, shift = nn.Linear(2, 2), nn.Parameter(torch.ones(2)), torch.zeros(2)
    block = Apply(lambda x, layer, weight, shift: layer(x) * weight + shift, layer, weight, shift)
    assert {id(p) for p in block.parameters()} == {id(layer.weight), id(layer.bias), id(weight)}
    assert [id(b) for b in block.buffers()] == [id(shift)]


@pytest.mark.parametrize(
    ("kind", "batch"), [case[:2] for case in CASES], ids=lambda value: getattr(value, "__name__", None)
)
def test_copies_of_the_blocks_use_copies_of_the_modules(kind, batch):
    """Blocks are copied to be measured, and to be trained beside the network."""
    model = pasted(kind, offered(kind()))().eval()
    before = model(batch)
    twin = copy.deepcopy(StageChain(chain(model)))
    for p in twin.parameters():
        p.data.zero_()
    assert torch.equal(model(batch), before)
    assert not torch.equal(twin(batch), before)
    for p in model.parameters():
        p.data.fill_(torch.nan)
    assert torch.isfinite(twin(batch)).all()
