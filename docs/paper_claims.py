"""What the four papers state, table by table and figure by figure, beside what the result files of this project say.

`docs/write_tables.py` writes the tables of `docs/papers.md` with it. A claim has sources; a source reads result files
and gives cases, each with its numbers and a verdict that follows from them by one of the rules here, which the page
states. Nothing is judged by hand: another result file gives another verdict, and one that is missing says how to make
it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from unlatch import methods
from unlatch.config.study import load_study
from unlatch.io.results import read_results
from unlatch.report.paired import Paired, paired
from unlatch.report.study import CaseFound, study_report
from unlatch.schedule import steady_buffers

HELD, NOT_HELD, UNDECIDED, PARTLY = "held", "not held", "undecided", "partly"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured yet"

DIGITS, FULL = "digits", "CIFAR-10, 3 epochs"

#: Points that a method may lose and still be as good as backpropagation.
MARGIN = 1.0
#: How far a number may be from a published one.
NEAR = 0.1


class Case(NamedTuple):
    """Numbers in words, and what follows from them."""

    text: str
    verdict: str


class Missing(Exception):
    """There is no result; the message tells how to make it."""


# -------------------------------------------------------------------------------- rules


def as_good(found: Paired) -> str:
    """No more than a point below: the whole 95 % interval is above -1. Not: it is below zero, and reaches below -1.

    >>> [as_good(Paired(dict(enumerate(d)))) for d in ([-0.1, 0, 0.1], [-2, -2.1, -1.9], [-3, 0, 2])]
    ['held', 'not held', 'undecided']
    """
    if not found.is_result or found.interval is None:
        return UNDECIDED
    low, high = found.interval
    return HELD if low > -MARGIN else NOT_HELD if high < 0 else UNDECIDED


def better(found: Paired) -> str:
    """The whole 95 % interval of the difference is above zero. Not: it is below zero.

    >>> [better(Paired(dict(enumerate(d)))) for d in ([1, 1.1, 0.9], [-2, -2.1, -1.9], [-3, 0, 2])]
    ['held', 'not held', 'undecided']
    """
    if not found.apart:
        return UNDECIDED
    return HELD if found.mean > 0 else NOT_HELD


def near(ours: float, published: float) -> str:
    """Within 10 % of a number.

    >>> near(1.09, 1.0), near(1.2, 1.0)
    ('held', 'not held')
    """
    return HELD if abs(ours / published - 1) <= NEAR else NOT_HELD


def holds(condition: bool) -> str:
    """An order of numbers that have no spread, since they are counted, simulated, or a whole range."""
    return HELD if condition else NOT_HELD


def together(verdicts: Sequence[str]) -> str:
    """The verdict on a row of several cases; those that were not measured count only where nothing was.

    >>> together(["held", "held", "not measured yet"]), together(["held", "not held"]), together(["undecided"])
    ('held', 'partly: 1 of 2', 'undecided')
    >>> together(["undecided", "not held"]), together(["not measured yet"]), together(["partly: 1 of 3", "held"])
    ('not held', 'not measured yet', 'partly: 1 of 2')
    """
    for only in (NOT_MEASURED, NOT_COMPARABLE):
        if all(verdict == only for verdict in verdicts):
            return only
    counted = [verdict for verdict in verdicts if verdict not in (NOT_MEASURED, NOT_COMPARABLE)]
    if not counted:
        return NOT_MEASURED
    held = counted.count(HELD)
    if held == len(counted):
        return HELD
    if held or any(verdict.startswith(PARTLY) for verdict in counted):
        return f"{PARTLY}: {held} of {len(counted)}" if held else PARTLY
    return NOT_HELD if NOT_HELD in counted else UNDECIDED


# ------------------------------------------------------------------------------ evidence


class Evidence:
    """Result files, read when they are asked for."""

    def __init__(self, results: Path, studies: Path) -> None:
        self.results, self.studies = results, studies
        self._read: dict[str, Any] = {}

    def file(self, name: str, command: str | None = None) -> dict[str, Any]:
        """A result file of `benchmarks/`."""
        path = self.results / f"{name}.json"
        if not path.is_file():
            raise Missing(command or f"python benchmarks/{name}.py")
        if name not in self._read:
            self._read[name] = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, Any] = self._read[name]
        return found

    def runs(self, name: str, label: Callable[[dict[str, Any]], str]) -> dict[str, dict[int, float]]:
        """Accuracies in percent by label and seed, of a benchmark with a line per run."""
        path = self.results / f"{name}.jsonl"
        if not path.is_file():
            raise Missing(f"python benchmarks/{name}.py --data-dir DIR")
        found: dict[str, dict[int, float]] = {}
        for run in read_results(path):
            found.setdefault(label(run), {})[run["seed"]] = run["accuracy"]
        return found

    def study(self, name: str) -> Studied:
        """What a study found."""
        file = self.studies / f"{name}.toml"
        where = "" if name.startswith(DIGITS) else " --data-dir DIR"
        command = f"unlatch compare studies/{name}.toml{where}"
        lines = read_results(self.studies / "results" / f"{name}.jsonl") if file.is_file() else []
        if not lines:
            raise Missing(command)
        if name not in self._read:
            self._read[name] = Studied(file, lines, command)
        found: Studied = self._read[name]
        return found


class Studied:
    """Cases of a study by label, as far as all their seeds came to an end."""

    def __init__(self, file: Path, lines: Sequence[Any], command: str) -> None:
        asked = load_study(file)
        self.command = command
        self._report = study_report(asked, lines, asked.baseline or asked.cases[0].label, command)

    @cached_property
    def _cases(self) -> dict[str, CaseFound]:
        whole = {row["case"] for row in self._report.numbers() if row["is_result"]}
        return {label: case for case in self._report.cases if case.label in whole for label in case.labels}

    def pair(self, label: str, other: str | None = None) -> Paired:
        """A case against another one, or its baseline: points by seed, and the least that accuracies can show."""
        if label not in self._cases or other not in (None, *self._cases):
            raise Missing(self.command)
        one = self._cases[label]
        two = self._report.base_of(one) if other is None else self._cases[other]
        values = [{seed: 100 * value for seed, value in case.values.items()} for case in (one, two)]
        both = paired(*values, 100 * max(one.resolution, two.resolution))
        assert both is not None, "whole cases have all seeds"
        return both

    def diverged(self, label: str, other: str | None = None) -> bool:
        """Whether a case did where what it stands against did not."""
        cases = {name: case for case in self._report.cases for name in case.labels}
        if label not in cases or not cases[label].diverged:
            return False
        beside = self._report.base_of(cases[label]) if other is None else cases.get(other)
        return beside is not None and beside.is_result

    def cosine(self, label: str) -> float:
        """The least cosine of a stage's gradient with that of backpropagation."""
        if label not in self._cases or not self._cases[label].cosines():
            raise Missing(self.command)
        return float(min(self._cases[label].cosines()))


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


