"""What a study found, as files: a page, Markdown, CSV, and two pictures."""

from __future__ import annotations

import csv
import io
import statistics as stats
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..io import durable
from .board import board
from .picture import Picture
from .study import StudyReport
from .study_case import CaseFound
from .web import render

__all__ = ["write_study"]

_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")


def write_study(report: StudyReport, path: Path) -> Path:
    """Write `path` with the endings html, md and csv, and two figures as PNG. **Returns:** the page."""
    for name, figure in (("differences", differences_figure(report)), ("curves", curves_figure(report))):
        figure.savefig(path.with_name(f"{path.name}-{name}.png"), dpi=140)
    durable.write_text(path.with_name(f"{path.name}.md"), report.markdown())
    durable.write_text(path.with_name(f"{path.name}.csv"), _as_csv(report.numbers()))
    page = path.with_name(f"{path.name}.html")
    durable.write_text(page, render(study_board(report)))
    return page


def study_board(report: StudyReport) -> dict[str, Any]:
    """The document of the page."""
    remarks = [". ".join(report.remarks(case)) or None for case in report.cases]
    general = report.notes[: len(report.notes) - sum(len(report.remarks(case)) for case in report.cases)]
    return board(
        report.study.name,
        [_run(report, case) for case in report.cases],
        introduction=[*([report.study.question] if report.study.question else []), *general],
        table=report.table,
        notes=remarks,
        captions={"curves": "After every epoch: the mean over seeds, and the range from the lowest to the highest."},
        footer=report.footer,
    )


def _run(report: StudyReport, case: CaseFound) -> dict[str, Any]:
    """A case as one line of every picture."""
    measure, speeds = report.curve_of, list(case.timed().values())
    where = "held-out" if report.held_out else "test"
    names = {"training loss": "train_loss", f"{where} {measure.replace('_', ' ')}": measure}
    per_stage = {
        "staleness": case.per_stage("staleness", stats.fmean),
        "predicted": case.per_stage("predicted_staleness", max),
        "peak_bytes": case.per_stage("peak_bytes", max),
        "weight_copies": case.per_stage("weight_copies", max),
    }
    return {
        "label": case.label,
        "baseline": case is report.base_of(case),
        "status": "finished",
        "accuracy": case.mean,
        "speed": stats.median(speeds) if report.timing and speeds else None,
        "ratio": report.ratio(case),
        "stages": [
            {"stage": stage} | {name: found[stage] for name, found in per_stage.items() if stage < len(found)}
            for stage in range(len(per_stage["staleness"]))
        ],
        "curves": {
            title: {"x": "epoch", "log": name.endswith("loss"), "share": name.endswith("accuracy"), "points": points}
            for title, name in names.items()
            if (points := case.curve(name))
        },
        "measures": {"cosine with backpropagation": {"words": "", "series": series}}
        if (series := case.cosine_series())
        else {},
    }


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def differences_figure(report: StudyReport) -> Figure:
    """Each case's differences to the baseline: pairs, their mean, and its interval."""
    compared = [(case, found) for case in report.cases if (found := report.against(case)) is not None]
    figure = Picture(figsize=(9, 1.2 + 0.28 * len(compared)), layout="constrained")
    axes = figure.subplots()
    scale = 100.0 if report.study.measure.endswith("accuracy") else 1.0
    for place, (case, found) in enumerate(compared):
        told = report.why_none(case) is None
        colour = _LINES[0] if told else "#999999"
        if found.interval is not None and told:
            axes.plot([scale * end for end in found.interval], [place, place], color=colour, linewidth=1.2)
        dots = [scale * difference for difference in found.differences.values()]
        axes.plot(dots, [place] * len(dots), ".", color=colour, markersize=4)
        axes.plot([scale * found.mean], [place], "o", color=colour, markersize=6)
    axes.axvline(0.0, color="#666666", linewidth=1)
    axes.set_yticks(range(len(compared)), [case.label for case, _ in compared])
    axes.invert_yaxis()
    axes.set_xlabel(f"{report.what}, {'points' if scale > 1 else 'difference'} to {report.beside} (grey: no result)")
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def curves_figure(report: StudyReport) -> Figure:
    """Training loss and the result that counts, epoch by epoch."""
    figure = Picture(figsize=(11, max(4.0, 1.0 + 0.2 * len(report.cases))), layout="constrained")
    panels = figure.subplots(1, 2)
    scale = 100.0 if report.study.measure.endswith("accuracy") else 1.0
    for axes, name, factor in zip(panels, ("train_loss", report.curve_of), (1.0, scale), strict=True):
        for number, case in enumerate(report.cases):
            points = case.curve(name)
            if points:
                epochs, mean, least, most = zip(*points, strict=True)
                look = {"color": _LINES[number % len(_LINES)], "label": case.label}
                dashes = ("-", "--", ":", "-.")[number // len(_LINES) % 4]
                axes.plot(epochs, [factor * value for value in mean], linestyle=dashes, linewidth=1.4, **look)
                edges = [[factor * value for value in edge] for edge in (least, most)]
                axes.fill_between(epochs, *edges, color=look["color"], alpha=0.1, linewidth=0)
        axes.set(xlabel="epochs", ylabel=name.replace("_", " ") + (" (%)" if factor > 1 else ""))
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yscale("log")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure
