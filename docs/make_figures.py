"""Draws the picture of the README from the schedules themselves, with the simulator of `unlatch.schedule`.

    python docs/make_figures.py

Three stages train with batches of four micro-batches. Per micro-batch a forward takes one unit of time and a backward
two; where DTR computes a forward again, three. All stages are equally large (the planner would give DTR's last stage
more, since it recomputes nothing). Messages take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from unlatch import schedule as sch
from unlatch.schedule import Costs, Kind, Schedule, Timeline

STAGES, PARTS, WINDOW, BATCHES = 3, 4, 60, 16
IMAGE = Path(__file__).parent / "img" / "locks.png"
COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa7733", "#7755aa", "#448899", "#996655", "#667722")
WHOLE: Costs = {Kind.F: PARTS, Kind.B: 2 * PARTS, Kind.U: 0}
PART: Costs = {Kind.F: 1, Kind.B: 2, Kind.U: 0}
AGAIN: Costs = {Kind.F: 1, Kind.B: 3, Kind.U: 0}


def timeline(schedule: Schedule, parts: int, costs: Sequence[Costs]) -> Timeline:
    """When everything happens if every stage starts its next action as soon as it can."""
    return sch.simulate(sch.streams(schedule, [parts] * BATCHES), costs)


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


def main() -> None:
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
    print(IMAGE)


if __name__ == "__main__":
    main()
