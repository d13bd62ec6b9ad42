"""LayerPipe and LayerPipe2: gains over PipeDream, traffic, the law of delay, averages in place of stored weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from result_tables.common import median_text

from unlatch import methods

from .claims import NO_CIFAR100, Claim, against, faster
from .evidence import DIGITS, Evidence
from .rules import Case, as_good, holds, near


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
    yield Case(f"{median_text(found)} times pipedream on layers of costs 1:2:4:3", holds(found["min"] > 1))


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
            NO_CIFAR100,
        ],
        "average against stash, 6 and 10 updates late",
    ),
)
