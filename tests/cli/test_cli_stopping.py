"""Ctrl-C: the batch under way is finished, a checkpoint is left, and the continued run is the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import unlatch as package
from unlatch import config
from unlatch.cli.prepare import loaders, make_run, prepare
from unlatch.cli.stopping import stop_file, stopping_on_signals
from unlatch.io import checkpoint, metrics
from unlatch.train import Trainer
from unlatch.train.batching import Compensation

SOURCE = str(Path(package.__file__).parent.parent)
CONSTANT = ["--set", "lr.shape=constant", "--set", "optimizer.lr=0.05"]
#: Seconds for what a quiet machine does in a few.
PATIENCE = 240


def start(*arguments, launcher=("-m", "unlatch")):
    # A group of its own, so that a signal reaches what a terminal would reach and nothing else.
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output(process):
    """All that it says until it ends; one that does not end takes nobody's time afterwards."""
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def wait_for_steps(folder, count, process):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if len(metrics.read(folder)) >= count:
            return
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"no {count} steps: {process.communicate()[0]}")


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_run_leaves_a_checkpoint_and_nobody_behind(unlatch, conf, cut, tmp_path, processes):
    flags = [*cut, "--method", "1f1b", *CONSTANT]
    process = start("train", conf, "--out", "run", "--processes", processes, "--epochs", 100_000, *flags)
    wait_for_steps(tmp_path / "run", 8, process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    text = output(process)
    assert process.returncode == 130, text
    assert "interrupted; continue with: unlatch train --resume run" in text
    assert "Traceback" not in text
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert alive == []
    assert not stop_file(tmp_path / "run").exists()
    fed = metrics.read(tmp_path / "run")[-1]["step"]
    epochs = -(-fed // 6) + 1
    result = unlatch("train", "--resume", "run", "--epochs", epochs, "--processes", 1)
    assert result.exit_code == 0, result.output
    unlatch("train", conf, "--out", "whole", "--epochs", epochs, *flags)
    one, other = (
        load_file(tmp_path / name / "checkpoints" / "latest" / "model.safetensors") for name in ("run", "whole")
    )
    assert all(one[name].equal(other[name]) for name in other)


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


class SavedOnTheWay:
    """Batches for a run that saves itself before one of them, which empties its pipeline, and then goes on."""

    def __init__(self, loader, trainer, place, path):
        self.loader, self.trainer, self.place, self.path, self.fed = loader, trainer, place, path, 0

    def __iter__(self):
        for batch in self.loader:
            if self.fed == self.place:
                self.trainer.save(self.path)
            self.fed += 1
            yield batch


def weights_never_stopped(settings, saved_at, path):
    prepared = prepare(settings)
    train, _ = loaders(settings)
    run = make_run(prepared, train.batch(0, 0))
    trainer = Trainer(run)
    trainer.fit(SavedOnTheWay(train, trainer, saved_at, path), settings.run.epochs)
    return run.module().state_dict()


#: Settings, and for a stop after so many batches where it takes effect: once an update is complete. The epochs are of
#: six batches. An accumulation goes on over their ends, joined batches do not.
STOPPED = {
    "delayed": ("dtr", (), {0: 0, 3: 3, 5: 5, 6: 6, 7: 7}),
    "joined": ("dtrp", ("method.compensate=4",), {1: 4, 4: 4, 5: 6, 6: 6, 7: 10}),
    "accumulated": ("pipedream", ("method.accumulate=4",), {1: 4, 5: 8, 6: 8}),
}


@pytest.mark.parametrize(("kind", "stop"), [(kind, stop) for kind, (_, _, stops) in STOPPED.items() for stop in stops])
def test_a_run_continues_as_if_nothing_had_happened_wherever_it_was_stopped(
    unlatch, conf, cut, tmp_path, monkeypatch, kind, stop
):
    method, options, places = STOPPED[kind]
    flags = ["--method", method, "--epochs", 2, "--set", "method.microbatches=1", *cut]
    flags += [part for option in options for part in ("--set", option)]
    stop_when_fed(stop, tmp_path / "run", monkeypatch)
    result = unlatch("train", conf, "--out", "run", *flags)
    assert result.exit_code == 130, result.output
    result = unlatch("train", "--resume", "run")
    assert result.exit_code == 0, result.output
    found = load_file(tmp_path / "run" / "checkpoints" / "latest" / "model.safetensors")
    expected = weights_never_stopped(config.load("run/config.toml"), places[stop], tmp_path / "on-the-way")
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    rows = metrics.read("run")
    assert [row["epoch/number"] for row in rows if "epoch/number" in row] == [1, 2]


def test_exact_gradients_are_not_touched_by_a_stop_at_all(unlatch, conf, cut, tmp_path, monkeypatch):
    flags = ["--method", "1f1b", "--epochs", 2, *cut]
    unlatch("train", conf, "--out", "whole", *flags)
    stop_when_fed(6, tmp_path / "run", monkeypatch)
    assert unlatch("train", conf, "--out", "run", *flags).exit_code == 130
    assert unlatch("train", "--resume", "run").exit_code == 0
    one, other = (
        load_file(tmp_path / name / "checkpoints" / "latest" / "model.safetensors") for name in ("run", "whole")
    )
    assert all(one[name].equal(other[name]) for name in other)


def test_a_run_that_has_nothing_left_to_train_is_finished_though_it_was_asked_to_stop(
    unlatch, conf, tmp_path, monkeypatch
):
    stop_when_fed(6, tmp_path / "run", monkeypatch)
    result = unlatch("train", conf, "--out", "run", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["status"] == "finished"
    assert summary["accuracy"] > 0


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
    one, other = (
        load_file(tmp_path / name / "checkpoints" / "latest" / "model.safetensors") for name in ("run", "whole")
    )
    assert all(one[name].equal(other[name]) for name in other)


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
    assert "stopped after 768 samples of epoch 1, and no batch of 100 begins there" in " ".join(result.stderr.split())
    result = unlatch("train", "--resume", "run", "--set", "data.batch_size=128")
    assert result.exit_code == 0, result.output
    assert checkpoint.state(tmp_path / "run" / "checkpoints" / "latest")["loop"]["batches"] == 3 + 6


def test_a_request_by_hand_does_not_make_the_first_signal_the_second(tmp_path):
    with stopping_on_signals(tmp_path):
        stop_file(tmp_path).touch()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_file(tmp_path).exists()


def interrupt_twice(folder):
    with stopping_on_signals(folder):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_file(folder).exists()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


def test_first_signal_asks_second_interrupts(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice(tmp_path)
    assert not stop_file(tmp_path).exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_torchrun_trains_the_same_weights(unlatch, conf, cut, tmp_path):
    flags = [*cut, "--method", "dtr", "--epochs", 2]
    unlatch("train", conf, "--out", "one", *flags)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "unlatch")
    process = start("train", conf, "--out", "two", *flags, launcher=launcher)
    text = output(process)
    assert process.returncode == 0, text
    assert text.count("writing to two") == 1
    one, other = (
        load_file(tmp_path / name / "checkpoints" / "latest" / "model.safetensors") for name in ("one", "two")
    )
    assert all(one[name].equal(other[name]) for name in one)


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
