"""What a claim is, how it becomes a row, and the sources that claims of several papers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from result_tables.common import median_text

from unlatch.report.paired import Paired, paired

from .evidence import Evidence, Missing, Studied
from .rules import NOT_COMPARABLE, NOT_HELD, NOT_MEASURED, UNDECIDED, Case, as_good, holds, together

Source = Callable[[Evidence], Iterable[Case]]


class Claim(NamedTuple):
    """A row: which table or figure, what it states, the published number, what we have, and why it is as it is."""

    where: str
    statement: str
    published: str
    sources: Sequence[Source]
    why: str


def rows(claims: Sequence[Claim], evidence: Evidence) -> list[list[str]]:
    """The cells of a table of claims."""
    made = []
    for claim in claims:
        cases = [case for source in claim.sources for case in _told(source, evidence)]
        # What a case found by itself is said where the cases of a row differ.
        several = len({case.verdict for case in cases if case.verdict != NOT_MEASURED}) > 1
        texts = [f"{text} *({said})*" if several and said != NOT_MEASURED else text for text, said in cases]
        texts = list(dict.fromkeys(texts))
        verdict = together([case.verdict for case in cases])
        made.append([claim.where, claim.statement, claim.published, "<br>".join(texts), f"**{verdict}**", claim.why])
    return made


def _told(source: Source, evidence: Evidence) -> list[Case]:
    try:
        return list(source(evidence))
    except Missing as missing:
        return [Case(f"not measured yet: `{missing}`", NOT_MEASURED)]


def nothing(reason: str) -> Source:
    """There is nothing to compare with, and no run will change that here."""
    return lambda _: [Case(reason, NOT_COMPARABLE)]


NO_CIFAR100 = nothing("CIFAR-100 cannot be had here")
NO_IMAGENET = nothing("ImageNet cannot be had here")


def difference_text(found: Paired | None) -> str:
    if found is None or found.interval is None:
        return "too few seeds"
    low, high = found.interval
    return f"{found.mean:+.2f} ({low:+.2f} to {high:+.2f})"


def beside_baseline(study: str, on: str, labels: Sequence[str], evidence: Evidence) -> Iterable[Case]:
    """Cases of a study against their baselines: as good?"""
    return _judged(evidence.study(study), on, dict.fromkeys(labels), as_good)


def against(
    study: str, on: str, pairs: Mapping[str, str], rule: Callable[[Paired], str], evidence: Evidence
) -> Iterable[Case]:
    """Cases of a study against other cases of it."""
    return _judged(evidence.study(study), on, pairs, rule)


def _judged(found: Studied, on: str, pairs: Mapping[str, str | None], rule: Callable[[Paired], str]) -> Iterable[Case]:
    """Cases against others, or against their baselines; a study may be half done."""
    missing = []
    for label, other in pairs.items():
        what = label if other is None else f"{label} against {other}"
        if found.diverged(label, other):
            yield Case(f"{on}, {what}: diverged", NOT_HELD)
            continue
        try:
            both = found.pair(label, other)
        except Missing:
            missing.append(what)
            continue
        yield Case(f"{on}, {what}: {difference_text(both)}", rule(both))
    if missing:
        yield Case(f"{on}, not measured yet: {'; '.join(missing)} (`{found.command}`)", NOT_MEASURED)


def benchmarked(
    file: str,
    on: str,
    label: Callable[[Mapping[str, Any]], str],
    pairs: Mapping[str, str],
    evidence: Evidence,
) -> Iterable[Case]:
    """Runs of a benchmark against others of it: as good?"""
    found = evidence.runs(file, label)
    for name, base in pairs.items():
        both = paired(found[name], found[base])
        assert both is not None
        yield Case(f"{on}, {name}: {difference_text(both)}", as_good(both))


def measured_speed(file: str, names: Sequence[str], evidence: Evidence) -> Iterable[Case]:
    network = file.removeprefix("pipeline_speed").strip("_") or "resnet20"
    found = evidence.file(file, f"python benchmarks/pipeline_speed.py --model {network}")
    missing: list[str] = []
    for name in names:
        ratio = found["ratio"].get(f"unlatch {name}")
        if ratio is None:
            missing.append(name)
            continue
        yield Case(f"{name}: {median_text(ratio)} times one process", holds(ratio["min"] > 1))
    if missing:
        # All at once, since rounds are interleaved and the file is written anew.
        ours = [name.removeprefix("unlatch ") for name in found["ratio"] if name.startswith("unlatch ")]
        command = f"{found['command']} --only {' '.join([*ours, *missing])}"
        yield Case(f"not measured yet: {', '.join(missing)} (`{command}`)", NOT_MEASURED)


def faster(name: str, other: str, evidence: Evidence) -> Iterable[Case]:
    """Of two systems on two ranks; their ranges must not overlap."""
    ratio = evidence.file("pipeline_speed", "python benchmarks/pipeline_speed.py --model resnet20")["ratio"]
    ours, theirs = ratio[name], ratio[other]
    apart = ours["min"] > theirs["max"] or ours["max"] < theirs["min"]
    told = f"{name} {median_text(ours)}, {other} {median_text(theirs)}"
    yield Case(f"ResNet-20: {told}", holds(ours["median"] > theirs["median"]) if apart else UNDECIDED)


def rises(values: Sequence[float]) -> list[bool]:
    """Whether each value is above the one before by more than rounding."""
    return [b > 1.005 * a for a, b in pairwise(values)]
