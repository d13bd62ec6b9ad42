"""Callbacks: told of everything, alike on every rank, part of checkpoints; one that raises loses nothing."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

import callback_jobs
import unlatch
from callback_jobs import Fails, batches, begun
from unlatch import callbacks
from unlatch.callbacks import EMA, Callback, Checkpointing, EarlyStopping, LearningRates, MetricsFiles, RunFolder
from unlatch.errors import CallbackFailed, ConfigError
from unlatch.io import metrics
from unlatch.report.record import read_run
from unlatch.train import Epoch, Monitor


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Limits of stability are not the subject here."""
    caplog.set_level(logging.ERROR, "unlatch")


class Notes(Callback):
    """Writes down what it is told."""

    def __init__(self):
        self.heard = []

    def attach(self, trainer):
        self.heard.append("attach")

    def on_start(self, trainer):
        self.heard.append("start")

    def on_step(self, trainer, result):
        self.heard.append(f"step {result.step}")

    def on_evaluation(self, trainer, found):
        self.heard.append("evaluation")
        found["added"] = 1.0

    def on_epoch(self, trainer, epoch):
        self.heard.append(f"epoch {epoch.epoch} {epoch.evaluation['added']:g}")

    def on_checkpoint(self, trainer, path):
        self.heard.append(path.name)

    def on_log(self, trainer, step, numbers):
        if "epoch/number" in numbers:
            self.heard.append(f"log {numbers['epoch/number']} {numbers['eval/added']:g}")

    def on_end(self, trainer, error):
        self.heard.append(f"end {error}")


def test_hooks_in_their_order(tmp_path):
    notes = Notes()
    with begun("bp") as run:
        trainer = unlatch.Trainer(run, tmp_path, save_every="1 epochs", callbacks=[notes])
        trainer.fit(batches(2), epochs=2, eval_loader=batches(1))
        trainer.save()
    first = ["step 1", "step 2", "evaluation", "log 1 1", "epoch 0 1"]
    second = ["step 3", "step 4", "evaluation", "log 2 1", "epoch 1 1", "step-00000002", "end None"]
    assert notes.heard == ["attach", "start", *first, *second, "step-00000004"]


def test_a_stop_at_a_step_and_at_an_epoch():
    class Enough(Callback):
        def on_step(self, trainer, result):
            if result.step == 3:
                trainer.stop("three are enough")

    with begun() as run:
        trainer = unlatch.Trainer(run, callbacks=[Enough()])
        assert trainer.fit(batches(), epochs=2) == []
        assert (run.batches, trainer.batches_into_epoch) == (3, 3)
        assert (trainer.stopped, trainer.cut_short) == ("three are enough", True)
        # The rest of the first pass, and another.
        assert [epoch.epoch for epoch in trainer.fit(batches(), until=2)] == [0, 1]
        assert trainer.stopped is None


def test_early_stopping_and_averages_resume_as_if_never_stopped(tmp_path):
    expected = callback_jobs.session(None, [])
    for stops in ([3], [5, 6], [7, 2, 1]):
        found = callback_jobs.session(str(tmp_path / str(stops)), stops)
        weights, others = found.pop("averages"), {k: v for k, v in expected.items() if k != "averages"}
        assert found == others
        assert all(torch.equal(t, weights[name]) for name, t in expected["averages"].items())


def test_early_stopping_counts_over_a_resume(tmp_path):
    def trained(epochs):
        with begun("bp", lr=0.0) as run:
            early = EarlyStopping("loss", patience=4)
            trainer = unlatch.Trainer(run, tmp_path, callbacks=[early])
            trainer.resume()
            history = trainer.fit(batches(1), epochs=epochs, eval_loader=batches(1))
            trainer.save()
            return len(history), early.waited, trainer.stopped

    assert trained(3) == (3, 2, None)
    assert trained(5) == (2, 4, "loss has not become better for 4 epochs")


def test_the_average_of_one_stage_is_that_of_plain_pytorch():
    weights, decay = [], 0.8

    class Watch(Callback):
        def on_start(self, trainer):
            weights.append(trainer.run.module()[0].weight.detach().clone())

        on_step = lambda self, trainer, result: self.on_start(trainer)  # noqa: E731

    ema = EMA(decay)
    with begun("bp") as run:
        unlatch.Trainer(run, callbacks=[ema, Watch()]).fit(batches(12))
        expected = weights[0]
        for update, new in enumerate(weights[1:], start=1):
            expected = torch.lerp(expected, new, 1 - min(decay, (1 + update) / (10 + update)))
        torch.testing.assert_close(callback_jobs.averages(ema, run)["0.weight"], expected)
        assert torch.equal(run.module()[0].weight, weights[-1])


