"""DGL and DNI against loops written by hand, and the parts that local methods are built from."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unlatch
from rank_jobs import conv_run
from recording import feed
from small_nets import images, tanh_net, vectors
from unlatch.errors import ShapeMismatch
from unlatch.methods import DGL, DNI, AuxNet, AuxVar, get
from unlatch.methods.auxnet.mismatch import BorderRule
from unlatch.methods.auxnet.sources import Raw
from unlatch.models import build
from unlatch.nn.auxiliary import coarse_parts, find_borders
from unlatch.nn.chain import chain
from unlatch.nn.heads import GradientSynthesiser, local_head
from unlatch.rules.ramp import value_at
from unlatch.transport.mail import Micro

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def run_of(net: nn.Module, method, data) -> unlatch.Run:
    return unlatch.parallelize(net, method, stages=3, loss_fn=mse_loss, optimizer=SGD, split=["1", "2"], sample=data[0])


def test_dgl_trains_every_stage_on_its_own_head():
    net, data = tanh_net(3), vectors(6)
    twin = copy.deepcopy(net)
    torch.manual_seed(4)
    heads = [nn.Linear(5, 5).double() for _ in range(2)]
    twin_heads = copy.deepcopy(heads)
    made = iter(heads)
    run = run_of(net, DGL(head=lambda border, output: next(made)), data)
    losses = [r.loss for r in feed(run, data)]

    modules = [nn.Sequential(twin[0], twin_heads[0]), nn.Sequential(twin[1], twin_heads[1]), twin[2]]
    optimizers = [SGD(list(m.parameters())) for m in modules]
    for number, (x, y) in enumerate(data):
        h = x
        for k in range(3):
            out = twin[k](h)
            loss = mse_loss(twin_heads[k](out) if k < 2 else out, y)
            optimizers[k].zero_grad()
            loss.backward()
            optimizers[k].step()
            h = out.detach()
        assert losses[number] == pytest.approx(float(loss.detach()), rel=1e-12)
    for a, b in zip(
        [*net.parameters(), *heads[0].parameters()], [*twin.parameters(), *twin_heads[0].parameters()], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", ["dgl", "dni"])
def test_every_stage_tells_how_long_its_parts_took(method):
    data = vectors(3, size=8)
    run = run_of(tanh_net(3), get(method, microbatches=2), data)
    feed(run, data)
    measured = run.method_statistics()
    assert [(s.stage, s.micros, s.batches) for s in measured] == [(k, 6, 3) for k in range(3)]
    assert all(set(s.seconds) == {"forward", "backward", "update", "border"} for s in measured)
    assert all(min(s.seconds.values()) > 0 for s in measured)
    assert all(s.metrics() == {} for s in measured)


class Guess(nn.Module):
    """A linear synthesiser."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(h)
        return out

    def loss(self, h: Tensor, target: Tensor | None, gradient: Tensor) -> Tensor:
        return mse_loss(self(h), gradient)


