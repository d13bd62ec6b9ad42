"""Faults on purpose, as data and in one process: they strike where and when they were asked to, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fault_jobs
import unlatch
from recording import feed, stages_of
from small_nets import vectors
from unlatch import Faults
from unlatch.errors import ConfigError, NonFinite, NonFiniteLoss, StageFailed
from unlatch.transport.faults import Fault, InjectedFault


def inline(faults: Faults | None, method: str = "dtr", stages: int = 2) -> unlatch.Run:
    return fault_jobs.start(method, stages, faults=faults)


def weights(faults: Faults | None, method: str = "dtr") -> list[float]:
    with inline(faults, method) as run:
        feed(run, vectors(8))
        return [x for p in run.module().parameters() for x in p.flatten().tolist()]


def test_chaining_leaves_the_original_alone() -> None:
    one = Faults().kill(stage=1, at=40)
    two = one.drop(stage=1, nth=3)
    assert (len(one), len(two)) == (1, 2)
    assert [str(fault) for fault in two] == [
        "kill stage 1 at batch 40",
        "drop the forward message for stage 1 at number 3",
    ]


def test_all_kinds_travel_as_text() -> None:
    faults = (
        Faults(log="struck.jsonl")
        .kill(0, 1, during="backward")
        .stall(1, 2, seconds=0.5, attempt=None)
        .fail(0, 3, text="no")
        .poison(1, 4, part="gradient", value="inf")
        .delay(0, 50, jitter=True, seed=3, every=4, message="backward")
        .corrupt(1, 5, part="header")
        .drop(1, 6)
        .duplicate(0, 7, message="backward")
        .reorder(1, 8, attempt=1)
    )
    assert Faults.from_json(faults.to_json()) == faults
    assert json.loads(Faults().drop(1, 6).to_json())["faults"] == [
        {"what": "drop", "stage": 1, "at": 6, "message": "forward"}
    ]


KEYS = st.sampled_from(["faults", "log", "what", "stage", "at", "seconds", "other"])


@given(
    st.one_of(
        st.text(),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
            max_leaves=12,
        ).map(json.dumps),
    )
)
def test_text_that_is_none(text: str) -> None:
    with contextlib.suppress(ConfigError):
        Faults.from_json(text)


@pytest.mark.parametrize("bad", [{"stage": -1}, {"stage": 0, "at": -1}, {"stage": 0, "every": 0}])
def test_numbers_that_make_no_sense(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="stage and at >= 0 and every >= 1"):
        Fault(what="kill", **bad)


@pytest.mark.parametrize("during", ["forward", "backward", "update"])
def test_a_stage_fails_where_it_was_told_to(during: str, tmp_path) -> None:
    faults = Faults(log=str(tmp_path / "log")).fail(stage=1, at=3, during=during, text="as ordered")
    before = time.monotonic()
    with pytest.raises(StageFailed, match=r"stage 1 failed in .* InjectedFault: as ordered") as caught:
        weights(faults)
    assert isinstance(caught.value.__cause__, InjectedFault)
    assert during in str(caught.value)
    (line,) = (tmp_path / "log").read_text().splitlines()
    struck = json.loads(line)
    assert struck["fault"] == "fail stage 1 at batch 3"
    assert before <= struck["time"] <= time.monotonic()


def test_a_fault_strikes_once_though_a_batch_has_many_parts() -> None:
    """One that is not deadly: the run goes on, with a hole where the poison was."""
    method = unlatch.methods.get("1f1b", microbatches=4)
    with inline(Faults().poison(stage=0, at=1, part="weight"), method) as run:
        poisoned = stages_of(run)[0].params[0]
        run.step(*vectors(1)[0])
        assert poisoned.isfinite().all()
        with pytest.raises(NonFiniteLoss, match="batch 1, part 1 of 4"):
            run.step(*vectors(1)[0])


@pytest.mark.parametrize("stage", [0, 1])
def test_poisoned_input_leaves_the_callers_batch_alone(stage: int) -> None:
    data = vectors(8)
    with inline(Faults().poison(stage, 2)) as run, pytest.raises(NonFiniteLoss, match="loss of batch 2"):
        feed(run, data)
    assert all(x.isfinite().all() and y.isfinite().all() for x, y in data)


def test_poisoned_gradient_waits_for_the_update_of_its_batch() -> None:
    method = unlatch.methods.get("dtr", accumulate=3)
    with inline(Faults().poison(stage=1, at=1, part="gradient"), method) as run:
        for x, y in vectors(2):
            run.step(x, y)
        with pytest.raises(NonFinite, match=r"the gradient of .* batches 0 to 2 \(stage 1, after 0 updates"):
            feed(run, vectors(1))


@pytest.mark.parametrize("method", ["bp", "pipedream", "dtrp"])
def test_delays_change_nothing(method: str) -> None:
    delayed = Faults().delay(0, 2, jitter=True).delay(1, 1, every=3, during="backward")
    assert weights(delayed, method) == weights(None, method)


def test_without_faults_nothing_is_wrapped() -> None:
    with inline(None) as plain, inline(Faults().delay(1, 0)) as delayed:
        works = [[task.work for task in run._engine._tasks] for run in (plain, delayed)]
    assert not any(hasattr(work, "__wrapped__") for work in works[0])
    assert sum(hasattr(work, "__wrapped__") for work in works[1]) == len(works[1]) // 2


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (Faults().kill(1, 3), "cannot kill stage 1 at batch 3: in one process there is nobody to notice"),
        (Faults().stall(1, 3), "cannot stall stage 1"),
        (Faults().drop(1, 3), "cannot drop the forward message"),
        (Faults().delay(1, 3, message="forward"), "no message on a wire"),
        (Faults().fail(2, 3), "there are stages 0 to 1"),
        (Faults().fail(0, 3, during="auxiliary"), "no 'auxiliary' among its work"),
    ],
)
def test_faults_that_could_not_strike_are_refused(faults: Faults, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        inline(faults)


@pytest.mark.parametrize("variable", ["UNLATCH_RESTARTS", "TORCHELASTIC_RESTART_COUNT"])
def test_after_a_restart_the_same_batch_passes(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults().fail(1, 3).fail(1, 5, attempt=1)
    monkeypatch.setenv("UNLATCH_FAULTS", faults.to_json())
    for start, batch in (("0", 3), ("1", 5)):
        monkeypatch.setenv(variable, start)
        with pytest.raises(StageFailed, match=f"batch {batch}"):
            weights(None)
    monkeypatch.setenv(variable, "2")
    found = weights(None)
    assert all(map(math.isfinite, found))
    monkeypatch.delenv("UNLATCH_FAULTS")
    assert found == weights(None)
