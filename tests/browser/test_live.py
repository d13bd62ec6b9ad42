"""Runs on a page that follows them: while they train, beside each other, and at their end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from browsing import colours, overflow, phone
from commands import Command
from run_folders import add_row, begin_run, sum_up, tell
from unlatch.io.run_folder import RunFolder
from unlatch.live.document import Watch, serving
from unlatch.live.server import listening

CONF = '[model]\nname = "mlp"\n[data]\nbatch_size = 64\n[run]\nstages = 2\nsplit = ["layers.2"]\nprocesses = 2\n'
#: Milliseconds for what a quiet machine does in a few hundred.
PATIENT = 90_000


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def changes(page, selector: str, attribute: str | None = None) -> None:
    """Wait until what is there is something else."""
    what = "element.textContent" if attribute is None else f"element.getAttribute('{attribute}')"
    look = f"selector => {{ const element = document.querySelector(selector); return element ? {what} : null; }}"
    before = page.evaluate(look, selector)
    page.wait_for_function(f"([selector, before]) => ({look})(selector) !== before", arg=[selector, before])


def test_a_run_is_watched_until_its_end(page):
    page.set_default_timeout(PATIENT)
    Path("conf.toml").write_text(CONF)
    with Command("train", "conf.toml", "--method", "dtr", "--out", "run", "--epochs", 1_000_000, "--live") as command:
        command.wait_until_it_says(r"http://127\.0\.0\.1:\d+/")
        page.goto(re.search(r"http://\S+", command.said())[0])
        for _ in range(2):
            page.locator(".status.running").wait_for()
            page.locator("canvas[aria-label^='Timeline run: 2 rows']").wait_for()
            assert colours(page) > 3
            page.locator(".chart polyline.line").first.wait_for()
            changes(page, ".chart polyline.line", "points")
            changes(page, "progress + .status")
            page.reload()
        page.locator(".facts", has_text="staleness").wait_for()
        Path("run/stop").touch()
        page.locator(".status.interrupted").wait_for()
        page.locator("#notice", has_text="The run has ended").wait_for()
        code, said = command.ended()
    assert code == 130, said
    assert "unlatch show run" in page.locator("#notice").text_content()
    assert colours(page) > 3, "what was shown stays"


def test_runs_beside_each_other_move_on_one_page(page, tmp_path):
    other = begin_run(tmp_path / "<img src=x onerror=alert(1)>", losses=20, epochs=2)
    sum_up(other, steps=20)
    with RunFolder.resume(begin_run(tmp_path / "dtr-1", losses=12)) as held:
        for rank in (0, 1):
            tell(held.path, rank, notes=["<b>slow</b>"])
        with serving(listening(), Watch([held.path, other])) as server:
            page.goto(server.url)
            page.locator(".card").first.wait_for()
            assert page.locator(".card .status.running").count() == 1
            assert page.locator(".card .status.finished").count() == 1
            assert page.locator("h3", has_text="<img src=x onerror=alert(1)>").count() >= 1
            assert page.locator(".warning", has_text="<b>slow</b>").count() == 1
            assert page.locator("#curves-legend button").count() == 2
            add_row(held.path, 13, {"train/loss": 0.5})
            page.locator("progress + .status", has_text="batch 13 of 100").wait_for()
            sum_up(held.path, steps=13)
            tell(held.path, 0, ended=True, step=13)
            page.locator(".status.finished").nth(1).wait_for()
            phone(page)
            assert overflow(page) == 0
