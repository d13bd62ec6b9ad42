"""Studies from file to page: done once, resumed after anything, and honest about what is no result."""

from __future__ import annotations

import csv
import fcntl
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from commands import Command
from unlatch.cli.settings import JUDGES
from unlatch.cli.study.jobs import performed
from unlatch.cli.study.run import Job
from unlatch.config.study import load_study

CASES = """
[[case]]
label = "bp"
[[case]]
label = "again"
method.name = "bp"
[[case]]
label = "{method.name}, K=2"
method.name = ["dtr", "1f1b"]
run.stages = 2
run.split = [["layers.1"]]
"""
HOT = '[[case]]\nlabel = "hot"\noptimizer.lr = 1e30\n'
#: Whatever depends on when and where a run was done.
TIMES = ("seconds", "others_busy", "samples_per_second", "bubble", "finished_at", "jobs", "command", "versions")


def timeless(rows):
    """Lines without times, by run; peaks of memory are of the process, so they stay."""
    plain = {}
    for row in rows:
        kept = {key: value for key, value in row.items() if key not in TIMES}
        kept["stages"] = [{k: v for k, v in stage.items() if k != "bubble"} for stage in row["stages"]]
        kept["curve"] = [{k: v for k, v in point.items() if k != "samples_per_second"} for point in row["curve"]]
        plain[row["digest"]] = kept
    return plain


def test_from_file_to_page(study, compare, lines):
    path = study(CASES + HOT, 'seeds = 3\nquestion = "Does it cost <anything>?"\nprobe = 2')
    result = compare(path)
    assert result.exit_code == 0, result.output
    rows = lines()
    assert len(rows) == 3 * 4  # bp and its other name once, dtr, 1f1b, hot
    line = next(row for row in rows if row["label"] == "dtr, K=2")
    assert [point["epoch"] for point in line["curve"]] == [1, 2]
    assert line["evaluation"]["samples"] == 256
    assert line["evaluation"]["accuracy"] == line["curve"][-1]["accuracy"]
    assert [stage["staleness"] for stage in line["stages"]] == [1.0, 0.0]
    assert {one["reference"] for one in line["gradients"]} == {"forward", "current"}
    assert line["versions"]["torch"]
    assert line["command"] == f"unlatch compare {path}"

    page = Path("results/small.html").read_text()
    assert "Does it cost" in page
    assert "<anything>" not in page
    assert "held-out training samples" in page
    assert "bp = again are the same settings, run once" in result.stdout
    assert "1f1b, K=2 computed" not in result.stdout  # cut into micro-batches, so it rounds otherwise
    assert "no result: 3 diverged" in Path("results/small.md").read_text()
    assert "the loss of batch 1 is nan" in result.stdout
    found = {row["case"]: row for row in csv.DictReader(Path("results/small.csv").read_text().splitlines())}
    mine, base = (
        {row["seed"]: row["evaluation"]["accuracy"] for row in rows if row["label"] == label}
        for label in ("dtr, K=2", "bp")
    )
    by_hand = sum(mine[seed] - base[seed] for seed in range(3)) / 3
    assert abs(float(found["dtr, K=2"]["difference"]) - by_hand) < 1e-12
    assert found["dtr, K=2"]["is_result"] == "True"
    assert found["hot"]["is_result"] == "False"
    assert all(Path(f"results/small-{name}.png").read_bytes()[1:4] == b"PNG" for name in ("curves", "differences"))
    assert not list(Path("results").glob(".small*"))

    before = Path("results/small.jsonl").read_bytes()
    assert "12 of 12 runs are done" in compare(path).stdout
    assert Path("results/small.jsonl").read_bytes() == before


def test_the_example_in_short_form(compare, lines):
    text = (Path(__file__).parents[2] / "examples" / "study.toml").read_text()
    Path("small.toml").write_text(text.replace("epochs = 5", "epochs = 1"))
    result = compare("small.toml")
    assert result.exit_code == 0, result.output
    assert len(lines()) == 15
    assert {row["status"] for row in lines()} == {"finished"}
    assert "no result" not in result.stdout


