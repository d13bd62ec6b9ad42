"""A table that can be printed, put into a page, or read by a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Table", "number_text"]


@dataclass(frozen=True)
class Table:
    """Column heads and rows of text.

    **Arguments:** `left`: columns of words; all others hold numbers and are set flush right.

    >>> print(Table(("method", "samples/s"), (("bp", "1,000"), ("dtr", "900"))).text())
    method  samples/s
    ------  ---------
    bp          1,000
    dtr           900
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...] = (0,)

    def text(self) -> str:
        """Lines with aligned columns."""
        widths = [max(len(row[i]) for row in (self.heads, *self.rows)) for i in range(len(self.heads))]
        rule = tuple("-" * width for width in widths)
        return "\n".join(self._line(row, widths) for row in (self.heads, rule, *self.rows))

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = [
            cell.ljust(width) if i in self.left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()


def number_text(value: Any, form: str = ",.0f") -> str:
    """A number, or a dash where there is none.

    >>> number_text(1234.5), number_text(None)
    ('1,234', '-')
    """
    return "-" if value is None else format(value, form)
