"""The browser that tests look through: it sees faults of pages, and tells them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from browsing import background, colours, dark, open_file, overflow, phone, printed, sheets

PAGE = """
    <!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>a page</title><link rel="icon" href="data:,">
    <style>body { background: #fff; margin: 0 } @media (prefers-color-scheme: dark) { body { background: #111 } }
    div { break-after: page; width: 700px }</style>
    <div>one</div><canvas width="9" height="9"></canvas>
    <script>document.querySelector("canvas").getContext("2d").fillRect(0, 0, 4, 4)</script>"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "page.html").write_text(textwrap.dedent(PAGE).strip())
    return tmp_path / "page.html"


def test_pages_are_seen_as_readers_see_them(page, file):
    open_file(page, file)
    assert (background(page), overflow(page), colours(page)) == ((255, 255, 255), 0, 2)
    assert sheets(printed(page)) == 2
    dark(page)
    phone(page)
    assert (background(page), overflow(page)) == ((17, 17, 17), 700 - 390)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("<script>const top = 1;</script>", "'top' has already been declared"),
        ("<script>nowhere();</script>", "nowhere is not defined"),
        ("<script>console.error('oh')</script>", "oh"),
        ("<img src='http://example.invalid/a.png'>", "asked for http://example.invalid/a.png"),
    ],
)
def test_faults_of_a_page_do_not_go_unseen(page, complaints, file, fault, words):
    file.write_text(file.read_text() + fault)
    open_file(page, file)
    page.wait_for_function("document.readyState === 'complete'")
    assert words in "\n".join(complaints)
    complaints.clear()
