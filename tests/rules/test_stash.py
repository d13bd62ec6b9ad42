"""A stashed graph sees the weights of its forward, whatever operation saved them and whatever happens to them since."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from recursions import behind, follow_recursion
from small_nets import images
from unlatch.methods import get
from unlatch.reference import SGD
from unlatch.rules.kept import Kept
from unlatch.rules.weights import StashView, move_to_fresh_storage

NETS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (3, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 3)), (3, 2, 8, 8)),
    "norms": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4), nn.PReLU()), (3, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (3, 5, 4)),
}


@pytest.mark.parametrize("name", NETS)
def test_a_graph_outlives_an_update(name):
    make, shape = NETS[name]
    net = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    params = list(net.parameters())
    expected = torch.autograd.grad(net(x).sin().sum(), [x, *params])
    with StashView(params).recording(Kept(None, 0, [x], "tensor")):
        loss = net(x).sin().sum()
    move_to_fresh_storage(params)
    with torch.no_grad():
        torch._foreach_add_(params, 1.0)
    for one, other in zip(expected, torch.autograd.grad(loss, [x, *params]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["pipedream", "ddg", "fdg"])
def test_stages_of_convolutions_follow_the_recursion(name):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Tanh()),
        nn.Sequential(nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)),
    ).double()
    data = [(x.double(), y) for x, y in images([6] * 8)]
    follow_recursion(
        model,
        get(name, microbatches=1),
        data,
        SGD(0.05, momentum=0.9),
        version=behind([1, 0]),
        backward="forward",
        mixed=False,
        loss_fn=cross_entropy,
    )
