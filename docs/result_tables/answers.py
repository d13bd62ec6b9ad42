"""What the questions of some studies come to: small tables and sentences computed from their results.

`studies.py` puts them where a page says `<!-- table: answer-NAME -->`. A case with fewer than three seeds, or with
a run that did not come to its end, is no result here either.
"""

from __future__ import annotations

import math
import re
import statistics as stats
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from unlatch.report.foretold import spearman
from unlatch.report.paired import ENOUGH, Paired, paired
from unlatch.report.study import StudyReport
from unlatch.report.study_case import CaseFound

__all__ = ["ANSWERS", "Answer"]

#: Heads, rows, and sentences below them.
Answer = tuple[list[str], list[list[str]], list[str]]

_STAGED = re.compile(r"(?P<method>.+), K=(?P<stages>\d+), M=(?P<parts>\d+)")


def _case(report: StudyReport, label: str) -> CaseFound | None:
    return next((case for case in report.cases if label in case.labels), None)


def _pair(report: StudyReport, label: str, other: str) -> Paired | None:
    """Two cases, seed by seed, if both are results."""
    one, two = _case(report, label), _case(report, other)
    if one is None or two is None or not (one.is_result and two.is_result):
        return None
    found = paired(one.values, two.values, max(one.resolution, two.resolution))
    return found if found is not None and found.seeds >= ENOUGH else None


def _points(found: Paired | None) -> str:
    """A difference in points; a star where zero is outside of its interval."""
    return "-" if found is None else f"{100 * found.mean:+.2f}{' *' if found.apart else ''}"


def _spelled(found: Paired | None) -> str:
    if found is None or found.interval is None:
        return "no result"
    low, high = found.interval
    verdict = "no difference shown" if not found.apart else "above" if found.mean > 0 else "below"
    return f"{100 * found.mean:+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}): {verdict}"


def starts_to_lose(report: StudyReport) -> Answer:
    """Per method the difference to backpropagation over the number of stages, and where it is first below it."""
    found: dict[tuple[str, str], dict[int, CaseFound]] = {}
    for case in report.cases:
        if match := _STAGED.fullmatch(case.label):
            found.setdefault((match["method"], match["parts"]), {})[int(match["stages"])] = case
    depths = sorted({stages for cases in found.values() for stages in cases})
    rows, first = [], dict[tuple[str, str], int | None]()
    for (method, parts), cases in found.items():
        lost = [stages for stages in depths if stages in cases and _lost(report, cases[stages])]
        first[method, parts] = min(lost, default=None)
        cells = [_cell(report, cases.get(stages)) for stages in depths]
        known = [stages for stages, cell in zip(depths, cells, strict=True) if cell != "-"]
        begins = f"K={min(lost)}" if lost else f"not up to K={max(known)}" if known else "-"
        rows.append([method, parts, *cells, begins])
    said = []
    for parts in dict.fromkeys(parts for _, parts in found):
        counts = [sum(where == stages for (_, p), where in first.items() if p == parts) for stages in depths]
        of = sum(p == parts for _, p in first)
        told = ", ".join(f"{count} at K={stages}" for stages, count in zip(depths, counts, strict=True) if count)
        kind = "micro-batch" if parts == "1" else "micro-batches"
        said.append(f"With {parts} {kind}, of {of} methods begin to lose: {told or 'none'}.")
    said.append("A star: zero is outside of the 95 % interval.")
    return ["method", "M", *(f"K={stages}" for stages in depths), "starts to lose"], rows, said


def _cell(report: StudyReport, case: CaseFound | None) -> str:
    if case is None or not case.lines:
        return "-"
    if case.missed("diverged"):
        return "diverged"
    return _points(report.against(case)) if report.why_none(case) is None else "-"


def _lost(report: StudyReport, case: CaseFound) -> bool:
    if case.missed("diverged"):
        return not report.base_of(case).flaws
    found = report.against(case) if report.why_none(case) is None else None
    return found is not None and found.apart and found.mean < 0


def inversion(form: str, kept: str, others: dict[str, str], counts: Sequence[int]) -> Callable[[StudyReport], Answer]:
    """What inversion costs beyond delay, and what a larger k does to the gap.

    **Arguments:** `form`, `kept`, `others`: labels of petra, of the same delays with inputs kept, and of further
    columns, with `{k}`; `counts`: the values of k.
    """

    def answer(report: StudyReport) -> Answer:
        rows, price, gaps = [], [], dict[int, Paired | None]()
        for k in counts:
            base = _case(report, f"bp, k={k}")
            gaps[k] = _pair(report, form.format(k=k), f"bp, k={k}")
            beside = _pair(report, form.format(k=k), kept.format(k=k))
            labels = [form, kept, *others.values()]
            cells = [_points(_pair(report, label.format(k=k), f"bp, k={k}")) for label in labels]
            mean = f"{100 * base.mean:.2f} %" if base is not None and base.is_result and base.mean is not None else "-"
            rows.append([str(k), mean, *cells, _points(beside)])
            price.append(f"k={k}: {_spelled(beside)}")
        said = [f"Petra beside the same delays with inputs kept, the price of inversion: {'; '.join(price)}."]
        said.append(f"Petra to bp: {'; '.join(f'k={k}: {_spelled(gap)}' for k, gap in gaps.items())}. {_closing(gaps)}")
        heads = ["k", "bp", "petra to bp", "inputs kept (dsp) to bp", *(f"{name} to bp" for name in others)]
        return [*heads, "petra to dsp"], rows, said

    return answer


