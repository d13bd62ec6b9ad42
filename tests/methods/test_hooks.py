"""What every method answers when generic code asks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from unlatch import methods
from unlatch.errors import ConfigError
from unlatch.methods import ClosedForm, Delayed

NAMES = methods.names()


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_late_where_there_is_delay(name):
    method = methods.get(name).resolve(4)
    if max(method.staleness(4)) > 0:
        assert method.gradient == "late"
    gated = name == "cgad"
    assert (method.inexact_at_rest is None) == (method.gradient != "local" and not gated)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_has_a_closed_form_or_says_why_not(name):
    method = methods.get(name).resolve(3)
    form = method.closed_form(3)
    if isinstance(form, str):
        assert form
        return
    assert method.gradient == "late"
    assert (form.per_update, len(form.delays)) == (method.microbatches * method.accumulate, 3)
    steady = 50 * form.per_update
    lateness = [50 - form.forward_version(stage, steady) for stage in range(3)]
    assert max(lateness) == lateness[0]
    assert lateness[0] >= int(method.staleness(3)[0])


def test_what_has_no_closed_form():
    reasons = {
        "has no delay": methods.BP(),
        "added up": methods.ADL(average=False),
        "approximate by design": methods.PETRA(),
    }
    for words, method in reasons.items():
        assert words in method.closed_form(2)
    shrinking = methods.FDG(shrink=0.5, gamma=0.9, predict="linear").closed_form(3)
    assert isinstance(shrinking, ClosedForm)
    assert (shrinking.shrink, shrinking.predict) == (0.5, "linear")
    assert [shrinking.scale(stage, 0) for stage in range(3)] == pytest.approx([0.81, 0.9, 1.0])
    assert "on purpose" in methods.FDG(shrink=0.5).inexact_at_rest


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_joined_only_by_methods_that_do(name):
    method = methods.get(name)
    joining = method.joining(3)
    assert joining.joined in (1, 3)
    assert joining.joining(1).joined == 1
    assert (joining == method) == (joining.joined == 1)
    assert methods.DTRP(compensate="auto").joined == 1


@pytest.mark.parametrize("name", NAMES)
def test_probing(name):
    method = methods.get(name)
    if name in ("dgl", "dni", "auglocal"):
        with pytest.raises(ConfigError, match=f"{name} has no border to measure at"):
            method.probing(5)
    elif method.gradient == "local":
        assert replace(method.probing(5), probe=method.probe) == method
    else:
        assert method.probing(5) is None


@pytest.mark.parametrize("name", NAMES)
def test_nothing_measured_is_nothing_told(name):
    method = methods.get(name)
    assert method.measurements([]) == []
    assert method.summarise([], 0.0, None) == {}


def test_a_flag_belongs_to_one_planner():
    planners = [planner for name in NAMES if (planner := methods.get(name).planner) is not None]
    assert planners
    flags = Counter(flag for planner in planners for flag in planner.flags)
    assert set(flags.values()) == {1}


def test_copies_of_weights():
    assert methods.PipeDream(microbatches=1).weight_copies(4) == 3
    assert methods.DTR(microbatches=1).weight_copies(4) == 0
    assert methods.DTRP(microbatches=1).weight_copies(4) == 1
    assert methods.PETRA(weights="average", microbatches=1).weight_copies(4) == 1


def test_all_delayed_methods_without_further_options_are_covered_by_the_recursion():
    exempt = {"petra", "cgad"}
    delayed = [name for name in NAMES if isinstance(methods.get(name), Delayed) and name not in exempt]
    assert all(isinstance(methods.get(name).resolve(2).closed_form(2), ClosedForm) for name in delayed)
