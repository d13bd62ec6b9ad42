"""The self-timed simulation against closed forms, a naive event loop, and the clock."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_runs import ALL, groups, schedules

from unlatch.errors import ScheduleError
from unlatch.schedule import (
    UNIT,
    Entry,
    Kind,
    Periodic,
    Port,
    Sequential,
    Workload,
    one_f_one_b_async,
    rounds,
    simulate,
    streams,
    ticked,
)
from unlatch.schedule.channel import Channel
from unlatch.schedule.machine import Machine


def costs(forward, backward, update=0):
    return {Kind.F: forward, Kind.B: backward, Kind.I: backward, Kind.W: backward, Kind.U: update}


# Four equal layers, forward and both gradients 1 each, no input gradient at the first; cut into stages.
FOUR_LAYERS = {
    1: ([costs(4, 7)], lambda n: 11 * n),
    2: ([costs(2, 3), costs(2, 4)], lambda n: 6 * n + 5),
    3: ([costs(2, 3), costs(1, 2), costs(1, 2)], lambda n: 5 * n + 2),
    4: ([costs(1, 1), costs(1, 2), costs(1, 2), costs(1, 2)], lambda n: 3 * n + 8),
}


@pytest.mark.parametrize("stages", FOUR_LAYERS)
@pytest.mark.parametrize("batches", [4, 5, 12, 40])
def test_pipedream_makespans(stages, batches):
    each, expected = FOUR_LAYERS[stages]
    assert simulate(streams(one_f_one_b_async(stages), [1] * batches), Workload(each)).makespan == expected(batches)


@pytest.mark.parametrize("stages", FOUR_LAYERS)
def test_one_batch_takes_its_latency(stages):
    each, _ = FOUR_LAYERS[stages]
    assert simulate(streams(one_f_one_b_async(stages), [1]), Workload(each)).makespan == 11


def test_fractions_stay_exact():
    each = [costs(Fraction(1, 3), Fraction(2, 3))] * 3
    timeline = simulate(streams(ticked(3), [1] * 7), Workload(each))
    assert isinstance(timeline.makespan, Fraction)
    assert timeline.busy == [7] * 3


def test_updates_take_time():
    timeline = simulate(streams(Sequential(1), [1, 1]), Workload(costs(1, 2, update=5)))
    assert timeline.makespan == 16
    assert timeline.bubbles == [0]
    assert timeline.utilisation == 1


def test_latency_and_transmission():
    """Two forwards leave stage 0 at 1 and 2; the border takes 3 for each, one after the other, and 10 to arrive."""
    run = streams(rounds((1, 0)), [1, 1])
    timeline = simulate(run, Workload(sizes={"forward": 3, "backward": 4}), Machine(Channel(bandwidth=1, latency=10)))
    times = {str(action): (start, end) for action, start, end in timeline}
    assert times["0F0"] == (0, 1)
    assert times["0F1"] == (1, 2)
    assert times["1F0"] == (14, 15)
    assert times["1B0"] == (15, 17)
    assert times["1F1"] == (17, 18)
    assert times["0B0"] == (17 + 14, 33)
    assert times["0B1"] == (21 + 4 + 10, 37)  # the way down is taken until 21


def test_each_border_has_its_own_link():
    run = streams(Sequential(3), [1])
    slow_last = simulate(run, machine=Machine([Channel(), Channel(latency=5)]))
    assert slow_last.makespan == simulate(run).makespan + 2 * 5
    with pytest.raises(ScheduleError, match="links for 2 borders, got 1"):
        simulate(run, machine=Machine([Channel()]))
    with pytest.raises(ScheduleError, match="costs for 3 stations, got 1"):
        simulate(run, Workload([UNIT]))


def test_stages_of_one_device_share_its_time_and_need_no_link():
    batches = 50
    run = streams(ticked(4), [1] * batches, devices=[0, 0, 1, 1])
    timeline = simulate(run, machine=Machine(Channel(latency=1)))
    assert timeline.busy == [2 * 3 * batches] * 2
    assert timeline.makespan < 2 * 3 * batches + 30
    alone = simulate(streams(ticked(4), [1] * batches, devices=[0] * 4), machine=Machine(Channel(latency=1000)))
    assert alone.makespan == 4 * 3 * batches
    assert alone.utilisation == 1


def test_steady_state_of_every_asynchronous_schedule_has_no_bubble():
    for name in ("ticked", "ticked, backward first", "pipedream"):
        for stages in range(1, 6):
            timeline = simulate(streams(ALL[name](stages), [1] * 100))
            assert max(timeline.bubbles) < 3 * 2 * stages


def naive(run, each, sizes, channels):
    """Sweep over all streams again and again until nothing moves."""
    stages = len(run)
    ends, free, position, wires = {}, [0] * stages, [0] * stages, {}
    times = [[] for _ in run]
    moved = True
    while moved:
        moved = False
        for stage, stream in enumerate(run):
            if position[stage] == len(stream):
                continue
            kind, _, batch = stream[position[stage]]
            arrival = 0
            if kind is Kind.F and stage:
                arrival = ends.get(("up", stage - 1, batch))
            elif kind in (Kind.B, Kind.I) and stage < stages - 1:
                arrival = ends.get(("down", stage + 1, batch))
            if arrival is None:
                continue
            start = max(free[stage], arrival)
            free[stage] = start + each[stage][kind]
            way, border = ("up", stage) if kind is Kind.F else ("down", stage - 1)
            if kind not in (Kind.W, Kind.U) and 0 <= border < stages - 1:
                channel = channels[border]
                wires[way, border] = max(free[stage], wires.get((way, border), 0)) + sizes[border] / channel.bandwidth
                ends[way, stage, batch] = wires[way, border] + channel.latency
            times[stage].append((start, free[stage]))
            position[stage] += 1
            moved = True
    return times


@settings(max_examples=80)
@given(schedules, groups, st.integers(1, 3), st.data())
def test_times_equal_those_of_a_naive_loop(schedule, groups, per_update, data):
    cost = st.fixed_dictionaries({kind: st.integers(0, 9) for kind in costs(0, 0)})
    stages = schedule.stages
    each = data.draw(st.lists(cost, min_size=stages, max_size=stages))
    link = st.builds(Channel, st.sampled_from([1, 2, 4]), st.integers(0, 5))
    channels = data.draw(st.lists(link, min_size=stages - 1, max_size=stages - 1))
    bytes_up = data.draw(st.lists(st.integers(0, 5), min_size=stages - 1, max_size=stages - 1))
    sizes = {("forward", k, k + 1): size for k, size in enumerate(bytes_up)}
    sizes |= {("backward", k + 1, k): size for k, size in enumerate(bytes_up)}
    run = streams(schedule, groups, per_update)
    timeline = simulate(run, Workload(each, sizes), Machine(channels))
    found = [list(zip(s, e, strict=True)) for s, e in zip(timeline.starts, timeline.ends, strict=True)]
    assert found == naive(run, each, bytes_up, channels)


def test_messages_are_counted_between_devices_only():
    run = streams(ticked(3), [1] * 5, devices=[0, 0, 1])
    sent = simulate(run, Workload(sizes={"forward": 8, ("backward", 2, 1): 2})).sent
    assert sent == {("forward", 1, 2): (5, 40), ("backward", 2, 1): (5, 10)}


def test_links_of_borders_suit_neighbours_only():
    ends = Entry(Kind.F, 0, gives=(Port("skip", 2),)), Entry(Kind.F, 2, takes=(Port("skip", 0),))
    far = Periodic(3, (*ends, Entry(Kind.F, 1)))
    with pytest.raises(ScheduleError, match="share no border: give one channel"):
        simulate(streams(far, [1]), machine=Machine([Channel(), Channel()]))


def test_a_million_actions_in_seconds():
    run = streams(ticked(8), [1] * 42_000)
    assert sum(map(len, run)) > 1_000_000
    start = time.process_time()
    timeline = simulate(run, Workload(sizes={"forward": 1, "backward": 1}), Machine(Channel(bandwidth=4, latency=0.5)))
    assert time.process_time() - start < 10
    assert timeline.utilisation > 0.99