#: Of studies that choose something: images, and windows of 32 characters.
HELD_OUT = {"cifar": 5000, "digits": 287, "shakespeare": 3125}
CHOICES = ("choice", "rates", "pull")
STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_studies_of_this_project_load_and_have_three_seeds(path):
    found = load_study(path, JUDGES)
    assert len(found.seeds) >= 3
    assert found.question
    held_out = {case.config.data.holdout for case in found.cases}
    chooses = path.stem.rpartition("-")[2] in CHOICES
    assert held_out == ({HELD_OUT[path.stem.partition("-")[0]]} if chooses else {None})


def test_fewer_than_three_seeds_are_no_result_and_a_new_seed_adds_its_runs_only(study, compare, lines):
    cases = '[[case]]\nlabel = "bp"\n[[case]]\nlabel = "slow"\noptimizer.lr = 0.01\n'
    answer = json.loads(compare(study(cases), "--json").stdout)
    assert [case["is_result"] for case in answer["cases"]] == [False, False]
    assert answer["cases"][1]["verdict"] == "no result: under 3 seeds"
    result = compare(study(cases, "seeds = 3"))
    assert "4 of 6 runs are done" in result.stdout
    assert "no result" not in result.stdout
    assert [(row["label"], row["seed"]) for row in lines()][4:] == [("bp", 2), ("slow", 2)]
    compare(study(cases.replace("0.01", "0.02"), "seeds = 3"), "--only", "sl*")
    assert len(lines()) == 9  # other settings, other runs
    dry = compare(study(cases + '[[case]]\nlabel = "new"\nrun.epochs = 1\n', "seeds = 3"), "--dry-run").stdout
    assert "3 of 9 runs to do" in dry
    assert len(lines()) == 9
    assert "no case is called 'x'" in compare(study(cases), "--only", "x").output


def test_only_may_be_given_several_times_and_any_of_them_chooses(study, compare, lines):
    """A second one took the place of the first, which was not said."""
    labels = ("bp", "slow", "slower", "fast")
    rates = (0.1, 0.01, 0.001, 0.2)
    cases = "".join(f'[[case]]\nlabel = "{n}"\noptimizer.lr = {lr}\n' for n, lr in zip(labels, rates, strict=True))
    path = study(cases, "seeds = 1")
    assert "3 of 3 runs to do" in compare(path, "--only", "slow*", "--only", "fast", "--dry-run").stdout
    compare(path, "--only", "fast", "--only", "slow")
    assert [row["label"] for row in lines()] == ["slow", "fast"]
    assert lines()[0]["command"] == f"unlatch compare {path} --only fast --only slow"
    refused = compare(path, "--only", "slow", "--only", "fsat")
    assert refused.exit_code == 2
    assert "no case is called 'fsat'" in refused.output
    assert len(lines()) == 2


def test_what_computes_the_same_is_said_to(study, compare):
    cases = '[[case]]\nlabel = "bp"\n[[case]]\nlabel = "cut"\nrun.stages = 2\nrun.split = [["layers.1"]]\n'
    assert "cut computed the same numbers, epoch by epoch, as bp" in compare(study(cases)).stdout


def test_a_cut_by_measured_times_is_the_same_for_all_seeds(study, compare, lines):
    common = '[model]\nname = "mlp"\nwidths = [64, 32, 32, 10]\n[data]\nsubset = 256\n[run]\nepochs = 1\n'
    path = study('[[case]]\nlabel = "dtr"\nmethod.name = "dtr"\nrun.stages = 2\n', common=common)
    compare(path)
    cuts = json.loads(Path("results/small.cuts.json").read_text())
    assert [row["split"] for row in lines()] == [*cuts.values()] * 2


def test_a_measure_that_no_run_reports_ends_a_study_with_its_first_run(study, compare, lines):
    cases = '[[case]]\nlabel = "bp"\n'
    for _ in range(2):
        result = compare(study(cases, 'seeds = 3\nmeasure = "acuracy"'))
        assert result.exit_code == 2
        assert "runs report no 'acuracy'; did you mean 'accuracy'?" in result.output
    assert len(lines()) == 2
    with Path("results/small.jsonl").open("a") as file:
        file.write('{"note": "of somebody else"}\n')
    result = compare(study(cases, "seeds = 3"))
    assert result.exit_code == 0, result.output
    assert "2 of 3 runs are done" in result.stdout


