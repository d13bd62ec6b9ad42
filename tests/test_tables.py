"""Tables of measured numbers in the documentation are those of the result files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_tables", ROOT / "docs" / "write_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = _script()
MARKED = [page for page in tables.PAGES if tables.MARKED.search(page.read_text(encoding="utf-8"))]


def test_the_readme_has_ratio_tables() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    there = {found[1] for found in tables.MARKED.finditer(text)}
    assert {"demo", "speed", "accuracy-digits", "memory", "prediction"} <= there


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in MARKED])
def test_tables_agree_with_the_result_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.rewritten(text) == text, "run `python docs/write_tables.py`"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in tables.PAGES])
def test_every_marker_has_its_end(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->") == len(tables.MARKED.findall(text))


def test_a_number_that_was_changed_by_hand_is_found() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks" / "results" / "pipeline_speed.json").read_text(encoding="utf-8"))
    best = max(ratio["median"] for ratio in found["ratio"].values())
    changed = text.replace(f" {best:.2f} |", f" {best + 1:.2f} |", 1)
    assert changed != text
    assert tables.rewritten(changed) == text


def test_a_result_that_changed_is_found(tmp_path: Path) -> None:
    name = {"ratio": {"fdg": {"median": 1.5, "min": 1.25, "max": 1.75, "repeats": 3}}, "command": "x"}
    (tmp_path / "pipeline_speed.json").write_text(json.dumps(name))
    page = "<!-- table: speed -->\nold\n<!-- end of table -->\n"
    assert "| fdg | 1.50 | 1.25 to 1.75 | 3 |" in tables.rewritten(page, tmp_path)


def test_what_was_not_measured_says_so_and_unknown_tables_are_refused(tmp_path: Path) -> None:
    assert "Not measured yet" in tables.made("speed", tmp_path)
    with pytest.raises(SystemExit, match="no table 'sped'"):
        tables.made("sped")