def test_dni_follows_its_recursion():
    """Every stage steps at once along its guess; a guess learns from the next stage's gradient two batches later."""
    net, data = tanh_net(3), vectors(6)
    twin = copy.deepcopy(net)
    torch.manual_seed(4)
    layers = [nn.Linear(5, 5).double() for _ in range(2)]
    guesses = copy.deepcopy(layers)
    made = iter(layers)
    method = DNI(synthesiser=lambda shape, classes: Guess(next(made)), learning_rate=0.01)
    feed(run_of(net, method, data), data)

    optimizers = [SGD(list(m.parameters())) for m in twin]
    learners = [torch.optim.Adam(g.parameters(), lr=0.01) for g in guesses]
    kept: list[list[tuple[Tensor, Tensor]]] = [[], []]

    def learn(k: int) -> None:
        h, gradient = kept[k].pop(0)
        learners[k].zero_grad()
        mse_loss(guesses[k](h), gradient).backward()
        learners[k].step()

    for number, (x, y) in enumerate(data):
        if number >= 2:
            learn(0)
            learn(1)
        h, found = x, []
        for k, stage in enumerate(twin):
            h = h.detach().requires_grad_(k > 0)
            out = stage(h)
            optimizers[k].zero_grad()
            out.backward(guesses[k](out).detach()) if k < 2 else mse_loss(out, y).backward()
            optimizers[k].step()
            found.append((h, out.detach()))
            h = out
        for k in range(2):
            kept[k].append((found[k][1], found[k + 1][0].grad))
    while kept[0]:
        learn(0)
        learn(1)
    pairs = [*zip(net.parameters(), twin.parameters(), strict=True)]
    pairs += [*zip(layers[0].parameters(), guesses[0].parameters(), strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_synthesiser_learns_the_gradient_of_its_label():
    torch.manual_seed(0)
    guess = GradientSynthesiser((4,), classes=3)
    optimizer = torch.optim.Adam(guess.parameters(), lr=1e-2)
    table = torch.randn(3, 4) * 1e-4
    for _ in range(300):
        y = torch.randint(3, (32,))
        optimizer.zero_grad()
        guess.loss(torch.randn(32, 4), y, table[y]).backward()
        optimizer.step()
    y = torch.arange(3)
    error = (guess(torch.randn(3, 4), y) - table[y]).norm() / table.norm()
    assert float(error.detach()) < 0.3


@pytest.mark.parametrize(
    ("border", "output"), [((8, 6, 6), (10,)), ((8, 2, 2), (10,)), ((7,), (3,)), ((12, 8), (12, 30)), ((5, 8), (4,))]
)
def test_automatic_heads(border, output):
    assert local_head(border, output)(torch.randn(3, *border)).shape == (3, *output)


def test_shapes_without_automatic_head():
    with pytest.raises(ShapeMismatch, match="pass head="):
        local_head((7,), (3, 4))


@pytest.mark.parametrize(("depth", "expected"), [(1, 3), (2, 5), (9, 7)])
def test_an_automatic_auxnet_takes_the_stem_and_some_blocks_per_group(depth, expected):
    net = build("resnet20", stem_stride=2)
    blocks = chain(net)
    starts = [0, 7]
    (border,) = find_borders(blocks, starts, torch.zeros(2, 3, 32, 32))
    assert border.shape == (32, 8, 8)
    assert border.non_negative
    (part,) = coarse_parts(border, starts, depth, shared=False)
    assert len(part) == expected
    assert part(torch.zeros(2, 3, 32, 32)).shape == (2, 32, 8, 8)
    assert not {id(p) for p in part.parameters()} & {id(p) for p in net.parameters()}


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "vgg11", "gpt", "mlp"])
def test_any_chain_has_an_automatic_auxnet(name):
    if name == "gpt":
        net = build("gpt", vocabulary=11, context=6, depth=4, width=16, heads=2)
        x = torch.randint(11, (3, 6))
    else:
        net = build(name, **({} if name == "mlp" else {"in_channels": 1}))
        x = torch.randn(3, 1, 8, 8) if name == "mlp" else torch.randn(3, 1, 32, 32)
    blocks = chain(net)
    middle = len(blocks) // 2
    (border,) = find_borders(blocks, [0, middle], x)
    (part,) = coarse_parts(border, [0, middle], 1, shared=False)
    assert part(x).shape == (3, *border.shape)


def test_copies_of_a_shared_network_stay_in_step():
    run = conv_run(AuxNet(shared=True), 4)
    feed(run, images([12, 12, 12]))
    parts = [run.stations[k].source.module.parts for k in (1, 2, 3)]
    assert [len(p) for p in parts] == [1, 2, 3]
    for one, other in pairwise(parts):
        for a, b in zip(one, other, strict=False):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                assert torch.equal(p, q)


def test_stored_variables_are_those_of_their_samples():
    """The same samples in another order find their own rows."""
    run = conv_run(AuxVar(), 2)
    x, y = images([12])[0]
    run.step(x, y)
    source = run.stations[1].source
    stored = source.tensors()["inputs"].clone()
    order = torch.randperm(12)
    found = source.predict(Micro(1, 1, 0, 1, 12, 1.0, 1, True), Raw(x[order], y[order]), keep=False)
    assert torch.equal(found, stored[order])


@given(
    shape=st.sampled_from([(4, 3), (4, 3, 5), (4, 3, 2, 2)]),
    units=st.sampled_from(["mean", "sum"]),
    norm=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_the_gradient_of_psi(shape, units, norm, seed):
    torch.manual_seed(seed)
    rule = BorderRule(units, norm)
    a, b = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    gradient, direction = rule.gradient(a, b), torch.randn(shape, dtype=torch.float64)
    step = 1e-6
    numeric = (rule.psi(a + step * direction, b) - rule.psi(a - step * direction, b)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(numeric), rel=1e-5, abs=1e-8)
    assert float(rule.psi(a, a)) < 1e-20
    if norm:
        # Large, such that the constant beside the variance plays no part even where a channel hardly varies.
        large = 1000 * a
        assert float(rule.psi(3 * large + 2, b)) == pytest.approx(float(rule.psi(large, b)), rel=1e-6)


def test_down_sampled_borders_send_less():
    rule = BorderRule("mean", normalise=False, downsample=2)
    a, b = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    assert rule.filter(b).shape == (2, 3, 2, 2)
    assert rule.gradient(a, rule.filter(b)).shape == a.shape


@given(
    points=st.lists(st.tuples(st.integers(0, 50), st.floats(0.1, 9)), min_size=1, max_size=5, unique_by=lambda p: p[0])
)
@settings(max_examples=30)
def test_a_ramp_passes_through_its_points(points):
    ramp = tuple(sorted(points))
    for update, value in ramp:
        assert value_at(ramp, update) == pytest.approx(value)
    assert min(v for _, v in ramp) <= value_at(ramp, 17) <= max(v for _, v in ramp) + 1e-12


def test_bf16_runs():
    run = conv_run(AuxNet(), 2, precision="bf16")
    losses = [r.loss for r in feed(run, images([12, 12]))]
    assert all(0 < loss < 5 for loss in losses)
