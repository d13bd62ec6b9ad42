"""Writes the interactive page of the site: what every method does, from the library, put into `explorer_page.html`.

    python docs/make_explorer.py

The page schedules nothing. For every method, number of stages and micro-batches this script asks the library for the
entries with their messages, for the order in which one round does them, for what they cost in terms of forward, input
gradient and weight gradient, for staleness and memory. A round repeats for ever: what would be of a micro-batch before
the first or after the last one falls away. That this is the library's own order is checked here, entry by entry; that
the page's numbers are those of the simulator, by `tests/browser/test_explorer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from unlatch import methods
from unlatch.errors import ConfigError
from unlatch.methods import Method
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.memory import StageMemory, layer_sizes, stage_memory, task_memory
from unlatch.schedule import Entry, Schedule, Workload, steady_buffers, unroll
from unlatch.schedule.channel import FREE
from unlatch.schedule.entries import Route
from unlatch.schedule.runs import moments
from unlatch.schedule.simulation import Costed

STAGES = range(2, 9)
PARTS = (1, 2, 4, 8, 16)
DOCS = Path(__file__).parent
TEMPLATE, PAGE = DOCS / "explorer_page.html", DOCS / "explorer" / "explorer.html"
#: Batches of a run in which every warm-up is over, and batches over which a pattern must not change.
LATE, LONG = 10**6, 16
#: Which cost a kind of entry has where tasks are placed one by one.
CLASSES = {"forward": 0, "input gradient": 1, "weight gradient": 2}


#: Many methods share a schedule, and what follows from it takes long to find out.
under_way = cache(steady_buffers)


class Unsteady(Exception):
    """A method that does not do the same for every batch."""


class Interned:
    """A list in which everything stands once."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def number(self, value: Any) -> int:
        return self.found.setdefault(json.dumps(value, separators=(",", ":")), len(self.found))

    def listed(self) -> list[Any]:
        return [json.loads(text) for text in self.found]


class Placed(NamedTuple):
    """A method on so many equal stages, with what entries cost per unit of forward, input and weight gradient."""

    costed: Costed
    times: dict[Entry, list[float]]
    sizes: dict[Route, float]
    #: Per stage: graphs of a batch, borders of a batch, and weights that it holds.
    memory: list[list[float]]
    staleness: Sequence[float]


def equal_layers(stages: int, **costs: float) -> list[LayerCost]:
    return [LayerCost(str(layer), **{"F": 0, "D": 0, "G": 0, **costs}) for layer in range(stages)]


def placed(method: Method, stages: int) -> Placed:
    """Ask the library; costs are linear, so that one question for each unit tells them all."""
    units = equal_layers(stages, F=1, D=1, G=1, activation_bytes=1)
    if (found := method.placed(units, stages, FREE, None)) is not None:
        plan, costed = found
        times = {entry: [0.0, 0.0, 0.0] for entry in costed.schedule.entries}
        for entry, row in times.items():
            if (time := costed.workload.time(entry)) > 0:
                row[CLASSES[entry.kind.cost]] = time
        memory = []
        for bytes_ in (
            {"kept_bytes": 1},
            {"kept_bytes": 0, "activation_bytes": 1},
            {"kept_bytes": 0, "weight_bytes": 1},
        ):
            again = method.placed(equal_layers(stages, F=1, D=1, G=1, **bytes_), stages, FREE, None)
            assert again is not None
            share = method.per_batch if "weight_bytes" not in bytes_ else 1
            held = task_memory(
                again[0],
                method.rules(),
                costed.schedule,
                costed.devices or range(stages),
                message_bytes=again[1].workload.bytes,
                per_update=method.per_update,
                optimizer_slots=0,
            )
            memory.append([float(size) / share for size in held])
        late = [delay / method.per_update for delay in plan.delays.gradient]
        return Placed(costed, times, sizes(costed), [list(row) for row in zip(*memory, strict=True)], late)
    schedule = method.schedule(stages)
    workloads = [method.workload(equal_layers(stages, **{cost: 1}), range(stages)) for cost in "FDG"]
    sample = method.workload(equal_layers(stages, F=3, D=5, G=7), range(stages))
    times = {entry: [work.time(entry) for work in workloads] for entry in schedule.entries}
    for entry, row in times.items():
        expected = sum(factor * share for factor, share in zip((3, 5, 7), row, strict=True))
        assert abs(expected - sample.time(entry)) < 1e-9, f"{method.name}: {entry} does not cost in proportion"
    costed = Costed(schedule, method.workload(units, range(stages)))
    return Placed(costed, times, sizes(costed), stage_units(method, schedule, stages), method.staleness(stages))


def sizes(costed: Costed) -> dict[Route, float]:
    routes = [route for entry in costed.schedule.entries for route in entry.outgoing]
    return {route: costed.workload.bytes(route) for route in routes}


def stage_units(method: Method, schedule: Schedule, stages: int) -> list[list[float]]:
    """What each stage holds, in graphs and borders of a whole batch and in weights."""

    def held(work: Workload, **bytes_: float) -> list[StageMemory]:
        return stage_memory(
            layer_sizes(equal_layers(stages, **bytes_), range(stages), microbatches=method.per_batch),
            method.rules(),
            schedule,
            microbatches=method.per_batch,
            accumulate=method.accumulate,
            delays=method.lateness(stages),
            optimizer_slots=0,
            message_bytes=work.bytes,
            under_way=under_way(schedule, method.per_batch, method.accumulate),
        )

    nothing = Workload()
    border = {"activation_bytes": 1 / method.per_batch}
    messages = method.workload(equal_layers(stages, **border), range(stages))
    columns = (
        held(nothing, kept_bytes=1),
        held(messages, kept_bytes=0, activation_bytes=1),
        held(nothing, kept_bytes=0, weight_bytes=1),
    )
    return [[stage.total for stage in row] for row in zip(*columns, strict=True)]