def test_an_average_goes_on_in_another_cut(tmp_path):
    ema = EMA(0.9)
    with begun("dtr") as run:
        trainer = unlatch.Trainer(run, tmp_path, callbacks=[ema])
        trainer.fit(batches())
        trainer.save(exact=False)
        expected = callback_jobs.averages(ema, run)
    again = EMA(0.9)
    with begun("pipedream", stages=3, split=["1", "4"]) as run:
        unlatch.Trainer(run, tmp_path, callbacks=[again]).resume()
        found = callback_jobs.averages(again, run)
    assert all(torch.equal(t, found[name]) for name, t in expected.items())


def test_an_average_before_training():
    with pytest.raises(ConfigError, match="there is no average yet"), EMA().averaged():
        pass
    with pytest.raises(ConfigError, match="decay must be at least 0 and less than 1"):
        EMA(1.0)


def test_a_callback_that_raises_is_named_and_nothing_is_lost(tmp_path):
    class Last(Callback):
        ended = None

        def on_end(self, trainer, error):
            self.ended = error

    last = Last()
    with begun() as run:
        trainer = unlatch.Trainer(run, tmp_path, callbacks=[Fails(0, 3), last])
        with pytest.raises(CallbackFailed) as caught:
            trainer.fit(batches(), epochs=2)
    text = "callback Fails raised in on_step after batch 3: ValueError: no such curve."
    assert str(caught.value) == f"{text} The state is saved in {tmp_path / 'step-00000003'}."
    assert isinstance(caught.value.__cause__, ValueError)
    assert last.ended is caught.value
    with begun() as run:
        trainer = unlatch.Trainer(run, tmp_path)
        assert trainer.resume()
        assert (run.batches, trainer.batches_into_epoch) == (3, 3)


def test_each_is_told_of_the_end_once():
    class Ends(Callback):
        def __init__(self, raises):
            self.raises, self.heard = raises, []

        def on_end(self, trainer, error):
            self.heard.append(type(error))
            if self.raises:
                raise OSError("no room")

    told = [Ends(False), Ends(True), Ends(False)]
    with begun("bp") as run, pytest.raises(CallbackFailed, match="callback Ends raised in on_end"):
        unlatch.Trainer(run, callbacks=told).fit(batches())
    assert [one.heard for one in told] == [[type(None)], [type(None)], [CallbackFailed]]


@pytest.mark.parametrize("hook", ["on_start", "on_evaluation", "on_epoch", "on_checkpoint", "on_log", "on_end"])
def test_each_hook_that_raises_is_named(hook, tmp_path):
    broken = type("Broken", (Callback,), {hook: lambda self, *happened: 1 / 0})()
    with begun("bp") as run:
        trainer = unlatch.Trainer(run, tmp_path, save_every="2 batches", callbacks=[broken])
        with pytest.raises(
            CallbackFailed, match=rf"callback Broken raised in {hook} after batch \d: ZeroDivisionError"
        ):
            trainer.fit(batches(), eval_loader=batches(1))
    # A folder that may be another run's is not written to before anything was trained.
    assert any(tmp_path.iterdir()) == (hook != "on_start")


def test_a_state_that_no_file_can_hold_is_named(tmp_path):
    broken = type("Broken", (Callback,), {"state": lambda self: {"when": object()}})()
    with begun("bp") as run:
        trainer = unlatch.Trainer(run, tmp_path, callbacks=[broken])
        with pytest.raises(
            CallbackFailed, match="callback Broken raised in state after batch 0, where a dict of plain"
        ):
            trainer.save()


@pytest.mark.parametrize("wrong", [EMA, print])
def test_what_is_no_callback_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"callbacks\[0\] must be an object of a class derived from"):
        unlatch.Trainer(begun(), callbacks=[wrong])


