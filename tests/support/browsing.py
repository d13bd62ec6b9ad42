"""What tests of pages do in a browser: look at it as others would, and ask it what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

PHONE = 390


def open_file(page: Page, file: Path) -> None:
    """Open a page from the disk, as a double click does."""
    page.goto(file.resolve().as_uri())


def dark(page: Page, on: bool = True) -> None:
    """Have the reader prefer dark pages."""
    page.emulate_media(color_scheme="dark" if on else "light")


def phone(page: Page) -> None:
    """Make the window as wide as a phone."""
    page.set_viewport_size({"width": PHONE, "height": 844})


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def background(page: Page) -> tuple[int, ...]:
    """Red, green and blue of the paper."""
    found = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


def colours(page: Page, selector: str = "canvas") -> int:
    """How many different colours are on a canvas: 1 if nothing is drawn."""
    return int(
        page.locator(selector).first.evaluate(
            """canvas => {
                const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                return new Set(new Uint32Array(data.buffer)).size;
            }"""
        )
    )


def printed(page: Page) -> bytes:
    """The page on paper (A4), as PDF."""
    return page.pdf(format="A4")


def sheets(pdf: bytes) -> int:
    """How many sheets a PDF has."""
    return len(re.findall(rb"/Type\s*/Page\b", pdf))
