"""The document that pages draw: runs, their curves and timelines, whatever the runs were like."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from made_runs import PAUSE, ROUND, WARM_UP, made_events, write_run
from unlatch.report.board import board, board_json, curves_of, run_of, timelines_of
from unlatch.report.comparison import rows_of
from unlatch.report.figures import curves
from unlatch.report.page import comparison_board
from unlatch.report.record import Record, read_run
from unlatch.report.spans import spans_of
from unlatch.report.steady import steady_windows
from unlatch.report.timeline import draw_timelines
from unlatch.runtime.events import Event


def record(**known) -> Record:
    return Record(Path("run"), {"status": "finished", "stages": []}, **known)


def test_seeds_are_one_line_with_a_band():
    first, second = record(losses=((1, 2.0), (2, 1.0))), record(losses=((1, 4.0), (2, 1.0), (3, 0.5)))
    loss = curves_of([first, second])["training loss"]
    assert loss["points"] == [[1, 3.0, 2.0, 4.0], [2, 2.0, 1.5, 2.5], [3, pytest.approx(5.5 / 3)]]
    assert (loss["x"], loss["log"]) == ("step", True)


def test_numbers_that_json_does_not_have_are_null():
    values = [1.0, math.inf, -math.inf, math.nan, 1e308, 1e308]
    diverged = record(losses=tuple(enumerate(values)), measures={"jump": {1: [(0, math.nan)]}})
    found = json.loads(board_json(board("t", [run_of("a", [diverged, diverged])])))
    assert [point[1] for point in found["runs"][0]["curves"]["training loss"]["points"]] == [1.0, *[None] * 5]
    assert found["runs"][0]["measures"]["jump"]["series"] == {"stage 1": [[0, None]]}


def test_long_runs_are_thinned_and_keep_their_ends():
    long = record(losses=tuple((step, 1.0 + step) for step in range(100_000)))
    points = curves_of([long])["training loss"]["points"]
    assert len(points) <= 400
    assert points[-1][0] == 99_999
    assert points[-1][1] == pytest.approx(100_000, rel=0.01)


def test_runs_that_have_just_begun_or_ended_early():
    assert run_of("new", [Record(Path("run"), {})], status="running")["curves"] == {}
    assert curves_of([record(losses=((1, 2.0),))])["training loss"]["points"] == [[1, 2.0]]
    assert timelines_of({"new": []}) == {}
    (only,) = timelines_of({"one": [Event(0, "F", 0, 0, 7.0, 7.5, 0)]}).values()
    assert (only["window"], only["spans"]) == ([0.0, 500.0], [[0, 0, 0, 0, 0.0, 500.0]])


def test_bubble_and_staleness_are_curves_for_who_follows_a_run():
    first = {"stage0/bubble": 0.1, "stage0/staleness": 2.0}
    row = {"epoch/number": 1, **first, "stage1/bubble": 0.3, "stage1/staleness": 0.0, "eval/samples": 9}
    found = curves_of([record(epochs=(row,))], by_epoch=True)
    assert found["bubble"]["points"] == [[1, pytest.approx(0.2)]]
    assert found["staleness of the latest stage"]["points"] == [[1, 2.0]]
    assert len(found) == 2


# ------------------------------------------------------------ steady rounds


def test_the_picture_of_first_steps_was_one_long_warm_up(tmp_path):
    """It showed the first actions of a run; now it shows rounds after the start and beside the evaluations."""
    slow, fast = (read_run(write_run(tmp_path / name)).events for name in ("slow", "fast"))
    fast = tuple(event._replace(start=event.start / 2, end=event.end / 2) for event in fast)
    windows = steady_windows({"slow": spans_of(slow), "fast": spans_of(fast)})
    assert [end - begin for begin, end in windows.values()] == [pytest.approx(3 * ROUND)] * 2
    begin, end = windows["slow"]
    assert begin > WARM_UP
    pause = WARM_UP + 39 * ROUND
    assert min(abs(begin - pause - PAUSE), abs(end - pause)) > 5 * ROUND, "a pipeline fills and drains beside a pause"
    timelines = timelines_of({"slow": slow, "fast": fast})
    for timeline in timelines.values():
        assert max(span[5] - span[4] for span in timeline["spans"]) < 1e3 * ROUND
    inside = {label: [s for s in one["spans"] if 0 <= s[4] < one["window"][1]] for label, one in timelines.items()}
    assert len(inside["fast"]) == pytest.approx(2 * len(inside["slow"]), abs=4)


def test_a_moment_in_which_the_machine_did_something_else_is_not_what_is_shown():
    events = [Event(**event) for event in made_events(epochs=1)]
    stop = WARM_UP + 24.1 * ROUND
    late = [e._replace(start=e.start + PAUSE * (e.start > stop), end=e.end + PAUSE * (e.end > stop)) for e in events]
    assert max(e.end - e.start for e in late if e.start > WARM_UP) >= PAUSE, "one action was interrupted"
    (timeline,) = timelines_of({"a": late}).values()
    shown = [span for span in timeline["spans"] if span[5] > 0 and span[4] < timeline["window"][1]]
    assert max(span[5] - span[4] for span in shown) < 1e3 * ROUND


def test_pictures_and_pages_show_the_same_rounds(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    (timeline,) = timelines_of({"run": run.events}).values()
    (axes,) = draw_timelines({"run": run.events}).axes
    assert axes.get_xlim() == pytest.approx(timeline["window"])
    labels = {text.get_text() for text in axes.texts}
    assert labels <= {str(span[3]) for span in timeline["spans"]}
    assert "0" not in labels


def test_records_keep_the_middle_of_the_events(tmp_path):
    events = made_events(rounds=2000)
    found = read_run(write_run(tmp_path / "run", events=events)).events
    assert len(found) == 4000 < len(events)
    assert found[0].batch == pytest.approx(2000 - 4000 / 6 / 2, abs=2)


# ------------------------------------------------------------- comparisons


@pytest.fixture
def groups(tmp_path):
    return {name: [read_run(write_run(tmp_path / name, measures=name == "b"))] for name in ("a", "b", "c")}


def test_the_thick_curve_was_the_first_run_instead_of_the_baseline(groups):
    rows = rows_of(groups, "b")
    document = comparison_board("t", [], groups, rows)
    assert [run["label"] for run in document["runs"] if run["baseline"]] == ["b"]
    loss, _ = curves(groups, {"b"}).axes
    assert {line.get_label(): line.get_linewidth() > 3 for line in loss.lines} == {"a": False, "b": True, "c": False}
    assert [line.get_color() for line in loss.lines] == ["#0072B2", "#BBBBBB", "#D55E00"]


def test_epochs_were_numbered_with_fractions(groups):
    _, accuracy = curves(groups).axes
    shown = [tick for tick in accuracy.get_xticks() if accuracy.get_xlim()[0] <= tick <= accuracy.get_xlim()[1]]
    assert shown == [1, 2, 3]


def test_sentences_are_notes_and_the_last_words_come_last(groups):
    rows = [replace(row, sentence="look" if row.label == "c" else "") for row in rows_of(groups, "a")]
    document = comparison_board("t", ["before"], groups, rows, closing=["after"])
    assert document["table"]["notes"] == [None, None, "look"]
    assert "what to see" not in document["table"]["heads"]
    assert (document["introduction"], document["closing"]) == (["before"], ["after"])
    assert document["captions"]["measures"].endswith("jump: how <far>.")
    assert document["footer"] == ["unlatch 0, torch 2, 2 cores"]