def test_the_best_by_what_is_watched(tmp_path):
    class Judged(Callback):
        def on_evaluation(self, trainer, found):
            found["fit"] = [1.0, 5.0, 3.0, 2.0][trainer.epochs]

    for mode, best in (("max", 4), ("min", 2)):
        keeping = Checkpointing(tmp_path / mode, keep_last=1, keep_best=1, monitor="fit", mode=mode)
        with begun("bp") as run:
            trainer = unlatch.Trainer(run, callbacks=[Judged(), keeping])
            trainer.fit(batches(2), epochs=4, eval_loader=batches(1))
        assert trainer.checkpoints.best().name == f"step-{best:08d}"
        assert trainer.checkpoints.latest().name == "step-00000008"
        assert len(trainer.checkpoints.steps()) == 2


def test_what_cannot_be_watched_is_named_and_nothing_is_lost(tmp_path):
    with begun("bp") as run:
        trainer = unlatch.Trainer(run, tmp_path, "1 epochs", monitor="perplexity")
        with pytest.raises(ConfigError, match="there is no 'perplexity' to watch: epoch 1 has train_loss; ask for it"):
            trainer.fit(batches(2), epochs=2)
    assert unlatch.Checkpoints(tmp_path).latest().name == "step-00000002"
    with pytest.raises(ConfigError, match='mode must be "min" or "max"'):
        Monitor("loss", "least")
    epoch = Epoch(0, 2.0, 8, 1.0, {"accuracy": 0.5, "loss": 3.0})
    assert [Monitor(name).score(epoch) for name in (None, "loss", "accuracy", "train_loss")] == [0.5, -3.0, 0.5, -2.0]


def test_numbers_in_files_go_on_after_a_resume(tmp_path):
    def train(until, stop=None):
        with begun("bp") as run:
            files = MetricsFiles(tmp_path / "numbers")
            trainer = unlatch.Trainer(run, tmp_path / "kept", callbacks=[files, LearningRates()])
            trainer.resume()
            trainer.fit(batches(3), until=until, eval_loader=batches(1), stop=stop)
            return trainer

    train(1).save()
    lost = train(2, iter([False, False, True]).__next__)
    assert lost.run.batches == 5
    train(2)
    rows = metrics.read(tmp_path / "numbers")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["epoch/number"] for row in rows if "epoch/number" in row] == [1, 2]
    assert {"stage0/lr", "stage1/lr"} <= {name for row in rows for name in row}
    with (tmp_path / "numbers" / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert sum(row["name"] == "train/loss" for row in table) == 6


def test_a_run_from_python_is_compared_like_any_other(tmp_path):
    with begun("dtr") as run:
        folder = RunFolder(tmp_path / "run", facts={"data": "noise"})
        trainer = unlatch.Trainer(run, callbacks=[Checkpointing(tmp_path / "run" / "checkpoints"), folder])
        history = trainer.fit(batches(), epochs=2, eval_loader=batches(2))
    record = read_run(tmp_path / "run")
    assert record.summary == json.loads(json.dumps(folder.summary))
    assert record.summary["status"] == "finished"
    assert (record.summary["method"], record.summary["data"], record.summary["batch_size"]) == ("dtr", "noise", 8)
    assert record.summary["accuracy"] == history[-1].evaluation["accuracy"]
    assert len(record.summary["stages"]) == 2
    assert len(record.epochs) == 2
    assert record.events
    with begun("bp") as run, pytest.raises(CallbackFailed, match="is not empty; choose another folder, or continue"):
        unlatch.Trainer(run, callbacks=[RunFolder(tmp_path / "run")]).fit(batches())
    with begun("dtr") as run:
        trainer = unlatch.Trainer(run, tmp_path / "run" / "checkpoints", callbacks=[RunFolder(tmp_path / "run")])
        assert trainer.resume()
        trainer.fit(batches(), until=3)
    assert [row["epoch/number"] for row in read_run(tmp_path / "run").epochs] == [1, 2, 3]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal_and_elsewhere(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120, highlight=False)
    with begun() as run:
        trainer = unlatch.Trainer(run, callbacks=[callbacks.Progress(console), EarlyStopping("train_loss", 1)])
        trainer.fit(batches(), epochs=2, eval_loader=batches(1))
    assert "epoch 1/2  loss" in shown.getvalue()
    assert "accuracy" in shown.getvalue()
    assert ("10/10" in shown.getvalue()) == terminal


def test_tensorboard_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'unlatch\[tensorboard\]'"):
        callbacks.TensorBoard(tmp_path)


def test_tensorboard_has_all_numbers(tmp_path, monkeypatch):
    """With the package, by the size of its file; without, by what it would have been given."""
    written = []
    if find_spec("tensorboard") is None:
        fake = ModuleType("torch.utils.tensorboard")
        given = {"add_scalar": lambda self, *scalar: written.append(scalar), "close": lambda self: written.append(None)}
        fake.SummaryWriter = type("SummaryWriter", (), {"__init__": lambda self, folder, purge_step: None, **given})
        monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    with begun("bp") as run:
        unlatch.Trainer(run, callbacks=[callbacks.TensorBoard(tmp_path)]).fit(batches(), eval_loader=batches(1))
    if written:
        assert {("train/loss", 5), ("eval/accuracy", 5)} <= {(name, step) for name, _, step in written[:-1]}
        assert written[-1] is None
    else:
        assert sum(path.stat().st_size for path in tmp_path.glob("events.out.tfevents.*")) > 500


def test_learning_rates_by_epoch_are_the_trainers_to_change():
    class Rates(Callback):
        def __init__(self):
            self.seen = []

        def on_log(self, trainer, step, numbers):
            if "stage1/lr" in numbers and "epoch/number" not in numbers:
                self.seen.append(numbers["stage1/lr"])

    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, eps=0.0)
    # Nothing is learned at such a rate, so the second epoch is no better than the first.
    for schedule, lr, expected in ((halved, 0.1, (1, 0.5, 0.25)), (plateau, 1e-12, (1, 1, 0.5))):
        rates = Rates()
        with begun("bp", lr, lr_scheduler=schedule, lr_scheduler_per="epoch") as run:
            trainer = unlatch.Trainer(run, callbacks=[LearningRates(), rates])
            trainer.fit(batches(2), epochs=3, eval_loader=batches(1))
        assert [rate / lr for rate in rates.seen[::3]] == pytest.approx(expected)


