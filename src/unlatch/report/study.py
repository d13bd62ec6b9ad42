"""What a study found: cases over equal seeds, each compared with the baseline in pairs; as page, Markdown, CSV, PNG.

Honest by construction: a case with fewer than three seeds, or with a run that did not come to its end or to a number,
is marked as no result, and so is whatever is compared with it; cases with the same settings are the same runs and stand
in one row; speeds appear only if nothing else ran.
"""

from __future__ import annotations

import csv
import io
import statistics as stats
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..config.study import Study
from ..io import durable
from ..io.space import bytes_text
from ..table import Table, number_text
from .board import board
from .paired import ENOUGH, Paired, holm, paired
from .picture import Picture
from .web import render

__all__ = ["CaseFound", "StudyReport", "study_report", "write_study"]

#: Cores that others may have kept busy while a run was timed.
_QUIET = 0.2
#: A difference is beyond chance if it is less likely than this without one.
_RARE = 0.05
#: What results in single precision can tell apart, relative to their size.
_SINGLE = 2.0**-23
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")

Line = Mapping[str, Any]


@dataclass(frozen=True)
class CaseFound:
    """What is known of one case.

    **Arguments:**

    - `labels`: what it is called; more than one if cases have the same settings.
    - `lines`: of its runs, by seed; the last word on each.
    - `asked`: how many seeds the study asks for.
    - `measure`: the result that counts.
    - `baseline`: the label of the case that it is compared with.
    """

    labels: tuple[str, ...]
    lines: Mapping[int, Line]
    asked: int
    measure: str
    baseline: str

    @property
    def label(self) -> str:
        """All names of it."""
        return " = ".join(self.labels)

    @cached_property
    def values(self) -> dict[int, float]:
        """What counts, by seed, of the runs that came to their end."""
        ended = {seed: line["evaluation"] for seed, line in self.lines.items() if line["status"] == "finished"}
        return {seed: found[self.measure] for seed, found in ended.items() if found.get(self.measure) is not None}

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return stats.fmean(self.values.values()) if self.values else None

    def missed(self, status: str) -> list[int]:
        """Seeds of runs that ended so."""
        return [seed for seed, line in self.lines.items() if line["status"] == status]

    @property
    def diverged(self) -> bool:
        """Whether any of its runs did."""
        return any(line["status"] == "diverged" for line in self.lines.values())

    @property
    def flaws(self) -> list[str]:
        """Why its runs are no result however many there are: those that are left would flatter it."""
        found = [f"{len(seeds)} {status}" for status in ("diverged", "failed") if (seeds := self.missed(status))]
        silent = len(self.missed("finished")) - len(self.values)
        return found + ([f"{silent} without a number"] if silent else [])

    @property
    def is_result(self) -> bool:
        """Whether it may be called one: enough seeds, and all that ran came to their end and to a number."""
        return len(self.values) >= ENOUGH and not self.flaws

    @property
    def resolution(self) -> float:
        """The least difference that what counts can show: one sample of a share, else the last digit of a float32."""
        if not self.measure.endswith("accuracy"):
            return _SINGLE * max(map(abs, self.values.values()), default=0.0)
        counts = [self.lines[seed]["evaluation"].get("samples") for seed in self.values]
        return max((1.0 / count for count in counts if count), default=0.0)

    @property
    def evaluated_on(self) -> tuple[Any, ...]:
        """Which samples its numbers are of; empty if its lines do not say."""
        told = (line["settings"]["data"] for line in self.lines.values() if "settings" in line)
        return next(((data.get("name"), data.get("holdout")) for data in told), ())

    def timed(self) -> dict[int, float]:
        """Samples per second of the runs that had the machine to themselves, by seed."""
        return {
            seed: line["samples_per_second"]
            for seed, line in self.lines.items()
            if line.get("samples_per_second") and line["jobs"] == 1 and line["others_busy"] <= _QUIET
        }

    def per_stage(self, name: str, over: Callable[[Iterable[float]], float]) -> tuple[float, ...]:
        """A number of each stage, taken together over seeds."""
        columns = zip(*(line["stages"] for line in self.lines.values() if line.get("stages")), strict=False)
        found = [[stage[name] for stage in column if stage.get(name) is not None] for column in columns]
        return tuple(over(column) for column in found if column)

    def cosines(self) -> tuple[float, ...]:
        """Of each stage's gradient to that of backpropagation at the weights it is applied to; empty if not probed."""
        return tuple(stats.fmean(value for _, value in points) for points in self.cosine_series().values())

    def cosine_series(self) -> dict[str, list[list[float]]]:
        """The same over the updates, means over seeds, by stage."""
        found: dict[int, dict[int, list[float]]] = {}
        for line in self.lines.values():
            for one in line.get("gradients") or ():
                if one["reference"] == "current":
                    by_update = found.setdefault(one["stage"], {})
                    for update, cosine in zip(one["update"], one["cosine"], strict=True):
                        by_update.setdefault(update, []).append(cosine)
        return {
            f"stage {stage}": [[update, stats.fmean(values)] for update, values in sorted(by_update.items())]
            for stage, by_update in sorted(found.items())
        }

    def curve(self, name: str) -> list[list[float]]:
        """Epoch, mean, least and most of a number over the epochs."""
        by_epoch: dict[int, list[float]] = {}
        for line in self.lines.values():
            for point in line.get("curve", ()):
                if point.get(name) is not None:
                    by_epoch.setdefault(int(point["epoch"]), []).append(point[name])
        return [[epoch, stats.fmean(found), min(found), max(found)] for epoch, found in sorted(by_epoch.items())]

    @cached_property
    def trace(self) -> tuple[Any, ...]:
        """All that its runs computed, for telling whether two cases are the same computation under two settings."""
        timeless = ({name: point[name] for name in point if name != "samples_per_second"} for point in self._points())
        return tuple(tuple(sorted(point.items(), key=lambda item: item[0])) for point in timeless)

    def _points(self) -> Iterable[Mapping[str, Any]]:
        return (point | {"seed": seed} for seed in sorted(self.lines) for point in self.lines[seed].get("curve", ()))


