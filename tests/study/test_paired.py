"""Statistics of pairs, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from unlatch.report.paired import paired, student


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
