"""A session that is stopped anywhere and continued trains every batch once and ends as if it had never been stopped."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainer_jobs
import unlatch
from trainer_jobs import SESSIONS
from unlatch.errors import CheckpointMismatch, ConfigError, DataError
from unlatch.io import checkpoint
from unlatch.train import Every


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Limits of stability and sizes of AuxNets are not the subject here."""
    caplog.set_level(logging.ERROR, "unlatch")


@pytest.mark.parametrize("loader", ["torch", "own"])
@pytest.mark.parametrize("case", SESSIONS)
def test_stopped_in_the_middle(case, loader, tmp_path):
    expected = trainer_jobs.undisturbed(case, loader)
    # In the first pass, at its end, in the middle of an accumulation, right after the start.
    for stops in ([3], [6, 1], [7, 4, 2]):
        found = trainer_jobs.interrupted(case, str(tmp_path / str(stops)), stops, loader)
        assert trainer_jobs.same(expected, found), stops


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.sampled_from(list(SESSIONS)), stops=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_stopped_anywhere(case, stops, tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    assert trainer_jobs.same(trainer_jobs.undisturbed(case), trainer_jobs.interrupted(case, str(folder), stops))


def test_the_same_trainer_goes_on(tmp_path):
    """Without any checkpoint: a stop leaves everything as it is."""
    expected = trainer_jobs.undisturbed("pipedream", noise=True)
    with trainer_jobs.begun("pipedream", noise=True) as run:
        torch.manual_seed(7)
        trainer, history = unlatch.Trainer(run), []
        for stop in (4, 5, 100):
            asked = trainer_jobs.countdown(stop).__next__
            history += trainer.fit(trainer_jobs.torch_loader(), until=trainer_jobs.EPOCHS, stop=asked)
        assert trainer_jobs.same(expected, trainer_jobs.result(run, history))


def test_global_random_numbers_go_on(tmp_path):
    expected = trainer_jobs.undisturbed("bp", noise=True)
    assert trainer_jobs.same(expected, trainer_jobs.interrupted("bp", str(tmp_path), [4, 3], noise=True))


@pytest.mark.parametrize("every", ["1 batch", "5 batches", "1 epochs", "0.00001 minutes"])
@pytest.mark.parametrize("case", ["pipedream", "1f1b", "dtrp joined"])
def test_every_checkpoint_leads_to_the_same_end(case, every, tmp_path):
    assert trainer_jobs.all_of_one(case, str(tmp_path), every) == []
    assert unlatch.Checkpoints(tmp_path).latest().name == sorted(p.name for p in tmp_path.glob("step-*"))[-1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("50 batches", (50, "batches")),
        ("1 batch", (1, "batches")),
        ("0.5 minutes", (0.5, "minutes")),
        ("2 epochs", (2, "epochs")),
    ],
)
def test_how_often(text, found):
    every = Every.parse(text)
    assert (every.count, every.unit) == found


@pytest.mark.parametrize(
    "text", ["", "often", "0 batches", "-1 batches", "1.5 epochs", "batches", "1..2 minutes", "5 hours"]
)
def test_how_often_in_other_words_is_refused(text):
    with pytest.raises(ConfigError, match='expected "50 batches", "5 minutes" or "1 epochs"'):
        Every.parse(text)


def test_the_last_and_the_best_are_kept(tmp_path):
    kept = unlatch.Checkpoints(tmp_path, keep_last=1, keep_best=1)
    run = trainer_jobs.begun("bp")
    trainer = unlatch.Trainer(run, kept)
    for score in (0.3, 0.9, 0.5, 0.1):
        run.step(*(t[:8] for t in trainer_jobs.tensors()))
        trainer.save(score=score)
    assert kept.steps() == [2, 4]
    assert kept.latest() == kept.path(4)
    assert kept.best() == kept.path(2)
    assert (tmp_path / "latest").readlink().name == "step-00000004"


def test_latest_without_its_link(tmp_path):
    """A process that is killed between the checkpoint and the link leaves the newest folder without one."""
    run = trainer_jobs.begun("bp")
    kept = unlatch.Checkpoints(tmp_path)
    unlatch.Trainer(run, kept).save()
    (tmp_path / "latest").unlink()
    assert kept.latest() == kept.path(0)
    (tmp_path / "latest").symlink_to("../elsewhere")
    assert kept.latest() == kept.path(0)


