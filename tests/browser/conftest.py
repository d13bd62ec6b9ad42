"""Pages in a real browser: headless Chromium, driven by playwright, with its console and its requests under watch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_LOCAL = {"127.0.0.1", "localhost", "::1"}


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The browser of this session; tests are skipped where there is none."""
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(_BROWSERS)} is installed")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive the browser")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser complained about so far; a test that provokes a complaint takes it off the list."""
    return []


@pytest.fixture
def page(chromium: Browser, complaints: list[str]) -> Iterator[Page]:
    """An empty page of 1280 by 900; errors in its console and requests beyond this machine fail the test.

    What tests do with it beside playwright's own methods is in `tests/support/browsing.py`.
    """
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(f"asked for {request.url}") if _far(request.url) else None)
    yield page
    context.close()
    assert not complaints, "\n".join(complaints)


def _far(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("file", "data", "blob", "about") and parts.hostname not in _LOCAL
