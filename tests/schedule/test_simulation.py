"""Simulated runs of schedules: known makespans, buffers, staleness, links, speeds, jitter."""

from __future__ import annotations

from fractions import Fraction
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_runs import ASYNCHRONOUS, FLUSHED

from unlatch.errors import ScheduleError
from unlatch.schedule import (
    ZBH1,
    ZBH2,
    Action,
    Costs,
    Flushed,
    GPipe,
    Kind,
    OneFOneB,
    Schedule,
    Workload,
    buffers,
    one_f_one_b_async,
    simulate,
    staleness,
    streams,
    ticked,
    update_ends,
)
from unlatch.schedule.channel import Channel
from unlatch.schedule.machine import Machine
from unlatch.schedule.simulation import Simulation, simulate_schedule

GENERATORS = FLUSHED | ASYNCHRONOUS


def times(forward: float, backward: float) -> Costs:
    return {Kind.F: forward, Kind.B: backward, Kind.I: backward / 2, Kind.W: backward / 2, Kind.U: 0}


def sending(size: float) -> Workload:
    """Units of work, and messages of one size."""
    return Workload(sizes={"forward": size, "backward": size})


def loads(*totals: int) -> Workload:
    """Stages of unit tasks: a third of the work is forward (two fifths and a half where the first D is missing)."""
    forwards = {11: 4, 6: 2, 5: 2, 3: 1, 2: 1}
    return Workload([times(forwards[total], total - forwards[total]) for total in totals])


@pytest.mark.parametrize(
    ("stages", "slope", "fill"),
    [((5, 6), 6, 5), ((5, 3, 3), 5, 2), ((2, 3, 3, 3), 3, 8)],
)
def test_pipedream_makespans(stages: tuple[int, ...], slope: int, fill: int) -> None:
    """Unit layers on 2, 3 and 4 devices: 6N+5, 5N+2, 3N+8, and 11 for one mini-batch."""
    for batches in (4, 5, 12, 14, 34):
        run = simulate_schedule(one_f_one_b_async(len(stages)), loads(*stages), batches=batches)
        assert run.makespan == slope * batches + fill
    assert simulate_schedule(one_f_one_b_async(len(stages)), loads(*stages), batches=1).makespan == 11
    assert run.interval == slope


@pytest.mark.parametrize(
    ("schedule", "parts", "makespan", "span", "kept"),
    [
        (GPipe(4), 8, 33, 33, (8, 8, 8, 8)),
        (OneFOneB(4), 8, 33, 33, (4, 3, 2, 1)),
        (ZBH1(4), 8, None, 27, (4, 4, 4, 4)),
        (ZBH2(4), 8, 27, 24, None),
        (ZBH2(4), 12, None, 36, (7, 7, 7, 7)),
        (ZBH2(4), 4, None, 15, None),
        (GPipe(2), 4, 15, 15, (4, 4)),
        (OneFOneB(2), 4, 15, 15, (2, 1)),
        (ZBH1(2), 4, None, 13, (2, 2)),
        (ZBH2(2), 4, 13, 12, (3, 3)),
    ],
)
def test_synchronous_makespans(
    schedule: Schedule, parts: int, makespan: int | None, span: int, kept: tuple[int, ...] | None
) -> None:
    run = simulate_schedule(schedule, batches=1, microbatches=parts)
    assert makespan is None or run.makespan == makespan
    assert max(run.timeline.spans) == span
    assert kept is None or run.in_flight == kept


runs = st.tuples(st.sampled_from(sorted(GENERATORS)), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))


def round_by_round(name: str, delay: int, stage: int, fed: int, ends: dict[int, int]) -> list[Action]:
    """What a stage of an asynchronous schedule does, without going through the global order."""
    backward_first = "backward first" in name and delay > 0
    found: list[Action] = []
    for step in range(fed + delay):
        late = step - delay
        if step < fed and not (backward_first and late >= 0):
            found.append(Action(Kind.F, stage, step))
        if 0 <= late < fed:
            found.append(Action(Kind.B, stage, late))
            if late in ends:
                found.append(Action(Kind.U, stage, ends[late]))
            if step < fed and backward_first:
                found.append(Action(Kind.F, stage, step))
    return found


