"""Clipping by the norm of the whole model's gradient, where all stages update at the same time."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from recording import feed
from small_nets import tanh_net, vectors
from unlatch.errors import ConfigError, NonFinite, ScheduleError
from unlatch.schedule import WholeNorm, check_order, check_schedule, one_f_one_b_async, simulate, streams, unroll

SYNCHRONOUS = [name for name in unlatch.methods.names() if unlatch.methods.get(name).schedule(2).flushes]
LIMIT = 0.05


def begun(method, stages=3, model=None, **options):
    settings = {"clip_grad_norm": LIMIT, "clip_norm_of": "model", **options}
    return unlatch.parallelize(
        model or tanh_net(4),
        method,
        stages=stages,
        split=["1", "3"][: stages - 1],
        loss_fn=mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        **settings,
    )


def by_hand(data, accumulate=1):
    """The whole model in plain torch; an incomplete accumulation at the end is applied as it is."""
    model = tanh_net(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for start in range(0, len(data), accumulate):
        part = data[start : start + accumulate]
        for x, y in part:
            (mse_loss(model(x), y) / len(part)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_it_is_torchs_clipping_of_the_whole_model(name, accumulate):
    data = vectors(5)
    method = unlatch.methods.get(name, microbatches=1 if name == "bp" else 3, accumulate=accumulate)
    run = begun(method)
    feed(run, data)
    expected, norms = by_hand(data, accumulate)
    assert min(norms) > 2 * LIMIT
    for key, value in run.module().state_dict().items():
        assert torch.allclose(value, expected[key], rtol=0, atol=1e-12), key
    apart = begun(method, clip_norm_of="stage")
    feed(apart, data)
    assert not torch.allclose(apart.module()[0][0].weight, expected["0.0.weight"], rtol=0, atol=1e-6)


def test_a_loose_limit_changes_nothing():
    runs = [begun("1f1b", **options) for options in ({"clip_grad_norm": 1e6}, {"clip_grad_norm": None})]
    for run in runs:
        feed(run, vectors(4))
    assert runs[1].schedule.entries == unlatch.methods.get("1f1b").schedule(3).entries
    one, other = (run.module().state_dict() for run in runs)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_losses_that_count_are_divided_before_the_norm():
    """Sums of squares with their number: the norm is that of the gradient of the mean."""

    def summed(output, target):
        return (output - target).square().sum(), output.numel()

    data = vectors(4, size=5)
    runs = [begun(unlatch.methods.get("gpipe", microbatches=2)), begun("bp")]
    runs.append(
        unlatch.parallelize(
            tanh_net(4),
            unlatch.methods.get("gpipe", microbatches=2),
            stages=3,
            split=["1", "3"],
            loss_fn=summed,
            optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
            clip_grad_norm=LIMIT,
            clip_norm_of="model",
        )
    )
    for run in runs:
        feed(run, data)
    expected = by_hand(data)[0]
    for run in runs:
        for key, value in run.module().state_dict().items():
            assert torch.allclose(value, expected[key], rtol=0, atol=1e-12), key


@pytest.mark.parametrize("name", [name for name in unlatch.methods.names() if name not in SYNCHRONOUS])
def test_methods_that_update_stages_apart_refuse(name):
    with pytest.raises(ConfigError, match=rf'and {name} updates each stage .* clip_norm_of="stage".*bp, gpipe, 1f1b'):
        begun(unlatch.methods.get(name, **({"microbatches": 3} if name == "pipedream-2bw" else {})))


def test_one_stage_is_the_model_under_every_method():
    run = begun("pipedream", stages=1)
    feed(run, vectors(3))
    expected = by_hand(vectors(3))[0]
    assert all(torch.equal(value, expected[key]) for key, value in run.module().state_dict().items())


@pytest.mark.parametrize("groups", [[1], [3, 3], [4, 2, 4]])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_schedule_passes_all_checks(name, groups, accumulate):
    schedule = WholeNorm(unlatch.methods.get(name).schedule(3))
    check_schedule(schedule, groups, accumulate)
    check_order(unroll(schedule, groups, accumulate))
    found = streams(schedule, groups, accumulate)
    base = streams(schedule.base, groups, accumulate)
    # The norm costs nothing but the wait for it.
    assert simulate(found).makespan >= simulate(base).makespan
    assert sum(a.kind == "Q" for stream in found for a in stream) == 3 * sum(a.kind == "U" for a in found[0])


def test_schedules_that_do_not_flush_have_no_such_form():
    with pytest.raises(ScheduleError, match="Periodic updates stages at different times"):
        WholeNorm(one_f_one_b_async(2))


def test_events_are_the_entries():
    run = begun(unlatch.methods.get("zb-h1", microbatches=2, accumulate=2))
    feed(run, vectors(5))
    expected = streams(run.schedule, [2] * 5, 2)
    done = {}
    for event in run.events:
        done.setdefault(event.stage, []).append(f"{event.stage}{event.kind}{event.batch}")
    assert done == {station: list(map(str, stream)) for station, stream in enumerate(expected)}


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_gradients_that_are_not_finite_are_found_before_anybody_updates(policy):
    data = vectors(4)
    spoiled = [(x.clone(), y) for x, y in data]
    spoiled[2][0][0, 0] = torch.inf
    run = begun("1f1b", nonfinite=policy)
    if policy == "stop":
        feed(run, spoiled[:2])
        before = copy.deepcopy(run.module().state_dict())
        with pytest.raises(NonFinite):
            run.step(*spoiled[2])
        assert all(torch.equal(before[key], value) for key, value in run.module().state_dict().items())
        return
    feed(run, spoiled)
    assert run.left_out == 1
    expected = by_hand([data[0], data[1], data[3]])[0]
    for key, value in run.module().state_dict().items():
        assert torch.allclose(value, expected[key], rtol=0, atol=1e-12), key


def test_a_probe_sees_the_gradients_as_they_are():
    """Their final form is made before the update that the probe was told of."""
    run = begun(unlatch.methods.get("gpipe", microbatches=2, accumulate=2))
    probe = run.probe_gradients(every=1)
    feed(run, vectors(4))
    assert probe.found
    assert all(found.relative_error < 1e-12 for found in probe.found)


def test_checkpoints_of_other_methods_are_finished_by_their_own_rules(tmp_path):
    with_batches_under_way = begun("pipedream", clip_norm_of="stage")
    for x, y in vectors(4):
        with_batches_under_way.step(x, y)
    with_batches_under_way.save(tmp_path / "checkpoint")
    run = begun("1f1b")
    run.load(tmp_path / "checkpoint")
    assert run.step(*vectors(1)[0]).batch == 4


def test_what_is_wrong_is_named():
    with pytest.raises(ConfigError, match='clip_norm_of must be "stage" or "model", got \'all\''):
        begun("bp", clip_norm_of="all")
