"""The command line as a function: text in, exit code and text out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from invoking import invoke

#: A run that takes a fraction of a second.
SMALL = """
[model]
name = "mlp"
[data]
batch_size = 256
[run]
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def unlatch() -> Callable:
    """Run a command in this process."""
    return invoke


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """Settings for a small run."""
    path = tmp_path / "conf.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def cut() -> tuple[str, ...]:
    """Flags for two stages cut at a named place: runs that are compared must not be cut by times measured for each."""
    return "--stages", "2", "--set", 'run.split=["layers.2"]'


@pytest.fixture
def costs(tmp_path):
    """Write layers to a file."""

    def write(layers: object) -> Path:
        path = tmp_path / "layers.json"
        path.write_text(layers if isinstance(layers, str) else json.dumps(layers))
        return path

    return write


@pytest.fixture
def answer(unlatch, costs):
    """The JSON that `unlatch plan` prints for a chain."""

    def ask(layers: object, devices: int, *flags: object) -> dict:
        result = unlatch("plan", "--costs", costs(layers), "--devices", devices, *flags, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return ask
