"""A table that can be printed, put into a page, or read by a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable

__all__ = ["Table", "number_text"]

#: No line is ever folded or cut: that is for the reader's terminal to do.
_WIDEST = 100_000


@dataclass(frozen=True)
class Table:
    """Column heads and rows of text.

    **Arguments:** `left`: columns of words; all others hold numbers and are set flush right.

    >>> print(Table(("method", "samples/s"), (("bp", "1,000"), ("dtr", "900"))).text())
    method  samples/s
    -----------------
    bp          1,000
    dtr           900
    """

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[int, ...] = (0,)

    def text(self) -> str:
        """Lines with aligned columns, the heads underlined."""
        heads, *rows = self.lines()
        return "\n".join([heads, "-" * max(map(len, (heads, *rows))), *rows])

    def lines(self) -> list[str]:
        """Lines with aligned columns, the heads first."""
        columns = [
            Column(head, justify="left" if i in self.left else "right", no_wrap=True)
            for i, head in enumerate(self.heads)
        ]
        table = RichTable(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for row in self.rows:
            table.add_row(*row)
        shown = StringIO()
        Console(file=shown, width=_WIDEST, color_system=None, markup=False, emoji=False, highlight=False).print(table)
        return [line.rstrip() for line in shown.getvalue().splitlines()]

    def html(self) -> str:
        """As a table for notebooks.

        >>> Table(("stage",), (("a < b",),)).html()
        '<table><thead><tr><th>stage</th></tr></thead><tbody><tr><td>a &lt; b</td></tr></tbody></table>'
        """
        body = "".join(_html_row("td", row) for row in self.rows)
        return f"<table><thead>{_html_row('th', self.heads)}</thead><tbody>{body}</tbody></table>"


def _html_row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"


def number_text(value: Any, form: str = ",.0f") -> str:
    """A number, or a dash where there is none.

    >>> number_text(1234.5), number_text(None)
    ('1,234', '-')
    """
    return "-" if value is None else format(value, form)
