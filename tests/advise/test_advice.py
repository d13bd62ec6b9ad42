"""What is said about delay: from the optimizer as it is, about all stages together, with cures that cure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

import unlatch
from unlatch import methods
from unlatch.advise.advice import ELSEWHERE, EXPECTED, RELIABILITY, Advice, advise
from unlatch.advise.motion import motion_of
from unlatch.methods import DTRP, FDG, AsyncPP, Method, PipeDream, PipeDream2BW
from unlatch.rules.predict import Linear, Regulator
from unlatch.schedule.stability import Lag, Motion, chain_limit

LATE = [name for name in methods.names() if methods.get(name).gradient == "late"]
LOCAL = [name for name in methods.names() if methods.get(name).gradient == "local"]


def one(kind: Callable[..., Optimizer], **options: object) -> Optimizer:
    return kind([nn.Parameter(torch.zeros(2, 2))], **{"lr": 0.1, **options})


HEAVY = partial(one, SGD, momentum=0.9)
NESTEROV = partial(one, SGD, momentum=0.9, nesterov=True)


def pasted(call: str) -> Method:
    found = eval(call, {"unlatch": unlatch})
    assert isinstance(found, Method)
    return found


# ---------------------------------------------------------------- the optimizer as it is


def test_adam_was_judged_as_heavy_ball() -> None:
    """`betas[0]` went into the recursion of heavy-ball momentum, so Adam was warned off what it bears."""
    adam = advise(PipeDream2BW(microbatches=2), 2, one(AdamW))
    heavy = advise(PipeDream2BW(microbatches=2), 2, HEAVY())
    assert heavy.limit == pytest.approx(0.1)
    assert adam.limit == pytest.approx(10 * heavy.limit, rel=1e-2)
    assert (adam.verdict, heavy.verdict) == ("about bp", "large loss")
    slow = advise(PipeDream(microbatches=1), 4, one(NAdam, betas=(0.99, 0.999)))
    assert slow.limit > 1.8
    assert slow.warning is None


def test_optimizers_are_read_as_they_are() -> None:
    assert motion_of(one(SGD)) == Motion(0.0)
    assert motion_of(one(SGD, momentum=0.8, dampening=0.5)) == Motion(0.8, fed=0.5)
    assert motion_of(NESTEROV(weight_decay=0.01)) == Motion(0.9, nesterov=True, decay=pytest.approx(0.001))
    average = Motion(0.75, fed=0.25, scale_free=True)
    assert motion_of(one(Adam, betas=(0.75, 0.9), weight_decay=0.01)) == average
    decoupled = motion_of(one(AdamW, betas=(0.75, 0.9), weight_decay=0.01))
    assert decoupled is not None
    assert (decoupled.decoupled, decoupled.decay) == (True, pytest.approx(0.001))
    ahead = motion_of(one(NAdam, betas=(0.75, 0.9)))
    assert ahead is not None
    assert ahead.nesterov


def test_the_group_with_most_weights_counts() -> None:
    few, many = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(9))
    found = motion_of(SGD([{"params": [few], "momentum": 0.1}, {"params": [many], "momentum": 0.9}], lr=0.1))
    assert found == Motion(0.9)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_smaller_steps_below_bear_more(gamma: float) -> None:
    advice = advise(PipeDream(microbatches=1, gamma=gamma), 3, HEAVY())
    assert advice.limit == chain_limit([Lag(late, scale=gamma**late) for late in (2, 1, 0)])
    assert advice.limits[0] == pytest.approx(chain_limit([Lag(2)]) / gamma**2)


def test_momentum_that_a_method_raises_counts() -> None:
    nets = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    run = unlatch.parallelize(
        nets, AsyncPP(microbatches=1), stages=2, loss_fn=nn.functional.mse_loss, optimizer=partial(NAdam, lr=0.01)
    )
    below, above = (Motion(beta, True, 1 - beta, scale_free=True) for beta in (0.95, 0.9))
    assert run.advice.limit == pytest.approx(chain_limit([Lag(1, below), Lag(0, above)]))


@pytest.mark.parametrize("kind", [RMSprop, torch.optim.Adagrad, torch.optim.Muon])
def test_where_there_is_no_theory_it_says_so(kind: type[Optimizer]) -> None:
    advice = advise(PipeDream(microbatches=1), 4, one(kind))
    assert kind.__name__ in str(advice.unknown)
    assert (advice.limit, advice.verdict, advice.warning) == (None, None, None)
    assert advice.table() == [f"no advice: {advice.unknown}"]


class Slower(SGD):
    """Steps in a way of its own."""

    def step(self, closure: object = None) -> None:
        super().step()


@pytest.mark.parametrize(
    ("kind", "options"), [(SGD, {"momentum": 1.0}), (SGD, {"momentum": 0.9, "dampening": 1.0}), (Slower, {})]
)
def test_settings_without_theory_were_an_error_or_taken_for_others(
    kind: type[Optimizer], options: dict[str, float]
) -> None:
    """Momentum 1 stopped `parallelize`; without new gradients a* was infinite; a subclass was judged as its base."""
    nets = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    run = unlatch.parallelize(
        nets,
        PipeDream(microbatches=1),
        stages=2,
        split=["1"],
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(kind, lr=0.1, **options),
    )
    assert kind.__name__ in str(run.advice.unknown)
    assert (run.advice.limit, run.advice.margin, run.advice.verdict) == (None, None, None)


def test_several_optimizers_in_one_have_no_theory() -> None:
    parts = [HEAVY(), one(AdamW)]
    assert "Joined" in str(advise(PipeDream(microbatches=1), 2, unlatch.optim.Joined(parts)).unknown)


def test_a_regulator_without_theory_was_taken_for_another() -> None:
    """Only alpha of a regulator was looked at, so that one with a cap was judged as if it had none."""
    capped = PipeDream(microbatches=1, predict=Linear(Regulator(rho="capped", cap=2)))
    assert "no model of this predictor" in str(advise(capped, 4, HEAVY()).unknown)
    assert advise(PipeDream(microbatches=1, predict=Linear(Regulator(alpha=0.5))), 4, HEAVY()).unknown is None


@pytest.mark.parametrize("name", LOCAL)
def test_local_methods_were_called_about_bp(name: str) -> None:
    advice = advise(methods.get(name).resolve(4), 4, NESTEROV())
    assert "local losses" in str(advice.unknown)
    assert advice.verdict is None


# ------------------------------------------------------------------ all stages together


def after_training(method: Method, lr: float, updates: int) -> float:
    """How far a product of two weights, near its optimum of 1, ends from it, trained for real."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for layer in net:
        nn.init.constant_(layer.weight, 1.0 + 1e-6)
    x = torch.ones(4, 1, dtype=torch.float64)

    def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).mean() / 2

    with unlatch.parallelize(
        net, method, stages=2, split=["1"], loss_fn=half_square, optimizer=partial(SGD, lr=lr, momentum=0.9)
    ) as run:
        for _ in range(updates):
            run.step(x, x)
        run.flush()
        return abs(math.prod(p.item() for p in run.module().parameters()) - 1.0)


