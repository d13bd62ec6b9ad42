"""Bad input: the right exit code, a message that says what to do, and never a stack trace."""

from __future__ import annotations

import sys

import pytest

from unlatch.transport import launch

BAD = {
    "unknown key": (["train", "conf.toml", "--set", "optimizer.momentun=0.5"], 2, ["momentun", "momentum"]),
    "unknown section": (["train", "conf.toml", "--set", "optimiser.lr=1"], 2, ["optimiser", "optimizer"]),
    "unknown method": (["train", "conf.toml", "--method", "dtrr"], 2, ["no method 'dtrr'", "Did you mean 'dtr'"]),
    "unknown model": (["train", "conf.toml", "--set", "model.name=resnet-20"], 2, ["Did you mean 'resnet20'"]),
    "unknown option of a method": (["train", "conf.toml", "--set", "method.betta=1"], 2, ["betta"]),
    "unknown format of messages": (["train", "conf.toml", "--messages", "fp8"], 2, ["run.messages", "'int8'", "fp8"]),
    "unknown transport": (["train", "conf.toml", "--transport", "tcp"], 2, ["run.transport", "'nccl'", "tcp"]),
    "nccl without a device for it": (
        ["train", "conf.toml", "--transport", "nccl"],
        2,
        ["from one cuda device to another", "computes on cpu", "leave transport out"],
    ),
    "wrong split name": (
        ["train", "conf.toml", "--stages", "2", "--set", 'run.split=["layer9"]'],
        2,
        ["layer9"],
    ),
    "more stages than blocks": (["train", "conf.toml", "--stages", "9"], 2, ["4 blocks", "1 to 4 stages, not 9"]),
    "more processes than stages": (["train", "conf.toml", "--processes", "3"], 2, ["processes = 3", "stages = 1"]),
    "missing data": (
        ["train", "conf.toml", "--set", "data.name=cifar10", "--data-dir", "nowhere"],
        2,
        ["nowhere"],
    ),
    "missing file": (["train", "absent.toml"], 2, ["absent.toml", "no such file"]),
    "no settings": (["train"], 2, ["unlatch train conf.toml"]),
    "nothing to resume": (["train", "--resume", "nowhere"], 2, ["nowhere", "no run to continue"]),
    "nan loss": (["train", "conf.toml", "--set", "optimizer.lr=1e30"], 1, ["the loss of batch", "Lower"]),
    "probe on two processes": (
        ["train", "conf.toml", "--stages", "2", "--processes", "2", "--probe", "gradients"],
        2,
        ["--processes 1"],
    ),
    "unknown method to show": (["methods", "petar"], 2, ["Did you mean 'petra'"]),
    "too few parts": (["methods", "pipedream-2bw", "--microbatches", "1"], 2, ["as many micro-batches"]),
    "no run to compare": (["compare", "nowhere"], 2, ["nowhere", "summary.json"]),
    "nothing to export": (["export", "nowhere", "out.safetensors"], 2, ["nowhere", "no checkpoint"]),
    "no methods to bench": (["bench", "conf.toml", "--methods", ","], 2, ["--methods"]),
    "check with unknown method": (["check", "conf.toml", "--method", "x"], 2, ["no method 'x'"]),
    "a device that is not there": (
        ["train", "conf.toml", "--stages", "2", "--processes", "2", "--device", "cuda"],
        2,
        ["finds no cuda device on this machine"],
    ),
    "no device at all": (["check", "conf.toml", "--device", "gpu"], 2, ["device must be", "got 'gpu'"]),
    "unknown command": (["trian"], 2, ["No such command"]),
    "unknown flag": (["train", "conf.toml", "--stage", "2"], 2, ["--stage"]),
    "not a number": (["train", "conf.toml", "--stages", "two"], 2, ["--stages"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(unlatch, conf, case):
    arguments, code, phrases = BAD[case]
    result = unlatch(*arguments)
    assert result.exit_code == code, result.output
    for phrase in phrases:
        assert phrase in result.stderr
    assert "Traceback" not in result.output


def test_a_folder_with_something_in_it_is_kept(unlatch, conf, tmp_path):
    unlatch("train", conf, "--out", "run")
    again = unlatch("train", conf, "--out", "run")
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert unlatch("train", conf, "--out", "run", "--overwrite").exit_code == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert unlatch("train", conf, "--out", "mine", "--overwrite").exit_code == 2
    assert (tmp_path / "mine" / "thesis.txt").exists()


FAULTY = """
import torch

calls = 0

def loss(output, target):
    global calls
    calls += 1
    if calls > 3:
        raise ValueError("the cat sat on the keyboard")
    return torch.nn.functional.cross_entropy(output, target)
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch, conf):
    # On a busy machine the cause may arrive long after its echo from the other rank.
    monkeypatch.setattr(launch, "_GRACE", 100.0)
    (tmp_path / "faulty_loss.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_loss", raising=False)
    conf.write_text(conf.read_text() + 'stages = 2\nloss = "faulty_loss:loss"\n')
    return conf


@pytest.mark.parametrize("processes", [1, 2])
def test_failure_in_user_code_shows_its_traceback_once(unlatch, faulty, processes):
    result = unlatch("train", faulty, "--processes", processes, "--method", "fdg")
    assert result.exit_code == 1
    assert "stage 1 failed in the forward of batch" in result.stderr
    assert result.stderr.count('raise ValueError("the cat sat on the keyboard")') == 1
    assert "faulty_loss.py" in result.stderr


@pytest.mark.parametrize("command", ["train", "methods", "check", "compare", "bench", "export"])
def test_help_has_an_example(unlatch, command):
    result = unlatch(command, "--help")
    assert result.exit_code == 0
    assert f"  unlatch {command}" in result.stdout
    assert "--json" in result.stdout


def test_version(unlatch):
    import unlatch as package

    assert unlatch("--version").stdout.strip() == package.__version__
