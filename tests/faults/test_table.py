"""The list of faults is complete, and the tests elsewhere that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fault_cover import COVER, ELSEWHERE

ROOT = Path(__file__).parents[2]
NUMBERS = [f"F{number}" for number in range(1, 26)]


@pytest.mark.parametrize("test", ELSEWHERE)
def test_named_tests_exist(test: str) -> None:
    file, name = test.split("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_every_fault_is_tried() -> None:
    here = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    tried = {*re.findall(r'row\(\s*"(F\d+)"', here), *COVER}
    assert [number for number in NUMBERS if number not in tried] == []


def test_every_fault_is_described() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (F\d+) \|", page, re.M) == NUMBERS
