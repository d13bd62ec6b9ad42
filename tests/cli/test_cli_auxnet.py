"""AuxNet from the command line: borders, sizes, formula, recalibration, data built on every rank."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from commands import same_weights
from unlatch.io import metrics
from unlatch.models import build

CONVOLUTIONS = """
[model]
name = "resnet8"
[data]
batch_size = 256
subset = 512
[method]
name = "auxnet"
measure = 1
[run]
stages = 2
split = ["layer3.0"]
"""


@pytest.fixture
def auxnet(tmp_path):
    path = tmp_path / "auxnet.toml"
    path.write_text(CONVOLUTIONS)
    return path


def test_a_run_tells_what_happens_at_its_borders(unlatch, auxnet, tmp_path):
    flags = ("--recalibrate", 2, "--probe", "gradients", "--probe-every", 1)
    result = unlatch("train", auxnet, "--out", "run", *flags)
    assert result.exit_code == 0, result.output
    assert "note: the AuxNet of stage 1 has " in result.output
    assert "with batch norm recalibrated)" in result.output
    assert "speed-up formula with the measured terms: " in result.output
    rows = [row for row in metrics.read(tmp_path / "run") if "measured/update" in row]
    assert [row["measured/update"] for row in rows] == [0, 1]
    measured = {"border1/violation", "border1/jump", "border1/multiplier", "border1/loss"}
    assert all(measured | {"stage0/cosine", "stage1/cosine"} <= row.keys() for row in rows)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [net["stage"] for net in summary["auxnets"]] == [1]
    # This network has one block per resolution, and the AuxNet takes one of each.
    assert summary["auxnets"][0]["flop_ratio"] == 1.0
    assert summary["recalibrated_accuracy"] != summary["accuracy"]
    formula = summary["layer_parallel"]
    work = formula["forward_seconds"] + formula["backward_seconds"]
    extra = sum(formula[f"{part}_seconds"] for part in ("data", "border", "aux_forward", "aux_backward"))
    assert formula["step_seconds"] == pytest.approx(extra + work / 2)
    assert (tmp_path / "run" / "measures.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run" / "probe.png").exists()

    result = unlatch("compare", "run", "-o", "page.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert "What the methods measure" in page
    assert "jump: distance of the gradient on the input" in page
    assert f"run: speed-up formula with the measured terms: {formula['text']}; a step of this run took " in page


def test_other_methods_have_no_borders(unlatch, conf, tmp_path):
    result = unlatch("train", conf, "--method", "dgl", "--stages", 2, "--out", "run", "--json")
    assert result.exit_code == 0, result.output
    assert not {"layer_parallel", "auxnets", "recalibrated_accuracy"} & json.loads(result.stdout).keys()
    assert not (tmp_path / "run" / "measures.png").exists()
    assert unlatch("compare", "run").exit_code == 0
    result = unlatch("train", conf, "--method", "dgl", "--stages", 2, "--out", "probed", "--probe", "gradients")
    assert result.exit_code == 2
    assert "dgl has no border to measure at" in result.output
    assert not (tmp_path / "probed").exists()


def test_a_run_goes_on_and_its_network_is_the_plain_model(unlatch, auxnet, tmp_path):
    once = ("--set", "lr.shape=constant", "--set", "optimizer.lr=0.05", "--set", "method.form=lagrangian")
    once += ("--set", "method.multiplier=synthesiser")
    assert unlatch("train", auxnet, "--epochs", 2, "--out", "whole", *once).exit_code == 0
    assert unlatch("train", auxnet, "--epochs", 1, "--out", "parts", *once).exit_code == 0
    result = unlatch("train", "--resume", "parts", "--epochs", 2)
    assert result.exit_code == 0, result.output
    for name in ("whole", "parts"):
        assert unlatch("export", name, f"{name}.safetensors").exit_code == 0
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "parts"))
    assert all(one[name].equal(other[name]) for name in one)
    build("resnet8", in_channels=1).load_state_dict(one)


def test_a_factory_by_name(unlatch, auxnet, tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def tiny(border):\n"
        "    channels, height, width = border.shape\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d((height, width)), nn.Conv2d(1, channels, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = unlatch("train", auxnet, "--set", "method.factory=nets:tiny", "--json", "--out", "run")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["auxnets"][0]["parameters"] == 64
    result = unlatch("train", auxnet, "--set", "method.factory=nets:tin")
    assert result.exit_code == 2
    assert "auxnet: factory 'nets:tin': no function 'tin' in it. Did you mean 'tiny'?" in result.output


def test_every_process_may_build_its_data(unlatch, conf, cut, tmp_path):
    """Only the first one had a loader, and the others refused to go on without."""
    flags = ("--method", "auxnet", *cut, "--recalibrate", 1)
    assert unlatch("train", conf, *flags, "--out", "sent").exit_code == 0
    result = unlatch("train", conf, *flags, "--processes", 2, "--set", "method.data=build", "--out", "built")
    assert result.exit_code == 0, result.output
    assert same_weights("sent", "built")
