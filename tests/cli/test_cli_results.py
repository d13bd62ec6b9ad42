"""`compare`, `export` and `bench`: what can be done with finished runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from unlatch import models
from unlatch.report.comparison import comparison_table, rows_of
from unlatch.report.record import Record


@pytest.fixture
def two_runs(unlatch, conf):
    unlatch("train", conf, "--out", "plain")
    unlatch("train", conf, "--method", "dtr", "--stages", 2, "--out", "late")


def test_compare(unlatch, two_runs, tmp_path):
    result = unlatch("compare", "plain", "late", "-o", "page.html")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["plain"][3] == "1.00"
    assert "1 / 0" in result.stdout
    page = (tmp_path / "page.html").read_text()
    document = json.loads(re.search(r'id="document">(.*?)</script>', page, re.DOTALL)[1])
    plain, late = document["runs"]
    assert (plain["label"], plain["baseline"], late["label"], late["baseline"]) == ("plain", True, "late", False)
    assert {"training loss", "test accuracy"} <= plain["curves"].keys() & late["curves"].keys()
    assert [len(run["timeline"]["rows"]) for run in (plain, late)] == [1, 2]
    assert all(run["timeline"]["spans"] and run["speed"] > 0 for run in (plain, late))
    assert [row[0] for row in document["table"]["rows"]] == ["plain", "late"]
    assert "http" not in page.replace("http-equiv", "")


def test_compare_as_json(unlatch, two_runs, tmp_path):
    found = json.loads(unlatch("compare", "plain", "late", "--json", "--baseline", "late").stdout)
    assert [row["label"] for row in found["rows"]] == ["plain", "late"]
    assert found["rows"][1]["ratio"] == 1.0
    assert found["baseline"] == "late"
    assert unlatch("compare", "plain", "--baseline", "x").exit_code == 2


def test_runs_of_the_same_name_are_told_apart(unlatch, conf):
    for parent in ("a", "b"):
        unlatch("train", conf, "--out", f"{parent}/run")
    found = json.loads(unlatch("compare", "a/run", "b/run", "--json").stdout)
    assert [row["label"] for row in found["rows"]] == ["a/run", "b/run"]
    assert unlatch("compare", "a/run", "a/run").exit_code == 2


def test_seeds_are_drawn_together_and_ratios_taken_within_turns(tmp_path):
    def run(speed, accuracy):
        stage = {"staleness": 1.0, "predicted_staleness": 1.0, "peak_bytes": 10, "weight_copies": 0}
        return Record(tmp_path, {"samples_per_second": speed, "accuracy": accuracy, "bubble": 0.1, "stages": [stage]})

    groups = {"base": [run(100, 0.9), run(10, 0.9), run(50, 0.9)], "fast": [run(200, 0.8), run(18, 1.0), run(80, 0.9)]}
    base, fast = rows_of(groups, "base")
    assert base.ratio == 1.0
    assert fast.ratio == pytest.approx(1.8)
    assert fast.accuracy == pytest.approx(0.9)
    assert "90.0% (80.0 to 100.0)" in comparison_table([fast]).text()


def test_every_row_may_have_a_baseline_of_its_own_and_a_sentence(tmp_path):
    def run(speed, kept):
        stages = [{"staleness": 1.0, "predicted_staleness": 1.0, "peak_bytes": b, "weight_copies": 0} for b in kept]
        ranked = [{**stage, "rank": max(0, number - 1)} for number, stage in enumerate(stages)]
        return Record(tmp_path, {"samples_per_second": speed, "accuracy": 0.9, "bubble": 0.1, "stages": ranked})

    groups = {"base": [run(100, [1])], "twin": [run(50, [1])], "late": [run(80, [1000, 2000, 4000])]}
    rows = rows_of(groups, {"base": "base", "twin": "twin", "late": "twin"})
    assert [(row.ratio, row.baseline) for row in rows] == [(1.0, "base"), (1.0, "twin"), (1.6, "twin")]
    assert rows[2].process_bytes == (3000, 4000)
    assert rows_of(groups, {"late": "twin"})[0].ratio is None
    spoken = [*rows[:2], replace(rows[2], sentence="Look here.")]
    assert comparison_table(spoken).heads[-1] == "what to see"
    assert "Look here." in comparison_table(spoken).text()
    assert "Look here." not in comparison_table(spoken, sentences=False).text()
    # Two stages share a process: memory is what the process had.
    assert "kept per process" in comparison_table(rows).heads
    assert "3.0 / 4.0 kB" in comparison_table(rows).text()
    assert "kept per stage" in comparison_table(rows[:2]).heads


def test_export_is_a_plain_state_dict(unlatch, two_runs, tmp_path):
    result = unlatch("export", "late", "model.safetensors", "--json")
    assert result.exit_code == 0, result.output
    tensors = load_file(tmp_path / "model.safetensors")
    model = models.build("mlp", widths=(64, 128, 128, 128, 10))
    model.load_state_dict(tensors)
    assert json.loads(result.stdout)["tensors"] == len(tensors)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert unlatch("export", "late", "model.safetensors").exit_code == 2
    assert unlatch("export", "late/checkpoints/latest", "model.safetensors", "--overwrite").exit_code == 0


def test_export_of_a_run_with_batches_under_way_says_so(unlatch, conf, cut, tmp_path):
    flags = (
        "--method",
        "dtr",
        "--epochs",
        2,
        "--out",
        "runs/late",
        "--save-every",
        "5 batches",
        "--keep-last",
        9,
        *cut,
    )
    unlatch("train", conf, *flags)
    result = unlatch("export", "runs/late/checkpoints/step-00000005")
    assert result.exit_code == 0, result.output
    assert "step-00000005.safetensors (step 5, 2 batches under way)" in result.stdout
    result = unlatch("export", "runs/late")
    assert "late.safetensors (step 12)" in result.stdout
    tensors = load_file(tmp_path / "step-00000005.safetensors")
    models.build("mlp", widths=(64, 128, 128, 128, 10)).load_state_dict(tensors)
    assert "--keep-best" in unlatch("export", "runs/late", "b.safetensors", "--best").stderr


def test_a_run_of_an_earlier_version_is_named_as_such(unlatch, conf, tmp_path):
    unlatch("train", conf, "--out", "run")
    latest = (tmp_path / "run" / "checkpoints" / "latest").resolve()
    latest.rename(tmp_path / "run" / "last")
    for command in (("export", "run", "x.safetensors"), ("train", "--resume", "run")):
        result = unlatch(*command)
        assert result.exit_code == 2
        assert "run/last/model.safetensors" in result.stderr


def test_bench_inline(unlatch, conf):
    flags = ("--repeats", 2, "--steps", 3, "--skip", 3, "--processes", 1, "--stages", 2, "--json")
    result = unlatch("bench", conf, "--methods", "fdg, dtr", *flags)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["methods"]
    assert list(found) == ["bp, one process", "fdg", "dtr"]
    assert found["bp, one process"]["ratio"] == 1.0
    assert all(len(row["measurements"]) == 2 and row["samples_per_second"] > 0 for row in found.values())


def test_bench_says_which_options_it_leaves_out(unlatch, conf):
    conf.write_text(conf.read_text() + 'stages = 2\n[method]\nname = "fdg"\nshrink = 0.5\n')
    flags = ("--processes", 1, "--repeats", 1, "--steps", 1, "--skip", 0, "--set", "method.pull=3.0")
    result = unlatch("bench", conf, "--methods", "dtr,auxnet", *flags)
    assert result.exit_code == 0, result.output
    notes = [line for line in result.stdout.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: dtr has no option pull: dropped what the settings say for fdg",
        "note: auxnet has no option shrink: dropped what the settings say for fdg",
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_bench_of_replicas(unlatch, conf, processes):
    flags = ("--stages", 2, "--replicas", 2, "--processes", processes, "--repeats", 1, "--steps", 2, "--json")
    result = unlatch("bench", conf, "--methods", "1f1b,dtr", *flags)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["methods"]) == ["bp, one process", "1f1b", "dtr"]
    assert all(row["samples_per_second"] > 0 for row in found["methods"].values())
    assert (found["settings"]["run"]["replicas"], found["settings"]["run"]["processes"]) == (2, processes)


def test_bench_refuses_what_replicas_cannot_train_before_it_measures(unlatch, conf):
    flags = ("--stages", 2, "--replicas", 2, "--processes", 1, "--repeats", 1, "--steps", 2)
    result = unlatch("bench", conf, "--methods", "1f1b,cgad", *flags)
    assert (result.exit_code, "cgad cannot train 2 replicas: its rule" in result.stderr) == (2, True), result.output
    assert "samples/s" not in result.stdout


def test_bench_on_two_processes(unlatch, conf):
    result = unlatch("bench", conf, "--methods", "1f1b", "--stages", 2, "--repeats", 1, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert "turn 1/1: bp, one process" in result.stdout
    assert re.search(r"1f1b +[\d,]+ ", result.stdout)
