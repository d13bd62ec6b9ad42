"""Disks that are full or read-only, and folders that are taken: on real file systems, mounted for the test."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import unlatch
from unlatch.cli import app
from unlatch.errors import ConfigError
from unlatch.io import checkpoint, metrics
from unlatch.io.checkpoints import Checkpoints
from unlatch.io.metrics import Metrics
from unlatch.io.optional import optional_file
from unlatch.io.run_folder import RunFolder
from unlatch.io.space import shortage

#: Scripts of their own import what is tested here.
SOURCES = {**os.environ, "PYTHONPATH": str(Path(unlatch.__file__).parents[1])}


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[..., Path]]:
    """Mount a small file system in memory; mode bits alone do not bind the superuser."""
    mounted: list[Path] = []

    def mount(size: str, name: str = "disk") -> Path:
        place = tmp_path / name
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Use up all room but `leave` bytes."""
    file = folder / "ballast"
    with file.open("ab", buffering=0) as out:
        try:
            while out.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
        out.truncate(max(0, out.tell() - leave))
    return file


# ----------------------------------------------------------------------------------------------------------- metrics


def test_metrics_on_a_full_disk_are_dropped_with_one_warning(disk, caplog):
    place = disk("64k")
    numbers = Metrics(place / "run")
    numbers.log(0, {"train/loss": 1.0})
    ballast = fill(place)
    with caplog.at_level(logging.WARNING, "unlatch"):
        for step in range(1, 2000):
            numbers.log(step, {"train/loss": 1.0, "eval/some_long_name": 2.0})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert "training goes on" in caplog.text
    steps = [row["step"] for row in metrics.read(place / "run")]
    assert steps == list(range(len(steps))), "what was written is whole"
    assert len(steps) < 2000
    ballast.unlink()
    numbers.log(2000, {"train/loss": 3.0})
    numbers.close()
    assert metrics.read(place / "run")[-1]["step"] == 2000
    assert (place / "run" / "metrics.csv").read_text().splitlines()[-1].startswith("2000,")


def test_metrics_that_begin_on_a_full_disk(disk):
    place = disk("64k")
    (place / "run").mkdir()
    fill(place)
    numbers = Metrics(place / "run")
    numbers.log(0, {"train/loss": 1.0})
    numbers.close()
    assert metrics.read(place / "run") == []


def test_metrics_in_a_folder_that_cannot_be_written(disk):
    place = disk("64k")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.raises(ConfigError, match="Read-only file system"):
        Metrics(place / "run")


def test_a_limit_on_the_size_of_files_is_a_full_disk_too(tmp_path):
    """Without a mount: the process may write no more than so many bytes into a file."""
    script = """
import resource, signal, sys
from unlatch.io.metrics import Metrics, read
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
numbers = Metrics(sys.argv[1])
for step in range(100):
    numbers.log(step, {"train/loss": 1.0})
numbers.close()
print(len(read(sys.argv[1])))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env=SOURCES,
    )
    assert 0 < int(done.stdout) < 100
    assert done.stderr.count("File too large") == 1
    assert len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------ other files


def test_an_optional_file_is_whole_or_as_it_was(disk, caplog):
    place = disk("64k")
    (place / "summary.json").write_text('{"old": 1}')
    fill(place)
    with caplog.at_level(logging.WARNING, "unlatch"), optional_file(place / "summary.json") as draft:
        draft.write_text("x" * 50_000)
    assert (place / "summary.json").read_text() == '{"old": 1}'
    assert "summary.json was not written: No space left on device" in caplog.text
    assert {file.name for file in place.iterdir()} == {"summary.json", "ballast"}


def test_room_is_told_before_it_is_needed(disk, tmp_path):
    place = disk("1m")
    assert shortage(place / "run" / "deep", 500_000, "one checkpoint") is None
    fill(place, leave=100_000)
    text = shortage(place / "run" / "deep", 500_000, "one checkpoint")
    assert text is not None
    assert "no room for one checkpoint of 500.0 kB" in text
    assert "are free there" in text


# ----------------------------------------------------------------------------------------------------- run folders


def test_folders_that_cannot_be_made(disk, tmp_path):
    place = disk("64k")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    (tmp_path / "file").write_text("x")
    for path, reason in [
        (place / "run", "Read-only file system"),
        (tmp_path / "file" / "run", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (f"{tmp_path}/a\0b", "null"),
        ("/proc/run", "No such file or directory"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            RunFolder.at(path)
    with pytest.raises(ConfigError, match="Read-only file system"):
        RunFolder.new("dtr", place / "runs")
    missing = tmp_path / "missing" / "parent"
    assert RunFolder.at(missing / "run").path.is_dir(), "parents are made"


def test_names_do_not_lead_out_of_the_folder_of_runs(tmp_path):
    for name in ("../../up", "/etc/x", "a/../../b", "..", ".", "~", "x\0y", "a\nb", "", "n" * 4000):
        made = RunFolder.new(name, tmp_path / "runs").path
        assert made.resolve().parent == (tmp_path / "runs").resolve()


def test_two_runs_in_one_folder(tmp_path):
    first = RunFolder.at(tmp_path / "run")
    first.describe("x = 1\n")
    for second in (
        lambda: RunFolder.at(tmp_path / "run"),
        lambda: RunFolder.at(tmp_path / "run", overwrite=True),
        lambda: RunFolder.resume(tmp_path / "run"),
    ):
        with pytest.raises(ConfigError, match="run: another run is writing there now"):
            second()
    assert (tmp_path / "run" / "config.toml").exists()
    first.release()
    RunFolder.resume(tmp_path / "run")


def test_a_refusal_that_is_kept_holds_nothing(tmp_path):
    RunFolder.at(tmp_path / "run").describe("x = 1\n")
    with pytest.raises(ConfigError, match="not empty") as kept:
        RunFolder.at(tmp_path / "run")
    RunFolder.at(tmp_path / "run", overwrite=True)
    assert kept.value.__traceback__ is not None


def test_a_killed_run_leaves_no_lock(tmp_path):
    script = """
