"""Which local variables of a function are still needed at a point of its source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

__all__ = ["live_before", "names_read", "names_written"]


def live_before(statements: Sequence[ast.stmt], after: Iterable[str] = ()) -> set[str]:
    """The names that these statements need from before them, if `after` is needed when they are done.

    >>> body = ast.parse("h = f(x)\\nfor layer in layers:\\n    h = layer(h) + y").body
    >>> sorted(live_before(body, {"h"}) & {"x", "y", "h", "layer"})
    ['x', 'y']
    """
    live = set(after)
    for statement in reversed(statements):
        live = _live_before_one(statement, live)
    return live


def _live_before_one(statement: ast.stmt, after: set[str]) -> set[str]:
    match statement:
        case ast.If(test=test, body=body, orelse=orelse):
            return names_read(test) | live_before(body, after) | live_before(orelse, after)
        case ast.For(target=target, iter=items, body=body):
            # What one round needs, the round before must leave alone.
            again = live_before(body, after) - names_written(target)
            return names_read(items) | after | (live_before(body, after | again) - names_written(target))
        case ast.While(test=test, body=body):
            return names_read(test) | after | live_before(body, after | live_before(body, after))
        case ast.With(items=items, body=body):
            return live_before(body, after).union(*(names_read(item.context_expr) for item in items))
        case ast.AugAssign(target=ast.Name(id=name)):
            return after | names_read(statement) | {name}
    return (after - names_written(statement)) | names_read(statement)


def names_read(node: ast.AST) -> set[str]:
    """Names whose values are looked at anywhere inside."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def names_written(node: ast.AST) -> set[str]:
    """Names that are assigned to anywhere inside."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
