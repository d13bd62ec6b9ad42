"""The stability limit against published numbers, closed forms and the recursion itself, one micro-batch at a time."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unlatch.errors import ConfigError
from unlatch.schedule.stability import (
    PREDICTORS,
    Lag,
    Motion,
    auto_microbatches,
    chain_limit,
    geometric_factor,
    stability_limit,
    version_lateness,
)

# The columns of the CIFAR-10 delay study: (nesterov, predictor, micro-batches per update), momentum 0.9.
COLUMNS = [
    (False, None, 1),
    (True, None, 1),
    (True, "geometric", 1),
    (True, None, 2),
    (True, None, 4),
    (True, "geometric", 4),
    (True, None, 8),
    (True, "geometric", 8),
]
TABLE = {
    0: "3.80 1.36 - - - - - -",
    1: ".100 .253 .358 .770 1.84 .870 1.81 1.31",
    3: ".035 .046 .095 .129 .416 .434 1.13 .678",
    5: ".022 .025 .045 .059 .176 .292 .556 .489",
    6: ".018 .021 .034 .046 .129 .235 .416 .434",
    9: ".013 .014 .020 .029 .069 .143 .211 .327",
    14: ".008 .009 .012 .018 .038 .075 .100 .196",
}


@pytest.mark.parametrize("lateness", TABLE)
def test_reproduces_the_published_table_to_every_printed_digit(lateness: int) -> None:
    for (nesterov, predictor, microbatches), printed in zip(COLUMNS, TABLE[lateness].split(), strict=True):
        if printed != "-":
            limit = stability_limit(lateness, nesterov=nesterov, predictor=predictor, microbatches=microbatches)
            half_a_digit = 0.5 * 10.0 ** -len(printed.split(".")[1])
            assert limit == pytest.approx(float(printed), abs=half_a_digit), (nesterov, predictor, microbatches)


def test_only_the_last_step_convention_reproduces_the_column_with_nesterov_and_prediction() -> None:
    printed = [float(TABLE[lateness].split()[2]) for lateness in (1, 3, 5, 6, 9)]
    coasting = [stability_limit(lateness, nesterov=True, predictor="coasting") for lateness in (1, 3, 5, 6, 9)]
    assert all(ours < 0.95 * theirs for ours, theirs in zip(coasting, printed, strict=True))


def test_the_whole_table_takes_less_than_two_seconds() -> None:
    # Another momentum than everywhere else, so that no limit is known yet.
    start = time.process_time()
    for lateness in TABLE:
        for nesterov, predictor, microbatches in COLUMNS:
            stability_limit(lateness, momentum=0.901, nesterov=nesterov, predictor=predictor, microbatches=microbatches)
    assert time.process_time() - start < 2.0


def test_plain_gradient_descent_has_the_delayed_lms_limit() -> None:
    printed = [2, 1, 0.618, 0.445, 0.347, 0.2846, 0.2411, 0.2091]
    for delay, threshold in enumerate(printed):
        limit = stability_limit(delay, momentum=0.0)
        assert limit == pytest.approx(2 * math.sin(math.pi / (2 * (2 * delay + 1))), rel=1e-12)
        assert limit == pytest.approx(threshold, abs=5e-4)


@pytest.mark.parametrize("delay", range(8))
def test_delayed_descent_converges_just_below_the_limit_and_diverges_just_above(delay: int) -> None:
    def end(a: float) -> float:
        w = [1.0] * (delay + 1)
        for _ in range(20_000):
            w.append(w[-1] - a * w[-1 - delay])
            if abs(w[-1]) > 1e6:
                break
        return abs(w[-1])

    limit = stability_limit(delay, momentum=0.0)
    assert end(0.99 * limit) < 1e-3
    assert end(1.01 * limit) > 1e3


@given(momentum=st.floats(0.0, 0.99))
def test_closed_forms_of_small_delays(momentum: float) -> None:
    assert stability_limit(0, momentum=momentum) == pytest.approx(2 * (1 + momentum))
    nesterov = stability_limit(0, momentum=momentum, nesterov=True)
    assert nesterov == pytest.approx(2 * (1 + momentum) / (1 + 2 * momentum))
    assert stability_limit(1, momentum=momentum) == pytest.approx(1 - momentum, rel=1e-6)


class Running:
    """One stage of a linear chain, newest first: its weights, buffers and gradients. The learning rate is 1."""

    def __init__(self, lag: Lag, state: np.ndarray) -> None:
        self.lag = lag
        self.weights, self.velocity, self.gradients = (list(part) for part in np.split(state, 3))

    def seen(self, steps: int) -> float:
        """What a forward that is `steps` updates ahead of its own finds."""
        motion, mu = self.lag.motion, self.lag.motion.momentum
        w, v, g = self.weights[steps], self.velocity[steps], self.gradients[steps]
        name, move = self.lag.predictor, 0.0
        if name == "difference":
            move = steps * (w - self.weights[steps + 1])
        elif name == "geometric":
            move = sum(mu**i for i in range(1, steps + 1)) * (w - self.weights[steps + 1])
        elif name == "linear":
            move = -steps * self.lag.scale * v
        elif name in ("coasting", "constant-gradient"):
            push = motion.fed * g if name == "constant-gradient" else 0.0
            for _ in range(steps):
                v = mu * v + push
                move -= self.lag.scale * (push + mu * v if motion.nesterov else v)
        return w + self.lag.alpha * move

    def update(self, gradient: float) -> np.ndarray:
        motion, mu, w = self.lag.motion, self.lag.motion.momentum, self.weights[0]
        own = self.lag.shrink * gradient
        pull = motion.fed * (own if motion.decoupled else own + motion.decay * w)
        v = mu * self.velocity[0] + pull
        stays = w * (1 - motion.decay * self.lag.scale) if motion.decoupled else w
        w = stays - self.lag.scale * (pull + mu * v if motion.nesterov else v)
        return np.array([w, *self.weights[:-1], v, *self.velocity[:-1], own, *self.gradients[:-1]])


def period_radius(a: float, lags: list[Lag]) -> float:
    """Spectral radius of the map over one update of a whole chain, found by running it from every unit vector.

    The chain is a product of weights near its optimum 1: what the output is off by is the sum of what each of them,
    as its own forward saw it, is off by, and so is the gradient of each of them.
    """
    depth, m = max(lag.lateness for lag in lags) + 2, lags[0].microbatches

    def run_one_period(state: np.ndarray) -> np.ndarray:
        stages = [Running(lag, part) for lag, part in zip(lags, np.split(state, len(lags)), strict=True)]
        first = depth * m  # a micro-batch that starts an update, late enough for all older versions to exist
        off = [stage.seen(b // m - (b - stage.lag.lateness) // m) for b in range(first, first + m) for stage in stages]
        gradient = a * sum(off) / m / len(lags)
        return np.concatenate([stage.update(gradient) for stage in stages])

    size = 3 * depth * len(lags)
    monodromy = np.stack([run_one_period(column) for column in np.eye(size)], axis=1)
    return float(np.abs(np.linalg.eigvals(monodromy)).max())


MOTIONS = st.builds(
    Motion,
    momentum=st.floats(0.0, 0.95),
    nesterov=st.booleans(),
    fed=st.sampled_from([1.0, 0.1]),
    decay=st.sampled_from([0.0, 0.01]),
    decoupled=st.booleans(),
)


def assert_first_lost_at(limit: float, lags: list[Lag]) -> None:
    # Alone, a stage has no direction without curvature. Together they have: a mode at 1 that stands still, several of
    # them at once, which are found only to a root of machine precision.
    near, rounding = (1e-3, 1e-9) if len(lags) == 1 else (2e-3, 1e-6)
    assert all(period_radius(part * limit, lags) < 1 + rounding for part in (0.05, 0.25, 0.5, 0.75, 0.9, 1 - near))
    assert period_radius((1 + near) * limit, lags) > 1 + (0 if len(lags) == 1 else rounding)


@settings(max_examples=60, deadline=None)
@given(
    lateness=st.integers(0, 9),
    m=st.integers(1, 6),
    mu=st.floats(0.0, 0.95),
    nesterov=st.booleans(),
    name=st.sampled_from(PREDICTORS),
    alpha=st.sampled_from([0.5, 1.0]),
)
def test_the_limit_is_where_the_recursion_first_loses_stability(
    lateness: int, m: int, mu: float, nesterov: bool, name: str, alpha: float
) -> None:
    limit = stability_limit(lateness, momentum=mu, nesterov=nesterov, predictor=name, alpha=alpha, microbatches=m)
    assert_first_lost_at(limit, [Lag(lateness, Motion(mu, nesterov), m, name, alpha)])


@settings(max_examples=40, deadline=None)
@given(
    lateness=st.lists(st.integers(0, 6), min_size=2, max_size=3),
    m=st.integers(1, 4),
    motion=MOTIONS,
    name=st.sampled_from([None, "difference", "linear", "geometric", "coasting"]),
    gamma=st.sampled_from([1.0, 0.5]),
    shrink=st.sampled_from([1.0, 0.7]),
)
def test_the_limit_of_a_chain_is_where_its_whole_recursion_first_loses_stability(
    lateness: list[int], m: int, motion: Motion, name: str | None, gamma: float, shrink: float
) -> None:
    below = range(len(lateness) - 1, -1, -1)
    lags = [
        Lag(late, motion, m, name, 1.0, gamma**under, shrink**under)
        for late, under in zip(lateness, below, strict=True)
    ]
    limit = chain_limit(lags)
    if math.isfinite(limit):
        assert_first_lost_at(limit, lags)


def test_stages_were_judged_one_at_a_time() -> None:
    """pipedream and pipedream-2bw at K=2 had one a*, though one stage of the first is late and both of the other."""
    late, prompt = Lag(1), Lag(0)
    assert stability_limit(1) == pytest.approx(0.1)
    assert chain_limit([late, late]) == pytest.approx(0.1)
    assert chain_limit([late, prompt]) == pytest.approx(0.2)


def test_averaged_gradients_were_taken_for_added_ones() -> None:
    """Adam's average was fed into the recursion of heavy-ball momentum, which bears 1 / (1 - beta) times less."""
    for beta in (0.9, 0.99):
        assert chain_limit([Lag(1, Motion(beta, fed=1 - beta))]) == pytest.approx(1.0)
        ahead = chain_limit([Lag(1, Motion(beta, nesterov=True, fed=1 - beta))])
        assert ahead == pytest.approx(stability_limit(1, momentum=beta, nesterov=True) / (1 - beta))
        assert Motion(beta, fed=1 - beta).total == pytest.approx(1.0)


