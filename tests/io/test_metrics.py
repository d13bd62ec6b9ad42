"""Metrics survive crashes and restarts, and both files say the same."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unlatch.io.metrics import Metrics, read


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_both_files_hold_the_same(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log(0, {"train/loss": 0.1 + 0.2, "stage2/delay": 4})
    metrics.log(7, {"eval/accuracy": torch.tensor(0.5)})  # type: ignore[dict-item]
    metrics.close()
    lines = read(tmp_path)
    assert [(line["step"], set(line) - {"step", "time"}) for line in lines] == [
        (0, {"train/loss", "stage2/delay"}),
        (7, {"eval/accuracy"}),
    ]
    assert lines[0]["train/loss"] == 0.1 + 0.2
    table = {(int(row["step"]), row["name"]): float(row["value"]) for row in rows(tmp_path)}
    assert table == {(0, "train/loss"): 0.1 + 0.2, (0, "stage2/delay"): 4.0, (7, "eval/accuracy"): 0.5}
    assert list(rows(tmp_path)[0]) == ["step", "time", "name", "value"]


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in range(3):
        metrics.log(step, {"train/loss": 1.0})
        assert len(read(tmp_path)) == len(rows(tmp_path)) == step + 1
    metrics.close()
    metrics.close()


def test_time_and_step_never_fall(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in (1, 1, 5):
        metrics.log(step, {"train/loss": 1.0})
    with pytest.raises(ValueError, match="step 4 after step 5"):
        metrics.log(4, {"train/loss": 1.0})
    metrics.close()
    times = [line["time"] for line in read(tmp_path)]
    assert len(times) == 3
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_continued_run_appends_and_time_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "time": 1000.0, "train/loss": 1.0}\n')
    (tmp_path / "metrics.csv").write_text("step,time,name,value\n9,1000.0,train/loss,1.0\n")
    metrics = Metrics(tmp_path)
    metrics.log(5, {"train/loss": 0.5})  # resumed from a checkpoint before the last line
    metrics.close()
    assert [line["step"] for line in read(tmp_path)] == [9, 5]
    assert 1000.0 <= read(tmp_path)[1]["time"] < 1060.0
    assert [row["step"] for row in rows(tmp_path)] == ["9", "5"]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": 1.0}\n{"step": 2, "ti')
    (tmp_path / "metrics.csv").write_text("step,time,name,value\n1,1.0,train/loss,1.0\n2,2.0,trai")
    assert [line["step"] for line in read(tmp_path)] == [1]
    metrics = Metrics(tmp_path)
    metrics.log(2, {"train/loss": 0.5})
    metrics.close()
    assert [line["step"] for line in read(tmp_path)] == [1, 2]
    assert [row["value"] for row in rows(tmp_path)] == ["1.0", "0.5"]


def test_a_killed_writer_loses_nothing_it_logged(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from unlatch.io.metrics import Metrics
metrics = Metrics(sys.argv[1])
for step in range(10):
    metrics.log(step, {"train/loss": 1.0})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=240).returncode == -9
    assert len(read(tmp_path)) == len(rows(tmp_path)) == 10


def test_a_diverged_loss_is_recorded_in_valid_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log(0, {"train/loss": math.nan, "a/b": math.inf, "a/c": -math.inf})
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    line = read(tmp_path)[0]
    assert math.isnan(line["train/loss"])
    assert (line["a/b"], line["a/c"]) == (math.inf, -math.inf)
    assert [row["value"] for row in rows(tmp_path)] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize("name", ["step", "time", "loss", "", "/x", "x/", "a b/c", "a/\n"])
def test_bad_names_write_nothing(tmp_path: Path, name: str) -> None:
    metrics = Metrics(tmp_path)
    with pytest.raises(ValueError, match="expected a path such as"):
        metrics.log(0, {"train/loss": 1.0, name: 1.0})
    metrics.close()
    assert read(tmp_path) == []
    assert rows(tmp_path) == []
