"""A run that is simulated in bulk has the figures of the run whose actions are followed one by one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_runs import ALL, ASYNCHRONOUS

from unlatch import methods
from unlatch.advise.prediction import simulate_method
from unlatch.plan.layer_costs import LayerCost
from unlatch.schedule import (
    ZBH1,
    Entry,
    Kind,
    OneFOneB,
    Periodic,
    Port,
    Schedule,
    Workload,
    chain_entry,
    simulation,
    split_rounds,
    ticked,
)
from unlatch.schedule.bulk import Figures
from unlatch.schedule.channel import FREE, Channel
from unlatch.schedule.machine import Machine
from unlatch.schedule.simulation import Simulation, simulate_schedule

SCHEDULES = {**ALL, "split": lambda stages: split_rounds(stages, 1)}
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U)
whole = st.integers(1, 9)
parts = st.builds(Fraction, whole, st.integers(1, 7))


def both(schedule: Schedule, **options: Any) -> tuple[Simulation, Simulation]:
    """The same run, followed and in bulk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "BULK", 10**12)
        followed = simulate_schedule(schedule, **options)
        patch.setattr(simulation, "BULK", 0)
        return followed, simulate_schedule(schedule, **options)


def alike(found: Simulation, followed: Simulation, rel: float) -> None:
    ours, theirs = found.summary(), followed.summary()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=rel, abs=rel), name


@st.composite
def runs(draw: st.DrawFn, numbers: st.SearchStrategy[Any]) -> tuple[Schedule, dict[str, Any]]:
    """Any schedule, with costs of every stage, links and groups."""
    stages = draw(st.integers(1, 5))
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))](stages)
    times = [{kind: draw(numbers) for kind in KINDS} for _ in range(stages)]
    channel = draw(st.sampled_from([FREE, Channel(2, 1), Channel(1, 3, overlapped=False), Channel(latency=5)]))
    if channel.bandwidth < 10 and not isinstance(times[0][Kind.F], float):
        channel = replace(channel, bandwidth=Fraction(channel.bandwidth))  # type: ignore[arg-type]
    per_update = draw(st.integers(1, 3))
    options = {
        "workload": Workload(times, {"forward": draw(whole), "backward": draw(whole)}, 3),
        "machine": Machine(channel, action=draw(st.integers(0, 2)), update=draw(st.integers(0, 3))),
        "batches": per_update * draw(st.integers(1, 25)),
        "microbatches": draw(st.integers(1, 7)),
        "per_update": per_update,
    }
    if not schedule.flushes:
        order = sorted(draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages)))
        options["devices"] = [sorted(set(order)).index(device) for device in order]
    return schedule, options


@given(runs(st.one_of(whole, parts)))
@settings(max_examples=60, deadline=None)
def test_exact_costs_give_equal_figures(run: tuple[Schedule, dict[str, Any]]) -> None:
    schedule, options = run
    followed, found = both(schedule, **options)
    assert isinstance(found.figures, Figures)
    assert found.makespan == followed.makespan
    assert found.busy == followed.busy
    assert found.figures.sent == followed.figures.sent
    assert found.in_flight == followed.in_flight
    assert found.staleness == followed.staleness
    # Where one side still has fractions the other has divided whole numbers: equal but for the last bit.
    alike(found, followed, rel=1e-15)


@given(runs(st.floats(0.01, 10.0)))
@settings(max_examples=30, deadline=None)
def test_floats_give_the_same_figures_up_to_rounding(run: tuple[Schedule, dict[str, Any]]) -> None:
    schedule, options = run
    followed, found = both(schedule, **options)
    assert isinstance(found.figures, Figures)
    # A float is rounded to a quantum of 2^-28 of itself or finer.
    alike(found, followed, rel=1e-8)


@pytest.mark.parametrize("name", sorted(methods.names()))
def test_every_method_is_simulated_alike(name: str) -> None:
    costed = methods.get(name, microbatches=3).example(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "BULK", 10**12)
        followed = costed.simulate(30, 3)
        patch.setattr(simulation, "BULK", 0)
        alike(costed.simulate(30, 3), followed, rel=1e-12)  # some have times that are floats


