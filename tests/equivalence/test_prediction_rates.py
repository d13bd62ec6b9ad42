"""Predictors against recursions written out: Adam's moments, and learning rates that change while a batch is under way.

A prediction is for the weights that its backward meets, so it goes at the rates of the updates between.
"""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from recording import Optimizers, feed, stages_of
from recursions import begin, follow_recursion, torch_optimizer
from small_nets import tanh_net, vectors
from unlatch.methods import DTRP, AsyncPP, PipeDream, get
from unlatch.reference import SGD, Adam

PREDICTORS = ["none", "difference", "linear", "geometric", "coasting", "constant-gradient"]
ADAMS = {
    "adam": Adam(1e-2, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.02),
    "adamw": Adam(1e-2, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.2, decoupled=True),
}
SGDS = {
    "plain": SGD(0.05),
    "heavy-ball": SGD(0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
}


def jumping(update):
    """Falls at once, rises by and by, and is never the same twice in a row after that."""
    return 1.0 if update < 6 else 0.1 + 0.07 * (update - 6)


def follows(method, optimizer, stages=4, batches=16, **options):
    data = vectors(batches * method.accumulate, size=12)
    return follow_recursion(tanh_net(stages), method, data, optimizer, tolerance=1e-12, loss_tolerance=1e-10, **options)


@pytest.mark.parametrize("predict", PREDICTORS)
@pytest.mark.parametrize("optimizer", ADAMS)
@pytest.mark.parametrize("name", ["dtrp", "pipedream"])
def test_adam_follows_the_recursion_with_every_predictor(name, optimizer, predict):
    follows(get(name, microbatches=1, predict=predict), ADAMS[optimizer], predict=predict)
    follows(get(name, microbatches=2, predict=predict, gamma=0.8), ADAMS[optimizer], predict=predict, gamma=0.8)


@pytest.mark.parametrize("predict", PREDICTORS)
@pytest.mark.parametrize("optimizer", [*SGDS, *ADAMS])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_predictors_go_at_the_rates_of_the_coming_updates(optimizer, predict, microbatches):
    """Linear and geometric once took the present rate, and under Nesterov that of the last update."""
    method = DTRP(microbatches=microbatches, predict=predict)
    schedule = {"lr_scheduler": lambda made: LambdaLR(made, jumping), "scale": lambda stage, update: jumping(update)}
    follows(method, (SGDS | ADAMS)[optimizer], predict=predict, **schedule)


@pytest.mark.parametrize("predict", ["linear", "geometric", "constant-gradient"])
def test_what_a_method_does_to_the_rates_is_foreseen_too(predict):
    """The discount of early steps changes with every update."""
    method = AsyncPP(microbatches=1, discount_updates=9, predict=predict)
    delays = [max(1, late) for late in method.staleness(4)]

    def scale(stage, update):
        return delays[stage] ** -(1 - update / 9) if update < 9 else 1.0

    follows(method, SGDS["nesterov"], scale=scale, predict=predict)


def test_after_a_jump_the_rate_decides():
    """The reference can tell: at the rate of the past the same run would end elsewhere."""
    method = DTRP(microbatches=1)
    late = {"lr_scheduler": lambda made: LambdaLR(made, jumping), "scale": lambda stage, update: jumping(update - 1)}
    with pytest.raises(AssertionError):
        follows(method, SGDS["nesterov"], predict="geometric", **late)


SCHEDULES = {
    "steps": lambda made: MultiStepLR(made, [3, 7], gamma=0.3),
    "one cycle, of momentum too": lambda made: OneCycleLR(made, max_lr=0.1, total_steps=40),
    "restarts": lambda made: CosineAnnealingWarmRestarts(made, 3),
    "one after the other": lambda made: SequentialLR(
        made, [LinearLR(made, 0.2, total_iters=4), MultiStepLR(made, [3])], milestones=[5]
    ),
    "one times the other": lambda made: ChainedScheduler([LinearLR(made, 0.2, total_iters=9), MultiStepLR(made, [3])]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_every_schedule_is_foreseen_and_left_as_it_is(schedule):
    run = begin(
        tanh_net(2), PipeDream(1, gamma=0.5), torch_optimizer(SGDS["nesterov"]), lr_scheduler=SCHEDULES[schedule]
    )
    first, (updater, *_) = [], [stage.updater for stage in stages_of(run)]
    for x, y in vectors(12):
        rates, state = updater.optimizer.param_groups[0]["lr"], updater.scheduler.state_dict()
        (found,) = updater.coming_rates(6)
        assert updater.optimizer.param_groups[0]["lr"] == rates
        assert updater.scheduler.state_dict() == state
        first.append((updater.version, found))
        run.step(x, y)
    applied = {version: found[0] for version, found in first}
    for version, found in first:
        for n, rate in enumerate(found):
            assert rate == pytest.approx(applied.get(version + n, rate), rel=1e-14)
    assert len(set(applied.values())) > 2


def test_the_end_of_an_epoch_is_foreseen_once_it_is_known():
    """Updates of the old epoch are still to come when the first forwards of the new one look ahead."""
    for make, metric in ((lambda made: MultiStepLR(made, [1], gamma=0.1), None), (_impatient, 1.0)):
        optimizers = Optimizers(torch.optim.SGD, lr=0.5, momentum=0.9)
        run = begin(tanh_net(4), DTRP(microbatches=1), optimizers, lr_scheduler=make, lr_scheduler_per="epoch")
        for x, y in vectors(12):
            run.step(x, y)
        updater = stages_of(run)[0].updater
        assert updater.coming_rates(9) == [[0.5] * 9]
        run.end_epoch(metric)
        left = 12 - updater.version
        assert left > 1
        assert updater.coming_rates(9) == [pytest.approx([0.5] * left + [0.05] * (9 - left))]
        run.flush()
        assert updater.coming_rates(2) == [pytest.approx([0.05] * 2)]


def _impatient(made):
    """Every epoch is a plateau."""
    return ReduceLROnPlateau(made, patience=-1)


def test_a_step_at_rate_zero_says_nothing_of_the_next():
    """Warm-up from zero: the last step has no direction that could be extended."""
    schedule = {"lr_scheduler": lambda made: LambdaLR(made, lambda update: 0.0 if update < 4 else 1.0)}
    run = begin(tanh_net(3), DTRP(microbatches=1), torch_optimizer(SGDS["nesterov"]), **schedule)
    assert all(result.loss < 10 for result in feed(run, vectors(12)))
