"""Draws the pictures of README and of the methods from the schedules themselves, with the simulator of the library.

    python docs/make_figures.py

**The picture of the README.** Three stages train with batches of four micro-batches. Per micro-batch a forward takes
one unit of time and a backward two; where DTR computes a forward again, three. All stages are equally large (the
planner would give DTR's last stage more, since it recomputes nothing). Messages take no time.

**One picture per page of `docs/methods/`.** Three stages of equal layers under every method of the page, each with the
costs that the planner gives it: a forward takes 1, a backward 2, a second forward 1, and what local methods train
beside a stage what the method says. Asynchronous methods are fed one micro-batch after the other. `layerpipe` places
the tasks of four layers with costs 1, 2, 4, 3 on two devices, as in its measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from unlatch import methods
from unlatch import schedule as sch
from unlatch.methods import Method
from unlatch.plan.layer_costs import LayerCost
from unlatch.schedule import Costs, Kind, Schedule, Timeline, Workload
from unlatch.schedule.channel import FREE

STAGES, PARTS, WINDOW, BATCHES = 3, 4, 60, 16
IMAGE = Path(__file__).parent / "img" / "locks.png"
COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa7733", "#7755aa", "#448899", "#996655", "#667722")
WHOLE: Costs = {Kind.F: PARTS, Kind.B: 2 * PARTS, Kind.U: 0}
PART: Costs = {Kind.F: 1, Kind.B: 2, Kind.U: 0}
AGAIN: Costs = {Kind.F: 1, Kind.B: 3, Kind.U: 0}


def timeline(schedule: Schedule, parts: int, costs: Sequence[Costs]) -> Timeline:
    """When everything happens if every stage starts its next action as soon as it can."""
    return sch.simulate(sch.streams(schedule, [parts] * BATCHES), Workload(costs))


def period(run: Timeline, parts: int) -> float:
    """Time from batch to batch once the pipeline is filled: the middle of the run, at stage 0."""
    ends = {action.batch: end for action, _, end in run if action.station == 0 and action.kind is Kind.B}
    first, last = BATCHES // 4, BATCHES // 2
    return (ends[last * parts - 1] - ends[first * parts - 1]) / (last - first)


def draw(axes: Axes, title: str, run: Timeline, parts: int) -> None:
    """One row per stage, one bar per action, one colour per batch; backwards are darker."""
    for action, start, end in run:
        shown = min(end, WINDOW) - start
        if action.kind is Kind.U or shown <= 0:
            continue
        forward = action.kind is Kind.F
        axes.broken_barh(
            [(start, shown)],
            (STAGES - 1 - action.station - 0.4, 0.8),
            facecolor=COLOURS[action.batch // parts % len(COLOURS)],
            alpha=0.45 if forward else 1.0,
            edgecolor="white",
            linewidth=0.8,
        )
        if end <= WINDOW:
            axes.text(
                (start + end) / 2,
                STAGES - 1 - action.station,
                str(action.batch // parts + 1),
                ha="center",
                va="center",
                fontsize=7,
                color="black" if forward else "white",
            )
    axes.set_title(f"{title}: a batch every {period(run, parts):g} units", loc="left", fontsize=10)
    axes.set_yticks(range(STAGES), [f"stage {stage}" for stage in reversed(range(STAGES))])
    axes.set_xlim(0, WINDOW)
    axes.set_ylim(-0.6, STAGES - 0.4)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


#: The pages of `docs/methods/` and the methods in the picture of each.
METHOD_PAGES = {
    "bp": ("bp",),
    "gpipe": ("gpipe",),
    "1f1b": ("1f1b",),
    "zero-bubble": ("zb-h1", "zb-h2"),
    "pipedream": ("pipedream", "pipedream-2bw"),
    "asyncpp": ("asyncpp",),
    "xpipe": ("xpipe",),
    "paci": ("paci",),
    "cgad": ("cgad",),
    "ddg-fr": ("ddg", "fr"),
    "fdg-adl": ("fdg", "adl"),
    "dsp": ("dsp",),
    "dtr-dtrp": ("dtr", "dtrp"),
    "petra": ("petra",),
    "layerpipe": ("layerpipe",),
    "dgl-dni": ("dgl", "dni"),
    "auglocal": ("auglocal",),
    "auxnet": ("auxnet",),
    "auxvar-sph": ("auxvar", "sph"),
}
METHOD_WINDOW, UNIT, ROW, MARGIN = 30, 25, 22, 60


def method_timeline(method: Method) -> Timeline:
    """Stages of one layer each, or the tasks of four layers on two devices."""
    placed = method.placed([LayerCost(str(n), t, t, t) for n, t in enumerate((1, 2, 4, 3))], 2, FREE, None)
    if placed is not None:
        found = placed[1]
        return sch.simulate(sch.streams(found.schedule, [1] * BATCHES, devices=found.devices), found.workload)
    schedule = method.schedule(STAGES)
    workload = method.workload([LayerCost(str(n), 1, 1, 1) for n in range(STAGES)], range(STAGES))
    batches = [PARTS] * 3 if schedule.flushes and method.per_batch > 1 else [1] * BATCHES
    return sch.simulate(sch.streams(schedule, batches), workload)


def method_svg(names: Sequence[str]) -> str:
    """Timelines below each other: a row per device, a bar per action with its entry and micro-batch.

    Written by hand: matplotlib takes ten times the bytes, and other bytes with each of its versions.
    """
    parts: list[str] = []
    top = 0
    for name in names:
        method = methods.get(name).resolve(STAGES)
        run = method_timeline(method)
        # Uneven layers take longer: twice the time in the same width.
        pace = 2 if _shares_devices(run) else 1
        parts.append(f'<text x="0" y="{top + 14}" font-size="13">{escape(f"{name}: {method.summary}")}</text>')
        parts += _device_rows(run, top + 22, UNIT / pace)
        top += 22 + ROW * len(run.streams) + 10
    for tick in range(0, METHOD_WINDOW + 1, 5):
        x = MARGIN + UNIT * tick
        parts.append(f'<text x="{x}" y="{top + 8}" text-anchor="middle" fill="#555">{tick * pace:g}</text>')
    unit = f"simulated time, in forwards of {'the first layer' if pace > 1 else 'one stage'}"
    parts.append(f'<text x="{MARGIN}" y="{top + 24}" fill="#555">{unit}</text>')
    width, height = MARGIN + UNIT * METHOD_WINDOW + 10, top + 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    paper = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="11">', paper, *parts, "</svg>\n"])


def _shares_devices(run: Timeline) -> bool:
    return any(len({action.station for action in stream}) > 1 for stream in run.streams)


def _device_rows(run: Timeline, top: int, unit: float) -> Iterator[str]:
    several, until = _shares_devices(run), METHOD_WINDOW * UNIT / unit
    for row, stream in enumerate(run.streams):
        y = top + ROW * row
        yield f'<text x="0" y="{y + 15}" fill="#555">{"device" if several else "stage"} {row}</text>'
        for action, start, end in zip(stream, run.starts[row], run.ends[row], strict=True):
            shown = float(min(end, until) - start)
            if shown > 0:
                x, width = MARGIN + unit * float(start), unit * shown
                colour = COLOURS[action.batch % len(COLOURS)]
                faint = {"forward": 0.45, "auxiliary": 0.25}.get(action.kind.cost)
                opacity = "" if faint is None else f' fill-opacity="{faint}"'
                size = f'x="{x:g}" y="{y}" width="{max(width - 1, 1):g}" height="{ROW - 2}"'
                yield f'<rect {size} fill="{colour}"{opacity}/>'
                label = str(action) if several else f"{action.kind}{action.batch}"
                if width >= 6.5 * len(label):
                    ink = "white" if faint is None else "black"
                    yield f'<text x="{x + width / 2:g}" y="{y + 15}" text-anchor="middle" fill="{ink}">{label}</text>'


def method_figures(folder: Path) -> list[Path]:
    """Draw the pictures of all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{page}.svg" for page in METHOD_PAGES]
    for path in written:
        path.write_text(method_svg(METHOD_PAGES[path.stem]), encoding="utf-8")
    return written


