"""What `unlatch methods` says: a table of all, or one method with its timetable, buffers and advice."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import torch
import typer

from ..advise.advice import Advice, advise, lags_of
from ..methods import GradientKind, Method, get
from ..schedule import Periodic, buffers, gantt, slot_table, streams, timetable
from ..schedule.stability import Motion, chain_limit
from ..table import Table
from .catalogue import Option, catalogue, facts, options
from .console import emit_json, flags_of

__all__ = ["list_all", "show"]

_FAMILIES: dict[GradientKind, str] = {
    "exact": "the gradient of backpropagation; stages wait for each other",
    "late": "the gradient of an older batch, so that no stage waits for the backward of the next",
    "local": "the gradient of a loss of the stage's own",
}
_COUNTS = (1, 2, 4, 8)
#: Micro-batches in a drawing.
_DRAWN = 4


def show(
    name: str,
    stages: int,
    *,
    ticks: int | None = None,
    microbatches: int | None = None,
    momentum: float = 0.9,
    nesterov: bool = True,
    as_json: bool = False,
) -> None:
    """Print all about one method."""
    chosen = get(name, **({} if microbatches is None else {"microbatches": microbatches})).resolve(stages)
    chosen.schedule(stages)
    optimizer = torch.optim.SGD(
        [torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=momentum, nesterov=nesterov and momentum > 0
    )
    advice = advise(chosen, stages, optimizer)
    if as_json:
        emit_json(_as_json(name, chosen, stages, microbatches, advice))
        return
    for line in _describe(chosen, stages, ticks or 2 * stages, microbatches):
        typer.echo(line)
    for line in _advice(chosen, stages, advice, Motion(momentum, optimizer.param_groups[0]["nesterov"])):
        typer.echo(line)


def list_all(stages: int, microbatches: int | None, as_json: bool) -> None:
    """Print the table of all methods."""
    found = catalogue(stages, microbatches)
    if as_json:
        emit_json([asdict(one) for one in found])
        return
    heads = ("method", "late", "copies", "what")
    rows = [(one.name, f"{one.staleness:.3g}", str(one.weight_copies), one.summary) for one in found]
    head, *lines = Table(heads, rows, left=(0, 3)).lines()
    typer.echo(head)
    for family, members in groupby(zip(found, lines, strict=True), key=lambda pair: pair[0].gradient):
        typer.echo(f"\n{family}: {_FAMILIES[family]}")
        for _, line in members:
            typer.echo(line)
    typer.echo(
        f"\n{stages} stages. late: updates between forward and backward of a batch at stage 0, with the micro-batches "
        "that the\nmethod chooses. copies: of the weights, beside the current ones. One method in detail: "
        "unlatch methods NAME"
    )


def _describe(method: Method, stages: int, ticks: int, asked: int | None) -> Iterator[str]:
    yield f"{method.name}: {method.summary}"
    yield f"{method.gradient}: {_FAMILIES[method.gradient]}; kept for it: {method.keeps}"
    yield ""
    yield (type(method).__doc__ or "").strip().split("\n\n")[0].replace("\n    ", "\n")
    yield ""
    yield "options"
    yield from _options(method)
    yield ""
    yield from _picture(method, stages, ticks, asked)
    yield ""
    yield from _stages(method, stages)
    yield ""


def _options(method: Method) -> Iterator[str]:
    found = [(f"{option.name} = {option.default!r}", _option_text(option)) for option in options(method)]
    margin = max(len(head) for head, _ in found) + 4
    columns = max(60, min(120, shutil.get_terminal_size().columns))
    for head, text in found:
        yield textwrap.fill(text, columns, initial_indent=f"  {head}".ljust(margin), subsequent_indent=" " * margin)


def _option_text(option: Option) -> str:
    choices = f" [{' | '.join(option.choices)}]" if len(option.choices) > 1 else ""
    return option.text.replace("`", "") + choices


def _picture(method: Method, stages: int, ticks: int, asked: int | None) -> Iterator[str]:
    shown, count = method.example(stages), method.per_batch
    schedule = shown.schedule
    if schedule.flushes:
        yield f"one batch in {_micros(count)} (F forward, B backward, I and W its halves; = goes on, . idle)"
        yield gantt(streams(schedule, [count]))
        return
    assert isinstance(schedule, Periodic), "all others go on for ever"
    if shown.devices is not None:
        yield f"the first {ticks} slots of {stages} equal layers (0F2: station 0 does the forward of micro-batch 2)"
        yield f"stations 0 to {stages - 1} are the layers at home, further ones their tasks elsewhere"
        yield slot_table(schedule, ticks, shown.devices)
    else:
        meaning = "fw forward, bw backward, re recomputation and backward, fb forward and backward"
        yield f"the first {ticks} ticks ({meaning}; letters: work beside the stage)"
        # The published timetables have one update per tick; micro-batches only if they were asked for.
        yield timetable(schedule, ticks, recompute=method.recomputes, group=asked or 1)
    yield ""
    yield "the same without a common clock, in units of work (= goes on, . idle)"
    yield gantt(streams(schedule, [1] * _DRAWN, devices=shown.devices), shown.workload.units(schedule.entries))


def _stages(method: Method, stages: int) -> Iterator[str]:
    in_flight = _in_flight(method, stages)
    rows = tuple(
        (str(stage), f"{updates:.3g}", str(in_flight[stage])) for stage, updates in enumerate(method.staleness(stages))
    )
    yield Table(("stage", "updates behind", "under way"), rows, left=()).text()
    yield f"with {_micros(method.per_batch)} per batch and one update per {_batches(method)}"


def _micros(count: int) -> str:
    return f"{count} micro-batch{'es'[: 2 * (count > 1)]}"


def _batches(method: Method) -> str:
    return "batch" if method.accumulate == 1 else f"{method.accumulate} batches"


def _advice(method: Method, stages: int, advice: Advice, motion: Motion) -> Iterator[str]:
    if advice.unknown is not None:
        yield from advice.table()
        return
    if not any(advice.lateness):
        yield "no gradient is late"
        return
    form = f"{'Nesterov' if motion.nesterov else 'heavy-ball'} momentum {motion.momentum:g}"
    yield f"how much delay is borne with {form} (a*: largest stable lr x curvature)"
    yield from advice.figures()
    yield ""
    yield "a* of all stages together, by micro-batches per update"
    yield _limits(method, stages, motion.momentum).text()
    if advice.warning is not None:
        yield ""
        yield f"warning: {advice.warning}"
        yield from flags_of(advice.cure)


def _limits(method: Method, stages: int, momentum: float) -> Table:
    kinds = {
        f"heavy ball {momentum:g}": Motion(momentum),
        f"Nesterov {momentum:g}": Motion(momentum, nesterov=True),
        f"average {momentum:g}": Motion(momentum, fed=1.0 - momentum),
    }
    rows = []
    for count in sorted({*_COUNTS, method.per_batch}):
        one = replace(method, microbatches=count)
        lateness = one.lateness(stages)
        limits = (chain_limit(lags_of(one, lateness, [motion] * stages)) for motion in kinds.values())
        rows.append((str(count), *(f"{limit:.3f}" for limit in limits)))
    return Table(("micro-batches", *kinds), tuple(rows), left=())


def _in_flight(method: Method, stages: int) -> tuple[int, ...]:
    enough = [method.per_batch] * (2 * stages + 2)
    return buffers(streams(method.example(stages).schedule, enough, method.accumulate)).in_flight[:stages]


def _as_json(name: str, method: Method, stages: int, asked: int | None, advice: Advice) -> dict[str, Any]:
    return {
        **asdict(facts(name, stages, asked)),
        "stages": stages,
        "options": {
            option.name: {"default": option.default, "choices": option.choices, "text": option.text}
            for option in options(method)
        },
        "staleness": list(method.staleness(stages)),
        "in_flight": list(_in_flight(method, stages)),
        "advice": asdict(advice),
    }
