"""A run's folder is never shared, never overwritten by accident, and says what made it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from unlatch.errors import ConfigError
from unlatch.io import checkpoint
from unlatch.io.run_folder import RunFolder
from unlatch.io.versions import versions


def test_numbers_count_up_and_names_are_made_safe(tmp_path: Path) -> None:
    made = [RunFolder.new(name, tmp_path / "runs").path for name in ("dtr", "dtr", "my.pkg:net/../x", "..")]
    assert [path.name for path in made] == ["dtr-1", "dtr-2", "my.pkg-net-..-x-1", "run-1"]
    assert all(path.parent == tmp_path / "runs" and path.is_dir() for path in made)


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunFolder.new("x", tmp_path).path, range(40)))
    assert len(set(made)) == 40


def test_a_chosen_folder_must_be_empty(tmp_path: Path) -> None:
    RunFolder.at(tmp_path / "a" / "b").describe("x = 1\n")
    with pytest.raises(ConfigError, match=r"not empty.*--resume.*--overwrite"):
        RunFolder.at(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "metrics.csv").write_text("old")
    fresh = RunFolder.at(tmp_path / "a" / "b", overwrite=True)
    assert list(fresh.path.iterdir()) == []


def test_overwrite_spares_what_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all my work")
    with pytest.raises(ConfigError, match="other than a run"):
        RunFolder.at(tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.at(tmp_path / "thesis.tex", overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "all my work"


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to continue"):
        RunFolder.resume(tmp_path)
    RunFolder.at(tmp_path / "r").describe("x = 1\n")
    assert RunFolder.resume(tmp_path / "r").path == tmp_path / "r"


def test_settings_of_each_start_are_kept(tmp_path: Path) -> None:
    folder = RunFolder.at(tmp_path / "r")
    for text in ("a", "a", "b", "b", "a"):
        folder.describe(text, {"seed": 3})
    names = ["config.toml", "config-2.toml", "config-3.toml"]
    assert sorted(path.name for path in folder.path.glob("*.toml")) == sorted(names)
    assert [(folder.path / name).read_text() for name in names] == ["a", "b", "a"]
    written = json.loads((folder.path / "versions.json").read_text())
    assert written == {**versions(), "seed": 3}


def test_versions_name_what_results_depend_on() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads() == 1
    assert {"python", "unlatch", "platform", "machine", "cores"} <= found.keys()


def test_a_checkpoint_whose_writer_died_between_renames_is_found(tmp_path: Path) -> None:
    path = RunFolder.at(tmp_path / "r").path / "last"
    checkpoint.write(path, checkpoint.Checkpoint({}, {"step": 7}))
    path.rename(path.with_name(f".{path.name}.old"))
    assert checkpoint.exists(path)
    assert checkpoint.read(path).state == {"step": 7}
