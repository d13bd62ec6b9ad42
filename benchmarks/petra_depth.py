"""Draws what the study `digits-petra-depth` found: errors of reconstructed inputs and cosines of gradients against the
number of stages and against the delay.

    unlatch compare studies/digits-petra-depth.toml --jobs 2
    python benchmarks/petra_depth.py

The picture is docs/methods/petra_depth.svg. Only cases with three seeds and more are drawn.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unlatch.config.study import load_study
from unlatch.io.results import read_results
from unlatch.report.study import study_report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "studies" / "digits-petra-depth.toml"
PICTURE = ROOT / "docs" / "methods" / "petra_depth.svg"
LABEL = re.compile(r"K=(\d+), (ticked|1f1b|dsp), k=(\d+)")
NAMES = {"ticked": "petra", "1f1b": "petra in 1F1B order", "dsp": "inputs kept (dsp)"}
COLOURS = {"ticked": "#0072B2", "1f1b": "#009E73", "dsp": "#D55E00"}


class Point(NamedTuple):
    """One case: means over seeds; the error is that of its worst stage, the cosine the mean over stages."""

    stages: int
    kind: str
    k: int
    late: float
    error: float | None
    cosine: float


def points() -> list[Point]:
    study = load_study(STUDY)
    lines = read_results(STUDY.parent / "results" / f"{study.name}.jsonl")
    found = []
    for case in study_report(study, lines, study.baseline or "", "").cases:
        match = LABEL.fullmatch(case.label)
        if match and case.is_result and case.cosines():
            errors = case.per_stage("usual_reconstruction_error", statistics.fmean)
            late = max(case.per_stage("staleness", statistics.fmean))
            cosine = statistics.fmean(case.cosines())
            found.append(Point(int(match[1]), match[2], int(match[3]), late, max(errors, default=None), cosine))
    return found


def line(axes: Axes, found: list[Point], across: str, value: str) -> None:
    for kind, k in dict.fromkeys((point.kind, point.k) for point in found):
        mine = sorted((p for p in found if (p.kind, p.k) == (kind, k)), key=lambda p: p.stages)
        drawn = [(getattr(p, across), getattr(p, value)) for p in mine if getattr(p, value) is not None]
        if drawn:
            style = "-" if k == 1 else (0, (4, 2))
            label = f"{NAMES[kind]}, k={k}"
            axes.plot(*zip(*drawn, strict=True), color=COLOURS[kind], linestyle=style, marker="o", ms=4, label=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def draw(found: list[Point]) -> Figure:
    figure, panels = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained", sharey="row", sharex="col")
    for row, value in zip(panels, ("error", "cosine"), strict=True):
        for axes, across in zip(row, ("stages", "late"), strict=True):
            line(axes, found, across, value)
    panels[0][0].set(ylabel="relative error of inputs", yscale="log")
    panels[1][0].set(ylabel="cosine of gradients", xlabel="stages")
    panels[0][0].set_title("reconstructed inputs, worst stage", loc="left", fontsize=10)
    panels[1][0].set_title("gradients beside backpropagation, mean of stages", loc="left", fontsize=10)
    panels[1][1].set(xlabel="updates late at the first stage")
    handles, labels = panels[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def main() -> None:
    found = points()
    if not found:
        raise SystemExit(f"no results with three seeds yet: unlatch compare {STUDY.relative_to(ROOT)}")
    # The same bytes from the same numbers.
    matplotlib.rcParams["svg.hashsalt"] = "unlatch"
    draw(found).savefig(PICTURE, metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
