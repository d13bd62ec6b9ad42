"""Statistics of pairs, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from unlatch.report.paired import chance, holm, paired, student


def test_by_hand():
    found = paired({0: 90.0, 1: 92.0, 2: 91.0, 3: 95.0}, {0: 91.0, 1: 94.0, 2: 92.0, 3: 99.0})
    # Differences -1, -2, -1, -4: mean -2, squares 1 + 0 + 1 + 4 = 6, variance 2, error sqrt(2 / 4).
    assert found.mean == -2.0
    assert found.error == pytest.approx(math.sqrt(0.5))
    assert found.range == (-4.0, -1.0)
    assert found.interval == pytest.approx((-2 - 3.182 * math.sqrt(0.5), -2 + 3.182 * math.sqrt(0.5)))
    assert found.is_result
    assert not found.apart


def test_pairs_show_what_means_hide():
    base = {0: 80.0, 1: 90.0, 2: 70.0}
    found = paired({seed: value - 1.0 - 0.01 * seed for seed, value in base.items()}, base)
    assert found.apart
    assert found.mean == pytest.approx(-1.01)


def test_only_seeds_of_both_count():
    found = paired({0: 1.0, 1: 5.0, 7: 100.0}, {0: 0.0, 1: 3.0, 2: 50.0})
    assert found.differences == {0: 1.0, 1: 2.0}
    assert not found.is_result
    assert not found.apart
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_pair_has_no_error():
    found = paired({0: 1.0}, {0: 0.0})
    assert (found.error, found.interval, found.is_result) == (None, None, False)


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 31, 100])
def test_quantiles(freedom):
    stats = pytest.importorskip("scipy.stats")
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=2e-3)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30])
@pytest.mark.parametrize("t", [0.0, 0.3, -2.5, 9.0])
def test_chances(t, freedom):
    stats = pytest.importorskip("scipy.stats")
    assert chance(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-12)


def test_chances_among_several_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.5, times 4, 3, 2, 1, and never less than one before.
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([]) == []


def test_equal_differences_say_nothing_of_their_spread():
    values, base = {0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0}
    unknown = paired(values, base)
    assert (unknown.interval, unknown.chance, unknown.apart) == (None, None, False)
    known = paired(values, base, resolution=0.3)
    assert known.unresolved
    assert known.error == pytest.approx(0.1)
    assert known.apart
    # A spread that shows is what it was.
    spread = {0: 2.0, 1: 3.0, 2: 4.3}
    assert paired(spread, base, resolution=0.3).error == pytest.approx(paired(spread, base).error)
    assert not paired(spread, base, resolution=0.3).unresolved
