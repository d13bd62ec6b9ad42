"""Odd batches, models and settings, each on two real ranks: the right result, and the same as inline."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import edge_jobs
from edge_jobs import NAMES, for_each
from rank_jobs import differences, falling_lr, momentum_sgd
from small_nets import conv_net, images
from unlatch.nn import replayable


def same_everywhere(pool, job, *args, names=NAMES):
    """Run on the ranks and inline; all must agree."""
    inline = for_each(job, names, *args)
    for rank, found in enumerate(pool.run(for_each, job, names, *args)):
        for name in names:
            assert differences(inline[name], found[name]) == [], (rank, name)
    return inline


def by_hand(sizes, stages=((0, 2), (2, 4)), seed=3):
    """Plain backpropagation over two stages: only the dropout masks know that there are two."""
    model = conv_net()
    parts = [model[a:b] for a, b in stages]
    optimizers = [momentum_sgd(list(part.parameters())) for part in parts]
    schedules = [falling_lr(optimizer) for optimizer in optimizers]
    losses = []
    for number, (x, y) in enumerate(images(list(sizes))):
        model.zero_grad()
        for k, part in enumerate(parts):
            with replayable(seed, k, number):
                x = part(x)
        loss = cross_entropy(x, y)
        loss.backward()
        for part, optimizer, schedule in zip(parts, optimizers, schedules, strict=True):
            nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((8, 8, 8, 3), id="short-last-batch"),
        pytest.param((8, 1, 8, 1), id="batch-of-one"),
        pytest.param((4, 4, 30, 4), id="larger-batch"),
        pytest.param((1,), id="only-one-sample"),
    ],
)
def test_batch_sizes(ranks2, sizes):
    found = same_everywhere(ranks2, edge_jobs.odd_batches, sizes)
    losses, state = by_hand(sizes)
    assert [loss for *_, loss in found["bp"]["steps"]] == losses
    assert all(torch.equal(found["bp"]["state"][key], value) for key, value in state.items())


def test_data_is_read_on_the_first_rank_only(ranks2):
    same_everywhere(ranks2, edge_jobs.data_only_where_it_is_read)


def test_accumulation_with_flushes_in_between(ranks2):
    found = same_everywhere(ranks2, edge_jobs.accumulates, names=[*NAMES, "pipedream-2bw", "adl"])
    for outcome in found.values():
        assert outcome["updates"] == [5, 5]
        assert [batch for _, batch, _ in outcome["steps"]] == list(range(11))


def test_leaving_with_batches_under_way(ranks2):
    for left in ranks2.run(for_each, edge_jobs.leaves_early, NAMES):
        assert left == {name: [] for name in NAMES}


def test_memory_of_targets_may_be_reused(ranks2):
    same_everywhere(ranks2, edge_jobs.reused_buffers)


def test_evaluation_before_training(ranks2):
    model = conv_net().eval()
    expected = {"samples": 38.0, "loss": 0.0, "correct": 0.0}
    with torch.no_grad():
        for x, y in images([7, 1, 30], seed=2):
            expected["loss"] += float(cross_entropy(model(x), y)) * len(x)
            expected["correct"] += float((model(x).argmax(1) == y).sum())
    for by_name in ranks2.run(for_each, edge_jobs.evaluates_first, NAMES):
        for found in by_name.values():
            result = found["evaluation"]
            assert result["samples"] == 38.0
            assert result["loss"] == pytest.approx(expected["loss"] / 38, rel=1e-7)
            assert result["accuracy"] == expected["correct"] / 38
            assert all(torch.equal(found["before"][key], found["after"][key]) for key in found["before"])


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_stage(ranks2, frozen):
    found = same_everywhere(ranks2, edge_jobs.frozen_stage, frozen)
    start = conv_net().state_dict()
    still = ("0.", "1.") if frozen == 0 else ("2.", "3.")
    learned = dict(conv_net().named_parameters())
    for outcome in found.values():
        for key, value in outcome["state"].items():
            if key in learned:
                assert torch.equal(value, start[key]) == key.startswith(still), key
            else:
                assert not torch.equal(value, start[key]), f"batch norm of a frozen stage still counts: {key}"


@pytest.mark.parametrize("free", [0, 1, 2])
def test_parameter_free_stage(ranks2, free):
    same_everywhere(ranks2, edge_jobs.parameter_free_stage, free)


def test_nested_activations_of_many_dtypes(ranks2):
    same_everywhere(ranks2, edge_jobs.tree_activations)


def test_activations_with_gaps(ranks2):
    same_everywhere(ranks2, edge_jobs.strided_activations)


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "dtrp"])
def test_channels_last_survives_the_wire(ranks2, name):
    inline = edge_jobs.watched_activations(name)
    below, above = ranks2.run(edge_jobs.watched_activations, name)
    assert differences(inline["outcome"], above["outcome"]) == []
    assert above["activations"] == inline["activations"]
    assert below["gradients"] == inline["gradients"]
    assert below["activations"] == above["gradients"] == []
    channels = 8
    for strides, dtype in above["activations"]:
        assert strides[1:] == (1, 8 * channels, channels)
        assert dtype == "torch.float32"
    assert {strides[1:] for strides in below["gradients"]} == {(1, 8 * channels, channels)}


def test_bf16_autocast(ranks2):
    same_everywhere(ranks2, edge_jobs.bf16)
    _, above = ranks2.run(edge_jobs.watched_activations, "dtrp", "bf16")
    assert {dtype for _, dtype in above["activations"]} == {"torch.bfloat16"}
    assert all(t.dtype != torch.bfloat16 for t in above["outcome"]["state"].values())


@pytest.mark.parametrize("m", [2, 3])
def test_batch_compensation(ranks2, m):
    inline = edge_jobs.compensated(m)
    for found in ranks2.run(edge_jobs.compensated, m):
        assert differences(inline, found) == []


def test_fit_with_a_loader_on_the_first_rank_only(ranks2):
    found = same_everywhere(ranks2, edge_jobs.fits)
    for outcome in found.values():
        assert [epoch for epoch, *_ in outcome["epochs"]] == [0, 1, 2]
        assert sum(samples for _, _, samples, _ in outcome["epochs"]) == 3 * 29
        assert [evaluation["samples"] for *_, evaluation in outcome["epochs"]] == [10.0] * 3
        assert outcome["epochs"][-1][1] < outcome["epochs"][0][1]


def test_fit_with_batch_compensation(ranks2):
    inline = edge_jobs.fits("dtrp", 3)
    for found in ranks2.run(edge_jobs.fits, "dtrp", 3):
        assert differences(inline, found) == []


@pytest.mark.parametrize(("name", "stages"), [("dtr", 4), ("pipedream", 3), ("1f1b", 2), ("dsp", 2)])
def test_staleness_is_measured_and_known_on_every_rank(ranks2, name, stages):
    one, other = ranks2.run(edge_jobs.measures, name, stages)
    assert one == other
    assert [stage for stage, *_ in one] == list(range(stages))
    for _, updates, measured, predicted in one:
        assert updates == 40
        assert measured == predicted