def batch_by_batch(schedule: Flushed, stage: int, groups: list[int], ends: dict[int, int]) -> list[Action]:
    """What a stage of a synchronous schedule does, without going through the global order."""
    found: list[Action] = []
    first = 0
    for count in groups:
        for kind, _, batch in schedule.stream(stage, count):
            found.append(Action(kind, stage, first + batch))
            if kind in (Kind.B, Kind.W) and first + batch in ends:
                found.append(Action(Kind.U, stage, ends[first + batch]))
        first += count
    return found


@given(runs, st.integers(1, 3))
@settings(max_examples=60)
def test_streams_stage_by_stage_are_the_streams(run: tuple[str, int, int, int], per_update: int) -> None:
    name, stages, batches, parts = run
    schedule = GENERATORS[name](stages)
    groups = [parts] * (batches - 1) + [max(1, parts - 1)]
    ends = update_ends(groups, per_update)
    if isinstance(schedule, Flushed):
        expected = [batch_by_batch(schedule, stage, groups, ends) for stage in range(stages)]
    else:
        expected = [round_by_round(name, schedule.delay(stage), stage, sum(groups), ends) for stage in range(stages)]
    assert streams(schedule, groups, per_update) == expected


@given(runs)
@settings(max_examples=40)
def test_buffers_and_staleness_follow_from_the_order(run: tuple[str, int, int, int]) -> None:
    name, stages, batches, parts = run
    schedule = GENERATORS[name](stages)
    found = simulate_schedule(schedule, Workload(kept=3), batches=batches, microbatches=parts)
    assert found.in_flight == buffers(found.timeline.streams).in_flight
    assert found.peak_bytes == tuple(3 * count for count in found.in_flight)
    total = batches * parts
    for stage in range(stages):
        late = [staleness(schedule, stage, micro, parts) for micro in range(total)][total // 2 :]
        assert found.staleness[stage] == sum(late) / len(late)


@given(runs, st.data())
@settings(max_examples=40)
def test_devices_never_do_two_things_and_all_work_is_done(run: tuple[str, int, int, int], data: st.DataObject) -> None:
    name, stages, batches, parts = run
    devices = sorted(data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages)))
    devices = [sorted(set(devices)).index(device) for device in devices]
    machine = Machine(Channel(2, 1, overlapped=data.draw(st.booleans())), jitter=0.2, seed=3)
    found = simulate_schedule(
        GENERATORS[name](stages),
        sending(1),
        batches=batches,
        microbatches=parts,
        devices=devices,
        machine=machine,
    )
    for starts, ends in zip(found.timeline.starts, found.timeline.ends, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert all(end >= start for start, end in zip(starts, ends, strict=True))
    ended = {action: end for action, _, end in found.timeline}
    for action, start, _ in found.timeline:
        if action.kind is Kind.F and action.station:
            assert start >= ended[action._replace(station=action.station - 1)]


def test_speeds_divide_times() -> None:
    fast = simulate_schedule(one_f_one_b_async(2), batches=20, machine=Machine(speeds=(1, 3)))
    assert fast.interval == 3
    slow = simulate_schedule(one_f_one_b_async(2), batches=20, machine=Machine(speeds=(0.5, 1)))
    assert slow.interval == 6
    assert slow.steady_utilisation == pytest.approx(0.75)


def test_actions_and_updates_cost_time() -> None:
    """F, B and U at 3 + 3 x 0.5, and 2 for the update of the second device, which sets the pace."""
    run = simulate_schedule(one_f_one_b_async(2), batches=20, machine=Machine(action=0.5, update=(0, 2)))
    assert run.interval == 6.5
    assert run.busy == [20 * 4.5, 20 * 6.5]
    # Four micro-batches share an update, but not what every action costs.
    parts = simulate_schedule(OneFOneB(1), batches=8, microbatches=4, machine=Machine(action=0.5, update=2))
    assert parts.interval * 4 == 4 * (1 + 2 + 2 * 0.5) + 2 + 0.5


def test_messages_that_hold_up_both_ends() -> None:
    """Each of two stages works 3, and every micro-batch crosses the border twice at 1 each: 3 + 2 per micro-batch."""
    machine = Machine(Channel(bandwidth=1, overlapped=False))
    run = simulate_schedule(ticked(2), sending(1), batches=60, machine=machine)
    assert run.interval == 5
    hidden = simulate_schedule(ticked(2), sending(1), batches=60, machine=Machine(Channel(bandwidth=1)))
    assert hidden.interval == 3


def test_the_way_there_and_back_bounds_the_interval() -> None:
    """F, message, F and B, message, B: 1 + 2 + 3 + 2 + 2 for every three micro-batches under way."""
    run = simulate_schedule(ticked(2), sending(2), batches=121, machine=Machine(Channel(bandwidth=1)))
    assert run.interval == pytest.approx(10 / 3)


def test_a_slow_wire_sets_the_pace() -> None:
    """All forwards, then all backwards: the wire is busy 5 per micro-batch each way, the stages only 1 and 2."""
    machine = Machine(Channel(bandwidth=1))
    run = simulate_schedule(GPipe(2), sending(5), batches=1, microbatches=100, machine=machine)
    assert run.makespan == 1 + 500 + 1 + 2 + 500 + 2
    assert run.bytes == 100 * 10
    assert run.messages == 200
    assert run.link_bytes == {(0, 1): 10}


def test_jitter_is_repeatable_and_slows_down() -> None:
    def interval(seed: int, jitter: float) -> float:
        machine = Machine(jitter=jitter, seed=seed)
        return simulate_schedule(ticked(4), batches=400, machine=machine).interval

    assert interval(1, 0.3) == interval(1, 0.3) != interval(2, 0.3)
    assert interval(1, 0) == 3
    assert 3.05 < interval(1, 0.3) < 3.9


def test_exact_numbers_stay_exact() -> None:
    third = Fraction(1, 3)
    run = simulate_schedule(OneFOneB(3), Workload(times(third, 2 * third)), batches=2, microbatches=4)  # type: ignore[arg-type]
    assert run.makespan == 2 * (4 + 2)


def test_summary_is_plain() -> None:
    summary = simulate_schedule(ticked(3), Workload(kept=2), batches=30).summary()
    assert summary["staleness"] == [4, 2, 0]
    assert summary["in_flight"] == [5, 3, 1]
    assert summary["bubble"] == pytest.approx(1 - summary["utilisation"])


def test_spans_leave_out_what_takes_no_time() -> None:
    run = simulate_schedule(ticked(2), batches=3)
    assert len(list(run.spans())) == 2 * 2 * 3
    assert all(span.kind != "U" for span in run.spans())


def test_a_run_that_cannot_go_on_names_who_waits() -> None:
    stuck = [[Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)], [Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)]]
    with pytest.raises(ScheduleError, match="device 0 stands before 0B0 and waits for 1B0"):
        simulate(stuck)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speeds": (1, 0)}, "above 0"),
        ({"speeds": (1, 1, 1)}, "speeds of 2 devices, got 3"),
        ({"jitter": -1}, "jitter"),
        ({"action": -1}, "at least 0"),
        ({"update": (1, 1, 1)}, "update on 2 devices, got 3"),
        ({"channel": [Channel()] * 3}, "1 borders, got 3"),
    ],
)
def test_wrong_machines(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate_schedule(ticked(2), batches=1, machine=Machine(**change))  # type: ignore[arg-type]


def test_many_devices_are_simulated_quickly() -> None:
    """The benchmark measures it; here only that nothing is quadratic."""
    started = process_time()
    run = simulate_schedule(ticked(2000), batches=40)
    assert isinstance(run, Simulation)
    assert run.makespan == 3 * 39 + 3 * 2000
    assert process_time() - started < 20
