"""What a notebook shows of a run, a plan and a picture. Cells are code run one after the other in one namespace."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

START = """
import torch, unlatch
from torch import nn
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
x, y = torch.randn(8, 4), torch.randint(2, (8,))
def sgd(params, stage):
    return torch.optim.SGD(params, lr=0.1 / (1 + stage.index))
run = unlatch.parallelize(
    model, "dtr", stages=2, loss_fn=cross_entropy, optimizer=sgd, split=["2"], sample=(x, y)
)
"""


@pytest.fixture
def cells() -> Any:
    """Runs cells; gives the value of the last line of the last one, if it is an expression."""
    namespace: dict[str, Any] = {}

    def run(*texts: str) -> Any:
        for text in texts[:-1]:
            exec(text, namespace)
        return eval(texts[-1], namespace)

    return run


def table(html: str) -> list[list[str]]:
    rows = ElementTree.fromstring(f"<div>{html}</div>").iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_a_run_says_what_it_is_and_how_far(cells):
    run = cells(START, "for _ in range(3): run.step(x, y)", "run")
    assert repr(run).startswith("<Run DTR(")
    assert "2 stages cut at ['2']; 3 batches fed, 2 under way>" in repr(run)
    html = run._repr_html_()
    heads, *rows = table(html)
    assert heads == ["stage", "blocks", "parameters", "relative cost", "sent up"]
    assert [row[1] for row in rows] == ["0 .. 1 (2)", "2"]
    assert [row[4] for row in rows] == ["not measured"] * 2
    assert "delay in updates: 1, 0" in html
    assert "3 batches fed, 2 under way" in html


def test_learning_rates_and_optimizers(cells):
    run = cells(START, "run")
    assert run.lr == {0: [0.1], 1: [0.05]}
    assert list(run.optimizers) == [0, 1]
    for group in run.optimizers[1].param_groups:
        group["lr"] = 0.1
    assert run.lr == 0.1


@pytest.mark.parametrize(
    "what", ["run.plan", "unlatch.methods.get('layerpipe').plan(unlatch.nn.chain(model), 2, 'auto')"]
)
def test_plans(cells, what):
    html = cells(START, what)._repr_html_()
    ElementTree.fromstring(f"<div>{html}</div>")
    assert "balance" in html


def test_what_crosses_a_cut_is_shown_where_it_was_measured(cells):
    heads, *rows = table(cells(START.replace('split=["2"], ', ""), "run.plan")._repr_html_())
    assert heads[3:] == ["ms/micro-batch", "sent up"]
    assert [row[4] for row in rows] == ["256 B", "-"]


def test_pictures_show_themselves(cells):
    draw = "from unlatch.report.timeline import draw_timeline"
    picture = cells(START, "for _ in range(3): run.step(x, y)", draw, "draw_timeline(run.events)")
    assert picture._repr_png_().startswith(b"\x89PNG")
