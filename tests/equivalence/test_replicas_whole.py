"""Replicas train what one network trains on whole batches; and what is said of them otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from rank_jobs import plain_sgd
from recording import feed
from recursions import follow_recursion
from replica_jobs import smooth_run, train_smooth
from small_nets import conv_net, images, tanh_net, vectors
from unlatch.errors import ConfigError, DataError, PlanError, ScheduleError
from unlatch.methods import get
from unlatch.plan import Plan
from unlatch.reference import SGD
from unlatch.schedule import Kind, Replicated, Workload, check_schedule, simulate, streams
from unlatch.schedule.channel import Channel
from unlatch.schedule.machine import Machine

SYNCHRONOUS = ("bp", "gpipe", "1f1b", "zb-h1", "zb-h2")
DELAYED = ("pipedream", "ddg", "fr", "fdg", "adl", "dsp", "dtr", "dtrp")
#: What replicas cannot train, and a word of the reason.
REFUSED = {
    "cgad": "weighs",
    "dni": "synthesisers",
    "auxvar": "every sample",
    "sph": "every sample",
    "layerpipe": "tasks",
}


def close(one, other):
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-12, abs=0)
    for name, value in one["state"].items():
        assert (value - other["state"][name]).abs().max().item() <= 1e-12, name


def alike(outcome, replicas):
    stations = sorted(outcome["own"])
    width = len(stations) // replicas
    for number in stations[width:]:
        pairs = zip(outcome["own"][number], outcome["own"][number % width], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), number


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_methods_train_what_one_replica_trains(name, replicas):
    method = get(name) if name == "bp" else get(name, microbatches=2)
    found = train_smooth(method, 3, replicas=replicas)
    close(found, train_smooth(method, 3))
    alike(found, replicas)


@pytest.mark.parametrize("options", [{"clip_norm_of": "model"}, {"clip_norm_of": "stage"}, {"loss_reduction": "sum"}])
def test_norms_and_sums_are_those_of_the_whole_batch(options):
    settings = {"clip_grad_norm": 0.05, "optimizer": plain_sgd, **options}
    if options.get("loss_reduction") == "sum":
        settings["loss_fn"] = lambda out, y: mse_loss(out, y, reduction="sum")
    method = get("1f1b", microbatches=2, accumulate=4)
    close(train_smooth(method, 3, replicas=2, **settings), train_smooth(method, 3, **settings))


def counted(out, y):
    """A mean over targets above zero, of which shards have different numbers."""
    wanted = y > 0
    return ((out - y)[wanted] ** 2).sum(), int(wanted.sum())


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_losses_that_count_weigh_shards_by_what_they_count(name, accumulate):
    method = get(name, microbatches=2, accumulate=accumulate)
    options = {"loss_fn": counted, "sample": None}
    close(train_smooth(method, 2, replicas=3, **options), train_smooth(method, 2, **options))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", DELAYED)
def test_delayed_methods_follow_the_recursion_on_whole_batches(name, replicas):
    method = get(name, microbatches=1)
    predict = "geometric" if name == "dtrp" else "none"
    rules = {"predict": predict, "gamma": method.gamma, "shrink": method.shrink}
    sgd = SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)
    run = follow_recursion(tanh_net(3), method, vectors(7, size=11), sgd, replicas=replicas, tolerance=1e-12, **rules)
    stations = run.stations
    for number, station in stations.items():
        for one, other in zip(station.stage.params, stations[number % 3].stage.params, strict=True):
            assert torch.equal(one, other), number


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"accumulate": 3, "microbatches": 1}])
def test_delayed_methods_in_parts_follow_the_recursion(options):
    # Unequal micro-batches weigh by their samples, which the recursion does not know.
    data = vectors(9, size=12)
    sgd = SGD(0.05, momentum=0.9)
    follow_recursion(tanh_net(3), get("dtr", **options), data, sgd, replicas=2, tolerance=1e-12, shrink=1.0)


@pytest.mark.parametrize("name", ["dgl", "auglocal", "auxnet"])
def test_networks_beside_stages_stay_alike(name):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)], nn.Linear(6, 3))
    data = [(torch.randn(9, 6), torch.randint(3, (9,))) for _ in range(4)]
    run = unlatch.parallelize(
        model,
        name,
        stages=3,
        split=["1", "2"],
        replicas=2,
        loss_fn=nn.functional.cross_entropy,
        optimizer=plain_sgd,
        sample=data[0],
    )
    before = {n: [p.detach().clone() for p in _trained(s)] for n, s in run.stations.items()}
    feed(run, data)
    assert any(before.values())
    for number, station in run.stations.items():
        for one, other, old in zip(_trained(station), _trained(run.stations[number % 3]), before[number], strict=True):
            assert torch.equal(one, other), (name, number)
            assert not torch.equal(one, old), (name, number)


def _trained(station):
    beside = [p for trained in station.trained().values() for p in trained.module.parameters()]
    return [*station.stage.params, *beside]


def test_heads_train_what_one_replica_trains():
    found, expected = (_heads(replicas) for replicas in (2, 1))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max().item() <= 1e-12


def _heads(replicas):
    with smooth_run("dgl", 3, replicas=replicas) as run:
        feed(run, vectors(5, size=11))
        heads = [p for number in range(2) for p in run.stations[number].trained()["head"].module.parameters()]
        return [t.detach().clone() for t in (*run.module().parameters(), *heads)]


def test_replicas_draw_masks_of_their_own_and_the_first_those_of_one():
    x, y = torch.ones(8, 64), torch.zeros(8, 64)
    seen = {}
    for replicas in (1, 2):
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64))
        run = unlatch.parallelize(
            model, "bp", stages=1, replicas=replicas, loss_fn=mse_loss, optimizer=plain_sgd, seed=5
        )
        for number, station in run.stations.items():
            dropout = station.stage.module.blocks[0]
            dropout.register_forward_hook(lambda _, __, out, key=(replicas, number): seen.update({key: out}))
        run.step(x[:4] if replicas == 1 else x, y[:4] if replicas == 1 else y)
    assert torch.equal(seen[1, 0], seen[2, 0])
    assert not torch.equal(seen[2, 0], seen[2, 1])


def test_batch_norm_is_that_of_each_replica_and_the_first_one_is_handed_out():
    run = unlatch.parallelize(
        conv_net(), "bp", stages=1, replicas=2, loss_fn=nn.functional.cross_entropy, optimizer=plain_sgd
    )
    run.step(*images([8])[0])
    first, second = (station.stage.module.blocks[0][1].running_mean for station in run.stations.values())
    assert not torch.equal(first, second)
    assert torch.equal(run.module()[0][1].running_mean, first)


@pytest.mark.parametrize("name", [name for name in unlatch.methods.names() if name not in REFUSED])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_columns_cannot_get_stuck(name, accumulate):
    method = get(name)
    schedule = Replicated(method.schedule(3), 3, method.also_applies)
    check_schedule(schedule, [2] * 6, accumulate)


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_the_simulator_counts_shares_and_sums(name):
    base = get(name).schedule(3)
    one = Workload({Kind.F: 2, Kind.B: 4, Kind.U: 1}, {"forward": 8, "backward": 8}, kept=4)
    columns, machine = Replicated(base, 2), Machine(Channel(bandwidth=4))
    halves = Workload({Kind.F: 1, Kind.B: 2, Kind.U: 1}, {"forward": 4, "backward": 4}, kept=2)
    alone = simulate(streams(base, [4] * 5), halves, machine).makespan
    free = columns.workload(one)
    assert simulate(streams(columns, [4] * 5), free, machine).makespan == alone
    # 20 bytes take 5 units, once for each update; nothing hides them where the pipeline is flushed.
    summing = simulate(streams(columns, [4] * 5), columns.workload(one, [20, 20, 20]), machine).makespan
    assert summing >= alone + (5 * 5 if base.flushes else 5)
    assert free.kept_bytes(3) == (2, 2, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_replicas_cannot_train_says_why(name):
    with pytest.raises(ConfigError, match=f"{name} cannot train 2 replicas: .*{REFUSED[name]}"):
        smooth_run(name, 2, replicas=2)


def test_options_that_replicas_cannot_train_say_why():
    for options in (
        {"data": "build"},
        {"multiplier": "synthesiser", "form": "lagrangian"},
        {"stage_steps": 2},
        {"probe": 3},
    ):
        with pytest.raises(ConfigError, match="auxnet cannot train 2 replicas"):
            smooth_run(get("auxnet", **options), 2, replicas=2)


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True, "2", None])
def test_replicas_are_counted(replicas):
    with pytest.raises(ConfigError, match="replicas must be a whole number, at least 1, got"):
        smooth_run("bp", 2, replicas=replicas)


def test_a_batch_has_a_row_for_every_replica_and_nothing_is_lost_if_not():
    run = smooth_run("dtr", 2, replicas=3)
    x, y = vectors(1, size=12)[0]
    run.step(x, y)
    with pytest.raises(DataError, match=r"a batch of 2 sample\(s\) cannot be shared out among 3 replicas"):
        run.step(x[:2], y[:2])
    assert run.batches == 1
    rest = [run.step(x, y), *run.flush()]
    straight = smooth_run("dtr", 2, replicas=3)
    assert [r.loss for r in feed(straight, [(x, y)] * 2)] == [r.loss for r in rest if r.loss is not None]
    with pytest.raises(DataError, match=r"the sample has 2 row\(s\) for 3 replicas"):
        smooth_run("dtr", 2, replicas=3, sample=(x[:2], y[:2]))


def test_micro_batches_are_fewer_where_replicas_would_go_without_a_row():
    method = get("gpipe", microbatches=4)
    close(train_smooth(method, 2, size=5, replicas=2), train_smooth(get("gpipe", microbatches=2), 2, size=5))


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    run = unlatch.parallelize(model, "bp", stages=1, replicas=2, loss_fn=mse_loss, optimizer=plain_sgd)
    with pytest.raises(ConfigError, match=r"the gradient of 0\.weight is sparse"):
        run.step(torch.randint(5, (4, 2)), torch.zeros(4, 2))


def test_a_schedule_that_takes_data_twice_cannot_be_replicated():
    schedule = get("auxnet", data="build").schedule(2)
    with pytest.raises(ScheduleError, match="0D at offset 0, 1D at offset 0 of the schedule takes data"):
        Replicated(schedule, 2)


def test_a_probe_wants_one_network():
    with pytest.raises(ConfigError, match="2 replicas are trained"):
        smooth_run("fdg", 2, replicas=2).probe_gradients(every=1)


def test_other_numbers_of_replicas_take_over_what_was_finished(tmp_path):
    with smooth_run("dtr", 3, replicas=2) as run:
        for x, y in vectors(4, size=9):
            run.step(x, y)
        run.save(tmp_path / "saved")
        run.flush()
        expected = [t.clone() for t in run.module().state_dict().values()]
    for replicas in (1, 3):
        with smooth_run("dtr", 3, replicas=replicas) as other:
            other.load(tmp_path / "saved")
            assert other.batches == 4
            found = other.module().state_dict().values()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            copies = [station.stage.module.blocks[0][0].weight for station in other.stations.values()]
            assert all(torch.equal(copy, copies[number % 3]) for number, copy in enumerate(copies))


def test_a_plan_and_the_number_asked_for_agree():
    plan = Plan(("0", "1"), (0, 1), (1, 1, 1, 1), replicas=(2, 2))
    with smooth_run("pipedream", 2, split="auto", plan=plan, replicas=2) as run:
        assert len(run.stations) == 4
    with pytest.raises(PlanError, match=r"has 2 replica\(s\) of each stage, but replicas=1"):
        smooth_run("pipedream", 2, split="auto", plan=plan)
    with pytest.raises(PlanError, match="stages have different numbers of devices"):
        smooth_run("pipedream", 2, split="auto", plan=Plan(("0", "1"), (0, 1), (1, 1, 1), replicas=(2, 1)), replicas=2)


def test_statistics_and_staleness_are_those_of_every_replica():
    with smooth_run("pipedream", 2, replicas=2) as run:
        results = feed(run, vectors(6, size=8))
        rows = run.statistics()
        assert results[-1].staleness.keys() == {0, 1}
        assert [(row.replica, row.stage) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert rows[0].staleness == rows[2].staleness == rows[0].predicted_staleness == 1.0
        assert "2 stages cut at ['1'] in each of 2 replicas; 6 batches fed" in repr(run)
        assert sorted(run.optimizers) == [0, 1]
        assert len(run.named_parameters()) == 2
