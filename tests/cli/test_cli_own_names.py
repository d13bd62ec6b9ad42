"""Models, data, losses and methods of users, named `package.module:Name`: found beside the settings, on ranks too."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from commands import Command, same_weights
from unlatch import lookup

MODULE = """
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn
from unlatch.methods import DTR
from unlatch.methods.options import at_least

def make(width=16):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

def digits():
    x = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(64) % 10
    return (x, y), (x, y)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

@dataclass(frozen=True)
class Patient(DTR):
    patience: Annotated[int, at_least(0)] = 1

finished = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
"""
SETTINGS = """
[model]
name = "mymod:make"
width = 24
[data]
name = "mymod:digits"
batch_size = 16
[method]
name = "mymod:Patient"
patience = 3
[lr]
shape = "constant"
[run]
stages = 2
split = ["3"]
epochs = 2
loss = "mymod:loss"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A settings file with a module beside it, in a folder that Python knows nothing of."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "mymod.py").write_text(MODULE)
    (folder / "conf.toml").write_text(SETTINGS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(lookup, "_ALSO", [])
    yield folder / "conf.toml"
    sys.modules.pop("mymod", None)


def forget(monkeypatch, tmp_path):
    """As in a new process."""
    sys.modules.pop("mymod", None)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.startswith(str(tmp_path))])
    monkeypatch.setattr(lookup, "_ALSO", [])


def test_all_of_a_users_own(unlatch, own, monkeypatch, tmp_path):
    result = unlatch("train", own, "--save-every", "3 batches", "--keep-last", 9)
    assert result.exit_code == 0, result.output
    assert "Patient(" in result.stdout
    assert "patience=3" in result.stdout
    assert Path("runs/mymod-Patient-1/summary.json").is_file()
    shutil.copytree("runs/mymod-Patient-1", "copy", symlinks=True)
    forget(monkeypatch, tmp_path)
    again = unlatch("train", "--resume", "copy/checkpoints/step-00000003")
    assert again.exit_code == 0, again.output
    assert "step 3, 2 of them under way" in again.stdout
    assert "patience=3" in again.stdout
    assert same_weights("copy", "runs/mymod-Patient-1")


def test_on_ranks_and_under_torchrun(greenhouse, unlatch, own):
    assert unlatch("train", own, "--out", "inline").exit_code == 0
    ranks = unlatch("train", own, "--processes", 2, "--out", "ranks")
    assert ranks.exit_code == 0, ranks.output
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "unlatch")
    with Command("train", own, "--out", "torchrun", launcher=launcher, greenhouse=greenhouse) as command:
        code, said = command.ended()
    assert code == 0, said
    assert same_weights("inline", "ranks")
    assert same_weights("inline", "torchrun")


def test_a_method_by_flag(unlatch, conf, own):
    result = unlatch("train", own, "--method", "unlatch.methods.fdg:FDG", "--set", "method.gamma=0.5")
    assert result.exit_code == 0, result.output
    assert "gamma=0.5" in result.stdout
    shown = unlatch("methods", "unlatch.methods.fdg:FDG")
    assert shown.exit_code == 0
    assert "gamma = 1.0" in shown.stdout


@pytest.mark.parametrize(
    ("override", "phrases"),
    [
        ("method.name=mymod:Patien", ["method 'mymod:Patien': no function 'Patien' in it. Did you mean 'Patient'?"]),
        ("method.name=mymod:make", ["expected a subclass of unlatch.methods.Method, got <function make"]),
        ("method.name=unlatch.methods:Delayed", ["with a schedule and rules of its own"]),
        ("method.name=nomod:X", ["there is no module 'nomod'; expected it beside the settings file"]),
        ("method.patience=-1", ["patience must be a whole number, at least 0, got -1"]),
        ("method.patiense=1", ["there is no option 'patiense'. Did you mean 'patience'?"]),
        ("model.widht=3", ["model: model 'mymod:make': there is no option 'widht'. Did you mean 'width'?"]),
        (
            "optimizer.name=mymod:finished",
            ["finished is an object of SGD, made already: expected a class"],
        ),
    ],
)
def test_what_is_wrong_with_them_is_said(unlatch, own, override, phrases):
    result = unlatch("train", own, "--set", override)
    assert result.exit_code == 2, result.output
    said = re.sub(r"\s+", " ", result.stderr)
    assert all(phrase in said for phrase in phrases), said
    assert "Traceback" not in result.output


def test_all_problems_of_a_file_at_once(unlatch, conf):
    """Names and options too, with hints that are right: `dtpr` is dtrp, not dtr, and `train_size` is subset."""
    conf.write_text(
        """
[model]
name = "resnet-20"
[data]
name = "digit"
train_size = 100
[data.options]
train_size = 50
[method]
name = "dtpr"
[optimizer]
learning_rate = 0.1
[lr]
lr_scheduler = "StepLR"
[run]
stages = 0
world_size = 2
"""
    )
    result = unlatch("train", conf)
    assert result.exit_code == 2
    for phrase in (
        "unknown model 'resnet-20'. Did you mean 'resnet20'?",
        "unknown data set 'digit'. Did you mean 'digits'?",
        "unknown key 'data.train_size'; did you mean 'data.subset'?",
        "data.options: train_size is a setting of its own: write it as data.subset",
        "there is no method 'dtpr'. Did you mean 'dtrp'?",
        "optimizer.learning_rate: SGD takes no 'learning_rate'; did you mean 'lr'?",
        "unknown key 'lr.lr_scheduler'; did you mean 'lr.shape'?",
        "run.stages: expected a number above 0",
        "unknown key 'run.world_size'; did you mean 'run.processes'?",
    ):
        assert phrase in result.stderr, phrase
    assert "Traceback" not in result.output


def test_all_options_of_a_method_at_once(unlatch, conf):
    flags = [f"method.{option}" for option in ("microbatches=0", "accumulate=x", "gama=1", "weights=old")]
    result = unlatch("train", conf, "--method", "fdg", *[word for flag in flags for word in ("--set", flag)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 5
    for phrase in (
        "microbatches must",
        "accumulate must",
        "Did you mean 'gamma'?",
        "weights must be one of stash, latest",
    ):
        assert phrase in result.stderr


def test_a_method_by_flag_heals_a_wrong_name_in_the_file(unlatch, conf):
    conf.write_text(conf.read_text() + '[method]\nname = "dtpr"\n')
    assert unlatch("train", conf, "--method", "dtr", "--stages", 2).exit_code == 0


def test_a_continued_run_shows_the_balance_of_its_cut(unlatch, conf, cut):
    first = unlatch("train", conf, "--method", "dtr", "--out", "run", *cut).stdout
    again = unlatch("train", "--resume", "run", "--epochs", 2).stdout
    balance = re.search(r"^balance \d+%", first, re.M)
    assert balance is not None
    assert balance[0] in again
