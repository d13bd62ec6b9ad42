"""What a study found: cases over equal seeds, each compared with the baseline in pairs; as numbers and in words.

Honest by construction: a case with fewer than three seeds, or with a run that did not come to its end or to a number,
is marked as no result, and so is whatever is compared with it; cases with the same settings are the same runs and stand
in one row; speeds appear only if nothing else ran.
"""

from __future__ import annotations

import statistics as stats
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..config.study import Study
from ..io.space import bytes_text
from ..methods import BASELINE
from ..table import Table, number_text
from .paired import ENOUGH, Paired, holm, paired
from .study_case import CaseFound, Line

__all__ = ["StudyReport", "baseline_of", "study_report"]

#: A difference is beyond chance if it is less likely than this without one.
_RARE = 0.05


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


def baseline_of(study: Study) -> str:
    """The case that others are compared with: what the study says, else the first of plain backpropagation, else the
    first one.
    """
    plain = (case.label for case in study.cases if case.config.method.name == BASELINE)
    return study.baseline or next(plain, study.cases[0].label)


def study_report(
    study: Study, lines: Sequence[Line], baseline: str | None = None, command: str = ""
) -> StudyReport:
    """Put the lines of a results file together, as far as they are of this study; the last of each run counts.

    **Arguments:** `baseline`: the label of the case that those without a baseline of their own are compared with; by
    default that of `baseline_of`.
    """
    beside_all = baseline or baseline_of(study)
    newest = {line["digest"]: line for line in lines if "digest" in line}
    # Cases with the same settings and the same baseline are one row; with another baseline, another question.
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in study.cases:
        digests = (study.run_of(case, seed).digest for seed in study.seeds)
        rows.setdefault((case.baseline or beside_all, *digests), []).append(case.label)
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
