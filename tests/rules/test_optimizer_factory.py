"""An optimizer factory may ask which stage it works for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from recording import feed, stages_of
from small_nets import tanh_net, vectors
from unlatch.rules.updates import StagePlace, UpdateRule, make_optimizer


def start(model, optimizer, method="pipedream", stages=3, **options):
    return unlatch.parallelize(
        model,
        unlatch.methods.get(method, microbatches=1),
        stages=stages,
        split=["1", "3"][: stages - 1],
        loss_fn=mse_loss,
        optimizer=optimizer,
        **options,
    )


def test_a_second_argument_is_the_place_of_the_stage():
    places = []

    def factory(params, stage):
        places.append(stage)
        return torch.optim.SGD(params, lr=0.1 / (1 + stage.delay))

    model = tanh_net(4)
    model[1][0].bias.requires_grad_(False)
    run = start(model, factory)
    names = [("0.0.weight", "0.0.bias"), ("1.0.weight", "2.0.weight", "2.0.bias"), ("3.0.weight", "3.0.bias")]
    assert places == [StagePlace(k, 3, 2 - k, names[k]) for k in range(3)]
    assert [s.updater.optimizer.param_groups[0]["lr"] for s in stages_of(run)] == [0.1 / 3, 0.1 / 2, 0.1]
    assert len(feed(run, vectors(6))) == 6


@pytest.mark.parametrize("method", ["pipedream", "asyncpp"])
def test_settings_of_each_stage_survive_a_checkpoint(method, tmp_path):
    def factory(params, stage):
        return torch.optim.NAdam(params, lr=0.01 / (1 + stage.delay), betas=(0.9, 0.999))

    def falling(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def settings(run):
        return [(g["lr"], g["betas"]) for s in stages_of(run) for g in s.updater.optimizer.param_groups]

    def go(model):
        return start(model, factory, method, lr_scheduler=falling)

    untouched, saved = go(tanh_net(4)), go(tanh_net(4))
    for run in (untouched, saved):
        feed(run, vectors(4))
        run.save(tmp_path / "last")
    resumed = go(tanh_net(4, seed=5))
    resumed.load(tmp_path / "last")
    assert settings(resumed) == settings(saved)
    assert len(set(settings(resumed))) == 3
    for run in (untouched, resumed):
        feed(run, vectors(4, seed=2))
    for p, q in zip(untouched.module().parameters(), resumed.module().parameters(), strict=True):
        assert torch.equal(p, q)
    # Another cut: what the stages had alike is taken over, what they did not have alike is the factory's.
    other = start(tanh_net(4), factory, method, stages=2, lr_scheduler=falling)
    other.load(tmp_path / "last")
    assert [lr for lr, _ in settings(other)] == [0.005, 0.01]


@pytest.mark.parametrize("method", ["dgl", "auxnet"])
def test_networks_beside_the_stages_ask_as_well(method):
    places = []

    def factory(params, stage):
        places.append((stage.index, len(stage.names) == len(params)))
        return torch.optim.SGD(params, lr=0.01)

    run = start(tanh_net(4), factory, method, sample=vectors(1)[0])
    feed(run, vectors(3))
    beside = [0, 1] if method == "dgl" else [1, 2]
    assert sorted(places) == sorted((k, True) for k in [0, 1, 2, *beside])


def test_other_factories_are_called_as_before():
    parameters = [nn.Parameter(torch.zeros(1))]
    place = StagePlace(0, 1)
    seen = []

    class Factory:
        def __call__(self, params):
            seen.append(params)
            return torch.optim.SGD(params, lr=1.0)

    def named(params, *, lr=0.5, stage=None):
        assert stage is None, "a keyword is the caller's own"
        return torch.optim.SGD(params, lr=lr)

    def optional(params, stage=None):
        seen.append(stage)
        return torch.optim.SGD(params, lr=1.0)

    for factory in (
        torch.optim.SGD,
        torch.optim.AdamW,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=1.0),
        Factory(),
        named,
        unlatch.methods.PetraSGD(64),
    ):
        assert isinstance(make_optimizer(factory, parameters, place), torch.optim.Optimizer)
    assert seen == [parameters]
    make_optimizer(optional, parameters, place)
    assert seen[-1] is place


def test_the_update_rule_tunes_what_the_factory_made_and_scales_by_update():
    class Rule(UpdateRule):
        def tune(self, optimizer, place):
            optimizer.param_groups[0]["momentum"] = 0.1 * place.delay

        def scale_at(self, place, update):
            return 0.5 if update == 0 else 1.0

    from unlatch.runtime.updating import Updater

    w = nn.Parameter(torch.ones(1))
    updater = Updater([w], Rule(decay=0.5), StagePlace(0, 2, delay=3), partial(torch.optim.SGD, lr=1.0), None)
    assert updater.optimizer.param_groups[0]["momentum"] == 0.1 * 3
    assert updater.lr_factor() == 0.25
    w.grad = torch.ones(1)
    updater.step(1)
    assert w.item() == 0.75
    assert updater.lr_factor() == 0.5
