"""`unlatch init`: what it writes trains as it is, tells all that can be set, and replaces nothing."""

from __future__ import annotations

import re
from pathlib import Path

from unlatch.config import Config, load

KEY = re.compile(r"^# (\w+ = [^#]+?)\s*(?:#.*)?$", re.M)


def test_it_trains_as_it_is(unlatch):
    written = unlatch("init")
    assert written.exit_code == 0
    assert "unlatch train unlatch.toml" in written.stdout
    trained = unlatch("train", "unlatch.toml", "--out", "run", "--epochs", 1)
    assert trained.exit_code == 0, trained.output
    assert "done in" in trained.stdout


def test_every_setting_is_in_it_with_its_default(unlatch):
    unlatch("init", "conf.toml")
    text = Path("conf.toml").read_text()
    as_it_is = load("conf.toml")
    Path("all.toml").write_text(KEY.sub(r"\1", text))
    everything = load("all.toml").model_dump()
    for section, values in as_it_is.model_dump(exclude_unset=False).items():
        fields = set(Config.model_fields[section].annotation.model_fields)
        assert fields <= {key for key in everything[section] if re.search(rf"^(# )?{key} = ", text, re.M)}, section
        defaults = {key: value for key, value in values.items() if value is not None and value != {}}
        assert {key: everything[section][key] for key in defaults} == defaults


def test_a_file_that_is_there_stays(unlatch):
    Path("conf.toml").write_text("mine")
    result = unlatch("init", "conf.toml")
    assert result.exit_code == 2
    assert "conf.toml: exists" in result.stderr
    assert Path("conf.toml").read_text() == "mine"


def test_folders_on_the_way_are_made_and_a_folder_is_no_file(unlatch):
    assert unlatch("init", "deep/er/conf.toml").exit_code == 0
    assert Path("deep/er/conf.toml").is_file()
    refused = unlatch("init", "deep")
    assert refused.exit_code == 2
    assert "is a folder" in refused.stderr
