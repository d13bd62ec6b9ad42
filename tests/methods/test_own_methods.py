"""Methods that are not registered: found by `package.module:Class`, and told apart from those they derive from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unlatch
from unlatch import methods
from unlatch.errors import ConfigError


@dataclass(frozen=True)
class Slower(methods.DTR):
    """DTR by another name, which it does not say."""

    gamma: float = 0.5


def run_of(method: str) -> unlatch.Run:
    torch.manual_seed(0)
    return unlatch.parallelize(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        methods.get(method, gamma=0.5, microbatches=1),
        stages=2,
        loss_fn=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        split=["2"],
    )


def feed(run: unlatch.Run, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        run.step(torch.randn(8, 4, generator=generator), torch.arange(8) % 2)


OUTSIDE = f"{__name__}:Slower"


def test_it_is_found_and_says_where():
    assert methods.get(OUTSIDE) == Slower()
    assert methods.get(OUTSIDE, gamma=0.25).gamma == 0.25
    assert (Slower().address, methods.DTR().address) == (OUTSIDE, "dtr")
    assert "Slower" not in methods.names()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{__name__}:Slow", "no function 'Slow' in it. Did you mean 'Slower'?"),
        (f"{__name__}:OUTSIDE", "OUTSIDE is an object of str, made already"),
        (f"{__name__}:feed", "expected a subclass of unlatch.methods.Method, got <function feed"),
        ("unlatch.methods:Method", "with a schedule and rules of its own, got one without"),
    ],
)
def test_what_is_none_is_refused(name, words):
    with pytest.raises(ConfigError) as refused:
        methods.get(name)
    assert words in str(refused.value)


def test_all_problems_of_options_at_once():
    found = methods.problems(OUTSIDE, {"gama": 1, "accumulate": 0, "predict": "none", "microbatches": "many"})
    assert len(found) == 3
    assert "there is no option 'gama'. Did you mean 'gamma'?" in found[0]
    assert methods.problems(OUTSIDE, {"gamma": 0.3}) == []


def saved(run: unlatch.Run, path: Path) -> dict[str, Any]:
    run.save(path)
    return json.loads((path / "state.json").read_text())["state"]


def test_its_checkpoint_is_not_that_of_its_parent(tmp_path):
    """A subclass with the name of its parent passed for it, and batches under way went on by another's rules."""
    with run_of(OUTSIDE) as run:
        feed(run, 3)
        state = saved(run, tmp_path / "own")
    assert (state["run"]["method"], state["loop"]["under_way"]) == (OUTSIDE, 2)
    with run_of(OUTSIDE) as same:
        same.load(tmp_path / "own")
        assert saved(same, tmp_path / "same")["loop"]["under_way"] == 2
    with run_of("dtr") as parent:
        parent.load(tmp_path / "own")
        assert saved(parent, tmp_path / "parent")["loop"]["under_way"] == 0
