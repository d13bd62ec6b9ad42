"""A file called `stop`: what is under way is kept in a checkpoint, and the continued run is the run."""

from __future__ import annotations

import json

import pytest

from commands import Command, same_weights
from scripts import TORCHRUN
from unlatch.cli.stopping import stop_file
from unlatch.io import checkpoint, metrics
from unlatch.train import Trainer
from unlatch.train.batching import Compensation


def stop_when_fed(count, folder, monkeypatch):
    """Ask the run in `folder` to stop once, when it has been fed `count` batches."""
    fit, add, fed, due = Trainer.fit, Compensation.add, [], [count]

    def ask_if_due():
        if [len(fed)] == due:
            due.clear()
            stop_file(folder).touch()

    def watched_fit(*arguments, **options):
        ask_if_due()
        return fit(*arguments, **options)

    def watched_add(*arguments):
        fed.append(None)
        ask_if_due()
        return add(*arguments)

    monkeypatch.setattr(Trainer, "fit", watched_fit)
    monkeypatch.setattr(Compensation, "add", watched_add)


#: Settings, and after how many batches to stop. The epochs are of six batches, of which a run may feed several as one.
STOPPED = {
    "delayed": ("dtr", (), (0, 3, 5, 6, 7)),
    "joined": ("dtrp", ("method.compensate=4",), (1, 4, 5, 6, 7)),
    "accumulated": ("pipedream", ("method.accumulate=4",), (1, 5, 6)),
    "exact": ("1f1b", (), (6,)),
}


@pytest.mark.parametrize(("kind", "stop"), [(kind, stop) for kind, (_, _, stops) in STOPPED.items() for stop in stops])
def test_a_run_continues_as_if_nothing_had_happened_wherever_it_was_stopped(
    unlatch, conf, cut, tmp_path, monkeypatch, kind, stop
):
    method, options, _ = STOPPED[kind]
    flags = ["--method", method, "--epochs", 2, "--set", "method.microbatches=1", *cut]
    flags += [part for option in options for part in ("--set", option)]
    assert unlatch("train", conf, "--out", "whole", *flags).exit_code == 0
    stop_when_fed(stop, tmp_path / "run", monkeypatch)
    result = unlatch("train", conf, "--out", "run", *flags)
    assert result.exit_code == 130, result.output
    result = unlatch("train", "--resume", "run")
    assert result.exit_code == 0, result.output
    assert same_weights("run", "whole")
    lines = [[(row["step"], row.get("train/loss")) for row in metrics.read(run)] for run in ("run", "whole")]
    assert lines[0] == lines[1]
    assert [row["epoch/number"] for row in metrics.read("run") if "epoch/number" in row] == [1, 2]


def test_a_request_after_the_last_batch_leaves_the_evaluation_to_whoever_continues(
    unlatch, conf, tmp_path, monkeypatch
):
    unlatch("train", conf, "--out", "whole")
    stop_when_fed(6, tmp_path / "run", monkeypatch)
    result = unlatch("train", conf, "--out", "run", "--json")
    assert result.exit_code == 130, result.output
    assert json.loads(result.stdout)["accuracy"] is None
    result = unlatch("train", "--resume", "run", "--json")
    assert result.exit_code == 0, result.output
    found, whole = json.loads(result.stdout), json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert found["status"] == "finished"
    assert (found["accuracy"], found["train_loss"]) == (whole["accuracy"], whole["train_loss"])
    assert same_weights("run", "whole")


def test_stopped_twice_in_the_same_epoch(unlatch, conf, tmp_path, monkeypatch):
    flags = ["--set", "lr.shape=constant"]
    unlatch("train", conf, "--out", "whole", *flags)
    for fed, total in ((2, 2), (3, 5)):
        with monkeypatch.context() as patch:
            stop_when_fed(fed, tmp_path / "run", patch)
            how = ("--resume", "run") if total > fed else (conf, "--out", "run", *flags)
            assert unlatch("train", *how).exit_code == 130
        state = checkpoint.state(tmp_path / "run" / "checkpoints" / "latest")["loop"]
        assert (state["epochs"], state["samples_into_epoch"], state["batches"]) == (0, total * 256, total)
    assert unlatch("train", "--resume", "run").exit_code == 0
    assert same_weights("run", "whole")


def test_an_old_request_to_stop_is_not_one_to_the_continued_run(unlatch, conf, tmp_path):
    unlatch("train", conf, "--out", "run")
    stop_file(tmp_path / "run").touch()
    result = unlatch("train", "--resume", "run", "--epochs", 2)
    assert result.exit_code == 0, result.output
    assert not stop_file(tmp_path / "run").exists()


def test_batches_of_another_size_must_fit_the_place_of_the_stop(unlatch, conf, tmp_path, monkeypatch):
    stop_when_fed(3, tmp_path / "run", monkeypatch)
    unlatch("train", conf, "--out", "run")
    result = unlatch("train", "--resume", "run", "--set", "data.batch_size=100")
    assert result.exit_code == 2
    assert "no batch of 100 begins after 768 samples of epoch 1" in " ".join(result.stderr.split())
    result = unlatch("train", "--resume", "run", "--set", "data.batch_size=128")
    assert result.exit_code == 0, result.output
    assert checkpoint.state(tmp_path / "run" / "checkpoints" / "latest")["loop"]["batches"] == 3 + 6


def test_torchrun_trains_the_same_weights(greenhouse, unlatch, conf, cut, tmp_path):
    flags = [*cut, "--method", "dtr", "--epochs", 2]
    unlatch("train", conf, "--out", "one", *flags)
    launcher = (*TORCHRUN, "-m", "unlatch")
    with Command("train", conf, "--out", "two", *flags, launcher=launcher, greenhouse=greenhouse) as command:
        code, text = command.ended()
    assert code == 0, text
    assert text.count("writing to two") == 1
    assert same_weights("one", "two")


def test_a_continued_run_keeps_its_measured_choices(unlatch, conf, tmp_path, monkeypatch):
    flags = ["--method", "dtrp", "--stages", 2, "--set", "method.compensate=auto"]
    unlatch("train", conf, "--out", "run", *flags)
    first = json.loads((tmp_path / "run" / "summary.json").read_text())
    monkeypatch.setattr("unlatch.methods.base.profile", None)
    monkeypatch.setattr("unlatch.methods.dtrp.choose_compensation", None)
    result = unlatch("train", "--resume", "run", "--epochs", 2, "--json")
    assert result.exit_code == 0, result.output
    again = json.loads(result.stdout)
    assert (again["split"], again["method_in_full"]) == (first["split"], first["method_in_full"])
