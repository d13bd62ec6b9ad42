"""LayerPipe plans in virtual time: never slower than slot by slot, every mini-batch at the right weights."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerpipe_chains import MIXED, UNIT, layers

from unlatch.methods.layerpipe.list_schedule import plan_list
from unlatch.methods.layerpipe.workload import simulate_layerpipe
from unlatch.plan.dataflow import Sizes, direct_bytes
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import PlannedTasks, plan_layerpipe
from unlatch.plan.tasks import MODES
from unlatch.schedule import Action, Kind, Workload, one_f_one_b_async
from unlatch.schedule.channel import Channel
from unlatch.schedule.machine import Machine
from unlatch.schedule.simulation import simulate_schedule


@pytest.mark.parametrize(("devices", "interval"), [(2, "11/2"), (3, "4"), (4, "11/4"), (6, "2"), (8, "3/2")])
def test_the_interval_is_reached(devices: int, interval: str) -> None:
    run = simulate_layerpipe(plan_layerpipe(UNIT, devices), 60)
    assert run.interval == Fraction(interval)
    assert run.steady_utilisation == pytest.approx(11 / devices / float(Fraction(interval)))


def test_it_beats_pipedream_on_the_mixed_chain() -> None:
    """The theory of the measured comparison: 20 against 16 on two devices."""
    run = simulate_layerpipe(plan_layerpipe(MIXED, 2), 60)
    straight = Workload([{Kind.F: f, Kind.B: b, Kind.U: 0} for f, b in ((7, 13), (3, 6))])
    other = simulate_schedule(one_f_one_b_async(2), straight, batches=60)
    assert (run.interval, other.interval) == (16, 20)


plans = st.builds(
    lambda costs, count, mode, anywhere: (plan_list if anywhere else plan_layerpipe)(costs, count, mode),
    layers(most=5),
    st.integers(1, 5),
    st.sampled_from(MODES),
    st.booleans(),
)


@given(plans, st.integers(1, 12))
@settings(max_examples=80)
def test_self_timed_is_never_slower_than_slots(plan: PlannedTasks, batches: int) -> None:
    run = simulate_layerpipe(plan, batches)
    assert max(plan.loads) * batches <= run.makespan <= plan.makespan(batches)
    done = Counter(str(a.kind) for stream in run.timeline.streams for a in stream if str(a.kind) in "FIHW")
    tasks = Counter({"D": "I", "G": "W"}.get(task.kind, task.kind) for task in plan.tasks)
    assert done == {kind: count * batches for kind, count in tasks.items()}


@given(plans)
@settings(max_examples=60)
def test_messages_are_those_of_the_plan(plan: PlannedTasks) -> None:
    run = simulate_layerpipe(plan, 2)
    assert sum(run.link_bytes.values()) == pytest.approx(float(direct_bytes(plan.dataflow, Sizes.of(plan.layers))))
    assert run.messages == 2 * len(plan.dataflow.messages(Sizes.of(plan.layers)))


@given(plans)
@settings(max_examples=60)
def test_weights_are_exactly_as_old_as_planned(plan: PlannedTasks) -> None:
    """The forward of batch t starts after the gradient of t - delay - 1 came, and before that of t - delay is made."""
    run = simulate_layerpipe(plan, 8)
    started = {action: start for action, start, _ in run.timeline}
    ended = {action: end for action, _, end in run.timeline}
    homes = {(task.kind, task.layer): task.device for task in plan.tasks}
    for layer, delay in enumerate(plan.delays.gradient):
        for batch in range(8):
            forward = Action(Kind.F, layer, batch)
            # A gradient that is made elsewhere counts from when it is received.
            kind = Kind.W if homes["F", layer] == homes["G", layer] else Kind("R")
            last, following = (Action(kind, layer, batch - delay - late) for late in (1, 0))
            if last.batch >= 0:
                assert ended[last] <= started[forward]
            if following.batch >= 0:
                assert ended[forward] <= started[following]


def test_buffers_are_those_of_the_slots() -> None:
    """One device per layer: between forward and weight gradient lie 2S slots, so 2S + 1 mini-batches are kept."""
    run = simulate_layerpipe(plan_layerpipe(UNIT, 4), 40)
    assert run.in_flight == (7, 5, 3, 1)
    assert run.staleness == (6, 4, 2, 0)
    assert run.peak_bytes == (0, 500, 300, 100)


def test_links_and_speeds_and_jitter() -> None:
    plan = plan_layerpipe(UNIT, 4, "atomic")
    slow = simulate_layerpipe(plan, 80, Machine(Channel(bandwidth=40)))
    assert slow.interval > plan.initiation_interval
    uneven = simulate_layerpipe(plan, 80, Machine(speeds=(0.5, 1, 1, 1)))
    assert uneven.interval == pytest.approx(6)
    noisy = simulate_layerpipe(plan, 80, Machine(jitter=0.2)).interval
    assert noisy != 3
    assert noisy == pytest.approx(3, rel=0.1)


def test_one_processor_is_sequential() -> None:
    plan = plan_layerpipe([LayerCost("a", 2, 0, 3), LayerCost("b", 1, 4, 1)], 1)
    run = simulate_layerpipe(plan, 7)
    assert run.makespan == 11 * 7
    assert [str(action) for action in run.timeline.streams[0][:5]] == ["0F0", "1F0", "1I0", "1W0", "0W0"]
