"""Diffs in the documentation: both sides run and agree, and few lines differ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DIFFS = [
    pytest.param(diff, id=f"{page.stem}-{number}")
    for page in sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    for number, diff in enumerate(re.findall(r"^```diff\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S))
]


def side(diff: str, sign: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", sign))


@pytest.mark.parametrize("diff", DIFFS)
def test_both_sides_train_alike(diff):
    if "transformers" in diff:
        pytest.importorskip("transformers")
    before, after = {}, {}
    exec(side(diff, "-"), before)
    exec(side(diff, "+"), after)
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
    assert after["weights"].keys() == before["weights"].keys()
    for name, t in after["weights"].items():
        torch.testing.assert_close(t, before["weights"][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("diff", DIFFS)
def test_at_most_five_lines_are_new(diff):
    assert len([line for line in diff.splitlines() if line.startswith("+")]) <= 5
