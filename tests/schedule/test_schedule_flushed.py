"""The synchronous schedules against published makespans, spans, memory and orders."""

from __future__ import annotations

import pytest
from schedule_runs import FLUSHED

from unlatch.errors import ScheduleError
from unlatch.schedule import (
    ZBH1,
    ZBH2,
    Action,
    GPipe,
    Kind,
    OneFOneB,
    Schedule,
    Sequential,
    buffers,
    check_order,
    simulate,
    streams,
    unroll,
)


def actions(text: str, stage: int) -> list[str]:
    return [f"{stage}{name}" for name in text.split()]


@pytest.mark.parametrize(
    ("schedule", "count", "makespan", "longest_span"),
    [
        (GPipe(4), 8, 33, 33),
        (OneFOneB(4), 8, 33, 33),
        (ZBH1(4), 8, 27, 27),
        (ZBH2(4), 8, 27, 24),
        (GPipe(2), 4, 15, 15),
        (OneFOneB(2), 4, 15, 15),
        (ZBH1(2), 4, 13, 13),
        (ZBH2(2), 4, 13, 12),
        (ZBH2(4), 4, 16, 15),
        (Sequential(3), 5, 45, 45),
    ],
    ids=str,
)
def test_makespan_and_longest_span(schedule, count, makespan, longest_span):
    timeline = simulate(streams(schedule, [count]))
    assert (timeline.makespan, max(timeline.spans)) == (makespan, longest_span)


def test_zb_h2_has_no_bubble_at_any_stage():
    timeline = simulate(streams(ZBH2(4), [8]))
    assert timeline.spans == [24] * 4
    assert timeline.bubbles == [0] * 4


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("count", [1, 3, 7, 13, 20])
def test_bubbles_follow_the_published_formulas(stages, count):
    def bubble(schedule):
        return max(simulate(streams(schedule, [count])).bubbles)

    assert bubble(GPipe(stages)) == bubble(OneFOneB(stages)) == 3 * (stages - 1)
    if count >= stages:
        assert bubble(ZBH1(stages)) == stages - 1
    if count >= 2 * stages - 1:
        assert bubble(ZBH2(stages)) == 0


@pytest.mark.parametrize(
    ("schedule", "count", "in_flight"),
    [
        (GPipe(4), 8, (8, 8, 8, 8)),
        (OneFOneB(4), 8, (4, 3, 2, 1)),
        (ZBH1(4), 8, (4, 4, 4, 4)),
        (ZBH2(4), 12, (7, 7, 7, 7)),
        (Sequential(4), 8, (1, 1, 1, 1)),
        (OneFOneB(4), 2, (2, 2, 2, 1)),
    ],
    ids=str,
)
def test_activations_in_flight(schedule, count, in_flight):
    assert buffers(streams(schedule, [count])).in_flight == in_flight


@pytest.mark.parametrize(
    ("schedule", "stage", "start"),
    [
        (OneFOneB(4), 0, "F0 F1 F2 F3 B0 F4 B1 F5 B2"),
        (OneFOneB(4), 3, "F0 B0 F1 B1 F2 B2"),
        (ZBH1(4), 0, "F0 F1 F2 F3 I0 W0 F4 I1 W1"),
        (ZBH1(4), 3, "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1"),
        (ZBH2(4), 0, "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1"),
        (GPipe(4), 2, "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2"),
        (Sequential(4), 1, "F0 B0 F1 B1"),
    ],
    ids=str,
)
def test_order_at_a_stage(schedule, stage, start):
    expected = actions(start, stage)
    assert [str(a) for a in schedule.stream(stage, 8)][: len(expected)] == expected


def fed(schedule: Schedule, first: int, count: int) -> list[Action]:
    """What a feed sets off, updates called by the micro-batch that they follow."""
    pairs = ((schedule.entries[number], micro) for number, micro in schedule.feed(first, count))
    return [Action.of(entry, micro, micro) for entry, micro in pairs]


@pytest.mark.parametrize("name", FLUSHED)
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_feed_is_the_streams_merged_and_shifted(name, stages, count):
    schedule = FLUSHED[name](stages)
    order = fed(schedule, 0, count)
    for stage in range(stages):
        update = Action(Kind.U, stage, count - 1)
        assert tuple(a for a in order if a.station == stage) == (*schedule.stream(stage, count), update)
    assert fed(schedule, 7, count) == [a._replace(batch=a.batch + 7) for a in order]
    assert list(schedule.drain(count)) == []
    assert [schedule.delay(stage) for stage in range(stages)] == [0] * stages
    check_order(unroll(schedule, [count, count]))


def test_the_global_order_is_that_of_the_starting_times():
    order = " ".join(str(a) for a in fed(OneFOneB(3), 0, 3) if a.kind is not Kind.U)
    assert order == "0F0 0F1 1F0 0F2 1F1 2F0 2B0 1B0 2F1 2B1 0B0 1F2 1B1 2F2 2B2 0B1 1B2 0B2"


def test_a_step_without_micro_batches_does_nothing():
    assert list(GPipe(2).feed(0, 0)) == []


def test_no_stages_is_an_error():
    with pytest.raises(ScheduleError, match="at least 1 stage, got 0"):
        GPipe(0)
