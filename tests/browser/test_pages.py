"""Every page that the library writes, opened as a reader opens it: drawn, quiet, of use on any screen and on paper."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from browsing import background, colours, dark, open_file, overflow, phone, printed, sheets
from made_runs import write_run
from unlatch.cli import app
from unlatch.report.comparison import rows_of
from unlatch.report.page import write_comparison
from unlatch.report.record import read_run
from unlatch.report.timeline import save_timeline
from unlatch.report.web import render
from unlatch.schedule import ZBH1
from unlatch.schedule.simulation import Span, simulate_schedule

NASTY = "</script><script>alert(1)</script> \"'`${1}` \u2028 \U0001f600 <b>bold</b> & {{ 7 }}"


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, list]:
    """Several systems: two seeds of one, a baseline that is not the first, one that diverges, one that did nothing."""
    made = {
        "late": [write_run(tmp_path / "late0"), write_run(tmp_path / "late1", losses=(2.5, 1.2, 0.8, 0.5))],
        "plain": [write_run(tmp_path / "plain", method="bp", stages=1, speed=600.0)],
        NASTY: [write_run(tmp_path / "nasty", losses=(2.0, 1e9, math.inf, math.nan), measures=True)],
        "empty": [write_run(tmp_path / "empty", losses=(), accuracies=(), events=())],
    }
    return {label: [read_run(folder) for folder in folders] for label, folders in made.items()}


@pytest.fixture
def comparison(runs, tmp_path: Path) -> Path:
    rows = [replace(row, sentence=f"What to see in {row.label}.") for row in rows_of(runs, "plain")]
    write_comparison(tmp_path / "page.html", f"Runs {NASTY}", [f"Before {NASTY}"], runs, rows, closing=["The end."])
    return tmp_path / "page.html"


def test_a_comparison(page, comparison):
    open_file(page, comparison)
    assert page.title().startswith(f"Runs {NASTY[:40]}")
    assert NASTY in page.locator("h1").text_content()
    assert page.locator("b").count() == 0
    assert page.locator("#table tbody tr:not(.note)").count() == 4
    assert page.locator("#table tr.note").first.inner_text() == "What to see in late."
    assert page.locator("#closing").inner_text() == "The end."
    assert page.locator("canvas").count() == 3
    assert colours(page, "canvas") >= 4
    assert page.locator("#curves-body h3").all_inner_texts() == ["training loss", "test accuracy", "test loss"]
    assert page.locator("#measures h3").all_inner_texts() == ["jump"]
    assert "how <far>" in page.locator("#measures-caption").inner_text()


def test_curves_show_the_baseline_the_spread_and_where_numbers_end(page, comparison):
    open_file(page, comparison)
    broad = page.locator("#curves-body .chart").first.locator("g:has(.base)")
    assert broad.evaluate_all("groups => groups.map(group => group.dataset.run)") == ["plain"]
    assert page.locator(".band").evaluate_all("all => all.map(one => one.parentNode.dataset.run)") == ["late"] * 3
    assert page.locator(".lost").count() == 1
    accuracy = page.locator("#curves-body .chart").nth(1)
    texts = accuracy.locator("text").all_text_contents()
    assert [text for text in texts if "%" not in text] == ["1", "2", "3", "epochs"]
    accuracy.locator("svg").hover()
    assert page.locator("#tip").inner_text().split("\n")[0] == "epoch 2"
    assert "75.0%" in page.locator("#tip").inner_text()
    page.get_by_role("button", name="plain").click()
    assert page.locator("#curves-body .base").count() == 0
    assert page.get_by_role("button", name="plain").get_attribute("aria-pressed") == "false"
    accuracy.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().startswith("epoch 1")


def test_timelines_zoom_move_and_tell(page, comparison):
    open_file(page, comparison)
    canvas = page.locator("canvas").first
    before = canvas.evaluate("canvas => canvas.toDataURL()")
    canvas.hover(position={"x": 80, "y": 12})
    words = page.locator("#tip").inner_text()
    assert "stage 0" in words
    assert " ms" in words
    page.mouse.move(2, 2)
    seen = {before}

    def is_new(what: str) -> None:
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        now = canvas.evaluate("canvas => canvas.toDataURL()")
        assert now not in seen, what
        seen.add(now)

    page.locator("#zoom-in").click()
    is_new("button")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 12)
    page.mouse.down()
    page.mouse.move(box["x"] + 420, box["y"] + 12, steps=3)
    page.mouse.up()
    page.mouse.move(2, 2)
    is_new("drag")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    is_new("key")
    page.mouse.move(box["x"] + 500, box["y"] + 12)
    page.mouse.wheel(0, -200)
    page.mouse.move(2, 2)
    is_new("wheel")
    page.keyboard.press("0")
    page.wait_for_function("before => document.querySelector('canvas').toDataURL() === before", arg=before)


def test_fingers(chromium, comparison):
    context = chromium.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    open_file(page, comparison)
    canvas = page.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    before = canvas.evaluate("canvas => canvas.toDataURL()")
    canvas.tap(position={"x": 70, "y": 12})
    assert page.locator("#tip").inner_text().split("\n")[1] == "stage 0"
    box = canvas.bounding_box()
    hand = context.new_cdp_session(page)
    for kind, apart in (("touchStart", 20), ("touchMove", 60), ("touchMove", 110)):
        fingers = [{"x": box["x"] + 200 + side * apart, "y": box["y"] + 12, "id": side + 1} for side in (-1, 1)]
        hand.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": fingers})
    hand.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.get_by_role("heading", name="Learning").tap()
    page.wait_for_function("before => document.querySelector('canvas').toDataURL() !== before", arg=before)
    page.locator("#tip").wait_for(state="hidden")
    page.locator("#reset").tap()
    page.wait_for_function("before => document.querySelector('canvas').toDataURL() === before", arg=before)
    context.close()


def test_a_wheel_over_timelines_scrolls_the_page_unless_one_was_chosen(page, comparison):
    open_file(page, comparison)
    page.locator("canvas").first.hover()
    start = page.evaluate("scrollY")
    page.mouse.wheel(0, 120)
    page.wait_for_function("start => scrollY > start", arg=start)


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    flags = ["--network", "vgg16", "--devices", "4", "--methods", "pipedream", "--batches", "6"]
    assert CliRunner().invoke(app, ["simulate", *flags, "--html", "line.html"]).exit_code == 0
    return tmp_path / "line.html"


def test_the_page_of_a_simulation_stayed_blank(page, simulated):
    """Its script declared `top`, which every window has."""
    open_file(page, simulated)
    assert colours(page) >= 4
    assert page.locator("h1").inner_text() == "pipedream, 4 devices (simulated)"
    assert page.locator("#timelines-legend").inner_text().split() == ["forward", "backward"]
    canvas = page.locator("canvas")
    before = canvas.evaluate("canvas => canvas.toDataURL()")
    canvas.hover(position={"x": 90, "y": 12})
    assert page.locator("#tip").inner_text().startswith("forward of batch ")
    page.mouse.wheel(0, -300)
    page.wait_for_function("before => document.querySelector('canvas').toDataURL() !== before", arg=before)


def test_other_timelines(page, tmp_path):
    timeline = simulate_schedule(ZBH1(3), batches=2, microbatches=4)
    open_file(page, save_timeline(tmp_path / "a.html", timeline, title=NASTY))
    assert colours(page) >= 4
    open_file(page, save_timeline(tmp_path / "b.html", []))
    assert page.locator("canvas").count() == 0
    assert page.locator("h1").inner_text() == "b"


def test_many_lanes_of_many_spans_are_drawn_at_once(page, tmp_path):
    spans = [Span(lane, lane, "FBU"[n % 3], n, float(n), n + 0.9) for lane in range(64) for n in range(1000)]
    open_file(page, save_timeline(tmp_path / "many.html", spans))
    page.get_by_role("button", name="All").click()
    assert colours(page) >= 4
    took = page.evaluate(
        """async () => {
            const begin = performance.now();
            document.getElementById("zoom-out").click();
            await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
            return performance.now() - begin;
        }"""
    )
    assert took < 5000, f"{took:.0f} ms for one picture"


def test_dark_and_light(page, comparison):
    open_file(page, comparison)
    canvas = page.locator("canvas").first
    light, drawn = background(page), canvas.evaluate("canvas => canvas.toDataURL()")
    dark(page)
    page.wait_for_function("before => document.querySelector('canvas').toDataURL() !== before", arg=drawn)
    assert min(light) > 240
    assert max(background(page)) < 40
    dark(page, on=False)
    page.wait_for_function("before => document.querySelector('canvas').toDataURL() === before", arg=drawn)


@pytest.mark.parametrize("name", ["comparison", "simulated"])
def test_on_a_phone_and_on_paper(page, request, name):
    file = request.getfixturevalue(name)
    phone(page)
    open_file(page, file)
    assert overflow(page) == 0
    assert colours(page) >= 4
    page.set_viewport_size({"width": 1280, "height": 900})
    assert overflow(page) == 0
    assert 1 <= sheets(printed(page)) <= 4


def test_nothing_is_cut_off_on_paper(page, comparison):
    dark(page)
    open_file(page, comparison)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert min(background(page)) > 240, "what is drawn for paper is drawn before the paper is there"
    page.emulate_media(media="print", color_scheme="dark")
    page.set_viewport_size({"width": 690, "height": 1000})
    assert overflow(page) == 0
    right = page.locator("td, canvas, svg, .track").evaluate_all(
        "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
    )
    assert right <= 690
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert max(int(part) for part in ink.removeprefix("rgb(").removesuffix(")").split(",")) < 80, "dark on white"


def test_a_page_without_a_document_asks_for_it_and_follows(page, complaints):
    """What a server says: first nothing, then a run that goes on, then nothing again."""
    said: dict[str, str] = {}

    def answer(route) -> None:
        if "text" in said:
            route.fulfill(status=200, content_type="application/json", body=said["text"])
        else:
            route.fulfill(status=503, body="")

    page.route("http://localhost/document.json", answer)
    page.route("http://localhost/", lambda route: route.fulfill(body=render(None, "Live"), content_type="text/html"))
    page.goto("http://localhost/")
    page.wait_for_selector("#notice:visible")
    assert page.title() == "Live"
    span = [[0, 0, 0, 1, 0.0, 4.0]]
    kinds = [{"kind": "F", "words": "forward", "cost": "forward"}]
    run = {
        **{"label": "dtr", "status": "running", "progress": {"share": 0.25, "text": "epoch 1 of 4"}},
        **{"facts": [["loss", "0.5"]], "warnings": ["too <b>fast</b>"], "stages": [{"stage": 0, "staleness": 1}]},
        "timeline": {"rows": ["stage 0"], "kinds": kinds, "spans": span, "unit": "ms", "window": [0, 10]},
        "curves": {"training loss": {"x": "step", "log": True, "points": [[1, 2.0]]}},
    }
    said["text"] = json.dumps({"title": "Now", "runs": [run]})
    page.wait_for_selector(".card")
    assert page.locator("#notice").is_hidden()
    assert page.locator(".card .status.running").inner_text() == "running"
    assert page.locator(".card .warning").inner_text() == "too <b>fast</b>"
    assert page.locator("circle").count() == 1
    page.locator("details summary").click()
    page.locator("#zoom-in").click()
    page.locator("canvas").focus()
    run["curves"]["training loss"]["points"].append([2, 1.0])
    said["text"] = json.dumps({"title": "Now", "runs": [run, {"label": "bp", "status": "finished"}]})
    page.wait_for_function("document.querySelectorAll('circle').length === 2")
    assert page.locator(".card").count() == 2
    assert page.locator("details[open]").count() == 1
    assert page.locator("canvas:focus").count() == 1, "what the reader looks at is not replaced"
    assert [text for text in complaints if "503" not in text] == []
    complaints.clear()