def main() -> None:
    draw_readme()
    for path in (IMAGE, *method_figures(IMAGE.parent / "methods")):
        print(path)


def draw_readme() -> None:
    """The picture of the README."""
    figure, rows = plt.subplots(4, 1, figsize=(11, 7.2), sharex=True, layout="constrained")
    ticked = sch.ticked(STAGES, backward_first=True)
    even, recomputing = [PART] * STAGES, [AGAIN] * (STAGES - 1) + [PART]
    draw(rows[0], "bp, one batch at a time", timeline(sch.Sequential(STAGES), 1, [WHOLE] * STAGES), 1)
    draw(rows[1], "1f1b, four micro-batches, then a flush", timeline(sch.OneFOneB(STAGES), PARTS, even), PARTS)
    draw(rows[2], "fdg, no flush, graphs kept", timeline(ticked, PARTS, even), PARTS)
    draw(
        rows[3], "dtr, no flush, only inputs kept, forwards computed twice", timeline(ticked, PARTS, recomputing), PARTS
    )
    rows[3].set_xlabel("simulated time, in forwards of one micro-batch; numbers and colours are batches")
    rows[0].legend(
        handles=[Patch(color="grey", alpha=0.45, label="forward"), Patch(color="grey", label="backward")],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    IMAGE.parent.mkdir(exist_ok=True)
    figure.savefig(IMAGE, dpi=130, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