@pytest.mark.parametrize("method", [PipeDream(microbatches=1), PipeDream2BW(microbatches=2), FDG(microbatches=2)])
def test_training_diverges_above_the_limit_and_not_below(method: Method) -> None:
    limit = advise(method, 2, HEAVY()).limit
    assert limit is not None
    # Two weights of curvature 1 each: the sharpest direction has 2.
    assert after_training(method, 0.8 * limit / 2, 250) < 1e-6
    assert after_training(method, 1.4 * limit / 2, 250) > 1e-5


def test_one_stage_alone_does_not_tell_2bw_from_pipedream() -> None:
    pipedream, twice = (advise(m, 2, HEAVY()) for m in (PipeDream(microbatches=1), PipeDream2BW(microbatches=2)))
    assert pipedream.limits[0] == twice.limits[0]
    assert pipedream.limit == pytest.approx(2 * twice.limit)
    assert (pipedream.verdict, twice.verdict) == ("some loss", "large loss")


def test_delays_of_a_plan_are_those_of_its_layers() -> None:
    """There may be more layers than stages, and a call to paste leaves their delays to the plan."""
    x = torch.zeros(16, 2)
    run = unlatch.parallelize(
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))),
        methods.LayerPipe(microbatches=1),
        stages=2,
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        sample=(x, x),
    )
    assert run.advice.lateness == run.method.lateness(2)
    assert len(run.advice.limits) == len(run.advice.lateness)
    assert run.method.call == "unlatch.methods.LayerPipe(microbatches=1)"


