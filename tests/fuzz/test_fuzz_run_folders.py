"""Files of a run folder that were cut off, damaged or edited: `compare` refuses them in one line, or can use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing import altered, cases, damaged, outcome
from unlatch.errors import ConfigError, UnlatchError
from unlatch.io import metrics
from unlatch.io.metrics import Metrics
from unlatch.report.comparison import comparison_table, rows_of
from unlatch.report.page import comparison_board, comparison_pictures, render
from unlatch.report.probe import read_probe
from unlatch.report.record import read_run

STAGE = {"stage": 0, "staleness": 2.0, "predicted_staleness": 2, "peak_bytes": 100, "weight_copies": 1, "rank": 0}
SUMMARY = {
    **{"status": "finished", "method": "dtr", "processes": 1, "accuracy": 0.5, "samples_per_second": 100.0},
    **{"bubble": 0.1, "stages": [STAGE, STAGE], "remarks": ["well done"], "measures": {"jump": "how far"}},
}
EVENTS = [
    {"stage": s, "kind": k, "batch": b, "version": 0, "start": b + s / 2, "end": b + s / 2 + 0.25, "bytes": 9}
    for b in range(3)
    for s in range(2)
    for k in ("F", "B")
]
LINES = [
    {"step": 1, "time": 0.5, "train/loss": 2.5, "probe/update": 0},
    {"step": 2, "time": 0.7, "measured/update": 1, "border1/jump": 0.5},
    {"step": 2, "time": 0.8, "train/loss": "nan", "epoch/number": 1, "eval/accuracy": 0.4, "eval/loss": 1.0},
]
FILES: dict[str, Any] = {"summary.json": SUMMARY, "events.jsonl": EVENTS, "metrics.jsonl": LINES}


def as_text(name: str, content: Any) -> str:
    if name.endswith(".jsonl") and isinstance(content, list):
        return "".join(json.dumps(line) + "\n" for line in content)
    return json.dumps(content)


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(as_text(name, content))
    (tmp_path / "versions.json").write_text('{"torch": "2"}')
    return tmp_path


def compared(folder: Path, draw: bool = False) -> None:
    record = outcome(read_run, folder)
    if isinstance(record, UnlatchError):
        assert isinstance(record, ConfigError)
        assert str(folder) in str(record)
        return
    rows = rows_of({"a": [record]}, "a")
    comparison_table(rows).text()
    render(comparison_board("a page", [], {"a": [record]}, rows))
    if draw:
        comparison_pictures({"a": [record]}, rows)


def test_the_files_are_sound(folder):
    assert len(read_run(folder).events) == len(EVENTS)
    assert read_run(folder).measures == {"jump": {1: [(1, 0.5)]}}
    compared(folder, draw=True)


@pytest.mark.parametrize("name", FILES)
def test_files_with_other_values(folder, name):
    @cases(150, share=0.5)
    @given(altered(FILES[name]))
    def check(tree: Any) -> None:
        (folder / name).write_text(as_text(name, tree))
        compared(folder)

    check()


@pytest.mark.parametrize("name", [*FILES, "versions.json"])
def test_damaged_files(folder, name):
    @cases(100, share=0.5)
    @given(damaged((folder / name).read_bytes(), most=5))
    @example(b"")
    @example(b"\xff\n")
    @example(b"[]\n")
    @example(b"[" * 100_000 + b"\n")
    def check(raw: bytes) -> None:
        (folder / name).write_bytes(raw)
        compared(folder)

    check()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_whatever_is_read_can_be_drawn(folder, name):
    """Figures of values at the edges; matplotlib may warn about them."""
    numbers = st.one_of(st.floats(), st.integers(-(2**40), 2**40))

    @cases(6, share=0.005)
    @given(altered(FILES[name], numbers))
    def check(tree: Any) -> None:
        (folder / name).write_text(as_text(name, tree))
        compared(folder, draw=True)

    check()


@pytest.mark.parametrize("update", ['"nan"', '"inf"', "1e300"])
def test_numbers_of_updates_that_are_none_used_to_end_in_a_traceback(folder, update):
    line = f'{{"step": 3, "time": 1.0, "measured/update": {update}, "border1/jump": 1, "probe/update": {update}, '
    (folder / "metrics.jsonl").write_text(line + '"probe/stage0/forward/cosine": 1.0}\n')
    compared(folder)
    assert read_probe(folder) == []


@cases(150)
@given(damaged(as_text("metrics.jsonl", LINES).encode(), most=4))
def test_a_run_with_damaged_metrics_is_continued_or_refused(tmp_path, raw):
    (tmp_path / "metrics.jsonl").write_bytes(raw)
    found = outcome(Metrics, tmp_path)
    if isinstance(found, Metrics):
        found.log(10**6, {"train/loss": 1.0})
        found.close()
        assert metrics.read(tmp_path)[-1]["step"] == 10**6