def test_missing_data_end_a_study_before_it_begins(study, compare):
    result = compare(study('[[case]]\nlabel = "a"\ndata.name = "cifar10"\ndata.dir = "nowhere"\n'))
    assert result.exit_code == 2
    assert "nowhere" in result.output
    assert Path("results/small.jsonl").read_text() == ""


def test_a_run_that_fails_is_a_line_and_is_tried_again(study, compare, lines):
    path = study('[[case]]\nlabel = "bp"\n[[case]]\nlabel = "odd"\nrun.stages = 2\nrun.split = [["nowhere"]]\n')
    result = compare(path)
    assert result.exit_code == 0, result.output
    assert "no result: 2 failed" in result.stdout
    assert [row["status"] for row in lines()] == ["finished", "failed"] * 2
    assert "nowhere" in lines()[1]["reason"]
    assert "2 of 4 runs are done" in compare(path).stdout


def test_killed_with_two_jobs_it_goes_on_with_one_to_the_same_results(study, compare, lines):
    # Long enough for the kill to come before the last of them, on a busy machine too.
    common = '[model]\nname = "mlp"\nwidths = [64, 32, 10]\n[data]\nsubset = 512\n[run]\nepochs = 6\n'
    path = study(CASES, "seeds = 3", common)
    with Command("compare", path, "--out", "killed", "--jobs", 2) as command:
        command.wait_until_it_says(r"1/9 ")
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.ended()[0] == -signal.SIGKILL  # and no job outlives it
    done = Path("killed/small.jsonl").read_bytes()
    # As if the kill had come while a line was written.
    Path("killed/small.jsonl").write_bytes(done + b'{"study": "small", "digest": "')
    result = compare(path, "--out", "killed")
    assert result.exit_code == 0, result.output
    assert f"{len(done.splitlines())} of 9 runs are done" in result.stdout
    assert "No speeds" in result.stdout
    assert Path("killed/small.jsonl").read_bytes().startswith(done)
    assert compare(path, "--out", "whole").exit_code == 0
    assert {row["jobs"] for row in lines("killed")} == {1, 2}
    assert timeless(lines("killed")) == timeless(lines("whole"))
    assert not list(Path("killed").glob(".small*"))


def test_a_request_to_stop_says_how_to_go_on(study):
    path = study(CASES.replace("1f1b", "gpipe"), "seeds = 3", '[model]\nname = "mlp"\n[run]\nepochs = 100_000\n')
    with Command("compare", path, "--jobs", 2) as command:
        # As early as can be: the interpreters of the jobs are still starting.
        command.wait_until(command.ranks, "no job begins")
        command.send(signal.SIGINT, "group")
        code, said = command.ended()
    assert code == 130
    assert f"9 of 9 runs are left; go on with: unlatch compare {path} --jobs 2" in said
    assert "Traceback" not in said


def test_a_request_to_stop_while_a_job_starts_left_a_process_that_was_waited_for(monkeypatch):
    """It came when the process was there and nobody had noted it yet; the command then hung for ever."""
    kind = multiprocessing.get_context("spawn").Process
    usual, started = kind.start, []

    def start(process):
        usual(process)
        started.append(process)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(kind, "start", start)
    # Python leaves a signal alone that whoever started it ignores, as shells do for what runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(performed([Job({}, None, "nowhere", 0, 0)] * 2, at_once=2))
    finally:
        signal.signal(signal.SIGINT, before)
    left = [process for process in started if process.is_alive()]
    for process in left:
        process.kill()
    assert left == []
    assert len(started) == 2


def test_folders_of_one_machine_were_kept_with_the_results(study, compare, lines):
    path = study('[[case]]\nlabel = "bp"\n', head="seeds = 1")
    assert compare(path, "--out", "elsewhere", "--data-dir", "/my/data").exit_code == 0
    assert [line["command"] for line in lines("elsewhere")] == [f"unlatch compare {path} --data-dir DIR"]


def test_two_processes_do_not_write_the_same_results(study, compare, tmp_path):
    path = study('[[case]]\nlabel = "bp"\n')
    Path("results").mkdir()
    with Path("results/small.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = compare(path)
    assert result.exit_code == 2
    assert "another process is writing results there now" in result.output
