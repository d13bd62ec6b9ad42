"""The page of runs as one file that needs nothing else: its template, style and scripts lie beside this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..board import board_json

__all__ = ["render"]

_HERE = Path(__file__).parent
_SCRIPTS = ("timeline.js", "curves.js", "board.js")


def render(document: Mapping[str, Any] | None, title: str = "Unlatch") -> str:
    """The page as text; everything that comes from data is escaped.

    **Arguments:**

    - `document`: from `board`; without one, the page asks for `document.json` beside it again and again.
    - `title`: until there is a document.

    >>> "a &lt; b" in render({"title": "a < b", "runs": []})
    True
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("board.html").render(
        title=title if document is None else document["title"],
        document=Markup("" if document is None else board_json(document)),
        style=Markup(_text("style.css")),
        script=Markup("".join(map(_text, _SCRIPTS))),
    )


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
