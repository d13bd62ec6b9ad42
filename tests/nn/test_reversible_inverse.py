"""The inverse of reversible blocks, alone: exact up to rounding, without side effects, and checked before training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from unlatch.errors import ConfigError, PlanError
from unlatch.nn.chain import StageChain, chain
from unlatch.nn.inverse_check import relative_error
from unlatch.nn.randomness import replayable
from unlatch.nn.reversible import (
    Coupling,
    Merge,
    RevBlock,
    SpaceToDepth,
    Split,
    check_inverse,
    check_reversible,
    invert,
    is_reversible,
    segments,
)


def tanh_branch(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def conv_branch(width: int) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )


def pair(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, dtype=dtype), torch.randn(*shape, dtype=dtype)


@settings(max_examples=20)
@given(width=st.integers(1, 6), batch=st.integers(1, 4), depth=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_run_of_couplings_is_undone_exactly(width: int, batch: int, depth: int, seed: int) -> None:
    torch.manual_seed(seed)
    run = nn.Sequential(*(Coupling(tanh_branch(width)) for _ in range(depth))).double()
    x = pair(batch, width)
    assert relative_error(invert(run, run(x)), x) < 1e-14


def test_each_block_has_an_inverse_of_its_own() -> None:
    for block in (Coupling(conv_branch(4)), RevBlock(conv_branch(4), nn.Tanh())):
        block.double()
        x = pair(3, 4, 5, 5)
        assert relative_error(block.inverse(block(x)), x) < 1e-14


def test_coupling_follows_its_formula() -> None:
    f = tanh_branch(3).double()
    x, carried = pair(2, 3)
    y, y_carried = Coupling(f)((x, carried))
    assert torch.equal(y, carried + f(x))
    assert torch.equal(y_carried, x)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, {8: 7e-16, 32: 2e-14, 128: 1e-12}),
        (torch.float32, {8: 4e-7, 32: 8e-6, 128: 2e-4}),
    ],
    ids=["fp64", "fp32"],
)
def test_rounding_of_long_frozen_chains(dtype: torch.dtype, expected: dict[int, float]) -> None:
    """The largest error at the bottom of 8, 32 and 128 tanh couplings, to an order of magnitude."""
    for depth, error in expected.items():
        torch.manual_seed(0)
        run = nn.Sequential(*(Coupling(tanh_branch(6)) for _ in range(depth))).to(dtype)
        for block in run:
            nn.init.normal_(block.f[0].weight, std=6**-0.5)
        x = pair(16, 6, dtype=dtype)
        found = max(float((a - b).abs().max()) for a, b in zip(invert(run, run(x)), x, strict=True))
        assert error / 10 < found < error * 10


def test_inverse_alone_changes_no_statistics() -> None:
    block = RevBlock(conv_branch(4), conv_branch(4))
    y = block(pair(3, 4, 5, 5, dtype=torch.float32))
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    block.inverse(y)
    invert(block, y)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())


def test_dropout_replays_in_reverse_order() -> None:
    def branch() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3))

    run = nn.Sequential(Coupling(branch()), RevBlock(branch(), branch()), Coupling(branch())).double()
    x = pair(4, 6)
    with replayable(1, 2, 3):
        y = run(x)
    with replayable(1, 2, 3):
        assert relative_error(invert(run, y), x) < 1e-14
    with replayable(1, 2, 4):
        assert relative_error(invert(run, y), x) > 1e-2


def test_dropout_masks_differ_between_blocks() -> None:
    masks: list[Tensor] = []
    drop = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    drop[1].register_forward_hook(lambda module, args, out: masks.append(out != 0))
    nn.Sequential(Coupling(drop), Coupling(drop))((torch.ones(64), torch.ones(64)))
    assert not torch.equal(*masks)


def test_evaluation_draws_nothing() -> None:
    run = nn.Sequential(Coupling(nn.Dropout(0.5)), Coupling(nn.Dropout(0.5))).eval()
    x = pair(2, 3)
    before = torch.get_rng_state()
    invert(run, run(x))
    assert torch.equal(before, torch.get_rng_state())


def test_branch_may_work_in_place_on_its_input() -> None:
    x = pair(2, 3)
    kept = (x[0].clone(), x[1].clone())
    y = Coupling(nn.ReLU(inplace=True))(x)
    assert torch.equal(x[0], kept[0])
    assert torch.equal(y[0], kept[1] + kept[0].relu())
    assert torch.equal(y[1], kept[0])


def test_other_weights_can_be_used_for_the_inverse() -> None:
    run = nn.Sequential(Coupling(tanh_branch(3)), RevBlock(tanh_branch(3), tanh_branch(3))).double()
    x = pair(2, 3)
    y = run(x)
    old = {name: tensor.detach().clone() for name, tensor in run.named_parameters()}
    with torch.no_grad():
        for parameter in run.parameters():
            parameter.add_(1.0)
    assert relative_error(invert(run, y), x) > 1e-2
    assert relative_error(invert(run, y, params=old), x) < 1e-14


# ------------------------------------------------------------------------------------------------------- permutations


def test_permutations_are_undone_bit_for_bit() -> None:
    x = torch.randn(2, 6, 4, 8)
    assert torch.equal(Split().inverse(Split()(x)), x)
    assert torch.equal(Split(-1).inverse(Split(-1)(x)), x)
    streams = pair(2, 3, 4, 8)
    assert relative_error(Merge().inverse(Merge()(streams)), streams) == 0
    down = SpaceToDepth(2)
    assert relative_error(down.inverse(down(streams)), streams) == 0
    assert torch.equal(down(x)[:, :4, 0, 0], x[:, 0, :2, :2].flatten(1))


def test_split_keeps_channels_last_and_shares_no_memory() -> None:
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    for stream in Split()(x):
        assert stream.is_contiguous(memory_format=torch.channels_last)
        assert stream.untyped_storage().nbytes() == x.nbytes // 2


def test_odd_channels_do_not_split() -> None:
    with pytest.raises(PlanError, match=r"7 channels.*\(2, 7, 4, 4\)"):
        Split()(torch.zeros(2, 7, 4, 4))


def test_odd_maps_have_no_space_to_depth() -> None:
    with pytest.raises(PlanError, match=r"multiples of 2, got \(1, 3, 4, 5\)"):
        SpaceToDepth(2)(torch.zeros(1, 3, 4, 5))


# ------------------------------------------------------------------------------------------- what counts as reversible


class Affine(nn.Module):
    """A module with an inverse of its own, right or wrong."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.error = error

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return state[0] * self.scale, state[1] + 1

    def inverse(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return state[0] / self.scale, state[1] - 1 - self.error


def test_who_is_reversible() -> None:
    coupling = Coupling(nn.Tanh())
    stage = StageChain(chain(nn.Sequential(coupling, Affine())))
    assert all(map(is_reversible, (coupling, Affine(), Split(), RevBlock(nn.Tanh(), nn.Tanh()), stage)))
    assert is_reversible(nn.Sequential(SpaceToDepth(), nn.Sequential(coupling, coupling)))
    assert not any(map(is_reversible, (nn.Linear(2, 2), nn.Sequential(coupling, nn.Tanh()), nn.ModuleList([coupling]))))


def test_a_sequence_with_steps_of_its_own_is_not_taken_for_a_composition() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return super().forward(super().forward(x))  # type: ignore[no-any-return]

    assert not is_reversible(Twice(Coupling(nn.Tanh())))


def test_segments_are_longest_runs() -> None:
    blocks = chain([nn.Tanh(), Split(), Coupling(nn.Tanh()), Merge(), nn.Tanh(), nn.Tanh()])
    found = [(part.reversible, [block.name for block in part.blocks]) for part in segments(blocks)]
    assert found == [(False, ["0"]), (True, ["1", "2", "3"]), (False, ["4", "5"])]


# -------------------------------------------------------------------------------------------------------------- checks


def test_a_right_inverse_passes_and_its_error_is_returned() -> None:
    assert check_inverse(Affine(), pair(2, 3)) < 1e-15
    errors = check_reversible(nn.Sequential(Split(), Affine(), Coupling(nn.Tanh()), nn.Identity()), torch.randn(4, 6))
    assert list(errors) == ["0", "1", "2"]
    assert max(errors.values()) < 1e-6


def test_a_wrong_inverse_is_named_with_its_error() -> None:
    model = nn.Sequential(Split(), Coupling(nn.Tanh()), Affine(error=1.0)).double()
    with pytest.raises(
        PlanError, match=r"block '2' is declared reversible, but .* by \d\.\d\de[+-]\d\d .*allowed 1e-09"
    ):
        check_reversible(model, torch.randn(4, 6, dtype=torch.float64))
    assert check_inverse(Affine(error=1e-6), pair(4, 3), tol=1e-3) < 1e-5


def test_an_inverse_that_is_not_finite_is_wrong() -> None:
    with pytest.raises(PlanError, match="by inf"):
        check_inverse(Affine(error=float("nan")), pair(4, 3))


def test_an_inverse_of_another_shape_is_named() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2]

        def inverse(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(PlanError, match=r"block 'shrink'.*returns \(4, 2\) for an input of \(4, 3\)"):
        check_inverse(Drops(), torch.randn(4, 3), name="shrink")


def test_an_inverse_that_fails_is_named() -> None:
    class Fails(nn.Identity):
        def inverse(self, x: Tensor) -> Tensor:
            raise NotImplementedError("not yet")

    with pytest.raises(PlanError, match=r"block 'stem'.*NotImplementedError: not yet"):
        check_inverse(Fails(), torch.randn(4, 3), name="stem")


@pytest.mark.parametrize("branch", [nn.Linear(3, 4), nn.Linear(3, 1)], ids=["wider", "broadcast"])
def test_a_branch_that_changes_shape_is_named(branch: nn.Module) -> None:
    model = nn.Sequential(Coupling(nn.Linear(3, 3)), Coupling(branch)).double()
    with pytest.raises(PlanError, match=r"block '1'.*shape \(2, 3\).*got \(2, [14]\)"):
        check_reversible(nn.Sequential(*model), pair(2, 3))


def test_a_branch_must_be_a_module() -> None:
    with pytest.raises(ConfigError, match=r"must be an nn\.Module, .* got function"):
        Coupling(lambda x: x)  # type: ignore[arg-type]


def test_bad_permutations() -> None:
    with pytest.raises(PlanError, match=r"Split\(1\) cannot cut a tensor of shape \(4,\), which has no such dimension"):
        Split()(torch.zeros(4))
    with pytest.raises(ConfigError, match="1 or more pixels a side, got 0"):
        SpaceToDepth(0)


def test_a_coupling_needs_two_streams() -> None:
    with pytest.raises(PlanError, match=r"two streams.*got Tensor"):
        Coupling(nn.Tanh())(torch.zeros(2, 3))


def test_random_numbers_outside_of_couplings_cannot_be_replayed() -> None:
    class Noisy(Affine):
        def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            torch.rand(1)
            return super().forward(state)

    with pytest.raises(PlanError, match=r"block 'noisy'.*random numbers"):
        check_inverse(Noisy(), pair(2, 3), name="noisy")
    with pytest.raises(PlanError, match=r"block 'Sequential'.*random numbers"):
        check_inverse(nn.Sequential(Coupling(nn.Dropout()), Noisy()), pair(2, 3))
    check_inverse(nn.Sequential(Coupling(nn.Dropout()), Affine()), pair(2, 3))


def test_checking_leaves_no_trace() -> None:
    block = Coupling(nn.Sequential(conv_branch(4), nn.Dropout(0.5)))
    sample = pair(3, 4, 5, 5, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    state = torch.get_rng_state()
    check_inverse(block, sample)
    check_reversible([block], sample)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
    assert all(parameter.grad is None for parameter in block.parameters())