# ------------------------------------------------------------------- verdicts and cures


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("name", LATE)
def test_defaults_tripped_their_own_warning(name: str, stages: int) -> None:
    """`microbatches="auto"` chose what the advisor, looking at one stage, then warned of."""
    for batch_size in (128, None):
        chosen = methods.get(name).resolve(stages, batch_size)
        for optimizer in (NESTEROV(), one(AdamW), one(NAdam)):
            assert advise(chosen, stages, optimizer, batch_size).warning is None


def test_micro_batches_come_first() -> None:
    """The cure for pipedream at K=4 was prediction, which made it worse; more micro-batches were never named."""
    advice = advise(PipeDream(microbatches=1), 4, NESTEROV(), batch_size=64)
    assert advice.cure is not None
    assert advice.cure.changes == ("microbatches=2",)
    assert advice.cure.call == "unlatch.methods.PipeDream(microbatches=2)"
    assert advice.cure.call in str(advice.warning)
    assert EXPECTED["about bp"] in str(advice.warning)
    # Under Nesterov momentum the chain bears less with this prediction than without it.
    plain, predicted = (advise(PipeDream(microbatches=2, predict=p), 4, NESTEROV()) for p in ("none", "geometric"))
    assert predicted.limit < plain.limit


def test_options_of_the_method_stay_in_the_call() -> None:
    advice = advise(FDG(microbatches=1, gamma=0.9, accumulate=2), 4, HEAVY())
    assert advice.cure is not None
    assert pasted(advice.cure.call) == FDG(microbatches=2, gamma=0.9, accumulate=2)


def test_where_batches_are_too_small_to_split_the_optimizer_is_next() -> None:
    cure = advise(PipeDream(microbatches=1), 2, HEAVY(), batch_size=8).cure
    assert cure is not None
    assert cure.changes == ("nesterov=True",)
    adam = advise(PipeDream(microbatches=1), 4, one(AdamW), batch_size=8).cure
    assert adam is not None
    assert adam.changes == ("predict='geometric'",)


def test_prediction_was_advised_where_a_study_shows_that_it_costs_accuracy() -> None:
    """Under Nesterov momentum a* may rise with it at one micro-batch, but accuracy fell on every network tried."""
    for stages in (3, 4, 6, 8):
        assert advise(FDG(microbatches=1), stages, NESTEROV(), batch_size=8).cure is None
    found = json.loads(CHECKED.read_text())["prediction"]
    helped = {name: [after - before for before, after in _points(found, name)] for name in ("heavy ball", "adamw 0.9")}
    assert all(gain > 0 for gains in helped.values() for gain in gains)
    assert all(after < before for before, after in _points(found, "nesterov"))


CHECKED = Path(__file__).parents[2] / "benchmarks" / "results" / "advice_check.json"
STUDIES = Path(__file__).parents[2] / "studies"


def _points(found: list[dict[str, Any]], optimizer: str) -> list[tuple[float, float]]:
    """Points to bp without and with prediction, by network."""
    return [tuple(row["points"]) for row in found if row["optimizer"] == optimizer]