# ------------------------------------------------------------------------ accuracy sources


def _difference(found: Paired | None) -> str:
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
        yield Case(f"{on}, {what}: {_difference(both)}", rule(both))
    if missing:
        yield Case(f"{on}, not measured yet: {'; '.join(missing)} (`{found.command}`)", NOT_MEASURED)


def benchmarked(
    file: str,
    on: str,
    label: Callable[[dict[str, Any]], str],
    pairs: Mapping[str, str],
    evidence: Evidence,
) -> Iterable[Case]:
    """Runs of a benchmark against others of it: as good?"""
    found = evidence.runs(file, label)
    for name, base in pairs.items():
        both = paired(found[name], found[base])
        assert both is not None
        yield Case(f"{on}, {name}: {_difference(both)}", as_good(both))


def closing_gap(study: str, on: str, least: int, most: int, evidence: Evidence) -> Iterable[Case]:
    """Whether what petra loses against bp is less at a larger k, both paired by seed, and whether it is still much."""
    found = evidence.study(study)
    gaps = {k: found.pair(f"petra: inputs reverse, weights current, k={k}", f"bp, k={k}") for k in (least, most)}
    change = paired(gaps[most].differences, gaps[least].differences, max(gap.resolution for gap in gaps.values()))
    assert change is not None, "both have the seeds of the study"
    told = f"to bp at k={least} {_difference(gaps[least])}, smaller at k={most} by {_difference(change)}"
    yield Case(f"{on}, {told}", better(change))
    yield Case(f"{on}, to bp at k={most} {_difference(gaps[most])}", as_good(gaps[most]))


# -------------------------------------------------------------------------- DTR and DTRP


def weight_delay(_: Evidence) -> Iterable[Case]:
    same = [
        methods.get("dtr").lateness(stages) == tuple(max(0, 2 * (stages - stage) - 1) for stage in range(1, stages + 1))
        for stages in range(2, 9)
    ]
    told = "-".join(str(late) for late in methods.get("dtr").lateness(4))
    yield Case(f"delays of `dtr` at K=4: {told}; the law holds for {sum(same)} of {len(same)} K", holds(all(same)))


def regulated(evidence: Evidence) -> Iterable[Case]:
    found = evidence.file("delay_regulator")["rows"]
    misses = {
        (row["predictor"], row["steps"]): {int(seed): miss for seed, miss in row["miss"].items()} for row in found
    }
    for s in sorted({row["steps"] for row in found}):
        saturating, plain = misses["velocity, geometric", s], misses["velocity, steps", s]
        gain = paired(plain, saturating)
        assert gain is not None
        told = f"{statistics.fmean(saturating.values()):.2f}, R(s) = s {statistics.fmean(plain.values()):.2f}"
        yield Case(f"s={s}: saturating {told}", better(gain))


def imbalance(evidence: Evidence) -> Iterable[Case]:
    found = evidence.file("batch_compensation")["imbalance"]
    by = {(row["stages"], row["cut"]): row for row in found}
    for stages in sorted({row["stages"] for row in found}):
        even, own = by[stages, "forward and backward balanced"], by[stages, "its own cut"]
        told = f"last stage busy {even['busy'][-1]:.0%}, mean {even['mean']:.0%}; mean of its own cut {own['mean']:.0%}"
        yield Case(f"K={stages}: {told}", holds(even["busy"][-1] < even["mean"]))


