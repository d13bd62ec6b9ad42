"""Reached on CIFAR-10 (10,000 training images, ResNet-20 with stride-2 stem, 8 epochs of 100 updates, 3 seeds): auxnet
within a point of bp at K=2 and about a point below it at K=3, and far above two of its ablations, no adjoint term and
frozen early stages (which has the settings of the others; tuned it is in `studies/cifar-auxnet-forms.toml`). The third,
the shallow network of AuxNet and last stage alone, is the subject of the settings called "late": a cut before the last
block and a tiny AuxNet. There depth pays, and auxnet without locks does not reach the shallow network, let alone bp.

    python benchmarks/auxnet_accuracy.py --data-dir DIR            # all runs; stop and start again at will
    python benchmarks/auxnet_accuracy.py --only "K2 auxnet" --seeds 1
    python benchmarks/auxnet_accuracy.py --table                   # table and plot of the finished runs

Batch 100, one cycle to lr 0.1 with 20 % warm-up, Nesterov momentum 0.9, decay 5e-4 on weights, pad-4 crop and flip, one
thread, inline (distributed runs give the same weights). The last weights are tested on all 10,000 test images: the
serial network as it is and with batch norm recalibrated on 20 training batches, and the short path from AuxNet to last
stage. Candidates for the late cut ("try ...") and a sweep of weights, AuxNet size and K over 4 epochs
("sweep ...") are compared on 5,000 training images outside of the 10,000, with a seed
of their own; the test set is used for the final runs only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from accuracy_common import Study, decay_weights_only, print_table, triangular
from common import write
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.data import Loader, TensorData, load
from unlatch.data.tensors import stratified
from unlatch.models import build
from unlatch.models.residual import BasicBlock, conv_norm_relu
from unlatch.nn.auxiliary import Border

EPOCHS, BATCH, PROBE, RECALIBRATION = 8, 100, 40, 20
FIGURES = Path(__file__).parent.parent / "docs" / "img"
MEASURES = ("violation", "jump", "multiplier", "loss")
UPDATES, TRIAL_SEED, SEEDS = 100 * EPOCHS, 100, 3
COMPLETE = "python benchmarks/auxnet_accuracy.py --data-dir DIR"
CUTS = {"K1": [], "K2": ["layer3.0"], "K3": ["layer2.0", "layer3.0"], "late": ["layer3.2"]}
CUTS["K4"] = ["layer1.2", "layer2.1", "layer3.0"]


def tiny(border: Border) -> nn.Module:
    """An AuxNet of about a tenth of what it stands for, ending at 64 channels of 4x4."""
    return nn.Sequential(conv_norm_relu(3, 8, stride=2), nn.AvgPool2d(2), BasicBlock(8, border.shape[0], 2, "conv"))


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    cut: str
    method: str = "auxnet"
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = EPOCHS


def ablations(cut: str, **options: Any) -> list[Setting]:
    """The method and what is left of it when parts are taken away."""
    whole = Setting(f"{cut} auxnet", cut, options=options)
    return [whole, *(Setting(f"{cut} {a}", cut, options={**options, "ablation": a}) for a in ABLATIONS)]


TRIED = ("try", "sweep")
ABLATIONS = ("no-adjoint", "frozen", "shallow")
MAIN = [Setting("bp", "K1", "bp"), *ablations("K2"), *ablations("K3")]
TINY: dict[str, Any] = {"factory": tiny}
REPLAY: dict[str, Any] = {**TINY, "form": "lagrangian", "pull": 10.0, "imitate": 1.0}
CANDIDATES = {
    "shallow": {**TINY, "ablation": "shallow"},
    "penalty": TINY,
    "replay": REPLAY,
    "replay, echo, looser": {**REPLAY, "pull": 3.0, "echo": 0.5},
    "penalty, echo": {**TINY, "echo": 0.5},
    "penalty, serial half": {**TINY, "serial_from": UPDATES // 2},
    "rebuild, true state": {
        **TINY,
        "form": "lagrangian",
        "multiplier": "rebuild",
        "theta": 1.0,
        "true_share": ((0, 0.0), (UPDATES // 2, 1.0)),
        "beta": ((0, 1.0), (UPDATES // 2, 0.01)),
    },
}
TRIALS = [Setting(f"try {name}", "late", options=options) for name, options in CANDIDATES.items()]
SWEPT: dict[str, dict[str, Any]] = {
    "default": {},
    "pull 3": {"pull": 3.0},
    "pull 300": {"pull": 300.0},
    "imitate 0.005": {"imitate": 0.005},
    "imitate 0.5": {"imitate": 0.5},
    "depth 2": {"depth": 2},
    "depth 3": {"depth": 3},
    "K=3": {},
    "shared at K=3": {"shared": True},
    "K=4": {},
}
SWEEP_CUTS = {"K=3": "K3", "shared at K=3": "K3", "K=4": "K4"}
#: What the sweep varies, and where in it the values are found.
AXES: dict[str, dict[str, str]] = {
    "pull": {"3": "pull 3", "30": "default", "300": "pull 300"},
    "imitate": {"0.005": "imitate 0.005", "0.05": "default", "0.5": "imitate 0.5"},
    "blocks per group in the AuxNet": {"1": "default", "2": "depth 2", "3": "depth 3"},
    "stages": {"2": "default", "3": "K=3", "3, shared": "shared at K=3", "4": "K=4"},
}
SWEEP = [
    Setting("sweep bp", "K1", "bp", epochs=4),
    *(Setting(f"sweep {name}", SWEEP_CUTS.get(name, "K2"), options=o, epochs=4) for name, o in SWEPT.items()),
]
#: In their second half these wait for the stage below: by whole backpropagation, or for its output.
LOCKED = ("penalty, serial half", "rebuild, true state")


def finals(study: Study) -> list[Setting]:
    """At the late cut: what is compared, and of the forms with and without locks the best on held-out images."""
    held_out_accuracy = {
        row["setting"].removeprefix("try "): row["accuracy"] for row in study.rows if "try " in row["setting"]
    }
    forms = [name for name in CANDIDATES if name != "shallow" and name in held_out_accuracy]
    groups = ([n for n in forms if n not in LOCKED], [n for n in forms if n in LOCKED])
    best = [max(group, key=lambda name: held_out_accuracy[name]) for group in groups if group]
    names = dict.fromkeys(("shallow", "penalty", *best))
    return [Setting(f"late {name}", "late", options=CANDIDATES[name]) for name in names]


def train(setting: Setting, data: tuple[TensorData, TensorData], seed: int) -> dict[str, Any]:
    """One run."""
    torch.set_num_threads(1)
    training, test = data
    loader = Loader(training, BATCH, shuffle=True, seed=seed, augment=True, drop_last=True, channels_last=True)
    torch.manual_seed(seed)
    model = build("resnet20", stem_stride=2).to(memory_format=torch.channels_last)
    options = dict(setting.options)
    if setting.method == "auxnet":
        options.setdefault("probe", PROBE)
    cpu, wall = time.process_time(), time.perf_counter()
    with unlatch.parallelize(
        model,
        unlatch.methods.get(setting.method, **options),
        stages=len(CUTS[setting.cut]) + 1,
        loss_fn=cross_entropy,
        optimizer=partial(decay_weights_only, lr=0.1, decay=5e-4, nesterov=True),
        lr_scheduler=partial(triangular, total=setting.epochs * len(loader)),
        split=CUTS[setting.cut],
        sample=loader.batch(0, 0),
        seed=seed,
    ) as run:
        history = unlatch.Trainer(run).fit(loader, setting.epochs)
        return {
            **_scores(run, setting, loader, Loader(test, 500, channels_last=True)),
            "loss": history[-1].loss,
            "cpu_seconds": time.process_time() - cpu,
            "seconds": time.perf_counter() - wall,
        }


def _scores(run: unlatch.Run, setting: Setting, loader: Loader, test: Loader) -> dict[str, Any]:
    if setting.options.get("ablation") == "shallow":
        return {"accuracy": 100 * run.evaluate(test)["accuracy"]}
    fresh = [loader.batch(1000, i) for i in range(RECALIBRATION)]
    found = run.evaluate_recalibrated(test, fresh)
    scores: dict[str, Any] = {
        "accuracy": 100 * found["recalibrated_accuracy"],
        "raw_accuracy": 100 * found["accuracy"],
    }
    if setting.method == "auxnet":
        scores["path_accuracy"] = 100 * run.evaluate(test, path="auxiliary")["accuracy"]
        measured = run.method_statistics()
        scores["violation"] = [round(b.mean("violation", last=20), 3) for b in measured if b.records]
        scores["cosines"] = [[round(c, 3) for c in s.cosine_thirds()] for s in measured]
        scores["borders"] = {s.stage: [_short(r) for r in s.records] for s in measured if s.records}
    return scores


def _short(record: Any) -> list[float]:
    return [record.update, *(float(f"{getattr(record, name):.3g}") for name in MEASURES)]


def held_out(data_dir: str | None) -> tuple[TensorData, TensorData]:
    """The same training images, and others of the training set to choose by."""
    whole, _ = load("cifar10", data_dir)
    chosen = stratified(whole.y, 10_000, 0)
    rest = torch.ones(len(whole), dtype=torch.bool)
    rest[chosen] = False
    return whole.take(chosen), whole.take(rest.nonzero().flatten()).subset(5_000)


def settle(study: Study, runs: list[tuple[Setting, int, tuple[TensorData, TensorData]]], only: str | None) -> None:
    """Do those runs that are wanted and not done yet."""
    for setting, seed, data in runs:
        if only is None or setting.name.startswith(only):
            study.run({"setting": setting.name, "seed": seed}, partial(train, setting, data, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--only", help="run only settings whose name begins with this")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    study = Study("auxnet_accuracy")
    if not args.table:
        data, trial = load("cifar10", args.data_dir, train_size=10_000), held_out(args.data_dir)
        settle(study, [(setting, TRIAL_SEED, trial) for setting in TRIALS], args.only)
        runs = [(setting, seed, data) for seed in range(args.seeds) for setting in (*MAIN, *finals(study))]
        settle(study, runs + [(setting, TRIAL_SEED, trial) for setting in SWEEP], args.only)
    report(study, complete=not (args.table or args.only or args.seeds < SEEDS))


def report(study: Study, *, complete: bool) -> None:
    """Print the table and write it with two figures. **Arguments:** `complete`: whether this call made all of it."""
    rows = [row for row in study.summary(("setting",), {"setting": "bp"}) if not row["setting"].startswith(TRIED)]
    print_table(rows)
    for row in study.rows:
        if row["setting"].startswith(TRIED):
            print(f"{row['setting']:>28}  {row['accuracy']:.2f} on held-out training images")
    # `--table`, `--only` and fewer seeds made none, or a part, of what is in the file.
    write("auxnet_accuracy", {"rows": rows} | ({} if complete else {"command": COMPLETE}))
    FIGURES.mkdir(exist_ok=True)
    _draw_accuracies(study, [row["setting"] for row in rows])
    _draw_borders(study)
    _draw_sweep(study)


def _draw_accuracies(study: Study, settings: list[str]) -> None:
    figure, axes = plt.subplots(figsize=(7, 0.35 * len(settings) + 1))
    for height, setting in enumerate(reversed(settings)):
        values = [row["accuracy"] for row in study.rows if row["setting"] == setting]
        axes.barh(height, statistics.mean(values), color="tab:blue" if "auxnet" in setting else "lightgrey")
        axes.plot(values, [height] * len(values), "k.", markersize=4)
    axes.set_yticks(range(len(settings)), reversed(settings))
    axes.set_xlabel("test accuracy in % (bar: mean, dots: seeds)")
    figure.tight_layout()
    figure.savefig(FIGURES / "auxnet-accuracy.svg")
    plt.close(figure)


def _draw_borders(study: Study) -> None:
    """The measurements at each border of one run at K=3."""
    row = next((row for row in study.rows if row["setting"] == "K3 auxnet" and "borders" in row), None)
    if row is None:
        return
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(12, 2.6))
    for column, (name, plot) in enumerate(zip(MEASURES, axes, strict=True), start=1):
        for border, records in row["borders"].items():
            plot.plot([r[0] for r in records], [r[column] for r in records], label=f"border {border}")
        plot.set_title(name)
        plot.set_xlabel("update")
        if name == "jump":
            plot.set_yscale("log")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(FIGURES / "auxnet-borders.svg")
    plt.close(figure)


def _draw_sweep(study: Study) -> None:
    """Accuracy on held-out images against what is varied, one run each."""
    found = {row["setting"].removeprefix("sweep "): row["accuracy"] for row in study.rows if "sweep " in row["setting"]}
    if not {"bp", *SWEPT} <= found.keys():
        return
    figure, axes = plt.subplots(1, len(AXES), figsize=(12, 2.8), sharey=True)
    for (what, values), plot in zip(AXES.items(), axes, strict=True):
        plot.plot(list(values), [found[name] for name in values.values()], "o-" if what != "stages" else "o")
        plot.axhline(found["bp"], color="grey", linestyle="--", label="bp")
        plot.set_xlabel(what)
        plot.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("held-out accuracy in %")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(FIGURES / "auxnet-sweep.svg")
    plt.close(figure)


if __name__ == "__main__":
    main()
