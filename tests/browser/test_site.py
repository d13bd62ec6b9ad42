"""The site: it builds without a warning and opens from a disk, without a server or a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browsing import dark, open_file, overflow, phone

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, made as `make docs` makes them: warnings are errors."""
    pytest.importorskip("sphinx", reason="needs the extra docs")
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(made / "trees")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(made / "html")], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return made / "html"


def test_the_site_opens_from_a_disk(site: Path, page: Page) -> None:
    """One test, since the site takes long to make: from page to page by links, in the dark, and on a phone."""
    open_file(page, site / "index.html")
    page.locator(".sidebar-tree").get_by_role("link", name="Methods", exact=True).click()
    page.locator("article").get_by_role("link", name="dtr, dtrp").first.click()
    assert page.locator("h1").inner_text().startswith("dtr, dtrp: re-computation")
    drawn = page.locator('img[src$="dtr-dtrp.svg"]')
    assert drawn.evaluate("image => image.complete && image.naturalWidth > 300")

    open_file(page, site / "index.html")
    page.locator("article").get_by_role("link", name="Move the costs yourself").click()
    assert page.locator("#first [data-figure=bubble]").inner_text() == "0 %"

    open_file(page, site / "api" / "unlatch.html")
    shown = page.locator("dl.py", has=page.locator("[id='unlatch.parallelize']")).first
    assert shown.locator("li", has_text="model:").count() == 1, "arguments are a list"
    assert ">>> run = parallelize(" in shown.locator("pre").first.inner_text()

    dark(page)
    phone(page)
    for file in ("index.html", "methods/petra.html", "api/unlatch.html"):
        open_file(page, site / file)
        assert overflow(page) <= 0, file


def test_no_page_asks_for_anything_elsewhere(site: Path) -> None:
    """Links may lead anywhere; what a page loads must lie beside it."""
    loads = re.compile(r'(?:<script[^>]*\bsrc|<link[^>]*\bhref|<img[^>]*\bsrc)="((?:https?:)?//[^"]*)"')
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    assert {page.name: found for page in pages if (found := loads.findall(page.read_text(encoding="utf-8")))} == {}
    styles = [style.read_text(encoding="utf-8") for style in site.rglob("*.css")]
    assert not any(re.search(r"url\(\s*['\"]?(?:https?:)?//", style) for style in styles)