@dataclass(frozen=True)
class StudyReport:
    """All that there is to say.

    **Arguments:** `command`: what to type to see it again.
    """

    study: Study
    cases: tuple[CaseFound, ...]
    command: str

    # --------------------------------------------------------------- numbers

    def base_of(self, case: CaseFound) -> CaseFound:
        """What a case is compared with."""
        return next(other for other in self.cases if case.baseline in other.labels)

    @cached_property
    def baselines(self) -> list[str]:
        """What cases are compared with, each once."""
        return list(dict.fromkeys(self.base_of(case).label for case in self.cases))

    def against(self, case: CaseFound) -> Paired | None:
        """A case and its baseline, seed by seed; nothing for the baseline itself."""
        base = self.base_of(case)
        return None if case is base else paired(case.values, base.values, max(case.resolution, base.resolution))

    def why_none(self, case: CaseFound) -> str | None:
        """Why nothing may be said of a case; `None` if something may."""
        if case.flaws:
            return ", ".join(case.flaws)
        base, found = self.base_of(case), self.against(case)
        if case is not base and base.flaws:
            return f"baseline has {', '.join(base.flaws)}"
        if case is not base and case.lines and base.lines and case.evaluated_on != base.evaluated_on:
            return "baseline was evaluated on other samples"
        if not case.is_result or (found is not None and not found.is_result):
            return f"under {ENOUGH} seeds"
        return "no pair with the baseline" if found is None and case is not base else None

    @cached_property
    def _among_all(self) -> dict[tuple[Any, ...], float]:
        """The chances of all comparisons, each adjusted for being one of them; the same computation counts once."""
        found: dict[tuple[Any, ...], float] = {}
        for case in self.cases:
            likely = None if (pairs := self.against(case)) is None or self.why_none(case) else pairs.chance
            if likely is not None:
                found.setdefault(self._computation(case), likely)
        return dict(zip(found, holm(list(found.values())), strict=True))

    def _computation(self, case: CaseFound) -> tuple[Any, ...]:
        return self.base_of(case).label, case.trace or case.label

    @property
    def comparisons(self) -> int:
        """How many differences to baselines there are to speak of, those of the same computation once."""
        return len(self._among_all)

    def adjusted(self, case: CaseFound) -> float | None:
        """How likely a difference such as that of a case is among all of the study without any (Holm)."""
        return None if self.why_none(case) else self._among_all.get(self._computation(case))

    @cached_property
    def timing(self) -> bool:
        """Whether all speeds were measured on a machine that nobody else used."""
        return all(case.timed().keys() == set(case.missed("finished")) for case in self.cases)

    def ratio(self, case: CaseFound) -> float | None:
        """Speed over that of the baseline, the median over seeds."""
        ours, theirs = case.timed(), self.base_of(case).timed()
        ratios = [ours[seed] / theirs[seed] for seed in ours if seed in theirs]
        return stats.median(ratios) if self.timing and ratios else None

    @property
    def held_out(self) -> bool:
        """Whether the numbers are of held-out training samples."""
        return all(case.config.data.holdout is not None for case in self.study.cases)

    def same_as(self, case: CaseFound) -> CaseFound | None:
        """An earlier case with other settings whose runs computed the same, to the last bit."""
        earlier = self.cases[: self.cases.index(case)]
        return next((other for other in earlier if case.trace and other.trace == case.trace), None)

    # ------------------------------------------------------------------ words

    def _number(self, value: float | None, form: str) -> str:
        if value is None:
            return "-"
        return format(100 * value, form + "z.2f") if self._share else format(value, form + "z.4f")

    @property
    def _share(self) -> bool:
        return self.study.measure.endswith("accuracy")

    @property
    def curve_of(self) -> str:
        """What there is after every epoch of the result that counts, some of which are known at the end only."""
        known = (name for case in self.cases for line in case.lines.values() for name in (line.get("curve") or [{}])[0])
        measure = self.study.measure
        return measure if measure in set(known) else measure.removeprefix("recalibrated_")

    @property
    def what(self) -> str:
        """What was measured, on what."""
        return f"{self.study.measure.replace('_', ' ')} on {'held-out training' if self.held_out else 'test'} samples"

    @property
    def beside(self) -> str:
        """The baseline in words."""
        return self.baselines[0] if len(self.baselines) == 1 else "the baseline of each case"

    @cached_property
    def table(self) -> Table:
        """A row per case."""
        probed = any(case.cosines() for case in self.cases)
        unit = " (%)" if self._share else ""
        heads: tuple[str, ...] = ("case", f"{self.study.measure.replace('_', ' ')}{unit}", "range", "seeds")
        heads += ("to baseline", "std. error", "95 % interval", "what that is")
        heads += ("baseline",) if len(self.baselines) > 1 else ()
        heads += ("samples/s", "ratio") if self.timing else ()
        heads += ("fullest stage", "updates late (predicted)", *(("least cosine",) if probed else ()))
        return Table(
            heads,
            tuple(self._row(case, probed) for case in self.cases),
            left=(0, 7, 8) if len(self.baselines) > 1 else (0, 7),
        )

    def _row(self, case: CaseFound, probed: bool) -> tuple[str, ...]:
        found, values = self.against(case), list(case.values.values())
        interval = found.interval if found is not None and self.why_none(case) is None else None
        speeds = list(case.timed().values())
        peaks, late = case.per_stage("peak_bytes", max), case.per_stage("staleness", stats.fmean)
        return (
            case.label,
            self._number(case.mean, ""),
            f"{self._number(min(values), '')} to {self._number(max(values), '')}" if values else "-",
            f"{len(values)} of {case.asked}" if len(values) < case.asked else str(len(values)),
            self._number(found.mean if found else None, "+"),
            self._number(found.error if found and interval else None, ""),
            " to ".join(self._number(end, "+") for end in interval) if interval else "-",
            self.verdict(case),
            *((self.base_of(case).label,) if len(self.baselines) > 1 else ()),
            *(
                (number_text(stats.median(speeds) if speeds else None), number_text(self.ratio(case), ".2f"))
                if self.timing
                else ()
            ),
            bytes_text(max(peaks)) if peaks else "-",
            f"{max(late):.3g} ({max(case.per_stage('predicted_staleness', max)):.3g})" if late else "-",
            *((number_text(min(case.cosines(), default=None), ".2f"),) if probed else ()),
        )

    def verdict(self, case: CaseFound) -> str:
        """What may be said of a case, in few words."""
        why = self.why_none(case)
        if why is not None:
            return f"no result: {why}"
        found = self.against(case)
        if found is None:
            return "baseline"
        side = "above" if found.mean > 0 else "below"
        if not found.apart:
            return f"{side} in all pairs, not beyond chance" if found.one_sided else "no difference shown"
        alone = (self.adjusted(case) or 0.0) > _RARE
        return f"{side} baseline" + (f", not beyond chance as one of {self.comparisons}" if alone else "")

    def remarks(self, case: CaseFound) -> list[str]:
        """What else there is to say of a case."""
        said = []
        if len(case.labels) > 1:
            said.append(f"{case.label} are the same settings, run once")
        if (same := self.same_as(case)) is not None:
            if all(case.lines[seed] is same.lines[seed] for seed in case.lines):
                said.append(f"{case.label} are the runs of {same.label}, beside another baseline")
            else:
                same_numbers = f"computed the same numbers, epoch by epoch, as {same.label}: not another finding"
                said.append(f"{case.label} {same_numbers}")
        found = self.against(case)
        if found is not None and found.seeds < len(case.values):
            pairs = f"{found.seeds} of its {len(case.values)} seeds"
            said.append(f"{case.label} is compared on the {pairs} that its baseline has too")
        if found is not None and found.unresolved and found.interval is not None and found.mean:
            said.append(
                f"{case.label}: the differences of all seeds are the same, to what can be told apart; the interval is "
                "as if one seed differed by that"
            )
        reasons = {line["reason"]: None for line in case.lines.values() if line.get("reason")}
        said += [f"{case.label}: {reason}" for reason in reasons]
        return said

    @cached_property
    def notes(self) -> list[str]:
        """What a reader must know to read the table rightly."""
        notes = [
            f"{self.what[:1].upper()}{self.what[1:]}, after the last epoch. Differences are to "
            f"{self.beside}, taken seed by seed; the interval is Student's for their mean over seeds, on these samples."
        ]
        if self.comparisons > 1:
            notes.append(
                f"{self.comparisons} comparisons: an interval is of one by itself; a difference is said to be above or "
                "below without more only if it is beyond chance among all of them (Holm's rule, 5 %)."
            )
        if not self.timing:
            notes.append("No speeds: some runs were done several at once (--jobs), or while others used the machine.")
        missing = sum(case.asked - len(case.lines) for case in self.cases)
        if missing:
            notes.append(f"{missing} runs are missing: go on with {self.command}")
        return notes + [remark for case in self.cases for remark in self.remarks(case)]

    @cached_property
    def footer(self) -> list[str]:
        """Where the numbers come from."""
        lines = list({line["digest"]: line for case in self.cases for line in case.lines.values()}.values())
        known = ("unlatch", "torch", "python", "platform", "cores")
        told = {", ".join(f"{name} {line['versions'][name]}" for name in known) for line in lines if "versions" in line}
        return [f"{len(lines)} runs, from: {self.command}", *sorted(told)]

    def markdown(self) -> str:
        """The same as text for a repository."""
        heads = self.table.heads
        rule = "|".join("---" if n in self.table.left else "---:" for n in range(len(heads)))
        rows = [
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (heads, *self.table.rows)
        ]
        parts = [f"# {self.study.name}", *([self.study.question] if self.study.question else [])]
        parts += ["\n".join([rows[0], f"|{rule}|", *rows[1:]]), "\n".join(f"- {note}" for note in self.notes)]
        return "\n\n".join([*parts, "\n".join(self.footer)]) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"study": self.study.name, "baselines": self.baselines, "cases": self.numbers(), "notes": self.notes}

    def numbers(self) -> list[dict[str, Any]]:
        """A row of plain numbers per case."""
        rows = []
        for case in self.cases:
            found, values = self.against(case), list(case.values.values())
            interval = (found.interval if found and self.why_none(case) is None else None) or (None, None)
            rows.append(
                {
                    "case": case.label,
                    "baseline": self.base_of(case).label,
                    "seeds": len(values),
                    "measure": self.study.measure,
                    "mean": case.mean,
                    "least": min(values, default=None),
                    "most": max(values, default=None),
                    "pairs": found.seeds if found else 0,
                    "difference": found.mean if found else None,
                    "standard_error": found.error if found else None,
                    "interval_low": interval[0],
                    "interval_high": interval[1],
                    "chance": found.chance if found else None,
                    "chance_among_all": self.adjusted(case),
                    "is_result": self.why_none(case) is None,
                    "verdict": self.verdict(case),
                    "samples_per_second": stats.median(case.timed().values()) if self.timing and values else None,
                    "ratio": self.ratio(case),
                    "peak_bytes": max(case.per_stage("peak_bytes", max), default=None),
                    "staleness": max(case.per_stage("staleness", stats.fmean), default=None),
                    "cosine": min(case.cosines(), default=None),
                }
            )
        return rows


def study_report(study: Study, lines: Sequence[Line], baseline: str, command: str) -> StudyReport:
    """Put the lines of a results file together, as far as they are of this study; the last of each run counts.

    **Arguments:** `baseline`: the label of the case that those without a baseline of their own are compared with.
    """
    newest = {line["digest"]: line for line in lines if "digest" in line}
    # Cases with the same settings and the same baseline are one row; with another baseline, another question.
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in study.cases:
        digests = (study.run_of(case, seed).digest for seed in study.seeds)
        rows.setdefault((case.baseline or baseline, *digests), []).append(case.label)
    cases = tuple(
        CaseFound(
            tuple(labels),
            {seed: newest[digest] for seed, digest in zip(study.seeds, digests, strict=True) if digest in newest},
            len(study.seeds),
            study.measure,
            beside,
        )
        for (beside, *digests), labels in rows.items()
    )
    return StudyReport(study, cases, command)


# ------------------------------------------------------------------------ files


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