import sys, time
from unlatch.io.run_folder import RunFolder
folder = RunFolder.at(sys.argv[1])
folder.describe("x = 1\\n")
print("held", flush=True)
time.sleep(600)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=SOURCES
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another run is writing there now"):
            RunFolder.at(tmp_path / "run", overwrite=True)
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        with RunFolder.resume(tmp_path / "run"):
            pass
    finally:
        holder.kill()
        holder.wait(60)
        holder.stdout.close()


def test_overwriting_does_not_follow_links(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("years of work")
    with RunFolder.at(tmp_path / "run") as folder:
        folder.describe("x = 1\n")
        (folder.path / "link").symlink_to(tmp_path / "thesis")
    RunFolder.at(tmp_path / "run", overwrite=True)
    assert (tmp_path / "thesis" / "text").read_text() == "years of work"


# ------------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "conf.toml").write_text('[model]\nname = "mlp"\n[data]\nbatch_size = 256\n')

    def run(*flags: object):
        threads = torch.get_num_threads()
        result = CliRunner().invoke(app, ["train", "conf.toml", *map(str, flags)])
        torch.set_num_threads(threads)
        return result

    return run


def one_line(result) -> str:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_a_run_on_a_read_only_disk(train, disk):
    place = disk("64k")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    result = train("--out", place / "run")
    assert result.exit_code == 2
    assert "Read-only file system" in one_line(result)


def test_a_run_into_a_folder_that_is_taken(train, tmp_path):
    with RunFolder.at(tmp_path / "run"):
        result = train("--out", "run")
    assert result.exit_code == 2
    assert "another run is writing there now" in one_line(result)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_on_a_disk_that_is_nearly_full(train, disk):
    """Told before anything is trained."""
    place = disk("2m")
    fill(place, leave=60_000)
    result = train("--out", place / "run")
    assert result.exit_code == 2
    assert "no room for one checkpoint" in one_line(result)


def test_a_run_on_a_disk_that_is_full_at_its_end(train, disk, monkeypatch):
    """The last checkpoint does not fit: said in one line, with the folder; nothing half-written is left."""
    # As if somebody else had used up the room in the meantime.
    monkeypatch.setattr("unlatch.cli.training.shortage", lambda *_: None)
    place = disk("2m")
    fill(place, leave=60_000)
    result = train("--out", place / "run")
    assert result.exit_code == 1, result.output
    assert "No space left on device" in one_line(result)
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) >= 6
    assert not [file for file in place.rglob("*.safetensors") if ".tmp-" in str(file)]


def test_training_goes_on_while_no_checkpoint_fits(disk, caplog):
    place = disk("400k")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 100), torch.nn.Tanh(), torch.nn.Linear(100, 3))
    run = unlatch.parallelize(
        model,
        "dtr",
        stages=2,
        loss_fn=torch.nn.functional.cross_entropy,
        split=["1"],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )
    batches = [(torch.randn(8, 40), torch.randint(3, (8,))) for _ in range(24)]

    class FillUp(unlatch.callbacks.Callback):
        def on_step(self, trainer: unlatch.Trainer, result: unlatch.StepResult) -> None:
            if result.step == 12:
                run.finish_saving()
                fill(place)

    with run, caplog.at_level(logging.WARNING, "unlatch"):
        trainer = unlatch.Trainer(run, place / "checkpoints", save_every="4 batches", callbacks=[FillUp()])
        (epoch,) = trainer.fit(batches)
    assert epoch.samples == 24 * 8
    assert "a checkpoint could not be written" in caplog.text
    assert "No space left on device" in caplog.text
    latest = Checkpoints(place / "checkpoints").latest()
    assert latest is not None
    assert latest.name in ("step-00000008", "step-00000012")
    assert checkpoint.read(latest).model["0.weight"].shape == (100, 40)
    assert not list(place.rglob(".*tmp-*"))
