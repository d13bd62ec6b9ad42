"""Claim examined: LayerPipe is 25 % faster than PipeDream on average and up to 80 % with 7 to 9 devices.

The published abstract gives these two numbers, not the networks, not the device. So: this library's planner (a
reconstruction) against the best straight pipeline of whole layers, for P = 2..16, on all networks of
`unlatch.plan.networks` and several models of what a task costs. Nothing is timed; the answer is the same everywhere.

python benchmarks/layerpipe_speedup.py [--networks vgg16,resnet50] [--no-plot]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common import write
from matplotlib.figure import Figure

from unlatch.methods.layerpipe.list_schedule import plan_list
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.plan.networks import mac_costs, network_names, network_shapes, systolic_costs
from unlatch.plan.pipedream import plan_pipedream, plan_straight

PROCESSORS = range(2, 17)
CLAIMED = range(7, 10)
PICTURE = Path(__file__).parents[1] / "docs" / "methods" / "layerpipe_speedup.png"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")


def cost_models(network: str) -> dict[str, list[LayerCost]]:
    """Costs of a network by the name of the model they come from; batches of 32 unless told otherwise."""
    shapes = network_shapes(network)
    models = {"mac": mac_costs(shapes, batch=32)}
    for side in (16, 64, 128, 256):
        for batch in (1, 32):
            models[f"systolic {side}x{side}, batch {batch}"] = systolic_costs(
                shapes, batch=batch, rows=side, columns=side
            )
    return models


def study(costs: Sequence[LayerCost]) -> dict[str, Any]:
    """Speed-ups over the straight pipeline for every number of devices, and where they come from."""
    found: dict[str, list[float]] = {
        key: []
        for key in (
            *("divisible", "atomic", "anywhere", "bound", "utilisation", "pipedream_utilisation"),
            *("traffic", "traffic_against_replicas"),
        )
    }
    for count in PROCESSORS:
        straight = plan_straight(costs, count)
        base = float(straight.initiation_interval)
        divisible = plan_layerpipe(costs, count)
        found["divisible"].append(base / float(divisible.initiation_interval))
        found["atomic"].append(base / float(plan_layerpipe(costs, count, "atomic").initiation_interval))
        found["anywhere"].append(base / float(plan_list(costs, count).initiation_interval))
        found["bound"].append(base / (float(divisible.work) / count))
        found["utilisation"].append(float(divisible.utilisation))
        found["pipedream_utilisation"].append(float(straight.utilisation))
        sent = float(divisible.communication_bytes)
        found["traffic"].append(sent / float(straight.communication_bytes))
        # Balanced like LayerPipe, PipeDream would replicate; with free messages its planner replicates everything.
        replicas = plan_pipedream(costs, count)
        found["traffic_against_replicas"].append(sent / float(replicas.communication_bytes))
    rounded: dict[str, Any] = {key: [round(value, 4) for value in values] for key, values in found.items()}
    gains = found["divisible"]
    near = [gain for count, gain in zip(PROCESSORS, gains, strict=True) if count in CLAIMED]
    best = max(range(len(gains)), key=gains.__getitem__)
    rounded |= {
        "mean": round(mean(gains), 4),
        "mean_2_to_12": round(mean(gains[:11]), 4),
        "best_at_7_to_9": round(max(near), 4),
        "best": round(gains[best], 4),
        "best_processors": PROCESSORS[best],
    }
    return rounded


def table(results: dict[str, dict[str, Any]], model: str) -> list[str]:
    """Markdown rows of one cost model."""
    lines = [f"| network | {' | '.join(map(str, PROCESSORS))} | mean |", "|---" * (len(PROCESSORS) + 2) + "|"]
    for network, models in results.items():
        row = models[model]
        cells = " | ".join(f"{gain:.2f}" for gain in row["divisible"])
        lines.append(f"| {network} | {cells} | {row['mean']:.2f} |")
    return lines


def summary(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Over all networks, for each cost model: the mean, the share of cases with 1.8 or more at 7 to 9 devices."""
    rows = []
    for model in next(iter(results.values())):
        cases = [models[model] for models in results.values()]
        near = {network: models[model]["best_at_7_to_9"] for network, models in results.items()}
        best = max(near, key=near.__getitem__)
        rows.append(
            {
                "model": model,
                "mean": round(mean(case["mean"] for case in cases), 3),
                "mean_without_alexnet": _mean_without(results, model, "alexnet"),
                "best_without_alexnet": max((near[name] for name in near if name != "alexnet"), default=None),
                "mean_anywhere": round(mean(mean(case["anywhere"]) for case in cases), 3),
                "best_at_7_to_9": near[best],
                "network": best,
                "networks_at_1.8": sorted(network for network, gain in near.items() if gain >= 1.8),
                "less_traffic": round(mean(mean(t < 1 for t in case["traffic"]) for case in cases), 3),
                "less_than_replicas": round(
                    mean(mean(t < 1 for t in case["traffic_against_replicas"]) for case in cases), 3
                ),
            }
        )
    return rows


def _mean_without(results: dict[str, dict[str, Any]], model: str, left_out: str) -> float | None:
    """One network of few, very unequal layers gains most: the mean of the others."""
    means = [models[model]["mean"] for name, models in results.items() if name != left_out]
    return round(mean(means), 3) if means else None


def draw(results: dict[str, dict[str, Any]], models: Sequence[str]) -> Figure:
    """Speed-up over the number of devices, a panel per cost model, with the claim marked."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True)
    for axes, model in zip(panels, models, strict=True):
        axes.axvspan(7, 9, color="#eeeeee")
        axes.axhline(1.25, color="#999999", linewidth=1, linestyle=":")
        axes.axhline(1.8, color="#999999", linewidth=1, linestyle="--")
        for (network, found), colour in zip(results.items(), COLOURS, strict=False):
            axes.plot(list(PROCESSORS), found[model]["divisible"], color=colour, marker=".", label=network)
        axes.set(xlabel="devices", title=model)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("speed-up over the straight pipeline")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle("Planned, not measured. Dotted: 1.25; dashed: 1.8; grey: 7 to 9 devices", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(network_names()))
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for network in args.networks.split(","):
        results[network] = {model: study(costs) for model, costs in cost_models(network).items()}
        means = ", ".join(f"{model} {row['mean']:.2f}" for model, row in results[network].items())
        print(f"{network}: {means}", flush=True)
    for model in ("mac", "systolic 16x16, batch 1", "systolic 128x128, batch 32"):
        print(f"\n{model}\n" + "\n".join(table(results, model)))
    overview = summary(results)
    head = ("costs", "mean", "tasks anywhere", "best at 7 to 9", "network", "1.8 or more at 7 to 9")
    print(f"\n| {' | '.join(head)} | less traffic | than replicas |")
    print("|---" * 8 + "|")
    for row in overview:
        reached = ", ".join(row["networks_at_1.8"]) or "none"
        print(
            f"| {row['model']} | {row['mean']:.2f} | {row['mean_anywhere']:.2f} | {row['best_at_7_to_9']:.2f} | "
            f"{row['network']} | {reached} | {row['less_traffic']:.0%} | {row['less_than_replicas']:.0%} |"
        )
    result = {"devices": list(PROCESSORS), "summary": overview, "networks": results}
    print(write("layerpipe_speedup", result))
    if not args.no_plot:
        draw(results, ("mac", "systolic 16x16, batch 1", "systolic 128x128, batch 32")).savefig(PICTURE, dpi=110)
        print(PICTURE)


if __name__ == "__main__":
    main()
