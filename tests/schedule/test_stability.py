"""The stability limit against published numbers, closed forms and the recursion itself, one micro-batch at a time."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unlatch.advise.advice import advise
from unlatch.errors import ConfigError
from unlatch.schedule.stability import (
    PREDICTORS,
    auto_microbatches,
    geometric_factor,
    stability_limit,
    version_lateness,
    wants_prediction,
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


def period_radius(a: float, lateness: int, mu: float, nesterov: bool, name: str, alpha: float, m: int) -> float:
    """Spectral radius of the map over one update, found by running one period from every unit vector."""
    depth = lateness + 2
    columns = np.eye(3 * depth)

    def run_one_period(state: np.ndarray) -> np.ndarray:
        weights, velocity, gradients = (list(state[i * depth : (i + 1) * depth]) for i in range(3))  # newest first
        total = 0.0
        first = depth * m  # a micro-batch that starts an update, late enough for all older versions to exist
        for b in range(first, first + m):
            steps = b // m - (b - lateness) // m
            w, v, g = weights[steps], velocity[steps], gradients[steps]
            fade = sum(mu**i for i in range(1, steps + 1))
            if name == "difference":
                move = steps * (w - weights[steps + 1])
            elif name == "geometric":
                move = fade * (w - weights[steps + 1])
            elif name == "linear":
                move = -steps * v
            elif name in ("coasting", "constant-gradient"):
                move, push = 0.0, g if name == "constant-gradient" else 0.0
                for _ in range(steps):
                    v = mu * v + push
                    move -= push + mu * v if nesterov else v
            else:
                move = 0.0
            total += a * (w + alpha * move) / m
        v = mu * velocity[0] + total
        w = weights[0] - (total + mu * v if nesterov else v)
        return np.array([w, *weights[:-1], v, *velocity[:-1], total, *gradients[:-1]])

    monodromy = np.stack([run_one_period(columns[:, i]) for i in range(3 * depth)], axis=1)
    return float(np.abs(np.linalg.eigvals(monodromy)).max())


@settings(max_examples=60)
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
    setting = (lateness, mu, nesterov, name, alpha, m)
    limit = stability_limit(lateness, momentum=mu, nesterov=nesterov, predictor=name, alpha=alpha, microbatches=m)
    # Multiple modes at 0 are found only to the root of machine precision, far from the circle: no harm.
    assert all(period_radius(part * limit, *setting) < 1 + 1e-9 for part in (0.05, 0.25, 0.5, 0.75, 0.9, 0.999))
    assert period_radius(1.001 * limit, *setting) > 1


@given(lateness=st.integers(0, 40), m=st.integers(1, 16))
def test_version_lateness_follow_the_index_law(lateness: int, m: int) -> None:
    first = 50 * m
    assert version_lateness(lateness, m) == tuple(b // m - (b - lateness) // m for b in range(first, first + m))


def test_geometric_factor() -> None:
    assert [round(geometric_factor(0.9, s), 3) for s in (0, 1, 3, 5, 7, 9)] == [0, 0.9, 2.439, 3.686, 4.695, 5.513]
    assert geometric_factor(1.0, 4) == 4


def test_the_rule_for_microbatches() -> None:
    assert [auto_microbatches(late) for late in (0, 1, 2, 3, 4, 5, 6, 9, 14, 16)] == [1, 1, 2, 2, 4, 4, 4, 8, 8, 16]
    assert [auto_microbatches(9, batch) for batch in (1, 15, 16, 31, 32, 64, 1000)] == [1, 1, 2, 2, 4, 8, 8]
    assert wants_prediction(7, 4)
    assert not wants_prediction(6, 4)
    assert not wants_prediction(0, 1)


def test_brackets() -> None:
    assert advise([1, 0], nesterov=True).verdicts == ("about bp", "about bp")
    assert advise([9, 0], nesterov=True, microbatches=4).verdicts[0] == "some loss"
    assert advise([5, 0], nesterov=True).verdicts[0] == "large loss"


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("nesterov", [False, True])
def test_no_delay_no_warning(momentum: float, nesterov: bool) -> None:
    advice = advise([0, 0, 0], momentum=momentum, nesterov=nesterov, predictor="linear")
    assert advice.warning is None
    assert advice.cure is None
    assert advise([]).warning is None


@pytest.mark.parametrize(
    ("lateness", "changes"),
    [
        ([1, 0], ("nesterov=True",)),
        ([3, 1, 0], ("microbatches=2", "nesterov=True", "predict='geometric'")),
        ([5, 3, 1, 0], ("microbatches=4", "nesterov=True")),
        ([9, 7, 5, 3, 1, 0], ("microbatches=8", "nesterov=True")),
        ([14, 12, 10, 8, 6, 4, 2, 0], ("microbatches=8", "nesterov=True", "predict='geometric'")),
    ],
)
def test_heavy_ball_is_cured_as_the_study_recommends(lateness: list[int], changes: tuple[str, ...]) -> None:
    advice = advise(lateness, momentum=0.9, batch_size=100)
    assert advice.warning is not None
    assert advice.cure is not None
    assert advice.cure.changes == changes
    assert advice.cure.limit >= 0.15
    assert all(change in advice.warning for change in changes)
    cured = advise(
        lateness, nesterov=True, microbatches=advice.cure.microbatches, predictor=advice.cure.predictor, batch_size=100
    )
    assert cured.warning is None


@settings(max_examples=60)
@given(
    lateness=st.integers(1, 30),
    m=st.integers(1, 8),
    nesterov=st.booleans(),
    name=st.sampled_from([None, *PREDICTORS]),
    mu=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    batch=st.sampled_from([None, 8, 32, 100]),
    available=st.booleans(),
)
def test_a_cure_is_better_feasible_and_true(
    lateness: int, m: int, nesterov: bool, name: str | None, mu: float, batch: int | None, available: bool
) -> None:
    assume(batch is None or m <= batch)
    advice = advise(
        [lateness, 0],
        momentum=mu,
        nesterov=nesterov,
        predictor=name,
        microbatches=m,
        batch_size=batch,
        nesterov_available=available,
    )
    assert (advice.warning is None) == (advice.limits[0] >= 0.15)
    if advice.cure is None:
        return
    cure = advice.cure
    assert cure.limit > advice.limits[0]
    assert cure.limit == stability_limit(
        lateness, momentum=mu, nesterov=cure.nesterov, predictor=cure.predictor, microbatches=cure.microbatches
    )
    assert batch is None or cure.microbatches == m or batch // cure.microbatches >= 8
    assert cure.nesterov == nesterov or (available and mu > 0)


def test_where_nothing_can_be_set_the_warning_says_what_else_to_do() -> None:
    advice = advise([9, 0], nesterov=True, predictor="geometric", batch_size=8)
    assert advice.cure is None
    assert advice.warning is not None
    assert "fewer stages" in advice.warning


def test_table_lists_stages_then_the_warning() -> None:
    lines = advise([5, 0], microbatches=2).table()
    assert [line.split()[:3] for line in lines[1:3]] == [["0", "5", "2.5"], ["1", "0", "0.0"]]
    assert "a* = " in lines[3]
    assert len(advise([0]).table()) == 2


@pytest.mark.parametrize(
    "bad", [{"lateness": -1}, {"microbatches": 0}, {"momentum": 1.0}, {"momentum": -0.1}, {"predictor": "gemoetric"}]
)
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        stability_limit(**{"lateness": 1, **bad})  # type: ignore[arg-type]
