"""Settings of any content: a `Config` that can be used and written down again, or a `ConfigError`."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tomli_w import dumps

from fuzzing import altered, cases, damaged, outcome, scalars, texts, values
from unlatch import methods
from unlatch.config import Config, from_mapping, load
from unlatch.errors import ConfigError, UnlatchError

FULL = from_mapping({"model": {"name": "mlp"}}).model_dump(exclude_none=True)
SECTIONS = {name: list(FULL[name]) for name in FULL}
TEXT = dumps(FULL)

#: TOML has no null, and its tables have text for keys.
junk = values.filter(lambda value: "None" not in repr(value))


def used(config: Any) -> None:
    """What every command does with settings once they are read."""
    if isinstance(config, UnlatchError):
        assert isinstance(config, ConfigError)
        return
    assert isinstance(config, Config)
    outcome(config.loss_fn)
    outcome(config.optimizer_factory(), [torch.nn.Parameter(torch.zeros(2))])
    config.lr_factory(10).curve(3)
    outcome(methods.get, config.method.name, **config.method.options)
    assert from_mapping(tomllib.loads(config.dump())).dump() == config.dump()


@cases(300)
@given(altered(FULL, junk))
@example({**FULL, "optimizer": {"name": ".", "lr": 0.1}})
@example({**FULL, "optimizer": {"name": ".a:b"}})
@example({**FULL, "run": {"loss": ".:x"}})
def test_settings_with_other_values(tree):
    used(outcome(from_mapping, tree))


@cases(200)
@given(st.dictionaries(st.sampled_from([*SECTIONS, "x"]), values, max_size=4))
def test_settings_made_of_anything(tree):
    used(outcome(from_mapping, tree))


@cases(300)
@given(damaged(TEXT.encode(), most=6))
@example(b"\xff\xfe")
@example(b"\xef\xbb\xbf[model]\nname='mlp'")
@example(b"a = " + b"[" * 5000)
@example(b"a = " + b"9" * 5000)
@example(b"a.b" + b".c" * 5000 + b" = 1")
def test_damaged_files(tmp_path, raw):
    (tmp_path / "conf.toml").write_bytes(raw)
    used(outcome(load, tmp_path / "conf.toml"))


keys = st.sampled_from([f"{section}.{key}" for section in SECTIONS for key in SECTIONS[section]])


@cases(300)
@given(st.lists(st.tuples(st.one_of(keys, texts), scalars.map(str)).map("=".join), max_size=4))
@example(["model.name=mlp", "model.name.x=1"])
@example(["a.b=" + "[" * 5000])
@example(["run.seed=" + "9" * 5000])
@example(["run.stages=10000000000000000000000"])
@example(["run.out=../../x"])
def test_overrides(overrides):
    used(outcome(load, None, ["model.name=mlp", *overrides]))


@pytest.mark.parametrize("path", ["", ".", "/", "/dev/null", "x\0y", "a" * 5000, "nowhere/conf.toml"])
def test_paths_that_are_no_files(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        load(path)


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"conf\.toml"):
        load(tmp_path / "file" / "conf.toml")