def test_nothing_to_resume(tmp_path):
    trainer = unlatch.Trainer(trainer_jobs.begun("bp"), tmp_path / "none")
    assert not trainer.resume()
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match=r'resume\("latest"\) needs a folder'):
        unlatch.Trainer(trainer.run).resume()
    with pytest.raises(ConfigError, match="save_every needs a folder"):
        unlatch.Trainer(trainer.run, save_every="1 batch")
    with pytest.raises(ConfigError, match="save needs a place"):
        unlatch.Trainer(trainer.run).save()


def test_fewer_data_than_were_fed(tmp_path):
    trainer = unlatch.Trainer(trainer_jobs.begun("bp"), tmp_path)
    trainer.fit(trainer_jobs.torch_loader(), stop=iter([False] * 5 + [True]).__next__)
    trainer.save()
    again = unlatch.Trainer(trainer_jobs.begun("bp"), tmp_path)
    again.resume()
    with pytest.raises(DataError, match="after 5 batches of epoch 1, and the loader has only 2"):
        again.fit([(torch.zeros(8, 6), torch.zeros(8, 6))] * 2)


def test_a_checkpoint_that_cannot_be_written_does_not_end_training(tmp_path, caplog):
    """The disk was full for one checkpoint: training ended and everything since the last one was lost."""
    caplog.set_level(logging.WARNING, "unlatch")
    (tmp_path / "step-00000002").write_text("in the way")
    expected = trainer_jobs.undisturbed("pipedream")
    found = trainer_jobs.saved_beside("pipedream", str(tmp_path), "2 batches")
    assert trainer_jobs.same(expected, found)
    assert "a checkpoint could not be written" in caplog.text
    assert "step-00000002: is a file" in caplog.text
    assert unlatch.Checkpoints(tmp_path).latest().name == "step-00000018"


def test_a_damaged_latest_is_named(tmp_path):
    trainer = unlatch.Trainer(trainer_jobs.begun("bp"), tmp_path)
    trainer.save()
    file = tmp_path / "latest" / "exact.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointMismatch, match=r"exact\.safetensors: .* bytes, expected"):
        trainer.resume()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", "abc"),
        ("summed", None),
        ("epoch_random", {}),
        ("batches_into_epoch", [1]),
        ("samples_into_epoch", -1),
    ],
)
def test_a_session_in_an_edited_state_is_named(name, value, tmp_path):
    """They ended in ValueError, TypeError and KeyError."""
    trainer = unlatch.Trainer(trainer_jobs.begun("bp"), tmp_path)
    trainer.save()
    content = checkpoint.read(tmp_path / "latest")
    state = {**content.state, "loop": {**content.state["loop"], name: value}}
    checkpoint.write(tmp_path / "edited", checkpoint.Checkpoint(content.model, state, content.extra))
    with pytest.raises(CheckpointMismatch, match="edited"):
        trainer.load(tmp_path / "edited")


def test_what_a_killed_writer_left_is_removed_with_the_next_checkpoint(tmp_path):
    """Each step has a folder of its own, so nobody came back to where the writer had died."""
    trainer = unlatch.Trainer(trainer_jobs.begun("bp"), tmp_path)
    (tmp_path / ".step-00000007.tmp-abc").mkdir(parents=True)
    (tmp_path / ".step-00000007.tmp-abc" / "model.safetensors").write_text("half")
    trainer.save()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory")])
def test_a_checkpoint_for_which_there_is_no_memory_does_not_end_training(error, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "unlatch")

    def refuse(path, content):
        raise error

    monkeypatch.setattr(checkpoint, "write", refuse)
    expected = trainer_jobs.undisturbed("pipedream")
    assert trainer_jobs.same(expected, trainer_jobs.saved_beside("pipedream", str(tmp_path), "4 batches"))
    assert "a checkpoint could not be written" in caplog.text


def test_a_score_that_is_no_number_is_no_best(tmp_path):
    kept = unlatch.Checkpoints(tmp_path, keep_last=1, keep_best=1)
    run = trainer_jobs.begun("bp")
    trainer = unlatch.Trainer(run, kept)
    for score in (0.3, float("nan"), 0.1):
        run.step(*(t[:8] for t in trainer_jobs.tensors()))
        trainer.save(score=score)
    assert kept.best() == kept.path(1)
