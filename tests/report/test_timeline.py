"""Timelines as pictures, pages and traces, from simulations and from events of real runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unlatch.errors import ConfigError
from unlatch.methods.layerpipe.workload import simulate_layerpipe
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.report.spans import Source, row_names, spans_of
from unlatch.report.timeline import draw_timeline, draw_timelines, save_timeline, timeline_html
from unlatch.report.trace import trace_json
from unlatch.runtime.events import Event
from unlatch.schedule import ZBH1, simulate, streams, ticked
from unlatch.schedule.machine import Machine
from unlatch.schedule.simulation import Simulation, Span, simulate_schedule


def simulated() -> Simulation:
    return simulate_schedule(ZBH1(3), batches=2, microbatches=4, machine=Machine(jitter=0.2))


def placed() -> Simulation:
    return simulate_layerpipe(plan_layerpipe([LayerCost(str(n), 1, 1, 1) for n in range(4)], 3), 6)


EVENTS = [
    Event(0, "F", 0, 0, 100.0, 100.1, 0),
    Event(0, "B", 0, 0, 100.2, 100.5, 0),
    Event(0, "U", 0, 0, 100.5, 100.5, 0),
    Event(1, "F", 0, 0, 100.1, 100.2, 0),
    Event(1, "aux", 0, 0, 100.2, 100.21, 0),
]


def test_simulations_timelines_and_events_are_one_thing() -> None:
    timeline = simulate(streams(ticked(2), [1] * 3))
    again = simulate_schedule(ticked(2), batches=3)
    assert spans_of(timeline) == spans_of(again) == spans_of(spans_of(again))
    assert spans_of(EVENTS)[0] == Span(0, 0, "F", 0, 100.0, 100.1)
    assert row_names(spans_of(EVENTS)) == ["stage 0", "stage 1"]
    assert row_names(spans_of(placed())) == ["device 0", "device 1", "device 2"]


def complete(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Spans of each track, by start."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return {key: sorted(events, key=lambda event: event["ts"]) for key, events in tracks.items()}


@pytest.mark.parametrize("source", [simulated(), placed(), EVENTS])
def test_traces_have_a_track_per_stage_and_kind_without_overlap(source: Source) -> None:
    trace = json.loads(json.dumps(trace_json(source)))
    tracks = complete(trace)
    for events in tracks.values():
        assert len({event["cat"] for event in events}) == 1
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(events))
    assert sum(map(len, tracks.values())) == len(spans_of(source))
    assert min(events[0]["ts"] for events in tracks.values()) == 0
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == set(tracks)


times = st.floats(0, 1e4, allow_nan=False)
events = st.builds(
    lambda stage, kind, start, length: Event(stage, kind, 0, 0, start, start + length, 0),
    st.integers(0, 2),
    st.sampled_from("FB"),
    times,
    st.floats(0, 10),
)


@given(st.lists(events, max_size=20), st.sampled_from([1.0, 1e-3, 7e-7]))
@settings(max_examples=60)
def test_traces_never_overlap_whatever_the_events(found: list[Event], unit: float) -> None:
    tracks = complete(trace_json(found, unit=unit))
    assert sum(map(len, tracks.values())) == len(found)
    for track in tracks.values():
        assert all(event["dur"] >= 0 for event in track)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(track))


def test_events_at_the_same_time_get_tracks_of_their_own() -> None:
    overlapping = [Event(0, "F", 0, 0, 0.0, 2.0, 0), Event(0, "F", 1, 0, 1.0, 3.0, 0)]
    trace = trace_json(overlapping)
    assert len(complete(trace)) == 2
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"} == {"F", "F (2)"}


@pytest.mark.parametrize("source", [simulated(), placed(), EVENTS, []])
def test_files(source: Source, tmp_path: Path) -> None:
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".html", b"<!DOCTYPE html>"), (".json", b"{")):
        path = save_timeline(tmp_path / f"timeline{suffix}", source, title="a run")
        assert path.read_bytes().startswith(start)
    with pytest.raises(ConfigError, match=r"\.png, \.svg"):
        save_timeline(tmp_path / "timeline.bmp", source)


def test_pages_need_nothing_else() -> None:
    page = timeline_html(simulated(), title="</script><b>")
    assert re.search(r"(https?:)?//[a-z]", page) is None
    assert "src=" not in page
    assert "</script><b>" not in page
    assert page.count("</script>") == page.count("<script") == 2


def embedded(page: str) -> Any:
    document = json.loads(page.split('id="document">', 1)[1].split("</script>", 1)[0])
    return document["runs"][0]["timeline"]


def test_pages_hold_all_spans() -> None:
    run = simulated()
    data = embedded(timeline_html(run))
    assert len(data["spans"]) == len(list(run.spans()))
    assert data["rows"] == ["stage 0", "stage 1", "stage 2"]
    assert [kind["kind"] for kind in data["kinds"]] == ["F", "I", "W"]
    assert [kind["words"] for kind in data["kinds"]] == ["forward", "input gradient", "weight gradient"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to parse the script")
def test_the_script_is_valid(tmp_path: Path) -> None:
    script = timeline_html(simulated()).split("<script>\n")[1].split("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    found = subprocess.run(["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_a_window_shows_only_its_part() -> None:
    figure = draw_timeline(simulated(), window=(2.0, 5.0), unit="s", rows=["a", "b", "c"])
    axes = figure.axes[0]
    assert axes.get_xlim() == (2.0, 5.0)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.get_xlabel() == "time (s)"


def test_many_devices_are_drawn() -> None:
    figure = draw_timeline(simulate_schedule(ticked(300), batches=5))
    assert len(figure.axes[0].get_yticks()) == 300


def test_runs_side_by_side_have_one_scale() -> None:
    later = [event._replace(start=event.start + 7.0, end=event.end + 7.0) for event in EVENTS]
    figure = draw_timelines({"one": EVENTS, "nothing": [], "later": later})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["one", "later"]
    assert [axes.get_xlim() for axes in figure.axes] == [pytest.approx((0.0, 500.0))] * 2
    words = {text.get_text() for text in figure.legends[0].get_texts()}
    assert words == {"forward", "backward", "aux"}
    assert draw_timelines({"nothing": []}).axes == []