def behaviour(evidence: Evidence) -> Iterable[Case]:
    ideal = evidence.file("decoupled_speed")["ideal"]
    for stages in (2, 3, 4):
        speed = ideal[str(stages)]["dtr"]
        # A tick is as long as the 4 units of an inner stage, of which the last one works 3.
        idle = 1 - 3 * (speed / (3 * stages))
        told = f"last stage idle {idle:.0%} of a tick on equal stages"
        yield Case(f"K={stages}: {told}", near(idle, 0.25))


def utilised(evidence: Evidence) -> Iterable[Case]:
    found = evidence.file("batch_compensation")["utilisation"]
    by = {(row["stages"], row["joined"]): row for row in found}
    most = max(row["joined"] for row in found)
    for stages in sorted({row["stages"] for row in found}):
        alone, joined = by[stages, 1], by[stages, most]
        told = f"{alone['mean']:.0%} without, {joined['mean']:.0%} with {most} joined"
        yield Case(f"K={stages}: {told}", holds(joined["mean"] > alone["mean"]))


def memory_over_stages(evidence: Evidence) -> Iterable[Case]:
    found = evidence.file("resnet56_memory")["rows"]
    size = {(row["method"], row["stages"]): max(row["measured"]) / 1e6 for row in found}
    most, bp = max(row["stages"] for row in found), size["bp", 1]
    for name in ("fdg", "ddg"):
        rising = _rising([size[name, stages] for stages in range(2, most + 1)])
        told = f"{size[name, 2]:.0f} MB at K=2, {size[name, most]:.0f} at K={most}, bp {bp:.0f}; "
        told += f"rises at {sum(rising)} of {len(rising)} further stages"
        yield Case(f"{name}: {told}", holds(all(rising)))
    for name in ("fr", "dtr", "dtrp"):
        mine = [size[name, stages] for stages in range(2, most + 1)]
        told = f"{min(mine):.0f} to {max(mine):.0f} MB (never more than bp, {bp:.0f})"
        yield Case(f"{name}: {told}", holds(max(mine) <= bp))


def _rising(values: Sequence[float]) -> list[bool]:
    """Whether each value is above the one before by more than rounding."""
    return [b > 1.005 * a for a, b in pairwise(values)]


def ideal_times(evidence: Evidence) -> Iterable[Case]:
    ideal = evidence.file("decoupled_speed")["ideal"]
    laws: dict[str, Callable[[int], float]] = {
        "bp": lambda _: 1.0,
        "fdg": float,
        "dtr": lambda stages: 3 * stages / 4,
        "dtrp": lambda stages: 3 * stages / 4,
    }
    for name, law in laws.items():
        speeds = [ideal[str(stages)][name] for stages in (2, 3, 4)]
        told = " / ".join(f"{speed:.2f}" for speed in speeds)
        expected = [law(stages) for stages in (2, 3, 4)]
        verdict = together([near(speed, wanted) for speed, wanted in zip(speeds, expected, strict=True)])
        yield Case(f"{name}: {told}", verdict)
    for name in ("ddg", "fr"):
        pairs = [(ideal[str(stages)][name], ideal[str(stages)][f"{name}, forward locked"]) for stages in (2, 3, 4)]
        told, locked = (" / ".join(f"{pair[n]:.2f}" for pair in pairs) for n in (0, 1))
        yield Case(f"{name}: {told}, by its definition {locked}", together([near(*pair) for pair in pairs]))


def kept_inputs(_: Evidence) -> Iterable[Case]:
    laws: dict[str, tuple[str, Callable[[int, int], int]]] = {
        "ddg": ("K-k+1 graphs", lambda stages, k: stages - k + 1),
        "fr": ("K-k+1 inputs", lambda stages, k: stages - k + 1),
        "fdg": ("2(K-k) graphs", lambda stages, k: max(1, 2 * (stages - k))),
        "dtr": ("2(K-k) inputs", lambda stages, k: max(1, 2 * (stages - k))),
    }
    for name, (words, law) in laws.items():
        found = {stages: steady_buffers(methods.get(name).schedule(stages)).in_flight for stages in (2, 3, 4)}
        same = all(list(kept) == [law(n, k) for k in range(1, n + 1)] for n, kept in found.items())
        yield Case(f"{name}, {words}: {'-'.join(map(str, found[4]))} at K=4", holds(same))


def sibling_speed(network: str, evidence: Evidence) -> Iterable[Case]:
    found = [row for row in evidence.file("decoupled_speed")["rows"] if row["network"] == network]
    for name in dict.fromkeys(row["method"] for row in found):
        mine = [row for row in found if row["method"] == name and "published" in row and name != "bp"]
        if mine:
            ours, theirs = (" / ".join(f"{row[key]:.2f}" for row in mine) for key in ("speedup", "published"))
            verdict = together([near(row["speedup"], row["published"]) for row in mine])
            yield Case(f"{name}: {ours}, published {theirs}", verdict)
    mine = [row for row in found if row["method"] == "dtr, its own cut" and row["stages"] <= 4]
    told = " / ".join(f"{row['speedup']:.2f}" for row in mine)
    yield Case(f"dtr: {told}, number not at hand", NOT_COMPARABLE)


