"""Learning-rate schedulers step at every update, or when an epoch ends."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as schedules

import unlatch
from recording import stages_of
from small_nets import on_plain_nets, tanh_net, vectors
from unlatch.errors import ConfigError

HALVES = partial(schedules.StepLR, step_size=1, gamma=0.5)
PLATEAU = partial(schedules.ReduceLROnPlateau, factor=0.1, patience=0)


def begun(lr_scheduler=HALVES, per="epoch", method="bp", stages=3, seed=0, **options):
    options.setdefault("optimizer", partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    return unlatch.parallelize(
        tanh_net(4, seed=seed),
        method,
        stages=stages,
        split=["1", "3"][: stages - 1],
        loss_fn=mse_loss,
        lr_scheduler=lr_scheduler,
        lr_scheduler_per=per,
        **options,
    )


def rates(run):
    return {group["lr"] for stage in stages_of(run) for group in stage.updater.optimizer.param_groups}


def pass_over(run, batches=3, seed=1):
    for x, y in vectors(batches, seed=seed):
        run.step(x, y)


def weights(run):
    run.flush()
    return copy.deepcopy(run.module().state_dict())


def test_per_epoch_is_torchs_loop():
    run = begun()
    model = tanh_net(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = HALVES(optimizer)
    for epoch in range(3):
        pass_over(run, seed=epoch)
        run.end_epoch()
        for x, y in vectors(3, seed=epoch):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        assert rates(run) == {0.1 * 0.5 ** (epoch + 1)}
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in weights(run).items())


def test_per_update_takes_no_notice_of_epochs():
    run = begun(per="update")
    pass_over(run)
    assert rates(run) == {0.1 * 0.5**3}
    run.end_epoch()
    assert rates(run) == {0.1 * 0.5**3}
    without = begun(None, per="update")
    without.end_epoch()
    assert rates(without) == {0.1}


class Rates(torch.optim.SGD):
    """Notes the learning rate of every step."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.used = []

    def step(self, closure=None):
        self.used.append(self.param_groups[0]["lr"])
        super().step(closure)


@pytest.mark.parametrize("name", ["bp", "1f1b", "pipedream", "dtrp", "petra", "fdg", "layerpipe", "dgl", "auxnet"])
def test_the_nth_update_has_the_same_rate_under_every_method(name):
    """Where the pipeline stays filled, the last updates of an epoch come when the next one has begun."""
    method = unlatch.methods.get(name, microbatches=1, **({"mode": "stages"} if name == "layerpipe" else {}))
    run = begun(method=on_plain_nets(method, 3), sample=vectors(1)[0], optimizer=Rates)
    for epoch in range(3):
        pass_over(run, 2, seed=epoch)
        run.end_epoch()
    run.flush()
    assert [stage.updater.optimizer.used for stage in stages_of(run)] == [[0.1, 0.1, 0.05, 0.05, 0.025, 0.025]] * 3
    assert rates(run) == {0.0125}


def test_an_update_of_two_epochs_has_the_rate_of_the_second():
    run = begun(method=unlatch.methods.get("pipedream", microbatches=1, accumulate=2), optimizer=Rates)
    for epoch in range(2):
        pass_over(run, 3, seed=epoch)
        run.end_epoch()
    run.flush()
    assert [stage.updater.optimizer.used for stage in stages_of(run)] == [[0.1, 0.05, 0.05]] * 3


def test_what_is_trained_beside_the_stages_moves_on_as_well():
    run = begun(method="dgl", sample=vectors(1)[0])
    pass_over(run)
    run.end_epoch()
    beside = [t.updater.optimizer for station in run.stations.values() for t in station.trained().values()]
    assert {group["lr"] for optimizer in beside for group in optimizer.param_groups} == {0.05}


def test_a_plateau_is_seen_at_the_end_of_an_epoch():
    run = begun(PLATEAU)
    for metric, rate in ((1.0, 0.1), (0.5, 0.1), (0.6, 0.01), (0.4, 0.01)):
        pass_over(run)
        run.end_epoch(metric)
        assert {round(found, 9) for found in rates(run)} == {rate}
    with pytest.raises(ConfigError, match=r"looks at a metric when an epoch ends: call run.end_epoch\(metric\)"):
        run.end_epoch()
    with pytest.raises(ConfigError, match="there is none at an update: set lr_scheduler_per='epoch'"):
        begun(PLATEAU, per="update")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("scheduler", "metric"), [(HALVES, None), (PLATEAU, 1.0)])
def test_a_resumed_run_goes_on_alike(scheduler, metric, exact, tmp_path):
    run = begun(scheduler, method="pipedream")
    pass_over(run)
    run.end_epoch(metric)
    run.save(tmp_path / "checkpoint", exact=exact)
    again = begun(scheduler, method="pipedream", seed=4)
    again.load(tmp_path / "checkpoint")
    for one in (run, again):
        pass_over(one, seed=7)
        one.end_epoch(metric)
        pass_over(one, seed=8)
    assert rates(run) == rates(again) != {0.1}
    one, other = weights(run), weights(again)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_end_of_an_epoch_is_done_again_by_who_goes_back():
    good, bad = begun(nonfinite="skip"), begun(nonfinite="skip")
    pass_over(good)
    pass_over(bad)
    good.end_epoch()
    bad.end_epoch()
    x, y = vectors(1)[0]
    bad.step(x, y * torch.nan)
    pass_over(good, seed=5)
    pass_over(bad, seed=5)
    assert bad.left_out == 1
    assert rates(bad) == rates(good) == {0.05}
    one, other = weights(good), weights(bad)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("scheduler", [HALVES, PLATEAU])
def test_a_trainer_tells_of_epochs(scheduler):
    run = begun(scheduler, method="pipedream")
    epochs = unlatch.Trainer(run).fit(vectors(3), 3, vectors(2, seed=9))
    losses = [epoch.evaluation["loss"] for epoch in epochs]
    falls = sum(after >= before for before, after in pairwise(losses))
    assert {round(rate, 9) for rate in rates(run)} == {0.0125 if scheduler is HALVES else round(0.1 * 0.1**falls, 9)}


def test_what_is_no_factory_is_named():
    optimizer = torch.optim.SGD(tanh_net(1).parameters(), lr=0.1)
    with pytest.raises(
        ConfigError,
        match=r"got a StepLR that is made already: pass functools.partial\(StepLR, \.\.\.\) without the opt",
    ):
        begun(HALVES(optimizer))
    with pytest.raises(ConfigError, match=r"lr_scheduler must be a function .* got dict"):
        begun({"name": "cosine"})
    with pytest.raises(ConfigError, match=r"got a SGD that is made already: pass functools.partial\(SGD, lr="):
        unlatch.parallelize(tanh_net(2), stages=1, loss_fn=mse_loss, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"got str: pass functools.partial\(torch.optim.SGD, lr="):
        unlatch.parallelize(tanh_net(2), stages=1, loss_fn=mse_loss, optimizer="sgd")
    with pytest.raises(ConfigError, match=r"must return a scheduler, something with step\(\), got int"):
        begun(lambda optimizer: 3)
    with pytest.raises(ConfigError, match='lr_scheduler_per must be "update" or "epoch", got \'batch\''):
        begun(per="batch")