@given(lateness=st.integers(0, 40), m=st.integers(1, 16))
def test_version_lateness_follow_the_index_law(lateness: int, m: int) -> None:
    first = 50 * m
    assert version_lateness(lateness, m) == tuple(b // m - (b - lateness) // m for b in range(first, first + m))


def test_geometric_factor() -> None:
    assert [round(geometric_factor(0.9, s), 3) for s in (0, 1, 3, 5, 7, 9)] == [0, 0.9, 2.439, 3.686, 4.695, 5.513]
    assert geometric_factor(1.0, 4) == 4


def test_the_rule_for_microbatches() -> None:
    assert [auto_microbatches(late) for late in (0, 1, 2, 3, 4, 5, 6, 9, 14, 16)] == [1, 1, 2, 4, 4, 4, 8, 8, 16, 16]
    assert [auto_microbatches(9, batch) for batch in (1, 15, 16, 31, 32, 64, 1000)] == [1, 1, 2, 2, 4, 8, 8]


@pytest.mark.parametrize(
    "bad", [{"lateness": -1}, {"microbatches": 0}, {"momentum": 1.0}, {"momentum": -0.1}, {"predictor": "gemoetric"}]
)
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        stability_limit(**{"lateness": 1, **bad})  # type: ignore[arg-type]