def test_a_long_run_is_skipped_not_walked() -> None:
    """Without the repetition this would take minutes."""
    started = process_time()
    run = simulate_schedule(ticked(8), batches=1_000_000)
    assert run.makespan == 3 * 999_999 + 3 * 8
    assert run.interval == 3
    assert run.busy == [3_000_000] * 8
    assert process_time() - started < 20


@pytest.mark.parametrize("batches", range(30, 38))
def test_messages_under_way_are_skipped_with_the_rest(batches: int) -> None:
    """Stages wait for their messages, so a message in the wrong place shows; whatever the number of rounds skipped."""
    followed, found = both(ticked(3), batches=batches, machine=Machine(Channel(latency=7)))
    assert found.summary() == followed.summary()


def test_batches_that_repeat_are_skipped() -> None:
    run = simulate_schedule(OneFOneB(4), batches=50_000, microbatches=8)
    assert run.makespan == 33 * 50_000  # stage 0 begins and ends every batch
    assert isinstance(run.figures, Figures)


def test_a_thousand_devices_in_steady_state() -> None:
    """Below 10 s on an idle machine, `benchmarks/simulate_speed.py` says; here CPU time, with room for others."""
    started = process_time()
    layers = [LayerCost(str(n), 1.0 + n % 3, 1.0, 1.0, 8, 4) for n in range(1000)]
    run = simulate_method("fdg", layers, 1000)
    assert isinstance(run.simulation.figures, Figures)
    assert run.time_per_batch == pytest.approx(5.0)
    assert process_time() - started < 10


UNSUITED: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "jitter": (ticked(3), {"machine": Machine(jitter=0.1), "batches": 9}),
    "an unfinished update": (ticked(3), {"batches": 9, "per_update": 2}),
    "an entry for some batches": (
        Periodic(1, (*ticked(1).entries[:2], Entry(Kind.U, 0, when=lambda moment: moment.batch % 2 == 0))),
        {"batches": 9},
    ),
    "a synchronous schedule on fewer devices": (ZBH1(3), {"batches": 4, "microbatches": 3, "devices": [0, 0, 1]}),
    "a forward that takes no time": (ticked(2), {"batches": 9, "workload": Workload({Kind.F: 0, Kind.B: 0})}),
    "times beyond all whole numbers": (ticked(2), {"batches": 9, "workload": Workload({Kind.F: 1e-30, Kind.B: 1e30})}),
}


@pytest.mark.parametrize("name", UNSUITED)
def test_what_is_not_done_in_bulk_is_followed(name: str) -> None:
    schedule, options = UNSUITED[name]
    followed, found = both(schedule, **options)
    assert not isinstance(found.figures, Figures)
    assert found.summary() == followed.summary()


def test_messages_across_stations_and_unequal_rates() -> None:
    """A route that skips stages, and an update that tells the others."""
    skip = (
        chain_entry(Kind.F, 0, 3),
        chain_entry(Kind.F, 1, 3),
        replace(chain_entry(Kind.F, 2, 3), takes=(Port("forward", 1), Port("skip", 0))),
        replace(chain_entry(Kind.B, 2, 3), gives=(Port("backward", 1), Port("back", 0))),
        chain_entry(Kind.B, 1, 3, offset=2),
        replace(chain_entry(Kind.B, 0, 3, offset=4), takes=(Port("backward", 1), Port("back", 2))),
    )
    entries = (replace(skip[0], gives=(Port("forward", 1), Port("skip", 2))), *skip[1:])
    work = Workload(sizes={"forward": 1, "backward": 2, "skip": 5, "back": 3})
    followed, found = both(Periodic(3, entries), workload=work, batches=60, machine=Machine(Channel(2.0, 0.5)))
    assert isinstance(found.figures, Figures)
    assert found.summary() == followed.summary()


def test_the_list_of_actions_is_made_when_it_is_asked_for() -> None:
    followed, found = both(ASYNCHRONOUS["pipedream"](3), batches=12)
    assert found.timeline.starts == followed.timeline.starts
    assert list(found.spans()) == list(followed.spans())
