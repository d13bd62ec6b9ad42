"""AuxNet and its predecessors: accuracy beside layer-serial training, speed-up over stages, the formula for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from .claims import NO_CIFAR100, NO_IMAGENET, Claim, benchmarked, beside_baseline, rises
from .evidence import DIGITS, Evidence
from .rules import Case, holds, near, together


def gain_over_stages(networks: Sequence[str], evidence: Evidence) -> Iterable[Case]:
    found = evidence.file("auxnet_speedup")["rows"]
    for network in networks:
        speeds = [row["speedup"] for row in found if row["network"] == network]
        told = " / ".join(f"{speed:.2f}" for speed in speeds)
        yield Case(f"{network}, K=2 to {len(speeds) + 1}: {told}", holds(min(speeds) > 1))
        rising = rises(speeds)
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
        [NO_CIFAR100, NO_IMAGENET],
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
