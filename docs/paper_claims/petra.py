"""PETRA: what reversible stages save and cost, accuracy beside backpropagation, quality of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from result_tables.accuracy import petra_case

from unlatch.report.paired import paired

from .claims import (
    NO_CIFAR100,
    NO_IMAGENET,
    Claim,
    against,
    benchmarked,
    beside_baseline,
    difference_text,
    measured_speed,
)
from .evidence import DIGITS, FULL, Evidence
from .rules import NEAR, Case, as_good, better, holds, near


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


def closing_gap(study: str, on: str, least: int, most: int, evidence: Evidence) -> Iterable[Case]:
    """Whether what petra loses against bp is less at a larger k, both paired by seed, and whether it is still much."""
    found = evidence.study(study)
    gaps = {k: found.pair(f"petra: inputs reverse, weights current, k={k}", f"bp, k={k}") for k in (least, most)}
    change = paired(gaps[most].differences, gaps[least].differences, max(gap.resolution for gap in gaps.values()))
    assert change is not None, "both have the seeds of the study"
    told = f"to bp at k={least} {difference_text(gaps[least])}, smaller at k={most} by {difference_text(change)}"
    yield Case(f"{on}, {told}", better(change))
    yield Case(f"{on}, to bp at k={most} {difference_text(gaps[most])}", as_good(gaps[most]))


def closer_gradients(evidence: Evidence) -> Iterable[Case]:
    found = evidence.study("digits-petra-depth")
    for stages in (4, 8, 18):
        petra, dsp = (found.cosine(f"K={stages}, {name}, k=1") for name in ("ticked", "dsp"))
        yield Case(f"K={stages}: cosine {petra:.3f}, inputs kept {dsp:.3f}", holds(petra >= dsp))


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
                petra_case,
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
        [NO_IMAGENET],
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
            NO_CIFAR100,
        ],
        "held: inputs kept and weights not is better than weights kept and inputs not; the same delays otherwise",
    ),
)
