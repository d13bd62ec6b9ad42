"""Ticks, versions, queues and groups of PETRA: what happens when, and how much is held, in closed form."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import unlatch
from recording import Optimizers, RecordingSGD, feed, stages_of
from rev_nets import REVNET18, regression, rev_net, rev_run
from unlatch.methods import PETRA
from unlatch.schedule import lockstep, one_f_one_b_async, ticked
from unlatch.schedule.entries import Kind
from unlatch.schedule.occupancy import buffers
from unlatch.schedule.runs import streams

NON_REVERSIBLE = {"SRRDRDRDRH": [0, 3, 5, 7], "SRRRH": [0]}
sgd = partial(torch.optim.SGD, lr=0.01)


def events(run: unlatch.Run, kind: str, stage: int) -> list[Any]:
    return [e for e in run.events if e.kind == kind and e.stage == stage]


def fed(pattern: str, batches: int, *, flush: bool = True, **options: Any) -> unlatch.Run:
    run = rev_run(pattern, PETRA(microbatches=1, **options), sgd)
    data = regression(batches)
    if flush:
        feed(run, data)
    else:
        for x, y in data:
            run.step(x, y)
    return run


@pytest.mark.parametrize("stages", [1, 2, 4, 10])
def test_ticks_of_the_timetable(stages: int) -> None:
    """O4: stage j takes batch b forward in tick b+j, backward 2(J-1-j) ticks later; first in tick 2(J-1)-j."""
    table = lockstep(ticked(stages), ticks=4 * stages)
    first: dict[int, int] = {}
    when: dict[Any, int] = {}
    for tick, row in enumerate(table):
        for action in (action for cell in row for action in cell):
            when[action] = tick
            if action.kind is Kind.B:
                first.setdefault(action.station, tick)
    assert first == {j: 2 * (stages - 1) - j for j in range(stages)}
    backwards = [action for action in when if action.kind is Kind.B]
    assert all(when[a] - when[a._replace(kind=Kind.F)] == 2 * (stages - 1 - a.station) for a in backwards)


@pytest.mark.parametrize("pattern", ["SRRRH", REVNET18])
def test_gradients_after_so_many_batches(pattern: str) -> None:
    """O4 at the executor: after N batches stage j has done N - 2(J-1-j) backwards; the measured delay is 2(J-1-j)."""
    count, batches = len(pattern), 2 * len(pattern) + 5
    run = fed(pattern, batches, flush=False)
    for j in range(count):
        tau = 2 * (count - 1 - j)
        assert len(events(run, "F", j)) == batches
        assert [e.batch for e in events(run, "B", j)] == list(range(batches - tau))
    assert [s.delay for s in run.statistics()] == [2 * (count - 1 - j) for j in range(count)]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7, 16, 32])
@pytest.mark.parametrize("count", [2, 3, 4, 10])
def test_versions(count: int, k: int) -> None:
    """O5 and O6: v_f = max(0, b - tau) // k and v_b = b // k, so the last stage is never stale."""
    pattern = "S" + "R" * (count - 2) + "H"
    batches = 3 * k + 4 * count
    run = fed(pattern, batches, accumulate=k)
    for j in range(count):
        tau = 2 * (count - 1 - j)
        assert [e.version for e in events(run, "F", j)] == [max(0, b - tau) // k for b in range(batches)]
        assert [e.version for e in events(run, "B", j)] == [b // k for b in range(batches)]
        crossed = [b // k - max(0, b - tau) // k for b in range(tau, batches)]
        assert set(crossed) <= {tau // k, -(-tau // k)}
    assert run.statistics()[-1].staleness == 0.0


def test_a_step_reports_the_staleness_of_each_stage() -> None:
    run = rev_run("SRRH", PETRA(microbatches=1), sgd)
    results = feed(run, regression(20))
    assert results[-1].staleness == {0: 6, 1: 4, 2: 2, 3: 0}
    found = run.statistics()
    assert [s.predicted_staleness for s in found] == [6.0, 4.0, 2.0, 0.0]
    assert [s.staleness for s in found] == [6.0, 4.0, 2.0, 0.0]


@pytest.mark.parametrize("k", [1, 3])
def test_every_stage_updates_with_the_same_groups_in_order(k: int) -> None:
    """O7: with weights frozen, the n-th update of each stage is the mean of the gradients nk .. nk+k-1."""
    data = regression(4 * k)
    singles, groups = Optimizers(RecordingSGD, lr=0.0), Optimizers(RecordingSGD, lr=0.0)
    feed(rev_run("SRDRH", PETRA(microbatches=1), singles), data)
    feed(rev_run("SRDRH", PETRA(microbatches=1, accumulate=k), groups), data)
    for j in range(5):
        assert len(groups[j].gradients) == 4
        for n, found in enumerate(groups[j].gradients):
            parts = singles[j].gradients[n * k : (n + 1) * k]
            for index, gradient in enumerate(found):
                mean = sum(part[index] for part in parts) / k
                torch.testing.assert_close(gradient, mean, rtol=0, atol=1e-16)


@pytest.mark.parametrize("pattern", list(NON_REVERSIBLE))
def test_queues_of_inputs(pattern: str) -> None:
    """O8: at stages that are not reversible tau inputs between ticks and one more at the peak; elsewhere none."""
    model = rev_net(pattern)
    count, size = len(pattern), 6
    run = rev_run(model, PETRA(microbatches=1), sgd)
    for x, y in regression(2 * count + 4, size=size):
        run.step(x, y)
    row = 4 * 8  # four features in float64
    for stage, found in zip(stages_of(run)[:-1], run.statistics(), strict=False):
        tau = 2 * (count - 1 - stage.index)
        if stage.index in NON_REVERSIBLE[pattern]:
            one = size * row * (1 if stage.index == 0 else 2)
            assert stage.kept_bytes == tau * one
            assert found.stored_bytes == (tau + 1) * one
        else:
            assert stage.reverses
            assert stage.kept_bytes == found.stored_bytes == 0
        assert found.in_flight == tau + 1
        assert list(stage.kept) == list(range(2 * count + 4 - tau, 2 * count + 4))
    feed(run, [])
    assert all(stage.kept_bytes == 0 and not stage.kept for stage in stages_of(run))


def test_queue_lengths_of_revnet18() -> None:
    """O8 with the numbers of the paper's model: 18/12/8/4 between ticks."""
    run = fed(REVNET18, 40, flush=False)
    lengths = {s.index: len(s.kept) for s in stages_of(run) if s.recomputes}
    assert lengths == {0: 18, 3: 12, 5: 8, 7: 4}
    assert [run.statistics()[j].in_flight for j in (0, 3, 5, 7)] == [19, 13, 9, 5]


def test_one_version_of_the_weights() -> None:
    """O16: no old version is ever held; a stash holds some, so the count can see them."""
    assert [s.weight_copies for s in fed("SRRDRH", 25).statistics()] == [0] * 6
    assert max(s.weight_copies for s in fed("SRRDRH", 25, weights="stash").statistics()) > 1


@pytest.mark.parametrize("count", [2, 4, 8])
def test_one_forward_one_backward_order(count: int) -> None:
    """O24: half of the delay. J-1-j updates are crossed at k=1, and J-j micro-batches are in flight at stage j."""
    pattern = "S" + "R" * (count - 2) + "H"
    run = fed(pattern, 4 * count, order="1f1b")
    found = run.statistics()
    assert [s.staleness for s in found] == [count - 1 - j for j in range(count)]
    assert [s.delay for s in found] == [count - 1 - j for j in range(count)]
    assert [s.in_flight for s in found] == [count - j for j in range(count)]
    plan = buffers(streams(one_f_one_b_async(count), [1] * (4 * count)))
    assert list(plan.in_flight) == [s.in_flight for s in found]
    assert found[0].stored_bytes * 2 == fed(pattern, 4 * count).statistics()[0].stored_bytes + 6 * 4 * 8
