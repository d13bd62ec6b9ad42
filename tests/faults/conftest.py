"""The fault suite: every test injects faults into real processes, and the session ends with a table of what happened.

`make faults` runs all of it, together with the tests elsewhere that `tests/support/fault_cover.py` names; `make test`
runs the core. With `UNLATCH_FAULT_TABLE=table.md` (or `.json`) the table is written down as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fault_cover import ELSEWHERE

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _patient_launcher(patient_launcher: None) -> None:
    """All tests here want the cause, not the first echo."""


class Row:
    """A line of the table that a test fills in.

    **Arguments:** `number`: of the fault, as in `docs/faults.md`; `injected`: what and where.
    """

    def __init__(self, item: pytest.Item, number: str, injected: str) -> None:
        self._item = item
        self._key = f"fault {number} {injected}"
        self._note(None, "")

    def _note(self, seconds: float | None, outcome: str) -> None:
        others = [kept for kept in self._item.user_properties if kept[0] != self._key]
        self._item.user_properties[:] = [*others, (self._key, json.dumps([seconds, outcome]))]

    def found(self, outcome: str, seconds: float | None = None) -> None:
        """What came of it, and after how long somebody knew."""
        self._note(seconds, outcome)


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`row("F1", "kill stage 1")` opens a line; its `found` fills it in."""
    return lambda number, injected: Row(request.node, number, injected)


class Line(NamedTuple):
    fault: str
    injected: str
    seconds: float | None
    outcome: str


def table(reports: list[Any]) -> list[Line]:
    """All lines that reports of finished tests hold, and one for each test elsewhere."""
    lines: list[Line] = []
    elsewhere: dict[str, list[str]] = {}
    for report in reports:
        for key, value in report.user_properties:
            if key.startswith("fault "):
                _, number, injected = key.split(" ", 2)
                seconds, outcome = json.loads(value)
                lines.append(Line(number, injected, seconds, outcome if report.passed else "FAILED"))
        test = report.nodeid.split("[")[0]
        if test in ELSEWHERE:
            elsewhere.setdefault(test, []).append(report.outcome)
    for test, outcomes in elsewhere.items():
        number, injected = ELSEWHERE[test]
        worst = next((outcome for outcome in ("failed", "skipped") if outcome in outcomes), "passed")
        lines.append(Line(number, injected, None, f"{worst.replace('failed', 'FAILED')}: {test} ({len(outcomes)})"))
    return sorted(lines, key=lambda line: (len(line.fault), line.fault))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for kind in ("passed", "failed", "skipped", "error") for r in terminalreporter.getreports(kind)]
    # Files that could not be read have reports too.
    reports = [report for report in reports if isinstance(report, pytest.TestReport)]
    lines = table(reports)
    if not lines:
        return
    rows = [("fault", "injected", "detected in", "outcome")]
    rows += [(n, injected, "" if s is None else f"{s:.2f} s", outcome) for n, injected, s, outcome in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    terminalreporter.section("faults")
    for row in rows:
        terminalreporter.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if (path := os.environ.get("UNLATCH_FAULT_TABLE")) is not None:
        Path(path).write_text(_written(path, rows, lines), encoding="utf-8")


def _written(path: str, rows: list[tuple[str, ...]], lines: list[Line]) -> str:
    if path.endswith(".json"):
        return json.dumps([line._asdict() for line in lines], indent=1) + "\n"
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" * 4 + "|", *body]) + "\n"
