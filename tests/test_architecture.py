"""Generic code names no method: what it must know, it asks through the hooks of `Method`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import unlatch
from unlatch import methods

#: Rooms, or files of the package, that work for every method alike.
GENERIC = ["cli", "throughput", "config", "report", "demo", "callbacks", "train", "advise", "plan", "runtime"]
GENERIC += ["transport", "nn", "live"]

PACKAGE = Path(unlatch.__file__).parent
#: Modules of `methods` that are about methods in general.
ABOUT_METHODS = {"base", "options", "planner"}


def _subclasses(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)


#: Every class that is a method or a family of them, where the library defines it.
CONCRETE = {kind.__name__ for kind in _subclasses(methods.Method) if kind.__module__.startswith("unlatch.")}
NAMES = set(methods.names())


def violations(source: str) -> list[str]:
    """What a module does that only a method should: one line each."""
    return [f"line {node.lineno}: {found}" for node in ast.walk(ast.parse(source)) for found in _judge(node)]


def _judge(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ImportFrom():
            yield from _imported(node)
        case ast.Import():
            for alias in node.names:
                yield from _module(alias.name)
        case ast.Attribute(value=ast.Name(id="methods"), attr=name) if name in CONCRETE:
            yield f"names the method {name}"
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass" as asks), args=[_, kinds]):
            for name in _names_in(kinds) & CONCRETE:
                yield f"{asks} against the method {name}"
        case ast.Call(func=ast.Name(id="getattr" | "hasattr" as asks), args=[of, *_]) if _about(
            of, "method|rules?|schedule"
        ):
            yield f"{asks} of {ast.unparse(of)}: make it a hook of Method"
        case ast.Compare():
            yield from _compared(node)
        case ast.Match(subject=subject) if _about(subject, "method|rules?") or _is_rule(subject):
            yield f"branches over {ast.unparse(subject)}"


def _imported(node: ast.ImportFrom) -> Iterator[str]:
    module = (node.module or "").split(".")
    if "methods" not in module:
        return
    yield from _module(node.module or "")
    for alias in node.names:
        if alias.name in CONCRETE or (module[-1] == "methods" and inspect.ismodule(getattr(methods, alias.name, None))):
            yield f"imports the method {alias.name}"


def _module(path: str) -> Iterator[str]:
    _, found, inside = path.partition("methods.")
    if found and inside.split(".")[0] not in ABOUT_METHODS:
        yield f"imports the module {path} of a method"


def _compared(node: ast.Compare) -> Iterator[str]:
    sides = [node.left, *node.comparators]
    texts = {text for side in sides for text in _texts_in(side)}
    said = ast.unparse(node)
    if texts & NAMES and any(_about(side, "method|name") for side in sides):
        yield f"compares with the name of a method: {said}"
    if texts and any(_is_rule(side) for side in sides):
        yield f"compares with the name of a rule: {said}"
    for side in sides:
        match side:
            case ast.Call(func=ast.Name(id="type"), args=[of]) if _about(of, "engine|method|rules?|schedule"):
                yield f"asks for the type of {ast.unparse(of)}: {said}"


def _about(node: ast.AST, words: str) -> bool:
    """Whether an expression is called so at its end, as `method`, `run.method`, `self.rules()` or `x["method"]` are."""
    return re.search(rf"(?:^|[\W_])(?:{words})(?:\([^()]*\)|['\"]?\])?$", ast.unparse(node)) is not None


def _is_rule(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("activations", "weights", "statistics", "predictor")


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def _texts_in(node: ast.AST) -> set[str]:
    inside = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {one.value for one in inside if isinstance(one, ast.Constant) and isinstance(one.value, str)}


FILES = [
    path
    for room in GENERIC
    for path in (sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / room])
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_generic_code_names_no_method(path):
    assert violations(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "from ..methods import DTRP",
        "from ..methods.local import Local",
        "from unlatch.methods import Method, PETRA",
        "from ..methods import dtrp",
        "import unlatch.methods.auxnet",
        "isinstance(run.method, methods.AuxNet)",
        "isinstance(method, (str, Local))",
        "issubclass(kind, BorderMethod)",
        "getattr(method, 'beta', 1.0)",
        "getattr(self.brief.method, 'predict', 'none')",
        "getattr(method.rules(), 'average', True)",
        "getattr(schedule, 'independent', False)",
        "hasattr(method, 'store')",
        "method.name == 'petra'",
        "'bp' != config.method.name",
        "summary['method'] == 'bp'",
        "wish.method in ('layerpipe', 'pipedream')",
        "rules.activations == 'reverse'",
        "method.rules().weights in ('latest', 'average')",
        "type(engine) is Engine",
        "type(self._engine) == LocalEngine",
        "match rules.activations:\n    case 'graph':\n        pass",
    ],
)
def test_what_is_forbidden_is_noticed(line):
    assert violations(line)


@pytest.mark.parametrize(
    "line",
    [
        "from ..methods import BASELINE, Method, get, names",
        "from ..methods.options import owner",
        "isinstance(method, str)",
        "isinstance(method, Method)",
        "method.gradient == 'local'",
        "record.summary['method'] == BASELINE",
        "getattr(torch.nn.functional, config.run.loss)",
        "x = 'pipedream'",
        "type(value) is int",
    ],
)
def test_what_is_allowed_is_not(line):
    assert violations(line) == []
