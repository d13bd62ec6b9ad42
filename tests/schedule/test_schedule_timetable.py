"""The lock-step timetable against the published one of DTR for three modules, its index laws, and the text pictures."""

from __future__ import annotations

import pytest

from unlatch.errors import ScheduleError
from unlatch.schedule import (
    ZBH1,
    GPipe,
    Kind,
    TickEntry,
    Workload,
    forward_locked,
    gantt,
    lockstep,
    one_f_one_b_async,
    streams,
    tick_entries,
    ticked,
    timetable,
)

DTR_OF_THREE_MODULES = """\
| tick | module 1 | module 2 | module 3 |
|---|---|---|---|
| 1 | fw b1 W2 | - | - |
| 2 | fw b2 W3 | fw b1 W2 | - |
| 3 | fw b3 W4 | fw b2 W3 | fb b1 W1 |
| 4 | fw b4 W5 | re b1 W3; fw b3 W4 | fb b2 W2 |
| 5 | re b1 W5; fw b5 W6 | re b2 W4; fw b4 W5 | fb b3 W3 |
| 6 | re b2 W6; fw b6 W7 | re b3 W5; fw b5 W6 | fb b4 W4 |"""


def dtr(stages: int):
    return ticked(stages, backward_first=True)


def test_dtr_timetable_is_the_published_one():
    assert timetable(dtr(3), 6, recompute=True) == DTR_OF_THREE_MODULES


def test_dtr_events_are_the_published_twenty():
    module_1 = [(t, 1, "fw", t, t + 1) for t in range(1, 7)] + [(t, 1, "re", t - 4, t) for t in (5, 6)]
    module_2 = [(t, 2, "fw", t - 1, t) for t in range(2, 7)] + [(t, 2, "re", t - 3, t - 1) for t in (4, 5, 6)]
    module_3 = [(t, 3, "fb", t - 2, t - 2) for t in range(3, 7)]
    entries = tick_entries(dtr(3), 6, recompute=True)
    assert len(entries) == 20
    assert set(entries) == {TickEntry(*cell) for cell in (*module_1, *module_2, *module_3)}


@pytest.mark.parametrize("K", range(1, 6))
def test_dtr_index_laws(K):  # noqa: N803 - the papers' letter
    for entry in tick_entries(dtr(K), 30, recompute=True):
        k, i = entry.module, entry.batch
        if k == K:
            assert (entry.what, entry.version, entry.tick) == ("fb", i, i + K - 1)
        elif entry.what == "fw":
            assert (entry.version, entry.tick) == (i + 1, i + k - 1)
        else:
            assert (entry.what, entry.version, entry.tick) == ("re", i + 2 * (K - k), i + 2 * K - k - 1)


@pytest.mark.parametrize("K", range(1, 6))
def test_dtr_lateness(K):  # noqa: N803
    for numbering in ("paper", "real"):
        entries = tick_entries(dtr(K), 40, recompute=True, versions=numbering)
        seen = {(e.module, e.batch, e.what): e.version for e in entries}
        lateness = [seen[k, 20, "re"] - seen[k, 20, "fw"] for k in range(1, K)]
        assert lateness == [2 * (K - k) - 1 for k in range(1, K)]


@pytest.mark.parametrize("K", range(1, 6))
def test_dtr_input_queue(K):  # noqa: N803
    """At most 2(K-k) inputs wait in module k, exactly that many from tick 2K-k-1 on until the pipeline drains."""
    batches, ticks = 20, 20 + 2 * K - 2
    table = lockstep(dtr(K), ticks, batches)
    for k in range(1, K + 1):
        queue: set[int] = set()
        for tick, row in enumerate(table, start=1):
            for action in row[k - 1]:
                assert (action.batch in queue) == (action.kind is Kind.B)
                queue ^= {action.batch}
                assert len(queue) <= max(2 * (K - k), 1)
            if 2 * K - k - 1 <= tick <= batches + k - 1:
                assert len(queue) == 2 * (K - k)
        assert not queue


@pytest.mark.parametrize("K", range(1, 6))
@pytest.mark.parametrize("T", [1, 3, 8, 15])
def test_dtr_update_counts(K, T):  # noqa: N803
    entries = tick_entries(dtr(K), T, recompute=True)
    for k in range(1, K + 1):
        updates = sum(e.module == k and e.what in ("re", "fb") for e in entries)
        assert updates == max(0, T - 2 * K + k + 1 if k < K else T - K + 1)
    batches = 9
    drained = tick_entries(dtr(K), batches + 2 * K - 2, recompute=True, batches=batches)
    for k in range(1, K + 1):
        assert sum(e.module == k and e.what in ("re", "fb") for e in drained) == batches
    assert max(e.tick for e in drained) == batches + 2 * K - 2


