"""Docstrings are Markdown, like the pages. Sphinx expects reStructuredText, so they are handed to MyST instead.

autodoc is given one directive in place of each docstring; its content is parsed as Markdown. Examples, which stand in
docstrings as the interpreter shows them, become blocks of code. A name in backticks that has an entry of its own in the
reference becomes a link to it.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils import new_document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

NAME = re.compile(r"unlatch(\.\w+)+(?:\(\))?|(?!None$|True$|False$)[A-Z]\w+")


class MarkdownDocstring(SphinxDirective):
    """A docstring in Markdown."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        source = self.state_machine.get_source_and_line(self.lineno)[0]
        document = new_document(source or "docstring", self.state.document.settings)
        document.reporter = self.state.document.reporter
        MystParser().parse("\n".join(fenced(list(self.content))), document)
        module = self.env.ref_context.get("py:module")
        for literal in list(document.findall(nodes.literal)):
            if NAME.fullmatch(literal.astext()):
                literal.replace_self(_reference(literal, module, self.env.docname))
        return document.children


def _reference(literal: nodes.literal, module: str | None, page: str) -> pending_xref:
    """Leads to the entry of that name, if there is one; otherwise the name stays as it is."""
    target = literal.astext().removesuffix("()")
    return pending_xref(
        "",
        literal.deepcopy(),
        refdomain="py",
        reftype="obj",
        reftarget=target,
        refdoc=page,
        refwarn=False,
        refspecific=True,
        **{"py:module": module, "py:class": None},
    )


def fenced(lines: list[str]) -> list[str]:
    """The lines with a fence around every example.

    >>> fenced(["Adds.", "", ">>> 1 + 1", "2"])
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    made: list[str] = []
    inside = False
    for line in lines:
        if not inside and line.lstrip().startswith(">>> "):
            made.append("```pycon")
            inside = True
        elif inside and not line.strip():
            made.append("```")
            inside = False
        made.append(line)
    return [*made, "```"] if inside else made


def as_directive(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Hide a docstring from the parser of reStructuredText."""
    if any(line.strip() for line in lines):
        lines[:] = [".. markdown-docstring::", "", *(f"   {line}" for line in lines), ""]


def only_what_is_public_in_contents(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """Classes and functions stand in the contents beside a page; their methods would bury them."""
    if domain == "py" and kind in ("method", "property", "attribute"):
        for signature in content.parent.findall(desc_signature):
            signature["_toc_name"] = ""


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("markdown-docstring", MarkdownDocstring)
    app.connect("autodoc-process-docstring", as_directive)
    app.connect("object-description-transform", only_what_is_public_in_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
