"""Running statistics stay inside `frozen_statistics`, and the output is that of an ordinary training forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from unlatch.nn import frozen_statistics


class Counting(nn.Module):
    """Changes its buffers in every way a module can: in place, behind autograd's back, by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("behind", torch.zeros(2))
        self.register_buffer("rebound", torch.zeros(2))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.in_place.add_(1)
        self.behind.data.add_(1)
        self.rebound = self.rebound + 1
        return x + self.in_place.sum() + self.behind.sum() + self.rebound.sum()


class LoudNorm(nn.BatchNorm1d):
    """A batch norm that does not obey torch's flag."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - x.mean(0)


CASES = {
    "batch 1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "batch 2d": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 8, 8)),
    "batch cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (2, 3, 8, 8)),
    "batch untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (6, 4)),
    "instance tracked": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 8, 8)),
    "spectral": (lambda: spectral_norm(nn.Linear(4, 4)), (6, 4)),
    "counting": (Counting, (6, 2)),
    "own batch norm": (lambda: LoudNorm(4), (6, 4)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_state_stays_and_output_is_the_same(case: str, channels_last: bool) -> None:
    build, shape = CASES[case]
    torch.manual_seed(0)
    module = build().train()
    x = torch.randn(shape)
    if channels_last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    ordinary = copy.deepcopy(module)
    before = copy.deepcopy(module.state_dict())
    frozen = frozen_statistics(module)
    for _ in range(2):
        with frozen:
            y = module(x)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(y, ordinary(x))
    if case != "batch untracked":
        assert any(not torch.equal(value, before[name]) for name, value in ordinary.state_dict().items())
    # Outside, statistics count again, and as if the frozen forward had never been.
    module(x)
    for name, value in ordinary.state_dict().items():
        assert torch.equal(value, module.state_dict()[name])


def test_buffers_are_the_same_objects_afterwards() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), Counting())
    before = dict(module.named_buffers())
    with frozen_statistics(module):
        module(torch.randn(4, 2))
    after = dict(module.named_buffers())
    assert before.keys() == after.keys()
    assert all(after[name] is tensor for name, tensor in before.items())


def test_nested_and_with_exceptions() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), Counting()).train()
    before = copy.deepcopy(module.state_dict())
    frozen = frozen_statistics(module)
    with frozen:
        with pytest.raises(RuntimeError, match="should contain 3 elements"), frozen:
            module(torch.randn(4, 3))
        module(torch.randn(4, 2))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module[0].track_running_stats
    with pytest.raises(ValueError, match="outer"), frozen_statistics(module):
        raise ValueError("outer")
    module(torch.randn(4, 2))
    assert int(module[0].num_batches_tracked) == 1


def test_evaluation_uses_running_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)).train()
    module(torch.randn(4, 2, 5) * 3 + 1)
    module.eval()
    x = torch.randn(4, 2, 5)
    expected = module(x)
    with frozen_statistics(module):
        assert torch.equal(module(x), expected)


def test_shared_buffer_stays_shared_inside() -> None:
    one, two = Counting(), Counting()
    two.in_place = one.in_place
    module = nn.Sequential(one, two)
    with frozen_statistics(module):
        module(torch.zeros(1, 2))
        assert one.in_place is two.in_place
        assert one.in_place[0] == 2
    assert one.in_place is two.in_place
    assert one.in_place[0] == 0


def test_graph_made_inside_can_run_backward_outside() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Counting()).train()
    with frozen_statistics(module):
        loss = module(torch.randn(4, 2)).square().sum()
    loss.backward()
    assert module[0].weight.grad is not None
