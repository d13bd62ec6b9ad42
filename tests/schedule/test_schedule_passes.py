"""What holds for every generator, any stages and batches: complete, executable, bounded, stale by law."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_runs import ALL, ASYNCHRONOUS, groups, schedules

from unlatch.errors import ScheduleError
from unlatch.schedule import (
    ZBH1,
    ZBH2,
    Action,
    Entry,
    GPipe,
    Kind,
    OneFOneB,
    Periodic,
    Port,
    Schedule,
    Sequential,
    buffers,
    chain_entry,
    check,
    check_order,
    check_schedule,
    interleave,
    rounds,
    staleness,
    streams,
    ticked,
    unroll,
    update_ends,
    versions,
)


def needs(action: Action, stages: int, split: bool) -> list[Action]:
    """Dependencies, written down independently of the passes."""
    kind, stage, batch = action
    backward = Kind.I if split else Kind.B
    if kind is Kind.F:
        return [Action(Kind.F, stage - 1, batch)] if stage else []
    if kind is Kind.W:
        return [Action(Kind.I, stage, batch)]
    if kind is Kind.U:
        return []
    above = [Action(backward, stage + 1, batch)] if stage < stages - 1 else []
    return [Action(Kind.F, stage, batch), *above]


def backward_first(schedule: Schedule, stage: int) -> bool:
    return next(e.kind for e in schedule.entries if e.station == stage) is Kind.B


def update_sizes(groups: list[int], per_update: int) -> list[int]:
    return [sum(groups[i : i + per_update]) for i in range(0, len(groups), per_update)]


@settings(max_examples=150)
@given(schedules, groups, st.integers(1, 4))
def test_runs_are_complete_ordered_and_free_of_deadlock(schedule, groups, per_update):
    order = list(unroll(schedule, groups, per_update))
    total, updates = sum(groups), -(-len(groups) // per_update)
    kinds = "FIW" if schedule.splits_backward else "FB"
    expected = {Action(Kind(k), s, b) for k in kinds for s in range(schedule.stages) for b in range(total)}
    expected |= {Action(Kind.U, s, u) for s in range(schedule.stages) for u in range(updates)}
    assert len(order) == len(expected)
    assert set(order) == expected

    place = {action: position for position, action in enumerate(order)}
    for action in order:
        for needed in needs(action, schedule.stages, schedule.splits_backward):
            assert place[needed] < place[action]
    for stage in range(schedule.stages):
        for kind in kinds:
            ids = [a.batch for a in order if a.station == stage and a.kind == kind]
            assert ids == sorted(ids)

    check_order(order)
    check(streams(schedule, groups, per_update), slots=1)


@settings(max_examples=60)
@given(schedules, groups, st.data())
def test_shared_devices_cannot_deadlock(schedule, groups, data):
    """Contiguous stages need one slot per border; any placement of stages at all, two."""
    devices = data.draw(st.lists(st.integers(0, 3), min_size=schedule.stages, max_size=schedule.stages))
    check(streams(schedule, groups, devices=sorted(devices)), slots=1)
    check(streams(schedule, groups, devices=devices), slots=2)


@settings(max_examples=100)
@given(schedules, groups, st.integers(1, 4))
def test_closed_form_staleness_equals_the_versions_pass(schedule, groups, per_update):
    seen = versions(streams(schedule, groups, per_update))
    backward = Kind.W if schedule.splits_backward else Kind.B
    sizes = update_sizes(groups, per_update)
    ends = list(accumulate(sizes))
    for stage in range(schedule.stages):
        for micro in range(sum(groups)):
            at_forward, at_backward = seen[Action(Kind.F, stage, micro)], seen[Action(backward, stage, micro)]
            assert at_backward == sum(end <= micro for end in ends)
            assert staleness(schedule, stage, micro, sizes) == at_backward - at_forward
            if len(set(sizes[:-1])) == 1 and sizes[-1] <= sizes[0]:
                assert staleness(schedule, stage, micro, sizes[0]) == at_backward - at_forward


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize("stages", range(1, 6))
def test_staleness_in_steady_state_is_the_delay(name, stages):
    schedule = ASYNCHRONOUS[name](stages)
    for stage in range(stages):
        delay = schedule.delay(stage)
        assert backward_first(schedule, stage) == (name == "ticked, backward first" and delay > 0)
        late = delay - 1 if backward_first(schedule, stage) else delay
        assert staleness(schedule, stage, 50) == late
        # On average over a group the lateness is divided by its size.
        assert sum(staleness(schedule, stage, 60 + i, 4) for i in range(4)) == late


def test_accumulated_staleness_of_adl():
    """K=3: accumulating 2 batches gives 2, 1, 0 updates; 4 batches give 1, (1, 1, 0, 0), 0."""
    schedule = ticked(3)
    assert [[staleness(schedule, s, m, 2) for m in range(40, 42)] for s in range(3)] == [[2, 2], [1, 1], [0, 0]]
    assert [[staleness(schedule, s, m, 4) for m in range(40, 44)] for s in range(3)] == [[1] * 4, [1, 1, 0, 0], [0] * 4]


def most_in_flight(schedule, stage: int, count: int) -> int:
    stages = schedule.stages
    match schedule:
        case Sequential():
            return 1
        case GPipe():
            return count
        case OneFOneB():
            return min(count, stages - stage)
        case ZBH1():
            return min(count, stages)
        case ZBH2():
            return min(count, 2 * stages - 1)
        case Periodic():
            delay = schedule.delay(stage)
            return min(count, delay if backward_first(schedule, stage) else delay + 1)
    raise AssertionError(schedule)


@settings(max_examples=80)
@given(schedules, groups)
def test_in_flight_is_what_the_schedule_promises(schedule, groups):
    count = max(groups) if schedule.flushes else sum(groups)
    expected = tuple(most_in_flight(schedule, stage, count) for stage in range(schedule.stages))
    assert buffers(streams(schedule, groups)).in_flight == expected


def worst_by_search(run: list[list[Action]]) -> tuple[list[int], list[int]]:
    """Visit every state that any timing can reach and note the fullest borders."""
    stages = len(run)
    split = any(a.kind is Kind.I for a in run[0])
    counts = [[(0, 0)] for _ in run]
    for stream, count in zip(run, counts, strict=True):
        for action in stream:
            forwards, backwards = count[-1]
            count.append((forwards + (action.kind is Kind.F), backwards + (action.kind in (Kind.B, Kind.I))))
    index = [{action: i for i, action in enumerate(stream)} for stream in run]
    worst_up, worst_down = [0] * (stages - 1), [0] * (stages - 1)
    start = (0,) * stages
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for border in range(stages - 1):
            below, above = counts[border][state[border]], counts[border + 1][state[border + 1]]
            worst_up[border] = max(worst_up[border], below[0] - above[0])
            worst_down[border] = max(worst_down[border], above[1] - below[1])
        for stage in range(stages):
            if state[stage] == len(run[stage]):
                continue
            required = needs(run[stage][state[stage]], stages, split)
            if all(index[a.station][a] < state[a.station] for a in required):
                after = (*state[:stage], state[stage] + 1, *state[stage + 1 :])
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return worst_up, worst_down


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("stages", "groups"), [(2, [3, 2]), (3, [2, 2]), (3, [4])])
def test_border_buffers_are_the_worst_over_all_timings(name, stages, groups):
    run = streams(ALL[name](stages), groups)
    worst_up, worst_down = worst_by_search(run)
    up = {("forward", border, border + 1): most for border, most in enumerate(worst_up)}
    down = {("backward", border + 1, border): most for border, most in enumerate(worst_down)}
    assert buffers(run).room == up | down


@settings(max_examples=60)
@given(schedules, groups, st.data())
def test_dropped_and_doubled_actions_are_found(schedule, groups, data):
    run = streams(schedule, groups)
    stage = data.draw(st.integers(0, schedule.stages - 1))
    position = data.draw(st.integers(0, len(run[stage]) - 1))
    action = run[stage][position]

    dropped = [list(stream) for stream in run]
    del dropped[stage][position]
    with pytest.raises(ScheduleError, match=f"station {stage}"):
        check(dropped)

    doubled = [list(stream) for stream in run]
    doubled[stage].insert(data.draw(st.integers(0, len(run[stage]))), action)
    with pytest.raises(ScheduleError, match=rf"station {stage}.*{action}"):
        check(doubled)


@settings(max_examples=60)
@given(schedules, st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_swapped_actions_are_found(schedule, groups, data):
    """Swapping two of a kind, or a backward with its forward, breaks the order at that stage."""
    run = streams(schedule, groups)
    stage = data.draw(st.integers(0, schedule.stages - 1))
    kind = data.draw(st.sampled_from("FIW" if schedule.splits_backward else "FB"))
    one, two = data.draw(st.lists(st.integers(0, sum(groups) - 1), min_size=2, max_size=2, unique=True))
    other = data.draw(st.sampled_from([Action(Kind(kind), stage, two), Action(Kind.F, stage, one)]))
    this = Action(Kind(kind), stage, one)
    if this == other:
        return
    a, b = run[stage].index(this), run[stage].index(other)
    run[stage][a], run[stage][b] = run[stage][b], run[stage][a]
    with pytest.raises(ScheduleError, match=f"station {stage}"):
        check(run)


def parse(text: str) -> list[Action]:
    return [Action(Kind(name[1]), int(name[0]), int(name[2:])) for name in text.split()]


def test_streams_waiting_in_a_circle_are_named():
    run = [
        parse("0F0 0B0 0U0 0F1 0B1 0U1"),
        parse("1F0 1F1 1B0 1U0 1B1 1U1"),
    ]
    with pytest.raises(ScheduleError) as error:
        check(run)
    assert str(error.value).splitlines() == [
        "the streams wait for each other in a circle with 1 message(s) per route:",
        "  stream 0 stands before 0B0 and waits for 1B0",
        "  stream 1 stands before 1F1 and waits for 0F1",
        "  stream 0:  0F0 [0B0] 0U0 0F1 0B1 0U1",
        "  stream 1:  1F0 [1F1] 1B0 1U0 1B1 1U1",
    ]


def test_a_circle_that_more_room_on_the_route_would_open():
    """Stages 0 and 2 share a worker that sends two forwards before it looks at what came back."""
    run = [
        parse("0F0 0F1 0F2 2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 0B0 0U0 0B1 0U1 0B2 0U2"),
        parse("1F0 1F1 1F2 1B0 1U0 1B1 1U1 1B2 1U2"),
    ]
    with pytest.raises(ScheduleError, match=r"waits for 2F0 to make room\n"):
        check(run, slots=1)
    check(run, slots=3)


def test_a_stream_that_ends_too_early_is_not_called_a_circle():
    with pytest.raises(ScheduleError, match="stream 0 ended too early"):
        list(interleave([parse("0F0"), parse("1F0 1F1")]))


def test_a_stream_may_wait_for_itself():
    forward, backward = Entry(Kind.F, 0, gives=(Port("kept", 0),)), Entry(Kind.B, 0, takes=(Port("kept", 0),))
    with pytest.raises(ScheduleError, match="stream 0 stands before 0B0 and waits for 0F0"):
        list(interleave([[Action.of(backward, 0, 0), Action.of(forward, 0, 0)]]))
    with pytest.raises(ScheduleError, match="in a circle"):
        list(interleave([parse("0B0 0F0"), parse("1F0 1B0")]))


def test_the_split_backward_is_named_as_such():
    run = [parse("0F0 0I0 0W0 0U0 0F1 0I1 0W1 0U1"), parse("1F0 1F1 1I0 1W0 1U0 1I1 1W1 1U1")]
    with pytest.raises(ScheduleError, match="stands before 0I0 and waits for 1I0"):
        check(run)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (["0F0 0B0"], "never applies the gradient of micro-batch 0: update 0U0 is missing"),
        (["0F0 0B0 0U1"], "does 0U1, but 0U0 is the update that is due"),
        (["0F0 0B0 0U0 0U1"], "does 0U1 without a new gradient"),
        (["0F0 0F1 0B0 0B1 0U0", "1F0 1B0 1U0 1F1 1B1 1U1"], "update 0 does not end with the same micro-batch"),
        (["0F0 0F1 0B0 0U0 0B1 0U1", "1F0 1B0 1F1 1B1 1U0"], "update 0 does not end with the same micro-batch"),
        (["0B0 0F0 0U0"], "station 0 does 0B0 before 0F0"),
        (["0F0 0W0 0I0 0U0"], "station 0 does 0W0 before 0I0"),
        (["0F0 0I0 0U0"], "never does the weight gradient of micro-batch 0: 0W0 is missing"),
        (["0F0 0I0 0B0 0U0"], "station 0 does 0B0 a second time"),
        (["0F0 0F1 0B1 0B0 0U0"], "station 0 does 0B1 where micro-batch 0 should come"),
        (["0F0 0B0 0U0", "2F0 2B0 2U0"], "numbered from 0 without gaps"),
        (["0F0 1F0 0B0", "1B0 1U0 0U0"], "is in streams 0 and 1"),
        (["0U0"], "no forward and no backward"),
    ],
)
def test_what_check_refuses(run, message):
    with pytest.raises(ScheduleError, match=message):
        check([parse(text) for text in run])


def test_errors_show_the_neighbours():
    run = streams(ticked(3), [1] * 6)
    del run[1][3]
    with pytest.raises(ScheduleError) as error:
        check(run)
    assert str(error.value).splitlines() == [
        "station 1 never does the backward of micro-batch 0: 1B0 is missing",
        "  station 0:  [0F0] 0F1 0F2 0F3 0F4 0B0 ...",
        "  station 1:  1F0 1F1 1F2 1U0 1F3 [1B1] 1U1 1F4 1B2 1U2 1F5 ...",
        "  station 2:  [2F0] 2B0 2U0 2F1 2B1 2U1 ...",
    ]


def test_a_global_order_in_which_a_result_comes_before_its_source():
    order = parse("1F0 0F0 1B0 1U0 0B0 0U0")
    check([[a for a in order if a.station == stage] for stage in range(2)])
    with pytest.raises(ScheduleError, match="1F0 comes before 0F0, which it needs"):
        check_order(order)


@pytest.mark.parametrize(("groups", "per_update"), [([], 1), ([1, 0], 1), ([1], 0)])
def test_impossible_runs_are_refused(groups, per_update):
    with pytest.raises(ScheduleError, match="expected at least one batch"):
        update_ends(groups, per_update)


def test_a_lone_layer_needs_no_input_gradient():
    """Only what the schedule lists tells it from a stage that forgets one."""
    layer = Periodic(1, tuple(chain_entry(kind, 0, 1) for kind in (Kind.F, Kind.W, Kind.U)))
    check_schedule(layer, [2, 1])
    with pytest.raises(ScheduleError, match="station 0 never does the backward of micro-batch 0: 0B0 is missing"):
        check(streams(layer, [2, 1]))


def test_check_needs_room_for_one_message():
    with pytest.raises(ScheduleError, match="slots=0"):
        check(streams(ticked(2), [1]), slots=0)


def test_delays_must_fall_to_zero():
    with pytest.raises(ScheduleError, match="strictly falling to 0"):
        rounds((1, 1))
    with pytest.raises(ScheduleError, match="at least 1 stage"):
        ticked(0)


def test_every_schedule_has_a_closed_form():
    class Foreign(Schedule):
        def feed(self, first, count): ...
        def drain(self, fed): ...
        def delay(self, stage): ...

        depth = 0

    with pytest.raises(TypeError, match=r"abstract method '?finished"):
        Foreign()


def test_a_station_that_only_runs_forward_is_never_late():
    forwards = Periodic(2, tuple(chain_entry(Kind.F, stage, 2, offset=stage) for stage in range(2)))
    assert [staleness(forwards, stage, micro) for stage in range(2) for micro in range(5)] == [0] * 10
    assert [forwards.delay(stage) for stage in range(2)] == [0, 0]
