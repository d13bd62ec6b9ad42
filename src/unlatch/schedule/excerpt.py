"""A readable piece of some streams, with one place marked: every schedule error shows where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .actions import Action

__all__ = ["excerpt"]

_REACH = 5


def excerpt(streams: Sequence[Sequence[Action]], marks: Mapping[int, int], name: str = "stream") -> str:
    """Show the surroundings of `marks` (stream number to position), the position itself in brackets.

    >>> from .actions import Kind
    >>> print(excerpt([[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]], {0: 1}))
      stream 0:  0F0 [0B0]
    """
    return "\n".join(f"  {name} {number}:  {_window(streams[number], at)}" for number, at in sorted(marks.items()))


def _window(stream: Sequence[Action], at: int) -> str:
    start, stop = max(0, at - _REACH), min(len(stream), at + _REACH + 1)
    shown = [f"[{stream[i]}]" if i == at else str(stream[i]) for i in range(start, stop)]
    return " ".join(["..."] * (start > 0) + shown + (["..."] if stop < len(stream) else ["[end]"] * (at >= stop)))
