"""Claim: of what PETRA computes, inputs are exact where they are stored or weights stashed, gradients (at the weights
of the forward) where weights are stashed, and the rest is off by an amount that falls with the learning rate.

    python benchmarks/petra_exactness.py
    python benchmarks/petra_exactness.py --redraw

A RevNet-14 of width 8, one block per stage (8 stages, delay 14 at the first), learns the digits of scikit-learn in
batches of 32 with momentum 0.9, in single precision. Its stages 1, 2, 4 and 6 are reversible. Every run compares some
reconstructed inputs with the true ones, and every few updates the gradients that are applied with those of
backpropagation. Three pictures, drawn into `docs/methods`:

- `petra_reconstruction.png`: the error of reconstructed inputs per stage, over learning rates and over the updates;
- `petra_gradients.png`: cosine and ratio of norms per stage, at the weights that the update is applied to, for the four
  buffer settings and for plain delayed gradients, as running medians of seven comparisons, since batches scatter;
- `petra_exact.png`: what is exact beside what is not, for the same methods.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from common import RESULTS, write
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.data.digits import digits
from unlatch.methods import PETRA, Compose, Method, buffer_settings
from unlatch.models import build
from unlatch.schedule import ticked
from unlatch.train.probe import Comparison
from unlatch.train.statistics import StageStatistics

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STAGES, BATCH, MOMENTUM, RATE = 8, 32, 0.9, 0.01
RATES = (0.0, 0.00001, 0.0001, 0.001, 0.01, 0.03)
UPDATES, SWEEP, EVERY, STEADY, SMOOTH = 180, 66, 4, 32, 7
#: Where 0 is drawn on a logarithmic axis.
ZERO = 3e-9
IMAGES = Path(__file__).parents[1] / "docs" / "methods"
METHODS: dict[str, Method] = {
    "petra (keeps nothing)": buffer_settings()["nothing"],
    "weights kept": buffer_settings()["weights"],
    "inputs kept (dsp)": buffer_settings()["inputs"],
    "inputs and weights kept": buffer_settings()["inputs+weights"],
    "delayed gradients (graph kept)": Compose(order=ticked, activations="graph", weights="stash"),
}
CURES: dict[str, Method] = {
    "petra": PETRA(),
    "order 1f1b": PETRA(order="1f1b"),
    "weights averaged": PETRA(weights="average"),
    "forward predicted": PETRA(predict="geometric"),
    "weights stashed": PETRA(weights="stash"),
}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#D55E00")
MARKERS = ("o", "s", "^", "D", "x", "v")

Lines = dict[str, dict[str, float]]


def trained(
    method: Method, lr: float, updates: int, every: int | None = None
) -> tuple[list[StageStatistics], list[Comparison]]:
    """Train on digits; what the stages measured, and the comparisons of gradients if asked for."""
    torch.manual_seed(0)
    run = unlatch.parallelize(
        build("revnet14", in_channels=1, width=8),
        replace(method, microbatches=1),
        stages=STAGES,
        loss_fn=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=MOMENTUM),
    )
    probe = run.probe_gradients(every=every) if every is not None else None
    train = digits()[0]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    for number in range(updates):
        picked = order[[(number * BATCH + i) % len(order) for i in range(BATCH)]]
        run.step(train.x[picked], train.y[picked])
    run.flush()
    return run.statistics(), probe.found if probe is not None else []


def typical(rows: Iterable[StageStatistics]) -> dict[str, float]:
    """Per stage that reconstructs, the median error once the pipeline is filled."""
    late = {str(row.stage): [error for micro, error in row.reconstruction if micro >= STEADY] for row in rows}
    return {stage: statistics.median(errors) for stage, errors in late.items() if errors}


def medians(found: Iterable[Comparison], reference: str, measure: str) -> dict[str, float]:
    """Per stage, over the updates at which the pipeline was filled."""
    steady = [c for c in found if c.reference == reference and c.update >= STEADY]
    return {str(s): statistics.median(getattr(c, measure) for c in steady if c.stage == s) for s in range(STAGES)}


def by_stage(found: Iterable[Comparison]) -> dict[str, dict[str, list[float]]]:
    """Per stage, updates, cosines and ratios of norms, beside exact gradients at the current weights."""
    rows = [c for c in found if c.reference == "current"]
    return {
        str(s): {
            "update": [c.update for c in rows if c.stage == s],
            "cosine": [round(c.cosine, 4) for c in rows if c.stage == s],
            "norm_ratio": [round(c.norm_ratio, 4) for c in rows if c.stage == s],
        }
        for s in range(STAGES)
    }


def measure() -> dict[str, Any]:
    """All runs, and of them what is drawn."""
    sweep = {rate: trained(PETRA(), rate, SWEEP)[0] for rate in RATES}
    runs = {name: trained(method, RATE, UPDATES, EVERY) for name, method in METHODS.items()}
    cures = {name: typical(trained(method, RATE, SWEEP)[0]) for name, method in CURES.items()}
    found = {name: comparisons for name, (_, comparisons) in runs.items()}
    return {
        "reconstruction_by_rate": {str(rate): typical(rows) for rate, rows in sweep.items()},
        "reconstruction_by_setting": cures | {"weights frozen": typical(sweep[0.0])},
        "reconstruction_over_updates": {
            str(row.stage): row.reconstruction for row in runs["petra (keeps nothing)"][0] if row.reconstruction
        },
        "error_at_forward": {name: medians(cs, "forward", "relative_error") for name, cs in found.items()},
        "cosine_at_current": {name: medians(cs, "current", "cosine") for name, cs in found.items()},
        "norm_ratio_at_current": {name: medians(cs, "current", "norm_ratio") for name, cs in found.items()},
        "gradients_over_updates": {name: by_stage(cs) for name, cs in found.items()},
    }


# ------------------------------------------------------------------------------------------------------------- pictures


def shades(stages: Sequence[str]) -> dict[str, Any]:
    """From the input (dark) to the output (light)."""
    scale = colormaps["viridis"]
    return {stage: scale(0.9 * index / max(1, len(stages) - 1)) for index, stage in enumerate(stages)}


def plain(*panels: Axes) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)


def draw_reconstruction(by_rate: Lines, over: dict[str, list[list[float]]]) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), layout="constrained", sharey=True)
    rates = [rate for rate in RATES if rate > 0]
    colours = shades(list(over))
    for stage, colour in colours.items():
        errors = [by_rate[str(rate)][stage] for rate in rates]
        left.plot(rates, errors, color=colour, marker="o", markersize=4, label=f"stage {stage}")
        moved = [(micro, error) for micro, error in over[stage] if micro > 0]
        right.plot(*zip(*moved, strict=True), color=colour, marker="o", markersize=4)
    still = max(by_rate["0.0"].values())
    for axes in (left, right):
        axes.axhline(still, color="#666666", linestyle=(0, (4, 2)), label="weights frozen: rounding, worst stage")
    below = 0.3 * min(by_rate[str(rates[0])].values())
    guide = [below * rate / rates[0] for rate in rates[:3]]
    left.plot(rates[:3], guide, color="#AAAAAA", linewidth=1)
    left.annotate("in proportion", (rates[2], guide[-1]), xytext=(6, -4), textcoords="offset points", color="#777777")
    left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="relative error of the reconstructed input")
    right.set(xlabel=f"updates, at learning rate {RATE:g}")
    left.set_title(f"by learning rate (median from update {STEADY} on)", loc="left", fontsize=10)
    right.set_title("while training", loc="left", fontsize=10)
    plain(left, right)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def smooth(values: Sequence[float]) -> list[float]:
    """A running median: single batches scatter."""
    half = SMOOTH // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw_gradients(found: dict[str, dict[str, dict[str, list[float]]]]) -> Figure:
    figure, panels = plt.subplots(2, len(found), figsize=(13, 5.4), layout="constrained", sharex=True, sharey="row")
    stages = [str(stage) for stage in range(STAGES)]
    colours = shades(stages)
    for column, (name, rows) in zip(panels.T, found.items(), strict=True):
        for axes, number in zip(column, ("cosine", "norm_ratio"), strict=True):
            for stage in stages:
                axes.plot(rows[stage]["update"], smooth(rows[stage][number]), color=colours[stage])
            axes.axhline(1.0, color="#666666", linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
        column[0].set_title(name, loc="left", fontsize=10)
        column[1].set_xlabel("updates")
    panels[0][0].set(ylabel="cosine", ylim=(0, 1.05))
    panels[1][0].set(ylabel="ratio of norms", ylim=(0, 2))
    plain(*panels.flat)
    handles = [Line2D([], [], color=colours[s], label=f"stage {s}") for s in stages]
    handles.append(Line2D([], [], color="#666666", linewidth=0.8, linestyle=(0, (4, 2)), label="backpropagation"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def draw_exact(inputs: Lines, gradients: Lines) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(11.5, 4.4), layout="constrained", sharey=True)
    stored = {str(s): 0.0 for s in range(STAGES) if str(s) not in inputs["petra"]}
    for axes, lines in zip(panels, (inputs | {"not reversible: stored": stored}, gradients), strict=True):
        for index, (name, line) in enumerate(lines.items()):
            axes.plot(
                [int(stage) for stage in line],
                [max(error, ZERO) for error in line.values()],
                color=COLOURS[index % len(COLOURS)],
                marker=(*MARKERS, "P")[index],
                label=name,
                linestyle="none" if name.startswith("not") else "-",
                linewidth=0.8,
                # Later ones are smaller, so that equal points show as one inside the other.
                markersize=8 if name.startswith("not") else 11 - 1.4 * index,
                fillstyle="none",
            )
        axes.set(xlabel="stage", yscale="log", xticks=range(STAGES), xlim=(-0.3, STAGES - 0.7))
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0.0, 0.46))
    powers = range(-8, 1, 2)
    panels[0].set_yticks([ZERO, *(10.0**p for p in powers)], ["0", *(f"$10^{{{p}}}$" for p in powers)])
    panels[0].minorticks_off()
    panels[0].set_ylabel("relative error (median)")
    panels[0].set_title("inputs, beside the true ones", loc="left", fontsize=10)
    panels[1].set_title("gradients, beside exact ones at the weights of the forward", loc="left", fontsize=10)
    plain(*panels)
    return figure


def draw(result: dict[str, Any]) -> None:
    pictures: dict[str, Callable[[], Figure]] = {
        "reconstruction": lambda: draw_reconstruction(
            result["reconstruction_by_rate"], result["reconstruction_over_updates"]
        ),
        "gradients": lambda: draw_gradients(result["gradients_over_updates"]),
        "exact": lambda: draw_exact(result["reconstruction_by_setting"], result["error_at_forward"]),
    }
    for name, make in pictures.items():
        make().savefig(IMAGES / f"petra_{name}.png", dpi=130, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="draw the stored result again, without measuring")
    torch.set_num_threads(1)
    if parser.parse_args().redraw:
        draw(json.loads((RESULTS / "petra_exactness.json").read_text()))
        return
    result = measure()
    draw(result)
    for title, lines in result.items():
        if title.endswith("over_updates"):
            continue
        print(f"\n{title}, per stage")
        for name, line in lines.items():
            print(f"{name:32}" + "".join(f"  {stage}: {value:<9.3g}" for stage, value in line.items()))
    print(write("petra_exactness", result))


if __name__ == "__main__":
    main()
