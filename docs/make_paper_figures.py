"""Draws the pictures of `docs/papers.md` from the result files of `benchmarks/`.

    python docs/make_paper_figures.py

Analogues of figures of the papers: DTR's Figures 3 (regulator), 5 (what devices do), 6 (utilisation) and 7 (memory over
K), and AuxNet's speed-up over K. Written by hand like those of `make_figures.py`; `tests/test_tables.py` checks that
the pictures in `docs/img/papers/` are those of the result files.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
IMAGES = Path(__file__).parent / "img" / "papers"
COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa7733", "#7755aa", "#448899", "#996655", "#667722")
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 520, 300, 58, 34, 230
ROW, LABELS, WIDE = 24, 70, 640

Line = Mapping[int, float]


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
    head += f'height="{height:g}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="white"/>', *parts, "</svg>\n"])


def chart(title: str, across: str, up: str, lines: Mapping[str, Line], dashed: Mapping[str, Line] | None = None) -> str:
    """Lines over whole numbers; what is `dashed` has the colour of the line of the same name, and no entry."""
    dashed = dashed or {}
    xs = sorted({x for line in lines.values() for x in line})
    most = max(value for line in (*lines.values(), *dashed.values()) for value in line.values())
    step = _step(most)
    ticks = [step * n for n in range(math.ceil(most / step) + 1)]

    def at(x: float, y: float) -> str:
        across_by = (x - xs[0]) / max(1, xs[-1] - xs[0])
        return f"{LEFT + 12 + across_by * (WIDTH - 24):.1f},{TOP + HEIGHT * (1 - y / ticks[-1]):.1f}"

    parts = [f'<text x="0" y="16" font-size="13">{escape(title)}</text>']
    for tick in ticks:
        y = TOP + HEIGHT * (1 - tick / ticks[-1])
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick:g}</text>')
    for x in xs:
        where = at(x, 0).partition(",")[0]
        parts.append(f'<text x="{where}" y="{TOP + HEIGHT + 18}" text-anchor="middle" fill="#555">{x}</text>')
    middle = LEFT + WIDTH / 2
    parts.append(f'<text x="{middle}" y="{TOP + HEIGHT + 38}" text-anchor="middle" fill="#555">{escape(across)}</text>')
    turned = f'x="0" y="0" transform="translate(13 {TOP + HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text {turned} fill="#555">{escape(up)}</text>')
    for number, (name, line) in enumerate(_apart(lines, ticks[-1]).items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [at(x, y) for x, y in sorted(line.items())]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in points:
            x, y = point.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        if (first := name.partition(" / ")[0]) in dashed:
            points = [at(x, y) for x, y in sorted(dashed[first].items())]
            style = f'fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="4 3"'
            parts.append(f'<polyline points="{" ".join(points)}" {style}/>')
        y = TOP + 14 + 20 * number
        parts.append(f'<rect x="{LEFT + WIDTH + 14}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 32}" y="{y}">{escape(name)}</text>')
    return svg(LEFT + WIDTH + LEGEND, TOP + HEIGHT + 48, parts)


def _apart(lines: Mapping[str, Line], most: float) -> dict[str, Line]:
    """Lines that would cover each other are one, with all their names."""
    shown: dict[str, Line] = {}
    for name, line in lines.items():
        for other, drawn_before in shown.items():
            if line.keys() == drawn_before.keys() and all(abs(line[x] - drawn_before[x]) < most / 100 for x in line):
                shown[f"{other} / {name}"] = shown.pop(other)
                break
        else:
            shown[name] = line
    return shown


def _step(most: float) -> float:
    """A round distance of about six ticks."""
    rough = most / 6
    power = 10 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def regulator(found: dict[str, Any]) -> str:
    lines: dict[str, dict[int, float]] = {"no prediction": {}}
    for row in found["rows"]:
        lines.setdefault(row["predictor"], {})[row["steps"]] = statistics.fmean(row["miss"].values())
        lines["no prediction"][row["steps"]] = 1.0
    title = "How far predicted weights are from the coming ones, as a share of the way that these go"
    return chart(title, "updates ahead", "miss", lines)


def utilisation(found: dict[str, Any]) -> str:
    lines: dict[str, dict[int, float]] = {}
    for row in found["utilisation"]:
        name = "without" if row["joined"] == 1 else f"{row['joined']} batches joined"
        lines.setdefault(name, {})[row["stages"]] = 100 * row["mean"]
    title = f"Batch compensation: dtr on {found['network']}, mean utilisation of devices, simulated"
    return chart(title, "stages", "busy, %", lines)


def memory(found: dict[str, Any]) -> str:
    lines: dict[str, dict[int, float]] = {}
    expected: dict[str, dict[int, float]] = {}
    stages = sorted({row["stages"] for row in found["rows"] if row["stages"] > 1})
    for row in found["rows"]:
        # Backpropagation in one process is a level to compare with.
        for x in stages if row["method"] == "bp" else [row["stages"]]:
            name = "bp, one process" if row["method"] == "bp" else row["method"]
            lines.setdefault(name, {})[x] = max(row["measured"]) / 1e6
            expected.setdefault(name, {})[x] = max(row["predicted"]) / 1e6
    title = f"ResNet-{found['depth']}, batch {found['batch']}: fullest stage, measured (dashed: predicted)"
    return chart(title, "stages", "MB", lines, expected)


def auxnet(found: dict[str, Any]) -> str:
    lines: dict[str, dict[int, float]] = {}
    expected: dict[str, dict[int, float]] = {}
    for row in found["rows"]:
        lines.setdefault(row["network"], {})[row["stages"]] = row["speedup"]
        expected.setdefault(row["network"], {})[row["stages"]] = row["formula"]
    return chart("AuxNet: speed-up over one device, simulated (dashed: formula)", "stages", "speed-up", lines, expected)


def devices(found: dict[str, Any]) -> str:
    """Rows of devices while a few batches enter; pale: forward, full: second forward and backward, grey: waiting."""
    parts, top = [], 0
    until = max(span[4] for shown in found["devices_at_work"] for span in shown["spans"])
    first = min(span[2] for shown in found["devices_at_work"] for span in shown["spans"]) - 1
    unit = WIDE / until
    for shown in found["devices_at_work"]:
        parts.append(f'<text x="0" y="{top + 14}" font-size="13">{escape(shown["cut"])}</text>')
        top += 22
        for device in range(1 + max(span[0] for span in shown["spans"])):
            y = top + ROW * device
            parts.append(f'<text x="0" y="{y + 16}" fill="#555">stage {device + 1}</text>')
            parts.append(f'<rect x="{LABELS}" y="{y}" width="{WIDE}" height="{ROW - 2}" fill="#dfe3e8"/>')
            for _, kind, batch, start, end in (span for span in shown["spans"] if span[0] == device):
                x, width = LABELS + unit * start, unit * (end - start)
                size = f'x="{x:.1f}" y="{y}" width="{max(width - 1, 1):.1f}" height="{ROW - 2}"'
                opacity, ink = (' fill-opacity="0.45"', "black") if kind == "F" else ("", "white")
                label = f"{kind}{batch - first}"
                parts.append(f'<rect {size} fill="{COLOURS[batch % len(COLOURS)]}"{opacity}/>')
                if width >= 22:
                    at = f'x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle"'
                    parts.append(f'<text {at} font-size="11" fill="{ink}">{label}</text>')
        top += ROW * (1 + max(span[0] for span in shown["spans"])) + 8
    told = (
        "dtr on ResNet-56, simulated, pipeline full. Pale: forward, full: second forward and backward, grey: waiting."
    )
    parts.append(f'<text x="0" y="{top + 10}" fill="#555">{told}</text>')
    return svg(LABELS + WIDE + 6, top + 20, parts)


#: Pictures, with the result file of each.
PICTURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "regulator": ("delay_regulator", regulator),
    "devices": ("batch_compensation", devices),
    "utilisation": ("batch_compensation", utilisation),
    "memory": ("resnet56_memory", memory),
    "auxnet": ("auxnet_speedup", auxnet),
}


def drawn(name: str, results: Path = RESULTS) -> str:
    """One picture."""
    file, draw = PICTURES[name]
    return draw(json.loads((results / f"{file}.json").read_text(encoding="utf-8")))


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        path = IMAGES / f"{name}.svg"
        path.write_text(drawn(name), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