def test_a_predictor_that_the_optimizer_refuses_is_never_named() -> None:
    for optimizer in (one(NAdam, betas=(0.5, 0.9)), one(torch.optim.RAdam), one(torch.optim.Adamax)):
        for method in (PipeDream(microbatches=1), FDG(microbatches=1)):
            advice = advise(method, 6, optimizer, batch_size=8)
            assert advice.warning is not None
            assert advice.cure is None


def test_where_nothing_can_be_set_the_warning_says_what_else_to_do() -> None:
    advice = advise(DTRP(microbatches=1), 8, NESTEROV(), batch_size=8)
    assert advice.cure is None
    assert "fewer stages" in str(advice.warning)


OPTIMIZERS = [HEAVY(), NESTEROV(), one(SGD), one(SGD, momentum=0.99), one(AdamW), one(NAdam)]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(LATE),
    stages=st.integers(2, 6),
    m=st.sampled_from([6, 8, 16]),
    optimizer=st.sampled_from(OPTIMIZERS),
    batch=st.sampled_from([None, 64, 256]),
)
def test_a_cure_is_better_feasible_and_true(
    name: str, stages: int, m: int, optimizer: Optimizer, batch: int | None
) -> None:
    advice = advise(methods.get(name, microbatches=m), stages, optimizer, batch)
    assert (advice.warning is None) == (advice.verdict == "about bp")
    if advice.cure is None:
        return
    cured = pasted(advice.cure.call)
    used = (
        NESTEROV(momentum=optimizer.param_groups[0]["momentum"])
        if "nesterov=True" in advice.cure.changes
        else optimizer
    )
    again = advise(cured, stages, used, batch)
    assert (again.limit, again.verdict) == (advice.cure.limit, advice.cure.verdict)
    assert again.limit > advice.limit
    assert batch is None or cured.per_batch == m or batch // cured.per_batch >= 8


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_delay_no_warning(optimizer: Optimizer) -> None:
    for method in (methods.get("1f1b", microbatches=4), methods.get("bp")):
        advice = advise(method, 3, optimizer)
        assert (advice.verdict, advice.warning, advice.cure) == ("about bp", None, None)


def test_table_lists_stages_then_all_together_then_the_warning() -> None:
    lines = advise(PipeDream(microbatches=1), 2, HEAVY()).table()
    assert [line.split()[:3] for line in lines[1:3]] == [["0", "1", "1.0"], ["1", "0", "0.0"]]
    assert lines[3].startswith("all stages together: a* = 0.200")
    assert "PipeDream(microbatches=2)" in lines[4]
    assert isinstance(advise(methods.get("bp"), 1, None), Advice)


def test_a_good_verdict_on_delay_says_that_it_is_no_promise() -> None:
    good, bad = (advise(PipeDream(microbatches=m), 2, HEAVY()) for m in (8, 1))
    assert (good.verdict, good.warning) == ("about bp", None)
    assert good.figures()[-1].endswith(ELSEWHERE)
    # Once: with the cure that promises as much.
    assert "\n".join(bad.table()).count(ELSEWHERE) == 1
    assert ELSEWHERE in str(bad.warning)
    # Nothing is late, so that nothing is in doubt.
    assert ELSEWHERE not in "\n".join(advise(methods.get("1f1b", microbatches=4), 2, HEAVY()).figures())


def test_what_was_said_of_defaults_is_of_a_study_that_is_there() -> None:
    """The file went on quoting two benchmarks that were gone, some of their rows of one seed."""
    rows = json.loads(CHECKED.read_text())["defaults elsewhere"]
    assert rows
    assert {row["study"] for row in rows} <= {file.stem for file in STUDIES.glob("*.toml")}
    assert min(row["seeds"] for row in rows) >= 3


def test_what_is_said_of_its_reliability_was_measured() -> None:
    found = json.loads(CHECKED.read_text())["other network"]
    assert f"{found['same class']} of {found['settings']} verdicts" in RELIABILITY
    assert f"{found['warned rightly']} of {found['warned']} warnings" in RELIABILITY
