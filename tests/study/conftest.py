"""Studies that take a second: a small perceptron on digits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from invoking import invoke

#: What all runs share.
COMMON = """
[model]
name = "mlp"
widths = [64, 32, 10]
[data]
batch_size = 256
subset = 512
holdout = 256
[run]
epochs = 2
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., Path]:
    """Write a study: its cases, how many seeds, and what all runs share."""

    def write(cases: str, head: str = "seeds = 2", common: str = COMMON) -> Path:
        path = tmp_path / "small.toml"
        path.write_text(f"[study]\n{head}\n{common}\n{cases}")
        return path

    return write


@pytest.fixture
def compare() -> Callable:
    """`unlatch compare` in this process."""
    return partial(invoke, "compare")


@pytest.fixture
def lines() -> Callable[..., list[dict]]:
    """The results of the study."""

    def read(folder: str = "results") -> list[dict]:
        return [json.loads(line) for line in Path(folder, "small.jsonl").read_text().splitlines()]

    return read