def round_of(schedule: Schedule, parts: int) -> tuple[int, list[tuple[int, int]]]:
    """What one round does, as numbers of entries and micro-batches relative to its first, and how many it feeds."""
    step = parts if schedule.flushes else 1
    first = schedule.depth
    return step, [(number, micro - first) for number, micro in schedule.feed(first, step) if due(schedule, number)]


def due(schedule: Schedule, number: int) -> bool:
    """Whether an entry is done at all once warm-ups are over, for samples met before."""
    entry = schedule.entries[number]
    if entry.when is None:
        return True
    found = {entry.when(moment) for moment in moments([1] * LONG, first=LATE)}
    if len(found) > 1:
        raise Unsteady("what it does differs from batch to batch")
    return found.pop()


def repeated(schedule: Schedule, parts: int, batches: int) -> Iterator[tuple[str, int]]:
    """The run that the page makes of a round."""
    step, done = round_of(schedule, parts)
    for first in range(0, parts * batches + schedule.depth, step):
        for number, ahead in done:
            entry, micro = schedule.entries[number], first + ahead
            if 0 <= micro < parts * batches and (entry.per == "micro" or (micro + 1) % parts == 0):
                yield str(entry), micro


@cache
def check_rounds(schedule: Schedule, parts: int) -> None:
    """A round that is repeated must be what the library does, action by action."""
    batches = 3 + schedule.depth // parts
    ours = list(repeated(schedule, parts, batches))
    library = [(str(a.entry), a.micro) for a in unroll(schedule, [parts] * batches, first=LATE)]
    if ours != library:
        at = next((n for n, pair in enumerate(zip(ours, library, strict=False)) if pair[0] != pair[1]), "the end")
        raise SystemExit(
            f"{type(schedule).__name__}, {schedule.stages} stages, {parts} micro-batches: rounds leave the library's "
            f"order at action {at}"
        )


def plain(value: float) -> float:
    """A short number: 2 instead of 2.0, nine digits otherwise."""
    return int(value) if value == int(value) else round(float(value), 9)


def tasks(method: Placed) -> dict[str, Any]:
    """Entries with messages and costs."""
    costed = method.costed
    schedule = costed.schedule
    routes = list(method.sizes)
    numbers = {route: number for number, route in enumerate(routes)}
    return {
        "stages": schedule.stages,
        "devices": list(costed.devices or range(schedule.stations)),
        "owners": list(costed.owners or range(schedule.stations)),
        "routes": [
            [sender, receiver, plain(method.sizes[name, sender, receiver])] for name, sender, receiver in routes
        ],
        "entries": [
            [
                str(entry.kind),
                entry.kind.cost,
                entry.station,
                [numbers[route] for route in entry.incoming],
                [numbers[route] for route in entry.outgoing],
                int(entry.per == "update"),
                [plain(time) for time in method.times[entry]],
            ]
            for entry in schedule.entries
        ],
    }


def data(counts: Sequence[int] = STAGES, parts: Sequence[int] = PARTS) -> dict[str, Any]:
    """All that the page knows."""
    work, rounds, figures = Interned(), Interned(), Interned()
    listed, left_out = [], []
    for name in methods.names():
        try:
            runs = [list(method_runs(name, stages, parts, work, rounds, figures)) for stages in counts]
        except Unsteady as error:
            left_out.append({"name": name, "why": str(error)})
            continue
        method = methods.get(name)
        listed.append(
            {
                "name": name,
                "summary": method.summary,
                "gradient": method.gradient,
                "keeps": method.keeps,
                "auto": [method.resolve(stages).microbatches for stages in counts],
                "runs": runs,
            }
        )
    return {
        "stages": list(counts),
        "parts": list(parts),
        "baseline": methods.base.BASELINE,
        "methods": listed,
        "left_out": left_out,
        "tasks": work.listed(),
        "rounds": rounds.listed(),
        "figures": figures.listed(),
    }


def method_runs(
    name: str, stages: int, choices: Sequence[int], work: Interned, rounds: Interned, figures: Interned
) -> Iterator[list[int] | str]:
    """Per number of micro-batches: numbers of tasks, round, staleness and memory, or why there are none."""
    for parts in choices:
        try:
            method = methods.get(name, microbatches=parts)
            found = placed(method, stages)
        except ConfigError as error:
            yield str(error)
            continue
        schedule = found.costed.schedule
        step, done = round_of(schedule, parts)
        check_rounds(schedule, parts)
        flat = [number for pair in done for number in pair]
        memory = [[plain(size) for size in stage] for stage in found.memory]
        yield [
            work.number(tasks(found)),
            rounds.number([step, flat]),
            figures.number([plain(late) for late in found.staleness]),
            figures.number(memory),
        ]


def page() -> str:
    """The page, with its data."""
    text = json.dumps(data(), separators=(",", ":")).replace("</", "<\\/")
    return TEMPLATE.read_text(encoding="utf-8").replace("/* data */ null", text)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {PAGE.stat().st_size / 1e6:.2f} MB")
