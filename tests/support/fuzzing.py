"""Bad input by the thousand: how hard to try, how input goes bad, and what may come of it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from unlatch.errors import UnlatchError

#: Cases per test that a nightly run asks for (`make fuzz`).
_NIGHTLY = int(os.environ.get("UNLATCH_FUZZ", "0"))
#: One file in one folder is written over and over, on purpose.
_CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]


def cases(few: int, share: float = 1.0) -> settings:
    """So many cases in the suite; `share` of what is asked for in a nightly run, for tests that are slow."""
    return settings(
        max_examples=max(few, int(_NIGHTLY * share)),
        # Far more than any case needs, far less than a hang.
        deadline=timedelta(seconds=30),
        suppress_health_check=_CHECKS,
    )


def outcome(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call returns, or the error of ours that it raises; any other error is a failure of the test."""
    try:
        return call(*args, **options)
    except UnlatchError as error:
        text = str(error)
        assert text.strip()
        assert len(text) < 8000, f"an error of {len(text)} characters"
        return error


# ----------------------------------------------------------------------------------------------------------- values

#: Numbers at the edges of what machines, formats and code expect.
EDGES = [0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.0, -0.0, 1e-320, 1e308, -1e308]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
#: Texts that mean something elsewhere.
NAMES = [
    *("", ".", "..", "../../etc/passwd", "/dev/null", "~", "a/b", "x\0y", "os:system", "os.path:join", ":", "a:b:c"),
    *("unlatch.errors:nothing", "tensor", "auto", "__class__", "{0.__class__}", "%s%n", "${HOME}", "-1", "1e999"),
    *("null", "NaN", "\ud7ff", "\u202e", "\ufeff", "ß" * 90, "a" * 300),
]

numbers = st.one_of(
    st.sampled_from(EDGES), st.integers(-5, 70), st.integers(), st.floats(), st.sampled_from(NOT_FINITE)
)
texts = st.one_of(st.sampled_from(NAMES), st.text(max_size=12))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
#: Whatever JSON can say.
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


# --------------------------------------------------------------------------------------------------------- mutations


@st.composite
def damaged(draw: st.DrawFn, data: bytes, most: int = 3) -> bytes:
    """Bytes with bits flipped, parts lost, doubled or replaced, the end cut off."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(0, len(out) - 1)))
        how = draw(st.sampled_from(["flip", "set", "cut", "drop", "double", "insert"]))
        length = draw(st.integers(1, 16))
        if how == "flip" and out:
            out[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "set" and out:
            out[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del out[at:]
        elif how == "drop":
            del out[at : at + length]
        elif how == "double":
            out[at:at] = out[at : at + length]
        else:
            out[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(out)


@st.composite
def altered(draw: st.DrawFn, tree: Any, junk: st.SearchStrategy[Any] = values, most: int = 3) -> Any:
    """A tree of dicts and lists in which some places hold something else, are gone, doubled, or have another name."""
    out = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(out))
        if not places:
            return draw(junk)
        parent, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["replace", "replace", "delete", "rename", "double"]))
        if how == "delete":
            del parent[key]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(texts)] = parent.pop(key)
        elif how == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[key] = draw(junk)
    return out


def _places(tree: Any) -> Any:
    found = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in found:
        yield tree, key
        yield from _places(value)
