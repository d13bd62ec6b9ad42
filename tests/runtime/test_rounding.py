"""Tensors in fewer bytes: how far off they may be, what must stay visible, and that errors do not add up."""

from __future__ import annotations

import pytest
import torch

from unlatch.nn.tree import flatten, leaves, tree_bytes, unflatten
from unlatch.transport.rounding import Residue, in_bf16, in_int8, restored

SHAPES = [(64,), (32, 7), (8, 5, 6), (6, 4, 5, 5), (2, 3, 4, 4, 4)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose channels differ a thousandfold in size."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(*shape, generator=generator, dtype=torch.float64)
    channel = 1 if len(shape) > 3 else len(shape) - 1
    if len(shape) > 1:
        sizes = torch.logspace(-2, 1, shape[channel], dtype=torch.float64)
        t *= sizes.reshape([-1 if d == channel else 1 for d in range(len(shape))])
    return t.to(dtype)


def largest_of_channel(t: torch.Tensor) -> torch.Tensor:
    """By the documented rule: dimension 1 from four dimensions on, else the last."""
    channel = 1 if t.dim() > 3 else t.dim() - 1
    return t.abs().amax([d for d in range(t.dim()) if d != channel], keepdim=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_off_by_half_a_step_of_its_channel_at_most(shape, dtype):
    t = drawn(*shape, dtype=dtype)
    found = restored(in_int8(t, Residue()))
    assert (found.dtype, found.shape) == (t.dtype, t.shape)
    step = (t.abs().amax() if t.dim() == 1 else largest_of_channel(t)) / 127
    # Half a step, and what the division and the product round away themselves.
    assert ((found - t).abs() <= step * (0.5 + 127 * torch.finfo(dtype).eps)).all()


def test_few_numbers_share_one_scale():
    rounded = in_int8(drawn(4, 100), Residue())
    numbers, scale = leaves(rounded)
    assert (numbers.dtype, numbers.shape, scale.numel()) == (torch.int8, (4, 100), 1)
    assert leaves(in_int8(drawn(16, 100), Residue()))[1].numel() == 100


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_is_off_by_a_256th_at_most(shape):
    t = drawn(*shape)
    found = restored(in_bf16(t))
    assert found.dtype == t.dtype
    assert ((found - t).abs() <= t.abs() / 256).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_come_back_as_halves(dtype):
    t, residue = drawn(32, 8).to(dtype), Residue()
    found = restored(in_int8(t, residue))
    assert found.dtype == dtype
    # What is owed counts what the receiver got, which its dtype has rounded once more.
    assert torch.equal(residue.rows, t.float() - found.float())


def test_zeros_stay_zeros():
    for t in (torch.zeros(32, 4), torch.full((32, 4), 1e-45), torch.zeros(0, 4)[:0]):
        if t.numel():
            found = restored(in_int8(t, Residue()))
            assert torch.equal(found, torch.zeros(32, 4))
    mixed = torch.zeros(32, 2)
    mixed[:, 1] = 3.0
    assert torch.equal(restored(in_int8(mixed, Residue()))[:, 0], torch.zeros(32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_and_is_owed_to_nobody(value):
    t, residue = drawn(32, 4), Residue()
    in_int8(t, residue)
    spoilt = t.clone()
    spoilt[3, 1] = value
    found = restored(in_int8(spoilt, residue))
    assert not found[3, 1].isfinite()
    assert found[:, [0, 2, 3]].isfinite().all()
    assert restored(in_int8(t, residue)).isfinite().all()
    assert restored(in_bf16(spoilt))[3, 1].isfinite() == torch.tensor(value).isfinite()


@pytest.mark.parametrize("seed", range(5))
def test_errors_do_not_add_up(seed):
    """All that was sent differs from all that was meant by what is still owed: one step, however many messages."""
    residue, meant, sent = Residue(), torch.zeros(24, 6, dtype=torch.float64), torch.zeros(24, 6, dtype=torch.float64)
    plain = meant.clone()
    steps = torch.zeros(6, dtype=torch.float64)
    for number in range(200):
        # A part that is always the same is what plain rounding never gets across.
        t = drawn(24, 6, seed=1000 * seed + number, dtype=torch.float64) + 0.003
        meant += t
        sent += restored(in_int8(t, residue))
        plain += restored(in_int8(t, Residue()))
        steps = torch.maximum(steps, (t.abs().amax(0) + residue.rows.abs().amax(0)) / 127)
    assert torch.allclose(meant - sent, residue.rows, rtol=0, atol=1e-9)
    assert ((meant - sent).abs() <= steps).all()
    assert ((meant - plain).abs().amax(0) > steps).any()


def test_a_shorter_batch_leaves_the_other_rows_waiting():
    residue = Residue()
    whole, short = drawn(32, 4, seed=1), drawn(20, 4, seed=2)
    in_int8(whole, residue)
    waiting = residue.rows[20:].clone()
    expected = short + residue.rows[:20]
    found = restored(in_int8(short, residue))
    assert torch.equal(residue.rows[20:], waiting)
    assert torch.equal(residue.rows[:20], expected - found)
    # A longer one begins with what is there.
    longer = Residue(torch.ones(2, 4))
    in_int8(torch.zeros(40, 4), longer)
    assert longer.rows.shape == (40, 4)
    assert not restored(in_int8(torch.zeros(40, 4), Residue(torch.ones(2, 4))))[2:].any()


def test_another_shape_begins_anew():
    residue = Residue(torch.ones(32, 4))
    t = drawn(32, 5)
    assert torch.equal(restored(in_int8(t, residue)), restored(in_int8(t, Residue())))


@pytest.mark.parametrize(
    "t",
    [
        drawn(8, 6, 5, 4).contiguous(memory_format=torch.channels_last),
        drawn(6, 40).T,
        drawn(32, 12)[:, ::3],
        drawn(1, 6).expand(32, 6),
    ],
    ids=["channels_last", "transposed", "gaps", "expanded"],
)
def test_any_memory_order(t):
    for rounded, plain in ((in_int8(t, Residue()), in_int8(t.contiguous(), Residue())), (in_bf16(t), in_bf16(t + 0))):
        assert torch.equal(restored(rounded), restored(plain))
    if t.dim() == 4:
        assert restored(in_int8(t, Residue())).is_contiguous(memory_format=torch.channels_last)


def test_the_bytes_that_travel():
    t = drawn(64, 100, 32)
    assert tree_bytes(in_bf16(t)) == t.nbytes / 2
    assert tree_bytes(in_int8(t, Residue())) == t.nbytes / 4 + 32 * 4


def test_a_rounded_tree_is_a_tree():
    tree = {"state": in_int8(drawn(32, 4), Residue()), "mask": torch.ones(3, dtype=torch.int8), "none": None}
    tensors, structure = flatten(tree)
    again = restored(unflatten(structure, tensors))
    assert torch.equal(again["state"], restored(tree["state"]))
    assert again["mask"].dtype == torch.int8
    assert again["none"] is None
