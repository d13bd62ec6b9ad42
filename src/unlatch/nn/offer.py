"""For a module that does not say where it can be cut: the `blocks()` that its forward suggests, to paste.

The source of `forward` is read, never run. Between two statements the model can be cut if only one local variable is
still needed there: it is the state that travels. What lies between two such points becomes a block:

    x = self.stem(x)                            self.stem
    for layer in self.layers: x = layer(x)      *self.layers
    return self.head(x.flatten(1))              Apply(lambda x: x.flatten(1)), self.head
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from .apply import Apply
from .liveness import live_before, names_read, names_written

__all__ = ["how_to_cut", "unfolding"]

_ADVICE = (
    "give it a method blocks() that lists modules whose composition is the model, or pass an nn.Sequential or a list "
    "of modules"
)
_NEVER = (ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Try, ast.FunctionDef, ast.ClassDef)
_OPERATIONS = (ast.Call, ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp)
_JUMPS = (ast.Break, ast.Continue)


class _Unclear(Exception):
    """Why no method can be offered."""


def how_to_cut(model: nn.Module) -> str:
    """What to do about a module that does not say where it can be cut, for the error that says so.

    >>> print(how_to_cut(nn.Identity()))
    give it a method blocks() that lists modules ... Here it is not obvious which: its forward is one piece
    """
    try:
        reader = _Reader(model)
        method = reader.method()
    except _Unclear as why:
        return f"{_ADVICE}. Here it is not obvious which: {why}"
    needs = "    from unlatch.nn import Apply\n\n" if "Apply(" in method else ""
    if isinstance(getattr(model, "blocks", None), nn.Module):
        return (
            "its attribute `blocks` is a module, so a method cannot go by that name. Rename it and add the method that "
            f"follows, or pass what it lists (the weights then go by their positions):\n\n{needs}{method}"
        )
    return f"this method, made from its forward, would do; paste it into {type(model).__name__}:\n\n{needs}{method}"


def unfolding(parts: Sequence[tuple[str, nn.Module]]) -> str:
    """A hint on blocks that could be several, for the error that there are too few; empty if there are none.

    >>> unfolding([("0", nn.Sequential(nn.Tanh(), nn.Tanh()))])
    " Block '0' is an nn.Sequential of 2: pass it instead of what wraps it, or its parts as a list."
    """
    folded = [(name, len(part)) for name, part in parts if isinstance(part, nn.Sequential) and len(part) > 1]
    if not folded:
        return ""
    if len(parts) == 1:
        ((name, count),) = folded
        return (
            f" Block '{name}' is an nn.Sequential of {count}: pass it instead of what wraps it, or its parts as a list."
        )
    named = ", ".join(f"'{name}' ({count} parts)" for name, count in folded)
    return f" Blocks that are an nn.Sequential can be listed part by part: {named}."


class _Reader:
    """Reads the forward of a model."""

    def __init__(self, model: nn.Module) -> None:
        if type(model).forward is nn.Module.forward:
            raise _Unclear("it has no forward")
        self.model = model
        self.function = type(model).forward
        self.body, self.me, self.input = self._parsed()
        self.local = {self.input}.union(*map(names_written, self.body))
        self.known = {**_without(self.function, self.local), self.me: model}
        self.helpers: list[str] = []

    def _parsed(self) -> tuple[list[ast.stmt], str, str]:
        tree = _definition(self.function)
        arguments = tree.args
        names = [one.arg for one in [*arguments.posonlyargs, *arguments.args]]
        others = [one.arg for one in [*arguments.kwonlyargs, arguments.vararg, arguments.kwarg] if one is not None]
        if len(names) < 2:
            raise _Unclear("its forward takes no input by position")
        me, first, *more = names
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        if used := sorted({*more, *others} & set().union(*map(names_read, body))):
            raise _Unclear(
                f"its forward takes several inputs ({', '.join([first, *used])}); let them travel from block to block "
                "as one tuple or dict"
            )
        return body, me, first

    def method(self) -> str:
        """The method, as text that was tried out on the model."""
        blocks = list(self._blocks())
        lines = [f"    def blocks({self.me}):"]
        lines += [textwrap.indent(helper, " " * 8) + "\n" for helper in self.helpers]
        lines += ["        return [", *(f"            {block}," for block in blocks), "        ]"]
        text = "\n".join(lines)
        try:
            known = {**self.known, "Apply": Apply}
            exec(textwrap.dedent(text), known)
            listed = known["blocks"](self.model)
        except Exception as error:
            raise _Unclear(f"what its forward suggests does not work here ({type(error).__name__}: {error})") from None
        if len(listed) < 2:
            raise _Unclear("its forward is one piece")
        return text

    # ------------------------------------------------------------------- statements

    def _blocks(self) -> Iterator[str]:
        body = self.body
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            raise _Unclear("its forward does not end by returning something")
        for statement in body:
            self._refuse_what_cannot_move(statement, statement is body[-1])
        live = [live_before(body[number:]) & self.local for number in range(len(body))]
        if live[0] != {self.input}:
            raise _Unclear("its forward does not begin with its input")
        cuts = [number for number, needed in enumerate(live) if len(needed) == 1]
        for start, end in zip(cuts, [*cuts[1:], len(body)], strict=True):
            (state,) = live[start]
            result = next(iter(live[end])) if end < len(body) else None
            yield from self._segment(body[start:end], state, result)

    def _refuse_what_cannot_move(self, statement: ast.stmt, last: bool) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Return) and not (last and node is statement):
                raise _Unclear("its forward returns in several places")
            if isinstance(node, _NEVER) or (isinstance(node, ast.Name) and node.id == "super"):
                raise _Unclear(f"its forward has {ast.unparse(node).splitlines()[0]!r} in it")
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                raise _Unclear(f"its forward keeps something in itself ({ast.unparse(node)})")

    def _segment(self, statements: Sequence[ast.stmt], state: str, result: str | None) -> Iterator[str]:
        match statements:
            case [ast.Return(value=value)] if value is not None:
                yield from self._steps(value, state)
            case [ast.Assign(targets=[ast.Name(id=to)], value=value)] if to == result:
                yield from self._steps(value, state)
            case [ast.For() as loop] if state == result and self._is_walk(loop, state):
                yield self._walk(loop, state)
            case _:
                uses = self._used(*statements)
                yield _apply(self._helper(statements, state, result, uses), uses)

    def _helper(
        self,
        statements: Sequence[ast.stmt],
        state: str,
        result: str | None,
        uses: dict[str, str],
        more: Sequence[str] = (),
    ) -> str:
        """The name of a function of several statements."""
        lines = [ast.unparse(_renamed(statement, uses)) for statement in statements]
        if result is not None:
            lines.append(f"return {result}")
        name, arguments = f"step{len(self.helpers) + 1}", ", ".join([state, *uses.values(), *more])
        self.helpers.append(f"def {name}({arguments}):\n" + textwrap.indent("\n".join(lines), "    "))
        return name

    # ------------------------------------------------------------------------ loops

    def _is_walk(self, loop: ast.For, state: str) -> bool:
        jumps = any(_mentions(loop, kind) for kind in _JUMPS)
        return not jumps and not loop.orelse and state not in names_read(loop.iter) | names_written(loop.target)

    def _walk(self, loop: ast.For, state: str) -> str:
        """The blocks of a loop, one per round."""
        items, targets = ast.unparse(loop.iter), sorted(names_written(loop.target))
        first = next(iter(self._value(loop.iter)), None)
        known = dict(self.known)
        known["_first"] = first
        exec(f"{ast.unparse(loop.target)} = _first", known)
        match loop.body:
            case [
                ast.Assign(targets=[ast.Name(id=to)], value=ast.Call(func=ast.Name(id=part), args=[ast.Name(id=of)]))
            ]:
                if to == of == state and [part] == targets and isinstance(first, nn.Module):
                    return f"*{items}"
        uses = self._used(*loop.body, known=known)
        # What changes from round to round and is no part of the model must be told to each block.
        read = {name for statement in loop.body for name in names_read(_renamed(statement, uses))}
        bound = [name for name in targets if name in read and name not in uses.values()]
        match loop.body:
            case [ast.Assign(targets=[ast.Name(id=to)], value=value)] if to == state:
                call = ast.unparse(_renamed(value, uses))
            case _:
                name = self._helper(loop.body, state, state, uses, bound)
                call = f"{name}({', '.join([state, *uses.values(), *bound])})"
        arguments = ", ".join([state, *uses.values(), *(f"{name}={name}" for name in bound)])
        return f"*[{_apply(f'lambda {arguments}: {call}', uses)} for {ast.unparse(loop.target)} in {items}]"

    # ------------------------------------------------------------------ expressions

    def _steps(self, value: ast.expr, state: str) -> Iterator[str]:
        """An expression of the state, from the inside out."""
        inner = _only_part_with(value, state)
        if isinstance(value, ast.Name) and value.id == state:
            return
        if inner is None:
            yield self._lambda(value, state)
            return
        yield from self._steps(inner, state)
        match value:
            case ast.Call(func=called, args=[_], keywords=[]) if called is not inner:
                module = self._value(called, None) if not _mentions(called, ast.Call) else None
                if isinstance(module, nn.Module):
                    unfolds = isinstance(module, nn.Sequential) and len(module) > 1
                    usual = type(module).forward is nn.Sequential.forward
                    yield f"*{ast.unparse(called)}" if unfolds and usual else ast.unparse(called)
                    return
        yield self._lambda(_renamed(value, {ast.unparse(inner): state}), state)

    def _lambda(self, value: ast.expr, state: str) -> str:
        uses = self._used(value)
        return _apply(f"lambda {', '.join([state, *uses.values()])}: {ast.unparse(_renamed(value, uses))}", uses)

    def _value(self, node: ast.expr, *default: Any, known: dict[str, Any] | None = None) -> Any:
        """What an expression without local variables is."""
        try:
            return eval(ast.unparse(node), self.known if known is None else known)
        except Exception as error:
            if default:
                return default[0]
            raise _Unclear(f"{ast.unparse(node)} cannot be looked up ({type(error).__name__}: {error})") from None

    def _used(self, *nodes: ast.AST, known: dict[str, Any] | None = None) -> dict[str, str]:
        """Modules and tensors of the model that some code reads, as it calls them, with names for them as arguments."""
        found: dict[str, str] = {}
        for node in nodes:
            self._collect(node, known or self.known, found)
        return found

    def _collect(self, node: ast.AST, known: dict[str, Any], found: dict[str, str]) -> None:
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
            value = self._value(node, None, known=known)
            if value is self.model:
                raise _Unclear("its forward hands itself on as a whole")
            if isinstance(value, nn.Module | Tensor):
                text = ast.unparse(node)
                found.setdefault(text, self._argument(node, found))
                return
            if isinstance(value, MethodType) and value.__self__ is self.model:
                self._refuse_method_with_modules(value, known)
                return
            if isinstance(node, ast.Attribute) and self._value(node.value, None, known=known) is self.model:
                return
        for child in ast.iter_child_nodes(node):
            self._collect(child, known, found)

    def _argument(self, node: ast.expr, found: dict[str, str]) -> str:
        """A name for a part of the model, such as `conv` for `self.conv`."""
        while isinstance(node, ast.Subscript):
            node = node.value
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "part"
        taken = {*found.values(), *(self.local if isinstance(node, ast.Attribute) else ())}
        return next(one for one in (name, *(f"{name}{n}" for n in range(2, 1000))) if one not in taken)

    def _refuse_method_with_modules(self, method: MethodType, known: dict[str, Any]) -> None:
        """What a method of the model reads cannot be seen from outside, so its block could not own it."""
        tree = _definition(method.__func__)
        me, *others = (one.arg for one in [*tree.args.posonlyargs, *tree.args.args])
        local = set(others).union(*map(names_written, tree.body))
        inside: dict[str, str] = {}
        for statement in tree.body:
            self._collect(statement, {**_without(method.__func__, local), me: self.model}, inside)
        if inside:
            raise _Unclear(
                f"its forward leaves {', '.join(inside)} to {method.__qualname__}; let forward itself call them"
            )


def _apply(function: str, uses: Iterable[str]) -> str:
    return f"Apply({', '.join([function, *uses])})"


_Node = TypeVar("_Node", bound=ast.AST)


def _renamed(node: _Node, names: Mapping[str, str]) -> _Node:
    """The same code with some expressions replaced by names."""
    renamed: _Node = _Renaming(names).visit(copy.deepcopy(node))
    return renamed


class _Renaming(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            name = self._names.get(ast.unparse(node))
            if name is not None:
                return ast.Name(name, ast.Load())
        return self.generic_visit(node)


def _definition(function: Callable[..., Any]) -> ast.FunctionDef:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        raise _Unclear(f"the source of {function.__qualname__} is not at hand") from None
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        raise _Unclear(f"{function.__qualname__} is no plain function")
    return tree


def _only_part_with(value: ast.expr, state: str) -> ast.expr | None:
    """The one operand through which the state enters an expression, if there is one."""
    if not isinstance(value, _OPERATIONS):
        return None
    inside, *others = (child for child in ast.iter_child_nodes(value) if state in names_read(child))
    if others:
        return None
    if isinstance(value, ast.Call) and inside is value.func:
        # A method of the state: x.flatten(1).
        return inside.value if isinstance(inside, ast.Attribute) else None
    return inside if isinstance(inside, (ast.Name, *_OPERATIONS)) else None


def _mentions(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(n, kind) for n in ast.walk(node))


def _without(function: Callable[..., Any], local: set[str]) -> dict[str, Any]:
    """What names mean inside a function, but for its own variables."""
    outside = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return {name: value for name, value in outside.items() if name not in local}
