"""Settings from files and overrides: what is read, what is refused, and in which words."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlatch.config import from_mapping, load
from unlatch.errors import ConfigError

FULL = """
[model]
name = "resnet20"
width = 16
channels_last = true

[data]
name = "cifar10"
dir = "data"
batch_size = 100
augment = true
subset = 5000

[method]
name = "dtrp"
predict = "geometric"
microbatches = 4

[optimizer]
lr = 0.05
weight_decay = 5e-4
dampening = 0

[lr]
shape = "cosine"
warmup = 0.1

[run]
stages = 3
processes = 2
replicas = 2
epochs = 10
seed = 7
precision = "bf16"
device = "cpu"
clip_grad_norm = 1
compile = {backend = "aot_eager", dynamic = true}
split = ["body.4", "body.9"]
plan = "plan.json"
threads = 2
out = "runs/x"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "conf.toml"
    path.write_text(FULL)
    return path


def with_model(**sections: Any) -> dict[str, Any]:
    return {"model": {"name": "mlp"}, **sections}


def error_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_mapping(values, "conf.toml")
    first, *problems = str(caught.value).split("\n  ")
    assert first == "conf.toml:"
    return problems


def test_everything_that_can_be_set(file: Path) -> None:
    config = load(file)
    assert config.model.options == {"width": 16}
    assert config.model.channels_last is True
    assert (config.data.dir, config.data.batch_size, config.data.augment, config.data.subset) == (
        "data",
        100,
        True,
        5000,
    )
    assert config.method.options == {"predict": "geometric", "microbatches": 4}
    assert config.optimizer.arguments == {
        "lr": 0.05,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
        "dampening": 0,
    }
    assert (config.lr.shape, config.lr.warmup) == ("cosine", 0.1)
    assert config.run.model_dump() == {
        "stages": 3,
        "processes": 2,
        "replicas": 2,
        "epochs": 10,
        "seed": 7,
        "precision": "bf16",
        "device": "cpu",
        "loss": "cross_entropy",
        "clip_grad_norm": 1.0,
        "clip_norm_of": "stage",
        "nonfinite": "stop",
        "messages": "exact",
        "compile": {"backend": "aot_eager", "dynamic": True},
        "transport": "auto",
        "split": ("body.4", "body.9"),
        "plan": "plan.json",
        "threads": 2,
        "out": "runs/x",
    }


def test_a_model_name_is_enough() -> None:
    config = load(None, ["model.name=mlp"])
    assert (config.method.name, config.data.name, config.run.stages, config.run.processes) == ("bp", "digits", 1, 1)
    assert config.lr.warmup == 0.2


def test_what_is_dumped_loads_as_the_same(file: Path, tmp_path: Path) -> None:
    config = load(file, ["data.options.path=x y", "run.seed=3"])
    again = tmp_path / "again.toml"
    again.write_text(config.dump())
    assert load(again) == config
    assert load(again).dump() == config.dump()


def test_nothing_changes_after_loading(file: Path) -> None:
    config = load(file)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1  # type: ignore[misc]
    config.model.options["width"] = 99
    assert config.model.options == {"width": 16}


def test_overrides(file: Path) -> None:
    config = load(
        file,
        [
            "optimizer.lr=0.2",
            "method.name=1f1b",
            "run.split=auto",
            'run.out="a=b"',
            " data . augment = false",
            "run.stages=4",
            "run.stages=5",
            "method.rates=[1, 2]",
            "method.name=zb-h1",
        ],
    )
    assert config.optimizer.lr == 0.2
    assert config.method.name == "zb-h1"
    assert config.run.split == "auto"
    assert config.run.out == "a=b"
    assert config.data.augment is False
    assert config.run.stages == 5
    assert config.method.options["rates"] == [1, 2]


@pytest.mark.parametrize("override", ["lr=1", "optimizer.lr", "optimizer.=1", ".lr=1", "=1", ""])
def test_malformed_override(override: str) -> None:
    with pytest.raises(ConfigError, match=f"override {re.escape(repr(override))}: expected section.key=value"):
        load(None, ["model.name=mlp", override])


def test_override_below_a_value() -> None:
    with pytest.raises(ConfigError, match=r"model\.name is a value, not a section"):
        load(None, ["model.name=mlp", "model.name.x=1"])


def test_override_cannot_smuggle_in_keys() -> None:
    assert load(None, ["model.name='mlp'\nother = 1"]).model.name == "'mlp'\nother = 1"


