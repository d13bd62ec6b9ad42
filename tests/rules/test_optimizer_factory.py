"""An optimizer factory may ask which stage it works for."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from recording import feed, stages_of
from small_nets import tanh_net, vectors
from unlatch.rules.updates import StagePlace, UpdateRule, make_optimizer


def start(model, optimizer, method="pipedream"):
    return unlatch.parallelize(
        model,
        unlatch.methods.get(method, microbatches=1),
        stages=3,
        split=["1", "3"],
        loss_fn=mse_loss,
        optimizer=optimizer,
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
