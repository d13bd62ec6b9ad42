"""`compile` in settings and on the command line: what trains, what is measured, and what is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

#: Needs no C++ compiler.
BACKEND = ("--set", "run.compile=aot_eager")


def test_settings_and_overrides_reach_the_run_and_stay_with_it(unlatch, conf, cut):
    flags = ("--method", "dtr", *cut, "--epochs", 1, "--set", "data.subset=512")
    trained = unlatch("train", conf, *flags, *BACKEND, "--out", "run")
    assert trained.exit_code == 0, trained.output
    assert tomllib.loads(Path("run/config.toml").read_text())["run"]["compile"] == "aot_eager"
    plain = unlatch("train", conf, *flags, "--out", "plain")
    assert plain.exit_code == 0
    losses = [json.loads(Path(folder, "summary.json").read_text())["eval_loss"] for folder in ("run", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_table_says_more(unlatch, conf):
    conf.write_text(conf.read_text() + 'stages = 2\ncompile = {backend = "aot_eager", full_graph = true}\n')
    result = unlatch("train", conf)
    assert result.exit_code == 2
    assert "compile has no 'full_graph'. Did you mean 'fullgraph'?" in " ".join(result.stderr.split())


def test_anything_else_is_refused_with_the_name_of_the_setting(unlatch, conf):
    result = unlatch("train", conf, "--set", "run.compile=3")
    assert result.exit_code == 2
    assert "run.compile: expected true, false, the name of a backend or a table, got 3" in result.stderr


def test_the_flag_keeps_how_the_file_compiles(unlatch, conf, cut):
    conf.write_text(conf.read_text() + 'compile = {backend = "aot_eager", fullgraph = false}\n')
    trained = unlatch("train", conf, "--method", "dtr", *cut, "--epochs", 1, "--set", "data.subset=512", "--compile")
    assert trained.exit_code == 0, trained.output
    kept = tomllib.loads(Path("runs/dtr-1/config.toml").read_text())["run"]["compile"]
    assert kept == {"backend": "aot_eager", "fullgraph": False}


def test_the_flag_takes_inductor_where_the_file_says_nothing(unlatch, conf):
    """Refused for its method, so that nothing is compiled here."""
    result = unlatch("train", conf, "--method", "zb-h1", "--stages", 2, "--compile")
    assert result.exit_code == 2
    assert "compile: zb-h1 does the two halves of a backward apart" in " ".join(result.stderr.split())


def test_bench_measures_what_can_be_compiled_twice(unlatch, conf):
    flags = ("--repeats", 1, "--steps", 2, "--skip", 0, "--processes", 1, "--stages", 2, "--json")
    result = unlatch("bench", conf, "--methods", "dtr,zb-h1", *flags, *BACKEND)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["methods"]
    assert list(found) == ["bp, one process", "bp, one process, compiled", "dtr", "dtr, compiled", "zb-h1"]
    assert "note: compile: zb-h1 does the two halves" in result.stderr


def test_check_is_about_methods_and_compiles_nothing(unlatch, conf):
    checked = unlatch("check", conf, "--method", "dtr", "--stages", 2, "--set", "run.compile=no-such-backend")
    assert checked.exit_code == 0, checked.output
