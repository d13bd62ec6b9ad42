"""Exact statements about DTR and DTRP that hold for the engine as it runs: order, counts, and what stays unchanged.

Numbers follow the list of oracles in the project's reconstruction of the method; those about timetables, indices and
the bare predictors (1, 2, 10) are tested where schedules and predictors are.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from rank_jobs import momentum_sgd
from recording import Forwards, Optimizers, RecordingSGD, feed, listening, stages_of
from recursions import begin, behind, follow_recursion
from small_nets import CONV_SPLITS, conv_net, images, tanh_net, vectors
from unlatch.methods import DTR, DTRP, FDG, FR, get
from unlatch.reference import SGD
from unlatch.runtime.stage import Stage, StageOptions
from unlatch.transport.mail import Micro

MOMENTUM = {"lr": 0.05, "momentum": 0.9}


def build(method, stages, optimizer, model=None):
    return begin(model if model is not None else tanh_net(stages), method, optimizer)


def trained(method, stages, data, optimizer):
    """Weights after training, and the losses."""
    model = tanh_net(stages)
    losses = [r.loss for r in feed(build(method, stages, optimizer, model), data)]
    return model.state_dict(), losses


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("predict", ["none", "difference", "linear", "geometric", "constant-gradient"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_oracle_03_queues_give_the_recursion(stages, predict):
    tolerance = 0.0 if predict == "none" else 1e-13
    follow_recursion(
        tanh_net(stages),
        DTRP(microbatches=1, predict=predict),
        vectors(14),
        SGD(0.05, momentum=0.9),
        version=behind([max(0, 2 * (stages - 1 - k) - 1) for k in range(stages)]),
        backward="current",
        mixed=False,
        predict=predict,
        tolerance=tolerance,
        loss_tolerance=tolerance,
    )


@pytest.mark.parametrize("method", [DTR(microbatches=1), DTRP(microbatches=1)])
def test_oracle_04_one_module_is_backpropagation(method):
    data = vectors(6)
    found, losses = trained(method, 1, data, momentum_sgd)
    expected, truth = trained("bp", 1, data, momentum_sgd)
    assert losses == truth
    assert same(found, expected)


def test_oracle_05_inputs_kept_by_each_module():
    stages, data = 5, vectors(12)
    run = build(DTR(microbatches=1), stages, momentum_sgd)
    watched = stages_of(run)
    limits = [2 * (stages - k) for k in range(1, stages + 1)]
    assert limits == [8, 6, 4, 2, 0]
    for rounds, (x, y) in enumerate(data, start=1):
        run.step(x, y)
        kept = [len(stage.kept) for stage in watched]
        assert kept == [min(rounds, limit) for limit in limits]
        # Module k ends its r-th round at tick r+k-1, so it is full from tick 2K-k-1 on.
        for k, (inside, limit) in enumerate(zip(kept[:-1], limits, strict=False), start=1):
            assert (inside == limit) == (rounds + k - 1 >= 2 * stages - k - 1)
    most = {stage.index: stage.peak_bytes for stage in watched[:-1]}
    run.flush()
    assert all(not stage.kept and stage.kept_bytes == 0 for stage in watched)
    assert most[0] > most[1] > most[2] > most[3]


def test_oracle_05_occupancy_never_exceeds_the_limit_inside_a_tick():
    stages = 4
    run = build(DTR(microbatches=1), stages, momentum_sgd)
    seen = dict.fromkeys(range(stages), 0)
    for stage in stages_of(run):
        inner = stage.forward

        def forward(*args, stage=stage, inner=inner):
            result = inner(*args)
            seen[stage.index] = max(seen[stage.index], len(stage.kept))
            return result

        stage.forward = forward
    feed(run, vectors(12))
    assert seen == {0: 6, 1: 4, 2: 2, 3: 1}


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_oracle_06_number_of_updates(stages):
    batches = 12
    run = build(DTR(microbatches=1), stages, momentum_sgd)
    for rounds, (x, y) in enumerate(vectors(batches), start=1):
        run.step(x, y)
        for k, stage in enumerate(stages_of(run), start=1):
            tick = rounds + k - 1
            due = tick - stages + 1 if k == stages else tick - 2 * stages + k + 1
            assert stage.version == max(0, due)
    run.flush()
    assert [stage.version for stage in stages_of(run)] == [batches] * stages


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_oracle_07_work_and_messages(stages):
    batches, model = 9, tanh_net(stages)
    forwards, backwards = Counter(), Counter()
    for k, block in enumerate(model):
        block.register_forward_hook(lambda *_, k=k: forwards.update([k]))
        block[0].weight.register_hook(lambda _, k=k: backwards.update([k]))
    run = build(DTR(microbatches=1), stages, momentum_sgd, model)
    with listening() as sent:
        feed(run, vectors(batches))
    last = stages - 1
    assert forwards == {k: batches if k == last else 2 * batches for k in range(stages)}
    assert backwards == dict.fromkeys(range(stages), batches)
    assert Counter(message.kind for message in sent) == Counter({"forward": last * batches, "backward": last * batches})


def test_oracle_08_frozen_lower_modules():
    stages, data = 3, vectors(10)

    def only_the_last_moves(model):
        top = {id(p) for p in model[-1].parameters()}
        return lambda params: torch.optim.SGD(params, lr=0.1 if id(params[0]) in top else 0.0, momentum=0.9)

    outcomes = []
    for method in (DTR(microbatches=1), DTRP(microbatches=1), FDG(microbatches=1)):
        model = tanh_net(stages)
        run = build(method, stages, only_the_last_moves(model), model)
        outcomes.append(([r.loss for r in feed(run, data)], model.state_dict()))
    assert outcomes[0][0] == outcomes[1][0] == outcomes[2][0]
    assert same(outcomes[0][1], outcomes[1][1])
    assert same(outcomes[0][1], outcomes[2][1])

    model = tanh_net(stages)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in data:
        with torch.no_grad():
            features = model[1](model[0](x))
        loss = mse_loss(model[2](features), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == outcomes[0][0]
    assert same(model.state_dict(), outcomes[0][1])


@pytest.mark.parametrize("method", [DTR(), DTRP(predict="linear"), DTRP(predict="constant-gradient"), FR()])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_oracle_09_without_motion_the_second_forward_equals_the_first(method, microbatches):
    model = conv_net()
    run = unlatch.parallelize(
        model,
        get(method, microbatches=microbatches),
        stages=4,
        loss_fn=cross_entropy,
        optimizer=Optimizers(torch.optim.SGD, lr=0.0, momentum=0.9),
        split=CONV_SPLITS[4],
        seed=5,
    )
    watched = [Forwards(stage.module) for stage in stages_of(run)]
    feed(run, images([12] * 8))
    for forwards in watched[:-1]:
        assert len(forwards.first) == 8 * microbatches
        assert forwards.lateness() == [0.0] * (8 * microbatches)
    assert not watched[-1].first


def test_oracle_13_the_last_module_never_predicts():
    class Watching(unlatch.rules.predict.Difference):
        def predict(self, params, optimizer, steps, history, out=None, rates=None):
            asked.setdefault(owner[id(params[0])], set()).add(steps)
            return super().predict(params, optimizer, steps, history, out=out, rates=rates)

    for stages in (2, 3, 4):
        asked: dict[int, set[int]] = {}
        model = tanh_net(stages)
        owner = {id(p): k for k, block in enumerate(model) for p in block.parameters()}
        run = build(DTRP(microbatches=1, predict=Watching()), stages, momentum_sgd, model)
        feed(run, vectors(12))
        assert {k: max(steps) for k, steps in asked.items()} == {k: 2 * (stages - 1 - k) - 1 for k in range(stages - 1)}
        if stages == 2:
            assert asked == {0: {1}}


@pytest.mark.parametrize("method", [FDG, DTR, DTRP])
def test_oracle_14_step_size_and_gradient_shrinking_are_the_same_without_decay(method):
    # Halving is exact in floating point, so the two must agree to the last bit.
    data, plain = vectors(12), Optimizers(torch.optim.SGD, **MOMENTUM)
    by_step, _ = trained(method(microbatches=1, gamma=0.5), 4, data, plain)
    by_gradient, _ = trained(method(microbatches=1, shrink=0.5), 4, data, plain)
    untouched, _ = trained(method(microbatches=1), 4, data, plain)
    identity, _ = trained(method(microbatches=1, gamma=1.0), 4, data, plain)
    assert same(by_step, by_gradient)
    assert same(untouched, identity)
    assert not same(by_step, untouched)

    decaying = Optimizers(torch.optim.SGD, **MOMENTUM, weight_decay=0.01)
    one, _ = trained(method(microbatches=1, gamma=0.5), 4, data, decaying)
    other, _ = trained(method(microbatches=1, shrink=0.5), 4, data, decaying)
    assert not same(one, other)


@pytest.mark.parametrize("predict", ["difference", "linear", "geometric", "constant-gradient"])
def test_oracle_15_true_weights_come_back(predict):
    run = build(DTRP(microbatches=1, predict=predict), 4, momentum_sgd)
    shown = [0]
    for stage in stages_of(run)[:-1]:
        inner = stage.forward

        def forward(*args, stage=stage, inner=inner):
            places = [p.data_ptr() for p in stage.params]
            values = [p.detach().clone() for p in stage.params]
            inside: list[int] = []
            hook = stage.module.register_forward_pre_hook(
                lambda m, _: inside.extend(p.data_ptr() for p in stage.params)
            )
            result = inner(*args)
            hook.remove()
            shown[0] += inside != places
            assert [p.data_ptr() for p in stage.params] == places
            assert all(torch.equal(p, v) for p, v in zip(stage.params, values, strict=True))
            return result

        stage.forward = forward
    feed(run, vectors(12))
    assert shown[0] > 20


def test_oracle_16_batch_compensation():
    stages, count = 3, 12
    data = vectors(count, size=4)
    plain, losses = trained(DTRP(microbatches=1), stages, data, momentum_sgd)
    once, same_losses = trained(DTRP(microbatches=1, compensate=1), stages, data, momentum_sgd)
    assert losses == same_losses
    assert same(plain, once)

    for m in (2, 3):
        joined = [tuple(torch.cat(column) for column in zip(*data[i : i + m], strict=True)) for i in range(0, count, m)]
        found, by_count = trained(DTRP(microbatches=1, compensate=m), stages, data, momentum_sgd)
        expected, by_size = trained(DTRP(microbatches=1), stages, joined, momentum_sgd)
        assert by_count == by_size
        assert len(by_count) == count // m
        assert same(found, expected)
        assert not same(found, plain)


def test_oracle_16_compensation_leaves_the_order_of_work_alone():
    def order(method, data):
        run = build(method, 3, momentum_sgd)
        feed(run, data)
        return [(e.stage, e.kind, e.batch, e.version) for e in run.events]

    assert order(DTRP(microbatches=1, compensate=2), vectors(12)) == order(DTRP(microbatches=1), vectors(6))


def test_oracle_18_features_replay_with_the_same_modules():
    """A driver of our own lets all modules forward a batch before any updates, with lateness K-k: that is FR."""
    stages, data = 4, vectors(9)
    model = tanh_net(stages)
    options = StageOptions(loss_fn=mse_loss, optimizer=momentum_sgd)
    modules = [Stage(k, stages, model[k], DTR(microbatches=1).rules(), options) for k in range(stages)]
    cotangents: list[dict[int, list[torch.Tensor]]] = [{} for _ in range(stages)]
    for t in range(len(data) + stages - 1):
        micros = {i: Micro(i, i, 0, 1, len(data[i][0]), 1.0, i, True) for i in range(max(0, t - stages), len(data))}
        if t < len(data):
            h, y = data[t]
            for stage in modules:
                h = stage.forward(micros[t], h, y if stage.last else None)
        # Each module uses what its upper neighbour produced one iteration earlier, so go from below.
        for k, stage in enumerate(modules):
            i = t - (stages - 1 - k)
            if 0 <= i < len(data):
                returned = stage.backward(micros[i], None if stage.last else cotangents[k].pop(i))
                if k:
                    cotangents[k - 1][i] = returned.gradients
                stage.update()
    expected, _ = trained(FR(microbatches=1), stages, data, momentum_sgd)
    assert same(model.state_dict(), expected)


def test_recording_sees_every_update():
    """The witnesses of these tests must not be empty."""
    optimizers = Optimizers(RecordingSGD, lr=0.1)
    feed(build(DTR(microbatches=1), 2, optimizers), vectors(3))
    assert [len(o.gradients) for o in optimizers.made] == [3, 3]
    assert all(isinstance(o.param_groups[0]["params"][0], nn.Parameter) for o in optimizers.made)
