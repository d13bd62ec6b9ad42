"""The interactive page shows what the library computes: its numbers beside those of the simulator, and its looks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from browsing import background, dark, overflow, phone
from docs_scripts import docs_script
from unlatch import methods
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.memory import layer_sizes, stage_memory
from unlatch.schedule import Kind, Workload
from unlatch.schedule.channel import FREE, Channel
from unlatch.schedule.machine import Machine
from unlatch.schedule.simulation import Costed, Simulation

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explorer" / "explorer.html"

explorer = docs_script("make_explorer")
COMMITTED = json.loads(re.search(r"^const DATA = (.*);$", PAGE.read_text(encoding="utf-8"), re.M)[1])

#: Method, stages, parts, backward, share of weight gradients, link.
CASES = [
    ("bp", 3, 1, 2.0, 0.5, 0.0),
    ("1f1b", 4, 8, 1.6, 0.5, 0.3),
    ("zb-h1", 4, 4, 2.4, 0.25, 0.0),
    ("fdg", 4, 4, 2.0, 0.5, 0.0),
    ("fdg", 8, 2, 3.0, 0.5, 1.5),
    ("dtrp", 3, 4, 2.0, 0.5, 0.2),
    ("petra", 5, 8, 1.5, 0.6, 0.7),
    ("pipedream-2bw", 4, 8, 2.0, 0.5, 0.1),
    ("layerpipe", 3, 4, 2.5, 0.4, 0.0),
    ("pipedream", 3, 4, 0.5, 0.5, 4.0),  # messages queue up before the wire
    ("dgl", 3, 1, 2.0, 0.5, 0.4),
    ("auxnet", 4, 1, 2.0, 0.5, 0.5),
]


def show(page: Page, **state: Any) -> None:
    page.goto(f"{PAGE.as_uri()}#{urlencode(state)}")


def change(page: Page, **state: Any) -> None:
    """Another choice on the page that is open."""
    page.evaluate("said => { history.replaceState(null, '', '#' + said); fromAddress(); }", urlencode(state))


def figure(page: Page, name: str, panel: str = "first") -> Any:
    return json.loads(page.locator(f"#{panel} [data-figure={name}]").get_attribute("data-value"))


def simulated(name: str, stages: int, parts: int, work: tuple[float, float, float], link: float) -> Simulation:
    """The library's own run of the same costs."""
    method = methods.get(name, microbatches=parts)
    layers = [LayerCost(str(n), *(cost / parts for cost in work), activation_bytes=1 / parts) for n in range(stages)]
    units = [LayerCost(str(n), 1, 1, 1) for n in range(stages)]
    if (found := method.placed(units, stages, FREE, None)) is not None:
        # A placement for equal tasks, at other costs; tasks may be shared between devices.
        costed, cost = found[1], {Kind.F: layers[0].F, Kind.I: layers[0].D, Kind.W: layers[0].G}
        times: list[dict[Kind, float]] = [{} for _ in range(costed.schedule.stations)]
        for entry in costed.schedule.entries:
            times[entry.station][entry.kind] = float(costed.workload.time(entry)) * cost.get(entry.kind, 0)
        costed = replace(costed, workload=Workload(times))
    else:
        costed = Costed(method.schedule(stages), method.workload(layers, range(stages)))
    batches = max(12, -(-(12 * stages + 16) // parts), 4 * stages + 8)
    machine = Machine(Channel(bandwidth=1 / link) if link else FREE)
    return costed.simulate(batches, parts, machine=machine)


def test_numbers_are_those_of_the_simulator(page: Page) -> None:
    show(page)
    for name, stages, parts, backward, weight, link in CASES:
        change(page, method=name, stages=stages, parts=parts, backward=backward, weight=weight, link=link)
        run = simulated(name, stages, parts, (1, backward * (1 - weight), backward * weight), link)
        assert figure(page, "period") == pytest.approx(run.interval * parts), name
        assert figure(page, "bubble") == pytest.approx(1 - run.steady_utilisation, abs=1e-9), name
        assert f"{round(run.makespan, 2):g} for {len(run.groups)} batches" in page.locator("#first").inner_text(), name


def test_staleness_and_memory_are_those_of_the_library(page: Page) -> None:
    show(page)
    for name, stages, parts in (("fdg", 4, 4), ("dtrp", 8, 2), ("pipedream-2bw", 4, 8), ("1f1b", 2, 16)):
        method, graph = methods.get(name, microbatches=parts), 1000
        change(page, method=name, stages=stages, parts=parts, border=0.25, weights=0.5)
        assert [late for (late,) in figure(page, "staleness")] == pytest.approx(list(method.staleness(stages))), name
        layers = [LayerCost(str(n), 1, 1, 1, 0.25 * graph, 0.5 * graph, kept_bytes=graph) for n in range(stages)]
        shares = [LayerCost(layer.name, 1, 1, 1, layer.activation_bytes / parts) for layer in layers]
        expected = stage_memory(
            layer_sizes(layers, range(stages), microbatches=parts),
            method.rules(),
            method.schedule(stages),
            microbatches=parts,
            delays=method.lateness(stages),
            optimizer_slots=0,
            message_bytes=method.workload(shares, range(stages)).bytes,
        )
        held = [sum(stage) * graph for stage in figure(page, "memory")]
        assert held == pytest.approx([stage.total for stage in expected]), name


def test_the_committed_page_is_what_the_library_says_now() -> None:
    template = explorer.TEMPLATE.read_text(encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == template.replace(
        "/* data */ null", json.dumps(COMMITTED, separators=(",", ":"))
    )
    assert [one["name"] for one in COMMITTED["methods"]] + [one["name"] for one in COMMITTED["left_out"]] == [
        name for name in methods.names() if name != "sph"
    ] + ["sph"]
    for stages, parts in ((2, 4), (5, 2)):
        now = explorer.data(range(stages, stages + 1), (parts,))
        for ours, theirs in zip(_resolved(now, stages, parts), _resolved(COMMITTED, stages, parts), strict=True):
            assert ours == theirs, "run `python docs/make_explorer.py`"


def _resolved(data: dict[str, Any], stages: int, parts: int) -> list[tuple[Any, ...]]:
    """Every method at so many stages and parts, with what its numbers stand for."""
    at, part, found = data["stages"].index(stages), data["parts"].index(parts), []
    for one in data["methods"]:
        run = one["runs"][at][part]
        if not isinstance(run, str):
            tasks, order, late, held = run
            run = (data["tasks"][tasks], data["rounds"][order], data["figures"][late], data["figures"][held])
        found.append((one["name"], one["summary"], one["gradient"], one["auto"][at], run))
    return found


def test_everything_moves_at_once_and_the_address_keeps_it(page: Page) -> None:
    show(page)
    assert figure(page, "bubble") == pytest.approx(0, abs=1e-9)
    assert figure(page, "bubble", "second") > 0.3
    assert figure(page, "staleness")[0][0] == 1.25
    page.get_by_label("Micro-batches").fill("0")
    assert figure(page, "staleness")[0][0] == 5
    page.get_by_label("Method").select_option("pipedream")
    page.get_by_label("Stages").fill("6")
    assert page.locator("#first svg rect.idle").count() == 6
    assert "stages=6" in page.url
    page.reload()
    assert page.locator("#first h2").inner_text() == "pipedream"
    assert page.locator("#first svg rect.idle").count() == 6


def test_a_micro_batch_can_be_followed_and_its_updates_are_counted(page: Page) -> None:
    show(page, method="fdg", beside="1f1b", stages=4, parts=1)
    page.locator("#first rect[data-station='0']").nth(2).hover()
    told = page.locator("#first .hint").inner_text()
    assert re.search(r"Stage 1: .* Here 5 updates happen between", told), told
    assert page.locator("#first line.between").count() == 5


def test_what_a_method_refuses_is_said(page: Page) -> None:
    show(page, method="pipedream-2bw", stages=4, parts=2)
    assert "at least as many micro-batches" in page.locator("#first .why").inner_text()


def test_nonsense_in_the_address_is_ignored(page: Page) -> None:
    show(page, method="<img src=x>", stages=99, parts="many", link=-1)
    assert page.locator("#first h2").inner_text() == "fdg"


def test_it_fits_a_phone_and_follows_dark(page: Page) -> None:
    show(page, method="auxnet", stages=8, parts=16)
    assert min(background(page)) > 240
    dark(page)
    assert max(background(page)) < 60
    phone(page)
    assert overflow(page) == 0
