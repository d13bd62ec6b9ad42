"""Draws the pictures of README and of the methods from the schedules themselves, with the simulator of the library.

    python docs/make_figures.py

**The picture of the README.** Four stages of equal size train with batches of four micro-batches, once the pipeline is
full. At every stage the forward of a batch takes 1 and its backward 2; a forward that is computed again takes its time
too. Messages take none. Idle share and speed are those of the simulator, lateness is the method's own.

**One picture per page of `docs/methods/`.** Three stages of equal layers under every method of the page, each with the
costs that the planner gives it: a forward takes 1, a backward 2, a second forward 1, and what local methods train
beside a stage what the method says. Asynchronous methods are fed one micro-batch after the other. `layerpipe` places
the tasks of four layers with costs 1, 2, 4, 3 on two devices, as in its measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from unlatch import methods
from unlatch import schedule as sch
from unlatch.methods import Method
from unlatch.plan.layer_costs import LayerCost
from unlatch.schedule import Timeline
from unlatch.schedule.channel import FREE
from unlatch.schedule.simulation import Costed, Simulation

STAGES, PARTS, BATCHES = 3, 4, 16
IMAGE = Path(__file__).parent / "img" / "locks.svg"
COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa7733", "#7755aa", "#448899", "#996655", "#667722")
METHOD_WINDOW, UNIT, ROW, MARGIN = 30, 25, 22, 60


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


#: The picture of the README: methods with what each does about the locks, stages, and its measures in pixels.
SHOWN = {
    "bp": "one batch at a time: every stage waits for the others",
    "1f1b": "micro-batches overlap, but the pipeline runs empty before every update",
    "pipedream": "never runs empty: gradients may be late, older weights are kept",
    "dtrp": "never runs empty, keeps inputs only: forwards run twice, weights are predicted",
    "petra": "never runs empty, keeps nothing: reversible stages compute their inputs back",
}
README_STAGES, README_WINDOW, README_UNIT, README_ROW, ASIDE = 4, 24, 27, 13, 250


def readme_svg() -> str:
    """Steady timelines below each other, with idle share, speed and lateness beside each; grey is waiting."""
    parts, top, wide = [], 8, README_WINDOW * README_UNIT
    for name, words in SHOWN.items():
        count = 1 if name == methods.base.BASELINE else PARTS
        method = methods.get(name, microbatches=count)
        layers = [LayerCost(str(n), 1 / count, 1 / count, 1 / count) for n in range(README_STAGES)]
        costed = Costed(method.schedule(README_STAGES), method.workload(layers, range(README_STAGES)))
        run = costed.simulate(8 * README_STAGES, count)
        parts.append(f'<text x="0" y="{top + 10}"><tspan font-weight="bold">{name}</tspan>  {escape(words)}</text>')
        parts += _steady_rows(run, count, top + 17)
        idle, speed = 1 - run.steady_utilisation, 3 * README_STAGES / (run.interval * count)
        late = max(method.staleness(README_STAGES))
        told = f'{speed:.1f} times one device<tspan x="{wide + 125}" dy="17">'
        told += f"{'exact gradients' if late == 0 else f'up to {late:.3g} updates late'}</tspan>"
        parts.append(f'<text x="{wide + 14}" y="{top + 52}" font-size="34" font-weight="bold">{idle:.0%}</text>')
        parts.append(f'<text x="{wide + 125}" y="{top + 38}">{told}</text>')
        top += 17 + README_ROW * README_STAGES + 14
    parts.insert(0, f'<text x="{wide + 14}" y="18" fill="#555">idle</text>')
    parts.append(
        f'<text x="0" y="{top + 8}" fill="#555">Four stages, simulated, pipeline full. Numbers and colours are '
        "batches; pale: forward, full: backward, grey: waiting.</text>"
    )
    width, height = wide + ASIDE, top + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    paper = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="12">', paper, *parts, "</svg>\n"])


def _steady_rows(run: Simulation, count: int, top: int) -> Iterator[str]:
    """A window from the middle of the run, one row per stage. **Arguments:** `count`: micro-batches of a batch."""
    middle, wide = len(run.groups) // 2, README_WINDOW * README_UNIT
    first = min(span.start for span in run.spans() if span.batch == middle * count)
    for stage in range(README_STAGES):
        size = f'width="{wide}" height="{README_ROW - 1}"'
        yield f'<rect x="0" y="{top + README_ROW * stage}" {size} fill="#dfe3e8"/>'
    for span in run.spans():
        start, end = max(0.0, span.start - first), min(README_WINDOW, span.end - first)
        if end <= start:
            continue
        x, width, y = README_UNIT * start, README_UNIT * (end - start), top + README_ROW * span.device
        batch = span.batch // count
        opacity = ' fill-opacity="0.45"' if span.kind == "F" else ""
        size = f'x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.5):.1f}" height="{README_ROW - 1}"'
        yield f'<rect {size} fill="{COLOURS[batch % len(COLOURS)]}"{opacity}/>'
        if span.kind != "F" and width >= 12:
            label = batch - middle + 1 if batch >= middle else ""
            at = f'x="{x + width / 2:.1f}" y="{y + 9.5}"'
            yield f'<text {at} font-size="9" text-anchor="middle" fill="white">{label}</text>'


def main() -> None:
    IMAGE.write_text(readme_svg(), encoding="utf-8")
    for path in (IMAGE, *method_figures(IMAGE.parent / "methods")):
        print(path)


if __name__ == "__main__":
    main()
