"""The page and its document on a server."""

from __future__ import annotations

import base64
import hashlib
import re
import socket

from ..report.web import render
from .document import Watch
from .server import Answer, PageServer

__all__ = ["DOCUMENT", "serving"]

#: What the page asks for, beside itself.
DOCUMENT = "/document.json"


def serving(listener: socket.socket, watch: Watch) -> PageServer:
    """A server of the page of some runs, which begins when it is entered."""
    html = render(None, watch.title)
    page = Answer(html.encode(), "text/html; charset=utf-8", _policy(html))
    return PageServer(
        listener, {"/": lambda: page, DOCUMENT: lambda: Answer(watch.text().encode(), "application/json")}
    )


def _policy(html: str) -> str:
    """Nothing runs on the page but what it came with, and it asks nobody but us."""
    scripts, styles = _hashes(html, "script"), _hashes(html, "style")
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(html: str, tag: str) -> str:
    inline = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