def _closing(gaps: dict[int, Paired | None]) -> str:
    least, most = min(gaps), max(gaps)
    small, large = gaps[least], gaps[most]
    if small is None or large is None:
        return "Whether a larger k closes the gap is not known yet."
    if not (small.apart and small.mean < 0):
        return f"No gap is shown at k={least} that a larger k could close."
    if large.apart and large.mean < 0:
        change = "narrows" if large.mean > small.mean else "does not narrow"
        return f"A gap is shown at k={least} and at k={most}: a larger k {change} it."
    return f"The gap that is shown at k={least} is not shown at k={most}."


def by_depth(report: StudyReport) -> Answer:
    """Errors of reconstructed inputs and cosines of gradients over stages and delay."""
    rows, points, lost = [], [], []
    for case in report.cases:
        match = re.fullmatch(r"K=(\d+), (ticked|1f1b), k=(\d+)", case.label)
        errors, cosines = case.per_stage("usual_reconstruction_error", stats.fmean), case.cosines()
        if not match or not case.is_result or not errors or not cosines:
            continue
        stages, order, k = match.groups()
        late, error, cosine = max(case.per_stage("staleness", stats.fmean)), max(errors), stats.fmean(cosines)
        twin = _case(report, f"K={stages}, dsp, k={k}") if order == "ticked" else None
        beside = stats.fmean(twin.cosines()) if twin is not None and twin.is_result and twin.cosines() else None
        lost += [cosine - beside] if beside is not None else []
        points.append((float(stages), late, error, cosine))
        other = "-" if beside is None else f"{beside:.2f}"
        accuracy = _points(report.against(case))
        rows.append([stages, order, k, f"{late:.3g}", f"{error:.2g}", f"{cosine:.2f}", other, accuracy])
    heads = ["stages", "order", "k", "updates late", "error of inputs", "cosine", "cosine, inputs kept", "points to bp"]
    said = []
    if len(points) >= ENOUGH:
        depth, late, error, cosine = zip(*points, strict=True)
        said.append(
            f"Rank correlations over these {len(points)} settings: error with updates late "
            f"{_ranked(late, error):+.2f}, with stages {_ranked(depth, error):+.2f}; cosine with updates late "
            f"{_ranked(late, cosine):+.2f}, with stages {_ranked(depth, cosine):+.2f}."
        )
    if lost:
        said.append(
            f"Inversion changes the mean cosine by {stats.fmean(lost):+.3f} on average over {len(lost)} settings "
            f"({min(lost):+.3f} to {max(lost):+.3f})."
        )
    return heads, rows, said


def _ranked(one: Iterable[float], two: Iterable[float]) -> float:
    """Spearman's rank correlation; none where all are equal."""
    found = spearman(np.array(list(one)), np.array(list(two)))
    return 0.0 if math.isnan(found) else found


def replaces_the_stash(report: StudyReport) -> Answer:
    """Stash, moving average and latest weights to bp, and the latter two beside the stash."""
    rows, said = [], []
    for case in report.cases:
        if "stash" not in case.label:
            continue
        name = case.label
        average, latest = (name.replace("stash", rule) for rule in ("average", "latest"))
        to_bp = [_points(_pair(report, label, case.baseline)) for label in (name, average, latest)]
        beside = [_pair(report, label, name) for label in (average, latest)]
        setting = name.replace(", stash", "")
        rows.append([setting, *to_bp, *(_points(found) for found in beside)])
        said.append(f"{setting}: the average beside the stash {_spelled(beside[0])}")
    heads = ["setting", "stash to bp", "average to bp", "latest to bp", "average to stash", "latest to stash"]
    return heads, rows, ["; ".join(said) + "."] if said else []


_BUFFERS = {
    "weights kept": "petra: inputs reverse, weights stash, k={k}",
    "both kept": "petra: inputs store, weights stash, k={k}",
    "1F1B order": "petra in 1F1B order, k={k}",
}
_PETRA = inversion(
    "petra: inputs reverse, weights current, k={k}", "petra: inputs store, weights current, k={k}", _BUFFERS, (1, 4, 16)
)

#: By the name of a study.
def defaults_hold(report: StudyReport) -> Answer:
    """Which methods keep what is asked of their defaults: no loss shown at 2 stages, less than a point lost at 4."""
    asked: dict[int, tuple[str, Callable[[Paired], bool]]] = {
        2: ("not below bp beyond chance", lambda found: not (found.apart and found.mean < 0)),
        4: ("less than a point below bp, in the mean", lambda found: found.mean > -0.01),
    }
    rows = []
    for stages, (what, kept) in asked.items():
        said: dict[bool | None, list[str]] = {True: [], False: [], None: []}
        for case in report.cases:
            if f"K={stages}" not in case.label.split(", "):
                continue
            found = None if report.why_none(case) else report.against(case)
            said[None if found is None else kept(found)].append(
                f"{case.label.replace(f', K={stages}', '')}{f' ({_points(found)})' if found else ''}"
            )
        rows.append([str(stages), what, *("; ".join(said[answer]) or "-" for answer in (True, False, None))])
    return ["stages", "asked", "held", "missed", "no result"], rows, ["A star: zero is outside of the 95 % interval."]


ANSWERS: dict[str, Callable[[StudyReport], Answer]] = {
    "digits-stages": starts_to_lose,
    "digits-petra": _PETRA,
    "cifar-petra": _PETRA,
    "digits-petra-transformer": inversion(
        "K=5, petra, ticked, k={k}", "K=5, dsp, k={k}", {"1F1B order": "K=5, petra, 1f1b, k={k}"}, (1, 4)
    ),
    "digits-petra-depth": by_depth,
    "digits-layerpipe": replaces_the_stash,
    "fashion-layerpipe": replaces_the_stash,
    "cifar-full": defaults_hold,
}
