"""Reversible networks and delayed methods at the command line: what a run tells about its stages and its gradients."""

from __future__ import annotations

import json

import pytest

from unlatch import methods
from unlatch.io import metrics
from unlatch.report.probe import read_probe

REVERSIBLE = """
[model]
name = "revnet8"
width = 4
[data]
batch_size = 256
[method]
name = "petra"
microbatches = 2
tolerance = 1e-6
[run]
stages = 4
"""
DELAYED = [
    name
    for name in methods.names()
    if issubclass(methods.base.METHODS[name], methods.Delayed)
    and not getattr(methods.get(name).schedule(2), "independent", False)
]


@pytest.fixture
def reversible(conf):
    conf.write_text(REVERSIBLE)
    return conf


def test_a_run_tells_per_stage_what_it_held_how_late_it_was_and_how_well_it_inverted(unlatch, reversible, tmp_path):
    result = unlatch("train", reversible, "--out", "run")
    assert result.exit_code == 0, result.output
    heads = next(line for line in result.output.splitlines() if line.startswith("stage  updates late"))
    assert " ".join(heads.split()) == ("stage updates late ticks late under way stored waiting old weights input error")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [s["delay"] for s in summary["stages"]] == [6, 4, 2, 0]
    assert [s["stored_bytes"] > 0 for s in summary["stages"]] == [True, False, True, True]
    assert [s["reconstruction_error"] is not None for s in summary["stages"]] == [False, True, False, False]
    reversed_one = summary["stages"][1]
    assert 0 < reversed_one["usual_reconstruction_error"] <= reversed_one["reconstruction_error"]
    (warning,) = (note for note in summary["notes"] if "reconstructs its input" in note)
    assert warning.startswith("stage 1 ")
    assert "store=(1,)" in warning
    last = metrics.read("run")[-1]
    measured = ("stored_bytes", "message_bytes", "delay", "staleness", "reconstruction_error")
    assert {f"stage1/{name}" for name in measured} <= set(last)
    assert (tmp_path / "run" / "reconstruction.png").stat().st_size > 1000


def test_the_offer_to_store_an_input_is_a_setting(unlatch, reversible, tmp_path):
    result = unlatch("train", reversible, "--out", "run", "--set", "method.store=[1]")
    assert result.exit_code == 0, result.output
    assert "input error" not in result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stages"][1]["stored_bytes"] > 0
    assert not [note for note in summary["notes"] if "reconstructs" in note]
    assert not (tmp_path / "run" / "reconstruction.png").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("method.store=1", "store lists numbers of stages"),
        ("method.store=[4]", "store names stage 4, but the model is cut into 4"),
        ("method.tolerance=much", "tolerance must be above 0 and finite, got 'much'"),
    ],
)
def test_bad_settings_are_answered_in_words(unlatch, reversible, setting, message):
    result = unlatch("train", reversible, "--set", setting)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_reports_compare_the_errors_of_inputs(unlatch, reversible):
    for method in ("petra", "dsp"):
        flags = ("--set", "method.tolerance=1") if method == "petra" else ("--method", "dsp")
        assert unlatch("train", reversible, "--out", method, *flags).exit_code == 0
    result = unlatch("compare", "petra", "dsp", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [error is not None for error in rows[0]["input_errors"]] == [False, True, False, False]
    assert rows[1]["input_errors"] == [None] * 4
    assert "input error" in unlatch("compare", "petra", "dsp").output


@pytest.mark.parametrize("method", DELAYED)
def test_gradients_of_every_delayed_method_can_be_probed(unlatch, conf, method, tmp_path):
    flags = ["--probe", "gradients", "--probe-every", 3, "--out", "run", "--set", "method.microbatches=3"]
    flags += {"layerpipe": ["--set", "method.mode=stages"], "petra": ["--set", "method.store=[0, 1]"]}.get(method, [])
    result = unlatch("train", conf, "--method", method, "--stages", 3, *flags)
    assert result.exit_code == 0, result.output
    found = read_probe(tmp_path / "run")
    assert {(c.stage, c.reference) for c in found} == {(s, r) for s in range(3) for r in ("forward", "current")}
    assert {c.update for c in found} == {0, 3}
    # Before the first update nothing is late.
    assert all(c.relative_error < 1e-5 for c in found if c.update == 0)
    assert (tmp_path / "run" / "probe.png").stat().st_size > 1000
