"""A chain keeps names and order; a stage computes what its blocks compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import PlanError
from unlatch.nn import StageChain, aliases, as_module, chain, cut, stage_of_blocks, stage_starts, state_names


class Net(nn.Module):
    """A usual user model: a block made on the fly, registered blocks, one parameter-free block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(4, 2)

    def blocks(self) -> list[nn.Module]:
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return [nn.Sequential(self.conv, self.norm), *self.layers, pool, self.head]


def names(model: object) -> list[str]:
    return [block.name for block in chain(model)]


def test_names() -> None:
    assert names(Net()) == ["block0", "layers.0", "layers.1", "block3", "head"]
    assert names([nn.ReLU(), nn.Tanh()]) == ["0", "1"]
    assert names((nn.ReLU(), nn.Tanh())) == ["0", "1"]
    assert names(nn.ModuleList([nn.ReLU()])) == ["0"]
    sequential = nn.Sequential()
    sequential.add_module("stem", nn.ReLU())
    sequential.add_module("head", nn.ReLU())
    assert names(sequential) == ["stem", "head"]


def test_block_used_twice_keeps_both_places() -> None:
    shared = nn.Linear(2, 2)
    assert names(nn.Sequential(shared, nn.ReLU(), shared)) == ["0", "1", "2"]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def blocks(self) -> list[nn.Module]:
            return [self.layer, self.layer]

    assert names(Twice()) == ["layer", "layer@1"]


def test_refusals() -> None:
    with pytest.raises(PlanError, match=r"Linear does not say where.*blocks\(\)"):
        chain(nn.Linear(1, 1))
    with pytest.raises(PlanError, match="no blocks"):
        chain([])
    with pytest.raises(PlanError, match="got builtin_function_or_method at position 1"):
        chain([nn.ReLU(), torch.relu])

    class Foreign(nn.Module):
        def blocks(self) -> list[nn.Module]:
            return [nn.Sequential(nn.Linear(2, 2))]

    with pytest.raises(PlanError, match=r"'0\.weight' of block Sequential is not .* of Foreign"):
        chain(Foreign())


@pytest.mark.parametrize("starts", [[0], [0, 2], [0, 1, 2, 3, 4]])
def test_state_names_cover_the_model(starts: list[int]) -> None:
    model = Net()
    found: dict[str, Tensor] = {}
    for part in cut(chain(model), starts):
        stage = StageChain(part)
        mapping = state_names(stage, model)
        state = stage.state_dict()
        assert mapping.keys() == state.keys()
        found |= {mapping[local]: tensor for local, tensor in state.items()}
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].data_ptr() == tensor.data_ptr() for name, tensor in expected.items())


def test_state_names_of_a_list() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]
    assert state_names(layers[2], layers) == {"weight": "2.weight", "bias": "2.bias"}
    assert list(as_module(layers).state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_tied_tensors_go_by_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert state_names(model[1], model) == {"weight": "0.weight"}
    assert aliases(model) == {"1.weight": "0.weight"}
    assert aliases(Net()) == {}


def test_extra_state_and_non_persistent_buffers() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("constant", torch.zeros(1), persistent=False)

        def get_extra_state(self) -> Tensor:
            return torch.ones(1)

        def set_extra_state(self, state: Tensor) -> None:
            pass

    model = nn.Sequential(nn.ReLU(), nn.Sequential(Extra()))
    assert state_names(StageChain(chain(model)[1:]), model) == {"blocks.0.0._extra_state": "1.0._extra_state"}


def test_stage_starts() -> None:
    blocks = chain(Net())
    assert stage_starts(blocks, []) == [0]
    assert stage_starts(blocks, ["layers.1", "head"]) == [0, 2, 4]
    assert stage_starts(blocks, ["block0", "head"]) == [0, 4]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["layer.1"], r"no block is called 'layer\.1'\. Did you mean 'layers\.1'\? The blocks are: block0, layers\.0,"),
        (["zzz"], r"no block is called 'zzz'\. The blocks are"),
        (["head", "layers.1"], "'layers.1' cannot start a stage after 'head'"),
        (["head", "head"], "'head' cannot start a stage after 'head'"),
        (["head", "block0"], "'block0' cannot start a stage after 'head'"),
        ("head", r"write \['head'\]"),
    ],
)
def test_wrong_split(split: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stage_starts(chain(Net()), split)


@pytest.mark.parametrize("starts", [[], [1], [0, 0], [0, 3, 2], [0, 5]])
def test_wrong_starts(starts: list[int]) -> None:
    with pytest.raises(PlanError, match="must start at 0"):
        stage_of_blocks(5, starts)


def test_stages_compose_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    for starts in ([0], [0, 1], [0, 2, 4], [0, 1, 2, 3, 4]):
        y = x
        for part in cut(chain(model), starts):
            y = StageChain(part)(y)
        assert torch.equal(y, model(x))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_input_written_in_place_is_kept(grad: bool, views: bool) -> None:
    layers = [nn.Flatten(), nn.ReLU(inplace=True)] if views else [nn.ReLU(inplace=True)]
    stage = StageChain(chain(layers))
    for _ in range(3):
        x = torch.tensor([[-1.0, 2.0]], requires_grad=grad)
        y = stage(x)
        assert x.tolist() == [[-1.0, 2.0]]
        assert y.tolist() == [[0.0, 2.0]]
        if grad:
            y.sum().backward()
            assert x.grad.tolist() == [[0.0, 1.0]]


def test_in_place_only_in_training_is_found() -> None:
    stage = StageChain(chain([nn.Dropout(0.5, inplace=True)]))
    x = torch.ones(20)
    stage.eval()(x)
    stage.train()
    for _ in range(2):
        assert stage(x).min() == 0
        assert x.min() == 1


def test_no_copy_without_in_place() -> None:
    stage = StageChain(chain([nn.Identity()]))
    x = torch.ones(2)
    assert stage(x) is not x  # the first call finds out
    assert stage(x) is x
    with torch.inference_mode():
        assert torch.equal(stage(torch.ones(2)), x)


def test_containers_written_by_a_block_are_kept() -> None:
    class Writes(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
            x["h"] = x["h"] + 1
            return x

    stage = StageChain(chain([Writes(), Writes()]))
    x = {"h": torch.zeros(1)}
    for _ in range(2):
        assert stage(x)["h"].item() == 2
        assert x["h"].item() == 0