@pytest.mark.parametrize("K", range(1, 6))
def test_dtr_work_and_messages(K):  # noqa: N803
    batches = 7
    entries = tick_entries(dtr(K), batches + 2 * K, recompute=True, batches=batches)
    for k in range(1, K + 1):
        forwards = sum(e.module == k for e in entries)  # each fw, re and fb holds one pass
        backwards = sum(e.module == k and e.what != "fw" for e in entries)
        assert (forwards, backwards) == ((2 * batches if k < K else batches), batches)
    activations = sum(e.module < K and e.what == "fw" for e in entries)
    gradients = sum(e.module > 1 and e.what in ("re", "fb") for e in entries)
    assert (activations, gradients) == ((K - 1) * batches, (K - 1) * batches)


@pytest.mark.parametrize("backward_first", [False, True])
@pytest.mark.parametrize("stages", range(1, 6))
def test_messages_of_a_tick_are_used_in_the_next(stages, backward_first):
    when = {
        action: tick
        for tick, row in enumerate(lockstep(ticked(stages, backward_first=backward_first), 25, batches=8))
        for cell in row
        for action in cell
    }
    for action, tick in when.items():
        source = action.station - 1 if action.kind is Kind.F else action.station + 1
        if 0 <= source < stages:
            assert when[action._replace(station=source)] == tick - 1


def test_a_stashed_backward_carries_the_version_of_its_forward():
    assert timetable(ticked(3), 7).splitlines()[-2:] == [
        "| 6 | fw b6 W2; bw b2 W1 | fw b5 W3; bw b3 W1 | fb b4 W4 |",
        "| 7 | fw b7 W3; bw b3 W1 | fw b6 W4; bw b4 W2 | fb b5 W5 |",
    ]
    # FDG, numbered as in DTR's table: the backward of batch i uses the graph made with W(i+1).
    assert timetable(dtr(3), 6).splitlines()[-1] == "| 6 | bw b2 W3; fw b6 W7 | bw b3 W4; fw b5 W6 | fb b4 W4 |"


def test_pipedream_and_forward_locked_timetables():
    assert timetable(one_f_one_b_async(3), 4).splitlines()[2:] == [
        "| 1 | fw b1 W1 | - | - |",
        "| 2 | fw b2 W1 | fw b1 W1 | - |",
        "| 3 | fw b3 W1; bw b1 W1 | fw b2 W1; bw b1 W1 | fb b1 W1 |",
        "| 4 | fw b4 W2; bw b2 W1 | fw b3 W2; bw b2 W1 | fb b2 W2 |",
    ]
    assert timetable(forward_locked(3), 6, recompute=True, batches=3).splitlines()[2:] == [
        "| 1 | fw b1 W1 | fw b1 W1 | fb b1 W1 |",
        "| 2 | fw b2 W1 | fw b2 W1; re b1 W1 | fb b2 W2 |",
        "| 3 | fw b3 W1; re b1 W1 | fw b3 W2; re b2 W2 | fb b3 W3 |",
        "| 4 | re b2 W2 | re b3 W3 | - |",
        "| 5 | re b3 W3 | - | - |",
        "| 6 | - | - | - |",
    ]


def test_versions_of_accumulated_updates():
    last_module = [e.version for e in tick_entries(ticked(2), 6, group=2) if e.module == 2]
    assert last_module == [1, 1, 2, 2, 3]
    with pytest.raises(ScheduleError, match="an update per tick"):
        timetable(dtr(2), 3, versions="paper", group=2)


def test_a_synchronous_schedule_has_a_gantt_chart_instead():
    with pytest.raises(ScheduleError, match=r"draw its gantt\(streams"):
        timetable(GPipe(2), 3)
    assert gantt(streams(GPipe(2), [2])).splitlines() == [
        "stage 0 | F0 F1 .  .  .  B0 =  B1 =",
        "stage 1 | .  F0 F1 B0 =  B1 =  .  .",
    ]
    assert gantt(streams(ZBH1(2), [3])).splitlines() == [
        "stage 0 | F0 F1 .  I0 W0 F2 I1 W1 I2 W2",
        "stage 1 | .  F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]


def test_gantt_of_shared_devices_and_shown_updates():
    costs = Workload({Kind.F: 1, Kind.B: 2, Kind.U: 1})
    assert gantt(streams(ticked(2), [1], devices=[0, 0]), costs) == "device 0 | 0F0 1F0 1B0 =   1U0 0B0 =   0U0"
    with pytest.raises(ScheduleError, match="whole numbers"):
        gantt(streams(ticked(2), [1]), Workload({Kind.F: 0.5, Kind.B: 1, Kind.U: 0}))