def measured_speed(file: str, names: Sequence[str], evidence: Evidence) -> Iterable[Case]:
    network = file.removeprefix("pipeline_speed").strip("_") or "resnet20"
    found = evidence.file(file, f"python benchmarks/pipeline_speed.py --model {network}")
    missing: list[str] = []
    for name in names:
        ratio = found["ratio"].get(f"unlatch {name}")
        if ratio is None:
            missing.append(name)
            continue
        yield Case(f"{name}: {_range(ratio)} times one process", holds(ratio["min"] > 1))
    if missing:
        # All at once, since rounds are interleaved and the file is written anew.
        ours = [name.removeprefix("unlatch ") for name in found["ratio"] if name.startswith("unlatch ")]
        command = f"{found['command']} --only {' '.join([*ours, *missing])}"
        yield Case(f"not measured yet: {', '.join(missing)} (`{command}`)", NOT_MEASURED)


def _range(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def faster(name: str, other: str, evidence: Evidence) -> Iterable[Case]:
    """Of two systems on two ranks; their ranges must not overlap."""
    ratio = evidence.file("pipeline_speed", "python benchmarks/pipeline_speed.py --model resnet20")["ratio"]
    ours, theirs = ratio[name], ratio[other]
    apart = ours["min"] > theirs["max"] or ours["max"] < theirs["min"]
    told = f"{name} {_range(ours)}, {other} {_range(theirs)}"
    yield Case(f"ResNet-20: {told}", holds(ours["median"] > theirs["median"]) if apart else UNDECIDED)


_NO_CIFAR100 = nothing("CIFAR-100 cannot be had here")
_NO_IMAGENET = nothing("ImageNet cannot be had here")
_BY_METHOD = ("ddg", "fr", "dgl", "fdg", "dtr", "dtrp")


def _at(stages: Iterable[int], names: Sequence[str], more: str = "") -> list[str]:
    return [f"{name}, K={count}{more}" for count in stages for name in names]


DTR = (
    Claim(
        "Figures 1, 2",
        "module k < K uses weights s_k = 2(K-k)-1 updates apart in its two forwards",
        "the law itself",
        [weight_delay],
        "counted from the schedule; all 20 events of Figure 1 are a test",
    ),
    Claim(
        "Figure 3",
        "a delay regulator keeps predictions from going too far (meaning inferred)",
        "number not at hand",
        [regulated],
        "distance of predicted and coming weights, as a share of the way they go; digits, 3 seeds",
    ),
    Claim(
        "Figure 4",
        "modules are imbalanced",
        "number not at hand",
        [imbalance],
        "simulated: the last stage runs no forward twice. A cut by the costs of `dtr` mends most of it",
    ),
    Claim(
        "Figure 5",
        "what devices do in a tick",
        "number not at hand; 1/4 idle is derived",
        [behaviour],
        "simulated; [picture](#what-devices-do)",
    ),
    Claim(
        "Figure 6",
        "batch compensation raises utilisation",
        "FDG without it on ResNet-56: 45/25 % (K=2), 38/29/17/10 % (K=4), same group",
        [utilised],
        "simulated; the loss on small batches is set to the 57 % published for one GPU, so levels are not comparable, "
        "the direction is",
    ),
    Claim(
        "Figure 7",
        "memory of ResNet-56 explodes with K under stored graphs, not under re-computation",
        "number not at hand",
        [memory_over_stages],
        "live tensors of the fullest stage, batch 16, stages of equal work. Their graphs shrink as 1/K while more "
        "are kept, so that `fdg` and `ddg` grow slowly, above bp (inferred); "
        "[picture](#memory-of-resnet-56)",
    ),
    Claim(
        "Figure 8, Table 3",
        "accuracy of ResNet-18 comparable with bp, or better, by method",
        "number not at hand; same group, K=2, error of bp 4.87, ddg 5.00, dgl 5.21, fr 4.80, fdg 4.82",
        [
            partial(beside_baseline, "digits-methods", DIGITS, _at([2], _BY_METHOD)),
            partial(beside_baseline, "cifar-full", FULL, _at([2], ("fdg", "dtr", "dtrp"))),
        ],
        "ResNet-8 and ResNet-20 in place of ResNet-18, 300 epochs cut to 8 and 3",
    ),
    Claim(
        "Table 1",
        "ideal time per batch",
        "entries not at hand; derived for Tb = 2 Tf at K=2 / 3 / 4",
        [ideal_times],
        "simulated speed-up; `ddg` and `fr` are faster here, since forwards overlap without changing a weight",
    ),
    Claim(
        "Table 2",
        "what module k stores",
        "entries not at hand; from public code and Figure 1",
        [kept_inputs],
        "counted from the schedule in steady state",
    ),
    Claim(
        "Table 4",
        "top-1 accuracy over K on CIFAR-10 and CIFAR-100",
        "number not at hand",
        [
            partial(beside_baseline, "digits-stages", DIGITS, _at([2, 4, 6, 8], ("dtr", "dtrp"), ", M=1")),
            partial(beside_baseline, "cifar-full", FULL, _at([2, 4], ("dtr", "dtrp"))),
            _NO_CIFAR100,
        ],
        "smaller network, shorter training",
    ),
    Claim(
        "Table 5",
        "validation error at K=2 as that of bp; shrinking the learning rate by gamma helps",
        "number not at hand; fdg with a tuned beta on ResNet-20: 7.23 % against 7.92 %, bp 7.78 %",
        [
            partial(beside_baseline, "digits-dtrp", DIGITS, _at([2], ("fdg", "dtr"), ", M=1")),
            partial(
                against,
                "digits-dtrp",
                DIGITS,
                {f"dtrp, K={k}, M=1, geometric, gamma 0.5": f"dtrp, K={k}, M=1, geometric, gamma 1.0" for k in (2, 4)},
                better,
            ),
            partial(
                against,
                "digits-dtrp",
                DIGITS,
                {f"dtrp, K={k}, M=1, geometric, gamma 1.0": f"dtr, K={k}, M=1" for k in (2, 4)},
                better,
            ),
            _NO_CIFAR100,
            _NO_IMAGENET,
        ],
        "gamma 1 and 0.5 as they are, neither tuned; the second pair is what prediction adds to `dtr`",
    ),
    Claim(
        "Table 6",
        "error over K on CIFAR-10, dtrp beside ddg, dgl, fr, fdg",
        "number not at hand; same group, ResNet-56 at K=2 / 3 / 4: bp 6.19, ddg 6.60 / 6.50 / 6.61, dgl 6.77 / 8.88 / "
        "9.65, fr 6.07 / 6.33 / 6.48, fdg 6.20 / 6.20 / 6.83",
        [
            partial(beside_baseline, "digits-methods", DIGITS, _at([4], _BY_METHOD)),
            partial(beside_baseline, "cifar-full", FULL, _at([4], ("fdg", "dtr", "dtrp"))),
        ],
        "digits are too easy to tell most methods apart",
    ),
    Claim(
        "Table 7, faster than bp",
        "training is accelerated",
        "dtrp: number not at hand",
        [partial(measured_speed, "pipeline_speed", ["ddg", "fr", "dgl", "fdg", "dtr", "dtrp"])],
        "measured on 2 ranks, ResNet-20",
    ),
    Claim(
        "Table 7, beside data parallel training",
        "faster than DDP (stated for fdg by its numbers)",
        "dtrp: number not at hand; same group, WRN-28-10 at K=2: fdg 118.3 s, data parallel 126.9 s",
        [partial(faster, f"unlatch {name}", "pytorch DDP") for name in ("fdg", "dtrp")],
        "measured on 2 ranks: 0.27 M weights are summed at once, and dtrp runs forwards twice",
    ),
    Claim(
        "Table 7, WRN-28-10",
        "speed-up over bp at K=2 / 3 / 4",
        "same group; dtrp: number not at hand",
        [partial(sibling_speed, "WRN-28-10")],
        "simulated by multiply-accumulates, messages free; their devices were 27 to 97 % busy. Our `ddg` and `fr` "
        "overlap forwards",
    ),
    Claim(
        "Table 7, ResNet-56",
        "speed-up over bp at K=2 / 3 / 4",
        "same group; dtrp: number not at hand",
        [partial(sibling_speed, "ResNet-56")],
        "simulated with full devices and free messages; theirs were 8 to 45 % busy, which is what batch "
        "compensation is for",
    ),
    Claim(
        "Table 8",
        "error of ResNet-20 as that of bp",
        "number not at hand; same group, K=2: bp 7.78, fdg 7.92",
        [partial(beside_baseline, "cifar-full", FULL, _at([2, 4], ("dtrp",)))],
        "all 50,000 images, stem of stride 2",
    ),
)


# -------------------------------------------------------------------------------- PETRA


def parallel_time(evidence: Evidence) -> Iterable[Case]:
    ideal = evidence.file("decoupled_speed")["ideal"]
    for stages in (4, 8):
        told = f"J={stages}: {ideal[str(stages)]['petra']:.2f} times one device"
        yield Case(f"{told}, published {stages}", near(ideal[str(stages)]["petra"], stages))


def nothing_stored(evidence: Evidence) -> Iterable[Case]:
    growth = evidence.file("petra_memory")["growth"]
    told = f"activations grow by {growth['petra']:.2f} from 8 to 32 blocks per stage (1f1b: {growth['1f1b']:.2f})"
    yield Case(told, near(growth["petra"], 1.0))


def buffers(counting: str, evidence: Evidence) -> Iterable[Case]:
    for row in evidence.file("petra_buffers")["rows"]:
        if row["network"] == "RevNet-50" and row["counting"] == counting:
            told = f"{row['kept']}: {row['bytes'] / 1e9:.1f} GB, saves {row['saving']:.1%}"
            if "published" in row:
                yield Case(f"{told}, published {row['published'] / 1e9:.1f}", near(row["bytes"], row["published"]))
            elif row["kept"] == "nothing":
                yield Case(told, holds(row["saving"] >= 0.543))


def throughput(evidence: Evidence) -> Iterable[Case]:
    for row in evidence.file("decoupled_speed")["reversible"]:
        ours = row["over_serial_reversible"]
        told = f"{row['network']} in {row['stages']} stages: {ours:.1f} times one stage after the other, simulated"
        yield Case(told, holds((1 - NEAR) * 2.4 <= ours <= (1 + NEAR) * 3.0))


def closer_gradients(evidence: Evidence) -> Iterable[Case]:
    found = evidence.study("digits-petra-depth")
    for stages in (4, 8, 18):
        petra, dsp = (found.cosine(f"K={stages}, {name}, k=1") for name in ("ticked", "dsp"))
        yield Case(f"K={stages}: cosine {petra:.3f}, inputs kept {dsp:.3f}", holds(petra >= dsp))


def _petra_case(run: dict[str, Any]) -> str:
    chosen = ", choice" if run["phase"] != "test" else ""
    return f"{run['task']}, K={run['stages']}, {run['method']}{chosen}"


_PETRA_DATA = {"digits": DIGITS, "cifar": "10,000 images"}
_BUFFERS = {
    f"petra: inputs store, weights current, k={k}": f"petra: inputs reverse, weights stash, k={k}" for k in (1, 4, 16)
}

PETRA = (
    Claim(
        "Table 1, time",
        "mean time per batch 3, bp 3J: J times as fast",
        "3 against 3J",
        [parallel_time],
        "the paper lets a device go forward and backward at once; one that does them in turn takes 4, so 3J/4",
    ),
    Claim(
        "Table 1, activations",
        "reversible stages store nothing",
        "0",
        [nothing_stored],
        "measured on 2 ranks: depth of a stage does not matter",
    ),
    Claim(
        "Table 2, CIFAR-10",
        "accuracy of bp on RevNets",
        "petra - bp: 0.0 (RevNet-18), -0.5 (34), -0.7 (50); 3 runs",
        [
            partial(
                benchmarked,
                "petra_accuracy",
                "10,000 images",
                _petra_case,
                {
                    "cifar10, K=4, petra M=4 1f1b": "cifar10, K=1, bp",
                    "cifar10, K=11, petra M=8 geometric 1f1b": "cifar10, K=1, bp",
                },
            ),
            partial(beside_baseline, "cifar-full", FULL, ["petra, K=4, ticked", "petra, K=4, 1f1b"]),
            partial(beside_baseline, "digits-methods", DIGITS, ["petra, K=2", "petra, K=4"]),
        ],
        "RevNet-20 in 4 to 11 stages; the paper trains 300 epochs, and chooses k on the training set",
    ),
    Claim(
        "Table 2, ImageNet32 and ImageNet",
        "accuracy of bp on RevNets",
        "petra - bp on ImageNet: +0.2 (RevNet-18), +0.3 (34), -0.6 (50)",
        [_NO_IMAGENET],
        "loaders exist, the data do not",
    ),
    Claim(
        "Figure 4",
        "the gap to bp becomes smaller with k, and closes at k = 32",
        "number not at hand",
        [
            *(partial(closing_gap, f"{name}-petra", on, 1, 16) for name, on in _PETRA_DATA.items()),
        ],
        "k = 1 and 16, each beside bp with the same k",
    ),
    Claim(
        "Table 3",
        "memory by what is buffered, RevNet-50",
        "44.5, 43.6, 21.2, 20.3 GB",
        [partial(buffers, "as published")],
        "counted as the paper counts: formulas there too, no measurement",
    ),
    Claim(
        "Table 3, saving",
        "PETRA saves 54.3 %",
        "54.3 %",
        [partial(buffers, "corrected")],
        "held where it is at least as much: with both streams and the stem counted everywhere it saves more than that",
    ),
    Claim(
        "throughput (final version)",
        "2.4 to 3.0 times as fast as a reversible model one stage at a time, 10 and 18 GPUs",
        "2.4 to 3.0, second-hand",
        [throughput],
        "simulated by multiply-accumulates with free messages: a bound. What messages and launches took on their GPUs "
        "is not known",
    ),
    Claim(
        "throughput, measured",
        "training is accelerated",
        "as above",
        [partial(measured_speed, "pipeline_speed_revnet20", ["petra"])],
        "2 ranks against bp of the same RevNet-20 in one process",
    ),
    Claim(
        "gradient quality (final version)",
        "gradients are closer to the true ones than those of plain delay",
        "number not at hand, second-hand",
        [closer_gradients],
        "least cosine of a stage, beside the same delays with inputs kept",
    ),
    Claim(
        "four buffer settings, CIFAR-100 (final version)",
        "approximate inputs hurt more than approximate weights",
        "number not at hand, second-hand",
        [
            *(partial(against, f"{name}-petra", on, _BUFFERS, better) for name, on in _PETRA_DATA.items()),
            _NO_CIFAR100,
        ],
        "held: inputs kept and weights not is better than weights kept and inputs not; the same delays otherwise",
    ),
)


# ------------------------------------------------------------------------------ LayerPipe


def average_gain(key: str, evidence: Evidence) -> Iterable[Case]:
    for row in evidence.file("layerpipe_speedup")["summary"]:
        yield Case(f"{row['model']}: {row[key]:.2f}", near(row[key], 1.25))


def best_gain(key: str, evidence: Evidence) -> Iterable[Case]:
    for row in evidence.file("layerpipe_speedup")["summary"]:
        yield Case(f"{row['model']}: {row[key]:.2f}", holds(row[key] >= 1.8))


def traffic(evidence: Evidence) -> Iterable[Case]:
    for row in evidence.file("layerpipe_speedup")["summary"]:
        straight, replicas = row["less_traffic"], row["less_than_replicas"]
        told = f"less than the straight pipeline in {straight:.0%}, than replicas in {replicas:.0%} of cases"
        yield Case(f"{row['model']}: {told}", holds(straight > 0.5))


def measured_gain(evidence: Evidence) -> Iterable[Case]:
    found = evidence.file("layerpipe_speed")["speedup"]
    yield Case(f"{_range(found)} times pipedream on layers of costs 1:2:4:3", holds(found["min"] > 1))


def delay_law(_: Evidence) -> Iterable[Case]:
    method = methods.get("layerpipe", mode="stages")
    same = [
        method.lateness(count) == tuple(2 * (count - stage) for stage in range(1, count + 1)) for count in range(2, 9)
    ]
    told = "-".join(map(str, method.lateness(4)))
    yield Case(f"delays in stages at K=4: {told}; the law holds for {sum(same)} of {len(same)} K", holds(all(same)))


def _averages(rates: Sequence[str]) -> dict[str, str]:
    return {
        f"K={k} ({late} late), average, lr {lr}": f"K={k} ({late} late), stash, lr {lr}"
        for k, late in ((4, 6), (6, 10))
        for lr in rates
    }


LAYERPIPE = (
    Claim(
        "abstract",
        "25 % faster than PipeDream on average",
        "1.25",
        [partial(average_gain, "mean")],
        "planned for 2 to 16 devices on 8 networks; which networks and which device the paper has is not known",
    ),
    Claim(
        "abstract, without AlexNet",
        "25 % faster than PipeDream on average",
        "1.25",
        [partial(average_gain, "mean_without_alexnet")],
        "few, very unequal layers gain most: AlexNet lifts the mean above",
    ),
    Claim(
        "abstract",
        "upwards of 80 % with 7 to 9 processors",
        "1.8 and more",
        [partial(best_gain, "best_at_7_to_9")],
        "the best network",
    ),
    Claim(
        "abstract, without AlexNet",
        "upwards of 80 % with 7 to 9 processors",
        "1.8 and more",
        [partial(best_gain, "best_without_alexnet")],
        "the best of the others",
    ),
    Claim(
        "abstract",
        "less communication than PipeDream",
        "number not at hand",
        [traffic],
        "held where it is less in more than half of the cases; against replicas it depends on the costs",
    ),
    Claim(
        "measured",
        "tasks placed one by one are faster than whole layers",
        "number not at hand",
        [measured_gain, partial(faster, "unlatch layerpipe", "unlatch pipedream")],
        "2 ranks; by theory 1.25 on the chain",
    ),
    Claim(
        "LayerPipe2",
        "a layer with S stages after it is 2S updates late",
        "2S",
        [delay_law],
        "counted from the schedule",
    ),
    Claim(
        "LayerPipe2, ResNet-18 on CIFAR-100",
        "a moving average of gradients replaces stored weights",
        "number not at hand",
        [
            partial(against, "digits-layerpipe", DIGITS, _averages(["0.02", "0.1"]), as_good),
            partial(against, "fashion-layerpipe", "Fashion-MNIST", _averages(["0.02", "0.1"]), as_good),
            _NO_CIFAR100,
        ],
        "average against stash, 6 and 10 updates late",
    ),
)


# -------------------------------------------------------------------------------- AuxNet


def gain_over_stages(networks: Sequence[str], evidence: Evidence) -> Iterable[Case]:
    found = evidence.file("auxnet_speedup")["rows"]
    for network in networks:
        speeds = [row["speedup"] for row in found if row["network"] == network]
        told = " / ".join(f"{speed:.2f}" for speed in speeds)
        yield Case(f"{network}, K=2 to {len(speeds) + 1}: {told}", holds(min(speeds) > 1))
        rising = _rising(speeds)
        yield Case(f"{network}: rises at {sum(rising)} of {len(rising)} further stages", holds(all(rising)))


def formula(evidence: Evidence) -> Iterable[Case]:
    found = evidence.file("auxnet_speedup")["rows"]
    for network in dict.fromkeys(row["network"] for row in found):
        mine = [row for row in found if row["network"] == network]
        off = [row["speedup"] / row["formula"] for row in mine]
        told = f"simulated over formula {min(off):.2f} to {max(off):.2f}"
        yield Case(f"{network}: {told}", together([near(row["speedup"], row["formula"]) for row in mine]))
    step = evidence.file("auxnet_step_time")
    told = f"measured {1 / step['ratio']['median']:.2f}, formula {step['formula']['speed_up_at_2']:.2f}"
    yield Case(f"ResNet-56, 2 ranks: {told}", near(1 / step["ratio"]["median"], step["formula"]["speed_up_at_2"]))


def measured_step(file: str, command: str, evidence: Evidence) -> Iterable[Case]:
    found = evidence.file(file, command)
    ratio, depth, widen = found["ratio"], found["settings"]["depth"], found["settings"].get("widen")
    network = f"WRN-{depth}-{widen}" if widen else f"ResNet-{depth}"
    told = f"{1 / ratio['median']:.2f} ({1 / ratio['max']:.2f} to {1 / ratio['min']:.2f})"
    yield Case(f"{network}, K=2 on 2 ranks: {told} times bp", holds(ratio["max"] < 1))


_WIDE = "python benchmarks/auxnet_step_time.py --repeats 7 --steps 4 --depth 28 --widen 2"

AUXNET = (
    Claim(
        "accuracy over K, CIFAR-10",
        "testing accuracy comparable with layer-serial training",
        "number not at hand",
        [
            partial(
                benchmarked,
                "auxnet_accuracy",
                "10,000 images",
                lambda run: run["setting"],
                {"K2 auxnet": "bp", "K3 auxnet": "bp", "late penalty": "bp"},
            ),
            partial(beside_baseline, "digits-methods", DIGITS, ["auxnet, K=2", "auxnet, K=4"]),
            partial(beside_baseline, "digits-auxnet", DIGITS, ["auxnet, K=2, none", "auxnet, K=3, none"]),
        ],
        "*late penalty* has an AuxNet of 10 % of the cost; what early stages add is on "
        "[its page](methods/auxnet.md#do-the-early-stages-earn-their-cost)",
    ),
    Claim(
        "accuracy, CIFAR-100 and ImageNet",
        "testing accuracy comparable with layer-serial training",
        "number not at hand",
        [_NO_CIFAR100, _NO_IMAGENET],
        "",
    ),
    Claim(
        "speed-up over K, ResNets",
        "faster than layer-serial training, more so with every stage",
        "number not at hand",
        [
            partial(gain_over_stages, ["ResNet-56", "ResNet-110"]),
            partial(measured_step, "auxnet_step_time", "python benchmarks/auxnet_step_time.py"),
        ],
        "simulated by multiply-accumulates, AuxNets of one block per resolution; [picture](#speed-up-of-auxnet)",
    ),
    Claim(
        "speed-up over K, WideResNets",
        "faster than layer-serial training, more so with every stage",
        "number not at hand",
        [
            partial(gain_over_stages, ["WRN-28-10"]),
            partial(measured_step, "auxnet_step_time_wrn", _WIDE),
        ],
        "WRN-28-10 takes too long here, so it is simulated; its 14 blocks cannot be shared out evenly beyond K = 4",
    ),
    Claim(
        "Equation 27",
        "rho(K) = (T_d+T_f+T_b) / (T_d+t_psi+t_f+t_b+(T_f+T_b)/K)",
        "the formula itself (its K-term inferred)",
        [formula],
        "it charges every device for the largest AuxNet and shares blocks out evenly; cuts by cost do better than it",
    ),
    Claim(
        "predecessor, stored variables",
        "comparable or even better testing accuracy",
        "number not at hand",
        [partial(beside_baseline, "digits-methods", DIGITS, ["auxvar, K=2, not augmented"])],
        "8 epochs; both without augmentation",
    ),
    Claim(
        "predecessor, serial and parallel phases",
        "comparable accuracy",
        "number not at hand",
        [partial(beside_baseline, "digits-methods", DIGITS, ["sph, K=2, not augmented"])],
        "8 epochs; both without augmentation",
    ),
)

#: The tables of `docs/papers.md`.
PAPERS = {"dtr": DTR, "petra": PETRA, "layerpipe": LAYERPIPE, "auxnet": AUXNET}
HEADS = ("table or figure", "the paper's statement", "published", "ours", "verdict", "why")


#: What a row may come to, in the order of the summary.
VERDICTS = (HELD, PARTLY, NOT_HELD, UNDECIDED, NOT_COMPARABLE, NOT_MEASURED)


def summary(results: Path) -> list[list[str]]:
    """How many rows of each paper came to what."""
    made = []
    for name in PAPERS:
        found = [row[4].strip("*").partition(":")[0] for row in paper(name, results)]
        made.append([name, *(str(found.count(verdict)) for verdict in VERDICTS)])
    return made


def paper(name: str, results: Path) -> list[list[str]]:
    """The rows of one paper, from a folder of results and the studies of the same tree."""
    return rows(PAPERS[name], Evidence(results, results.parents[1] / "studies"))
