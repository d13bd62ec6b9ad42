"""Tables of studies: what was found, what that says to their question, and whether it was foretold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from unlatch.advise.advice import ELSEWHERE, EXPECTED, Verdict, earned
from unlatch.config.study import load_study
from unlatch.io.results import read_results
from unlatch.report.foretold import Judged, correlations, judged, read_foretold
from unlatch.report.study import StudyReport, study_report

from .answers import ANSWERS
from .common import STUDIES, sourced, table


class Points(NamedTuple):
    """How far a case of a study is above its baseline, of accuracies in points; as text with its interval and seeds."""

    mean: float
    interval: tuple[float, float]
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.interval[0]:+.2f} to {self.interval[1]:+.2f}, {self.seeds} seeds)"


def study_points(name: str, studies: Path) -> dict[str, Points]:
    """Differences of the cases of a study to their baselines, where that is a result."""
    lines = read_results(studies / "results" / f"{name}.jsonl")
    if not lines:
        return {}
    report = study_report(load_study(studies / f"{name}.toml"), lines)
    rows = [row for row in report.numbers() if row["is_result"] and row["interval_low"] is not None]
    scale = 100 if report.study.measure.endswith("accuracy") else 1
    return {
        row["case"]: Points(
            scale * row["difference"], (scale * row["interval_low"], scale * row["interval_high"]), row["pairs"]
        )
        for row in rows
    }


def digits(results: Path) -> str:
    """What the best known methods lose on digits, by the number of stages."""
    found = study_points("digits-methods", results.parents[1] / "studies")
    if not found:
        return "*Not measured yet: `unlatch compare studies/digits-methods.toml`.*"
    rows = [
        [f"`{name}`", *(str(found.get(f"{name}, K={stages}", "")) for stages in (2, 4))]
        for name in ("1f1b", "pipedream", "fdg", "dtr", "dtrp", "petra", "layerpipe", "dgl", "auxnet")
    ]
    heads = ["points to its own bp (95 % interval)", "2 stages", "4 stages"]
    return sourced(table(heads, rows), ["unlatch compare studies/digits-methods.toml"])


def _report(name: str, folder: Path, measure: str | None = None) -> StudyReport:
    """All that is known of a study, perhaps nothing yet; by another measure than its own if told."""
    file = folder / f"{name}.toml"
    if not file.is_file():
        raise SystemExit(f"there is no study {name!r} in {folder}")
    lines, asked = read_results(folder / "results" / f"{name}.jsonl"), load_study(file)
    asked = asked if measure is None else replace(asked, measure=measure)
    return study_report(asked, lines, command=f"unlatch compare studies/{name}.toml")


def _unmeasured(report: StudyReport) -> str | None:
    """What stands in place of a table whose study has no line yet."""
    return None if any(case.lines for case in report.cases) else f"*Not measured yet: `{report.command}`.*"


def answer(name: str, folder: Path = STUDIES) -> str:
    """What a study says to its question."""
    if name not in ANSWERS:
        raise SystemExit(f"there is no answer of the study {name!r}; known: {', '.join(ANSWERS)}")
    report = _report(name, folder)
    if missing := _unmeasured(report):
        return missing
    heads, rows, said = ANSWERS[name](report)
    return "\n\n".join([table(heads, rows), *said, f"From `{report.command}`."])


def study(name: str, folder: Path = STUDIES) -> str:
    """What a study found: the cases that are results, each beside its baseline."""
    report = _report(name, folder)
    if missing := _unmeasured(report):
        return missing
    command = report.command
    several = len(report.baselines) > 1
    beside = "to its baseline" if several else f"to {report.baselines[0]}"
    heads = ["case", report.what, beside, "95 % interval", "seeds"]
    rows = []
    for row in report.numbers():
        if row["is_result"]:
            rows.append(_study_row(row, 100.0 if row["measure"].endswith("accuracy") else 1.0))
            rows[-1] += [row["baseline"]] if several else []
    left_out = len(report.cases) - len(rows)
    said = f" {left_out} cases are left out: too few seeds, or runs that did not come to their end." if left_out else ""
    return f"{table([*heads, *(['baseline'] if several else [])], rows)}\n\nFrom `{command}`.{_beyond(report)}{said}"


def _beyond(report: StudyReport) -> str:
    """How many differences are more than chance, each by itself and among all of them."""
    judged = [row for row in report.numbers() if row["chance_among_all"] is not None]
    alone, among = (sum(row[name] <= 0.05 for row in judged) for name in ("chance", "chance_among_all"))
    if not judged:
        return ""
    return (
        f" Beyond chance by themselves: {alone} of {len(judged)} differences; as one of {report.comparisons} different "
        f"computations (Holm): {among}."
    )


def foretold(name: str, folder: Path = STUDIES) -> str:
    """How well what was expected agrees with what was found: rank correlations, then verdicts."""
    told = read_foretold(folder / "results" / f"{name}.predicted.json")
    if told is None:
        raise SystemExit(f"nothing was foretold for the study {name!r} in {folder}")
    said = f"Written down on {told['made_at'][:10]} at commit `{str(told['commit'])[:9]}`, before any run"
    report = _report(name, folder)
    if _unmeasured(report):
        silent = sum(row["margin"] is None for row in told["cases"])
        return (
            f"*Not measured yet: `unlatch compare studies/{name}.toml`. {said}: {len(told['cases'])} cases, about "
            f"{silent} of which the advisor says nothing.*"
        )
    cases = judged(report, told)
    rows = [
        [
            one.group,
            one.ranking,
            str(one.cases),
            f"{one.spearman:+.2f} ({one.spearman_interval[0]:+.2f} to {one.spearman_interval[1]:+.2f})",
            f"{one.kendall:+.2f} ({one.kendall_interval[0]:+.2f} to {one.kendall_interval[1]:+.2f})",
            f"{one.chance:.3f}" if one.chance >= 0.001 else "< 0.001",
        ]
        for one in correlations(cases)
    ]
    heads = ["optimizer", "ranked by", "cases", "Spearman (95 %)", "Kendall (95 %)", "as good by chance"]
    left_out = len(told["cases"]) - len(cases)
    rest = f" {left_out} cases have no result (yet)." if left_out else ""
    return (
        f"{table(heads, rows, words=2)}\n\n{_verdicts(judged(_report(name, folder, 'accuracy'), told))}\n\n"
        f"{said}; runs from `{report.command}`.{rest}"
    )


def _verdicts(cases: Sequence[Judged]) -> str:
    """What was said of cases, and what of that came true in points of accuracy."""
    rows = []
    for verdict, expected in EXPECTED.items():
        points, right = _came_true(cases, verdict)
        if points:
            middle, least, most = (
                f"{one:+.1f}" if math.isfinite(one) else "diverged"
                for one in (statistics.median(points), min(points), max(points))
            )
            rows.append([expected, str(len(points)), str(right), middle, f"{least} to {most}"])
    return table(["said", "cases", "came true", "points to bp, median", "range"], rows)


def _came_true(cases: Sequence[Judged], verdict: Verdict) -> tuple[list[float], int]:
    """Points of accuracy to bp of the cases of which this was said, and for how many it was right."""
    points = [-100 * case.worse for case in cases if case.foretold["verdict"] == verdict]
    return points, sum(earned(one) == verdict for one in points)


def printed(name: str, folder: Path = STUDIES) -> str:
    """What the library prints about its own verdicts; refused unless this study found it."""
    told, report = read_foretold(folder / "results" / f"{name}.predicted.json"), _report(name, folder, "accuracy")
    points, right = _came_true(judged(report, told), "about bp") if told is not None else ([], 0)
    beyond = 2 * right - len(points)
    share = f"{'fewer' if beyond < 0 else 'more'} than half" if beyond else "just half"
    if not points or f"{share} of " not in ELSEWHERE:
        raise SystemExit(
            f"ELSEWHERE of unlatch/advise/advice.py says {ELSEWHERE!r}, but in the study {name!r} "
            f"{right} of {len(points)} cases held, which is {share}: correct the sentence"
        )
    return f"Printed with such a verdict: *{ELSEWHERE}*; in this study {right} of {len(points)} held."


def grid(name: str, folder: Path = STUDIES) -> str:
    """Differences to the baselines; a star where zero is outside of the 95 % interval."""
    report = _report(name, folder)
    if missing := _unmeasured(report):
        return missing
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for case in report.cases:
        found = report.against(case)
        if case.missed("diverged"):
            text = "diverged"
        elif found is None:
            continue
        else:
            text = f"{found.mean:+.3f}{' *' if found.apart else ''}" if report.why_none(case) is None else "-"
        column, _, row = case.labels[0].partition(", ")
        columns[column] = None
        cells.setdefault(row, {})[column] = text
    rows = [[row, *(by.get(column, "") for column in columns)] for row, by in cells.items()]
    return sourced(table([f"{report.study.measure}, to bp", *columns], rows), [report.command])


def _study_row(row: dict[str, Any], scale: float) -> list[str]:
    unit, digits = (" %", 2) if scale > 1 else ("", 4)
    mean, (difference, *ends) = (
        f"{scale * row['mean']:.{digits}f}{unit}",
        (
            "-" if row[name] is None else f"{scale * row[name]:+.{digits}f}"
            for name in ("difference", "interval_low", "interval_high")
        ),
    )
    return [row["case"], mean, difference, " to ".join(ends) if "-" not in ends else "-", str(row["seeds"])]


#: What is made of a study: the beginning of the table's name, before that of the study.
STUDY_TABLES: dict[str, Callable[[str], str]] = {
    "study": study,
    "answer": answer,
    "foretold": foretold,
    "printed": printed,
    "grid": grid,
}