class Recorder:
    """Stands for a logging package that is not installed: remembers the calls of its functions."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def called(*args, **options):
            self.calls.append((name, args, options))
            return self

        return called


@pytest.mark.parametrize(
    ("package", "name", "calls"),
    [("wandb", "WandB", ("init", "log", "finish")), ("mlflow", "MLflow", ("start_run", "log_metrics", "end_run"))],
)
def test_loggers_of_the_docs_log_all_numbers(package, name, calls, monkeypatch, tmp_path):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed; it would write where it likes")
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if f"import {package}" in block)
    known = {"callbacks": callbacks}
    exec(code, known)
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, package, recorder)
    with begun("bp") as run:
        unlatch.Trainer(run, callbacks=[known[name]()]).fit(batches(), eval_loader=batches(1))
    assert [call for call, *_ in recorder.calls] == [calls[0], *[calls[1]] * 6, calls[2]]
    assert recorder.calls[-2][2] == {"step": 5}
    assert {"epoch/number", "eval/loss", "eval/accuracy", "stage1/staleness"} <= recorder.calls[-2][1][0].keys()


def test_recalibration_at_the_end():
    class Heard(Callback):
        numbers = None

        def on_log(self, trainer, step, numbers):
            self.numbers = dict(numbers)

    heard = Heard()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    run = unlatch.parallelize(
        model,
        "bp",
        stages=2,
        split=["2"],
        loss_fn=torch.nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    with run:
        trainer = unlatch.Trainer(run, callbacks=[heard])
        trainer.fit(batches(), eval_loader=batches(2), recalibrate=3)
        statistics = {name: t.clone() for name, t in run.module().state_dict().items()}
        expected = run.evaluate_recalibrated(batches(2), batches()[:3])
    assert trainer.recalibrated["recalibrated_loss"] == expected["recalibrated_loss"]
    assert heard.numbers == {f"eval/{name}": value for name, value in trainer.recalibrated.items()}
    assert all(torch.equal(t, statistics[name]) for name, t in run.module().state_dict().items())


def test_a_single_callback_instead_of_a_list_is_named():
    with pytest.raises(ConfigError, match=r"callbacks must be a list of callbacks, got .*; put it into brackets"):
        unlatch.Trainer(begun(), callbacks=LearningRates())
