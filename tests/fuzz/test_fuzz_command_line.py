"""Arguments of every command, of any kind: exit code 0, 1 or 2 and words, never a stack trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import example, given
from hypothesis import strategies as st
from tomli_w import dumps
from typer.testing import CliRunner

from fuzzing import altered, cases, texts, values
from unlatch.cli import app
from unlatch.config import from_mapping

COSTS = [{"name": f"l{i}", "F": 1 + i, "D": 1, "G": 2, "activation_bytes": 8, "weight_bytes": 4} for i in range(3)]

#: Settings that train in a fraction of a second.
SMALL = from_mapping({"model": {"name": "mlp"}, "data": {"batch_size": 720}, "run": {"stages": 2}}).model_dump(
    exclude_none=True
)


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("UNLATCH_DATA", raising=False)
    (tmp_path / "conf.toml").write_text(dumps(SMALL))
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    (tmp_path / "text").write_text("some text")
    (tmp_path / "folder").mkdir()


def run(arguments: list[str]) -> int:
    """The exit code; anything but an orderly end is a failure."""
    threads = torch.get_num_threads()
    try:
        result = CliRunner().invoke(app, arguments)
    finally:
        torch.set_num_threads(threads)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output, result.output
    assert result.exit_code in (0, 1, 2), result.output
    assert result.exit_code == 0 or result.stderr.strip(), arguments
    return result.exit_code


def flags_of(command: str) -> list[str]:
    group: Any = typer.main.get_command(app)
    parameters = group.get_command(None, command).params
    return [flag for parameter in parameters for flag in parameter.opts if flag.startswith("-")]


COMMANDS = ["train", "compare", "plan", "simulate", "bench", "check", "export", "methods"]
words = st.one_of(
    texts.filter(lambda text: "\0" not in text),
    st.sampled_from(["conf.toml", "costs.json", "text", "folder", "nowhere", "bp", "dtr", "petra"]),
    st.sampled_from(["0", "1", "2", "-1"]),
    st.sampled_from(["nan", "inf", "1e400", "99999999999999999999", "1.5", "auto", "model.name=mlp", "run.stages=2"]),
)


#: Commands that train end where they read their data.
STOPPED = {command: ["--set", "data.name=cifar10", "--data-dir", "nowhere"] for command in ("train", "bench", "check")}


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_of_any_kind(command):
    some = st.lists(st.one_of(st.sampled_from(flags_of(command)), words), max_size=6)

    @cases(60, share=0.05)
    @given(some)
    def check(arguments: list[str]) -> None:
        run([command, *STOPPED.get(command, []), *arguments])

    check()


# What may run to its end without a limit on time: planners on three layers.
NUMBERS = st.sampled_from(["0", "1", "2", "3", "7", "-1", "1e-300", "1e300", "nan", "inf", "0.5", "1000000", ""])


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_planners_with_odd_numbers(command):
    takes = {
        "plan": ["--devices", "--bandwidth", "--latency", "--memory", "--batch", "--array"],
        "simulate": ["--devices", "--bandwidth", "--latency", "--batches", "--jitter", "--seed"],
    }[command]
    known = [flag for flag in takes if flag in flags_of(command)]

    @cases(40, share=0.02)
    @given(st.lists(st.tuples(st.sampled_from(known), NUMBERS), max_size=3))
    @example([("--devices", "100000000000000000000")])
    def check(pairs: list[tuple[str, str]]) -> None:
        # A million devices or batches are allowed and take their time.
        if ("--devices", "1000000") in pairs or ("--batches", "1000000") in pairs:
            return
        run([command, "--costs", "costs.json", "--json", *[word for pair in pairs for word in pair]])

    check()


@cases(30, share=0.01)
@given(altered(SMALL, values.filter(lambda value: "None" not in repr(value)), most=2))
@example({**SMALL, "model": {"name": "mlp", "hidden": "x"}})
@example({**SMALL, "model": {"name": "resnet8", "width": -3}})
@example({**SMALL, "data": {"name": "digits", "options": {"seed": -1}}})
@example({**SMALL, "data": {"name": "digits", "batch_size": 10**30}})
@example({**SMALL, "data": {"name": "digits", "subset": 10**30}})
@example({**SMALL, "optimizer": {"name": "Adam", "betas": [2.0]}})
@example({**SMALL, "optimizer": {"name": "SGD", "lr": 0.1, "maximize": "x"}})
@example({**SMALL, "run": {"loss": "nll_loss"}})
@example({**SMALL, "run": {"threads": 10**30}})
@example({**SMALL, "run": {"stages": 2, "split": ["layers.9"]}})
@example({**SMALL, "run": {"out": "/proc/nowhere"}})
@example({**SMALL, "run": {"out": "text/run"}})
@example({**SMALL, "run": {"plan": "costs.json"}})
@example({**SMALL, "lr": {"milestones": [0.1] * 5, "shape": "step"}})
def test_trainings_with_odd_settings(tree):
    """Each to its end, if it is allowed to begin; never on processes of its own, and never for long."""
    limits = {"epochs": 1, "processes": 1}
    if not isinstance(tree, dict) or not isinstance(tree.get("run", {}), dict):
        return
    sections = {name: part for name, part in tree.items() if isinstance(part, dict)}
    if len(sections) < len(tree):
        return
    try:
        text = dumps({**sections, "run": {**sections.get("run", {}), **limits}})
    except (TypeError, AttributeError):
        return
    Path("odd.toml").write_text(text, encoding="utf-8", errors="replace")
    run(["train", "odd.toml"])
