"""The site: it builds without a warning and opens from a disk, without a server or a network."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import unlatch
from browsing import dark, open_file, overflow, phone

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
#: The list of all, and one that shows six modules.
NOT_ONE_MODULE = {"README", "rules"}


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
    page.locator("h1", has_text=re.compile("^dtr, dtrp: re-computation")).wait_for()
    page.wait_for_load_state()  # a click does not wait for pictures
    drawn = page.locator('img[src$="dtr-dtrp.svg"]')
    assert drawn.evaluate("image => image.complete && image.naturalWidth > 300")

    open_file(page, site / "index.html")
    page.locator("article").get_by_role("link", name="Move the costs yourself").click()
    assert page.locator("#first [data-figure=bubble]").inner_text() == "0 %"

    open_file(page, site / "api" / "unlatch.html")
    shown = page.locator("dl.py", has=page.locator("[id='unlatch.parallelize']")).first
    assert shown.locator("li", has_text="model:").count() == 1, "arguments are a list"
    assert ">>> run = parallelize(" in shown.locator("pre").first.inner_text()

    page.goto(f"{(site / 'search.html').resolve().as_uri()}?q=clip_grad_norm")
    page.locator("#search-results li a").first.wait_for()

    dark(page)
    phone(page)
    for file in ("index.html", "methods/petra.html", "api/unlatch.html"):
        open_file(page, site / file)
        assert overflow(page) <= 0, file


@pytest.mark.parametrize("page", sorted({path.stem for path in (ROOT / "docs" / "api").glob("*.md")} - NOT_ONE_MODULE))
def test_what_is_public_is_in_the_reference(site: Path, page: str) -> None:
    """Classes and functions; a constant or an alias of a type needs no entry."""
    module = unlatch if page == "unlatch" else import_module(f"unlatch.{page}")
    listed = getattr(module, "__all__", None) or [name for name in vars(module) if name.endswith(("Error", "Mismatch"))]
    wanted = [name for name in listed if _defined(getattr(module, name))]
    text = (site / "api" / f"{page}.html").read_text(encoding="utf-8")
    assert wanted
    assert [name for name in wanted if f'id="{module.__name__}.{name}"' not in text] == []


def _defined(found: object) -> bool:
    return inspect.isfunction(found) or (inspect.isclass(found) and found.__module__.startswith("unlatch"))


def test_every_public_module_has_a_page() -> None:
    rooms = [name for name in unlatch.__all__ if inspect.ismodule(getattr(unlatch, name))]
    assert [name for name in rooms if not (ROOT / "docs" / "api" / f"{name}.md").is_file()] == []


def test_no_page_asks_for_anything_elsewhere(site: Path) -> None:
    """Links may lead anywhere; what a page loads must lie beside it."""
    loads = re.compile(r'(?:<script[^>]*\bsrc|<link[^>]*\bhref|<img[^>]*\bsrc)="((?:https?:)?//[^"]*)"')
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    assert {page.name: found for page in pages if (found := loads.findall(page.read_text(encoding="utf-8")))} == {}
    styles = [style.read_text(encoding="utf-8") for style in site.rglob("*.css")]
    assert not any(re.search(r"url\(\s*['\"]?(?:https?:)?//", style) for style in styles)
