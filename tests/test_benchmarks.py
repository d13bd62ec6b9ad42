"""Benchmarks are not run by tests; what they import from each other is at least there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(FOLDER.glob("*.py"))


def missing(source: str, others: dict[str, set[str]]) -> list[str]:
    """What a file wants of others, whose names are given, and does not find there."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in others
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0) if module in others:
                found += [f"{module}.{alias.name}" for alias in names if alias.name not in others[module]]
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in modules:
                if attr not in others[modules[name]]:
                    found.append(f"{modules[name]}.{attr}")
    return found


def names(source: str) -> set[str]:
    """Whatever the top level of a file defines or imports."""
    return {name for node in ast.parse(source).body for name in _bound(node)}


def _bound(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        case _:
            inside = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from (n.id for n in inside)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_benchmark_imports_from_another_one_is_there(path):
    others = {other.stem: names(other.read_text(encoding="utf-8")) for other in FILES}
    assert missing(path.read_text(encoding="utf-8"), others) == []


@pytest.mark.parametrize(
    "source", ["from common import gone", "import common\ncommon.gone()", "import common as c\nprint(c.gone)"]
)
def test_what_is_not_there_is_noticed(source):
    others = {"common": names("import json\nA, B = 1, 2\nC: int = 3\ndef write(): ...\n")}
    assert others["common"] == {"json", "A", "B", "C", "write"}
    assert missing(source, others) == ["common.gone"]
    assert missing("from common import A, C, json, write\nimport common\ncommon.write", others) == []