@given(value=st.text(st.characters(codec="utf-8")))
def test_any_text_is_an_override_or_a_config_error(value: str) -> None:
    # Anything but a ConfigError would escape and fail the test.
    with contextlib.suppress(ConfigError):
        assert isinstance(load(None, [f"model.name={value}"]).model.name, str)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"optimiser": {}}, "unknown section 'optimiser'; did you mean 'optimizer'?"),
        ({"zzz": {}}, "unknown section 'zzz'; known: data, lr, method, model, optimizer, run"),
        ({"epochs": 3}, "unknown section or key 'epochs'; did you mean 'run.epochs'?"),
        ({"run": {"epoch": 3}}, "unknown key 'run.epoch'; did you mean 'run.epochs'?"),
        ({"run": {"lr": 3}}, "unknown key 'run.lr'; did you mean 'optimizer.lr'?"),
        ({"data": {"batchsize": 3}}, "unknown key 'data.batchsize'; did you mean 'data.batch_size'?"),
        ({"run": {"epochs": "ten"}}, "run.epochs: expected a whole number, got 'ten' (text)"),
        ({"run": {"epochs": 2.5}}, "run.epochs: expected a whole number, got 2.5 (number)"),
        ({"run": {"epochs": True}}, "run.epochs: expected a whole number, got true (true/false)"),
        ({"run": {"epochs": 0}}, "run.epochs: expected a number above 0, got 0 (whole number)"),
        ({"run": {"seed": -1}}, "run.seed: expected at least 0, got -1 (whole number)"),
        ({"run": {"precision": "fp8"}}, "run.precision: expected one of 'fp32', 'bf16' or 'fp16', got 'fp8' (text)"),
        ({"run": [1]}, "run: expected a section with keys, got a list"),
        ({"method": "dtrp"}, "method: expected a section with keys, got 'dtrp' (text)"),
        ({"lr": 0.1}, "lr: expected a section with keys, got 0.1 (number); did you mean 'optimizer.lr'?"),
        ({"data": {"augment": 1}}, "data.augment: expected true or false, got 1 (whole number)"),
        ({"data": {"dir": 3}}, "data.dir: expected text, got 3 (whole number)"),
        ({"optimizer": {"lr": "0.1"}}, "optimizer.lr: expected a number, got '0.1' (text)"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: expected a finite number, got nan (number)"),
        ({"optimizer": {"lr": -1.0}}, "optimizer.lr: expected at least 0.0, got -1.0 (number)"),
        ({"lr": {"warmup": 2}}, "lr.warmup: expected at most 1.0, got 2 (whole number)"),
        ({"lr": {"milestones": [0.5, "x"]}}, "lr.milestones.1: expected a number, got 'x' (text)"),
        (
            {"run": {"split": 3}},
            'run.split: expected "auto" or a list of the names of the blocks that start a stage, got 3',
        ),
    ],
)
def test_problems_in_plain_words(values: dict[str, Any], problem: str) -> None:
    assert error_of(with_model(**values)) == [problem]


def test_all_problems_at_once() -> None:
    problems = error_of({"model": {}, "run": {"epochs": "x", "sed": 1}})
    assert problems == [
        "model.name: missing, and there is no default",
        "run.epochs: expected a whole number, got 'x' (text)",
        "unknown key 'run.sed'; did you mean 'run.seed'?",
    ]
    assert error_of({}) == ["the section [model] is missing"]


def test_contradictions() -> None:
    assert "a process needs at least one stage" in error_of(with_model(run={"processes": 4, "stages": 2}))[0]
    assert (
        "expected 2, one for each stage after the first" in error_of(with_model(run={"stages": 3, "split": ["a"]}))[0]
    )


def test_replicas_share_the_processes() -> None:
    def problem(**run: int) -> str:
        return error_of(with_model(run=run))[0]

    assert "every replica needs equally many processes" in problem(processes=3, stages=3, replicas=2)
    assert "so there are at most 4" in problem(processes=6, stages=2, replicas=2)
    assert "run.replicas: expected" in problem(replicas=0)
    assert from_mapping(with_model(run={"processes": 4, "stages": 2, "replicas": 2})).run.replicas == 2
    assert from_mapping(with_model(run={"replicas": 3})).run.processes == 1


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: no such file"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)


def test_syntax_error_shows_the_line(tmp_path: Path) -> None:
    path = tmp_path / "conf.toml"
    path.write_text('[model]\nname = "mlp"\n[run]\nepochs = ten\n')
    with pytest.raises(ConfigError, match=r"conf\.toml: not valid TOML: .*line 4.*\n  4 \| epochs = ten"):
        load(path)
    path.write_text("[model")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(path)


def test_encodings(tmp_path: Path) -> None:
    path = tmp_path / "conf.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\nname = "mlp"\n')
    assert load(path).model.name == "mlp"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        load(path)
