"""Tables of what takes time: steps, start, checkpoints, the way to an accuracy; and of `make demo`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from unlatch.report.paired import ENOUGH

from .common import median_text, ratio_rows, result, sourced, table


def speed(found: dict[str, Any]) -> str:
    return table(["2 ranks, one thread each", "ratio to one process", "range", "rounds"], ratio_rows(found))


def ratios(head: str, found: dict[str, Any]) -> str:
    return table(["", head, "range", "rounds"], ratio_rows(found))


def demo(found: dict[str, Any]) -> str:
    """The rows of `make demo`, and below them its closing lines."""
    rows = []
    for row in found["rows"]:
        lowest, highest = min(row["accuracies"]), max(row["accuracies"])
        late = " / ".join(f"{value:.3g}" for value in row["staleness"])
        predicted = " / ".join(f"{value:.3g}" for value in row["predicted"])
        rows.append(
            [
                row["label"],
                f"{row['ratio']:.2f}",
                f"{row['accuracy']:.1%} ({100 * lowest:.1f} to {100 * highest:.1f})",
                f"{row['bubble']:.0%}",
                late if late == predicted else f"{late} (predicted {predicted})",
                " / ".join(f"{value / 1e6:.1f}" for value in row["process_bytes"]),
                row["sentence"],
            ]
        )
    heads = ["method", "speed", "accuracy (range)", "bubble", "updates late", "kept per process, MB", "what to see"]
    lines = "\n".join(f"- {line}" for line in found["closing"])
    return f"{table(heads, rows, prose=1)}\n\n{lines}"


def many_ranks(found: dict[str, Any]) -> str:
    """The share of ideal that each method reaches, by number of ranks, and what their start takes."""
    sizes = list(dict.fromkeys(row["ranks"] for row in found["rows"]))
    cells: dict[str, dict[int, str]] = {}
    for row in found["rows"]:
        share = row["of_ideal"]
        cells.setdefault(row["method"], {})[row["ranks"]] = median_text(share)
    rows = [[name, *(by.get(ranks, "-") for ranks in sizes)] for name, by in cells.items()]
    started = [f"{found['start'][str(ranks)]['seconds']['median']:.1f} s" for ranks in sizes]
    heads = ["share of ideal, median (range)", *(f"{ranks} ranks" for ranks in sizes)]
    return table(heads, [*rows, ["start until the first batch is trained", *started]])


def overhead(found: dict[str, Any]) -> str:
    """CPU time per micro-batch and rank, and its ratio to the baseline of the column."""
    cases = found["cpu_per_microbatch"]
    columns = list(dict.fromkeys(column for row in cases.values() for column in row))
    rows = []
    for name, row in cases.items():
        told = {at: f"{cell['microseconds']['median']:.0f} ({cell['ratio']['median']:.2f})" for at, cell in row.items()}
        rows.append([name, *(told.get(column, "-") for column in columns)])
    return table(["microseconds per micro-batch and rank (ratio)", *columns], rows)


def saving(found: dict[str, Any]) -> str:
    """What a checkpoint in the middle of a round costs, in time and on disk."""
    rows = [
        [
            name,
            *(median_text(row[kind]) for kind in ("exact", "drained")),
            *(f"{row['bytes'][kind] / 1e6:.1f} MB" for kind in ("exact", "drained")),
            str(row["exact"]["repeats"]),
        ]
        for name, row in found["methods"].items()
    ]
    heads = [
        "time over that without a checkpoint",
        "exact",
        "pipeline emptied first",
        "exact, on disk",
        "emptied, on disk",
    ]
    return table([*heads, "rounds"], rows)


def auxnet_step(found: dict[str, Any]) -> str:
    """A step of auxnet beside one of backpropagation in one process, and what the formula says."""
    formula = found["formula"]
    rows = [
        [
            "step over one of one-process bp, median and range",
            f"{median_text(found['ratio'])}, {found['ratio']['repeats']} rounds",
        ],
        ["speed-up by the formula, from terms measured in the same run", f"{formula['speed_up_at_2']:.2f}"],
        ["stages from which it pays, by the formula", f"{formula['break_even_stages']:.1f}"],
        ["FLOPs of the AuxNet over those it stands for", f"{found['auxnet']['flops']:.1%}"],
    ]
    return table(["", "2 ranks, one thread each"], rows)


def layerpipe_speed(found: dict[str, Any]) -> str:
    """Layerpipe beside pipedream on a chain of unequal layers."""
    rows = [
        [
            name,
            f"{1000 * found['seconds_per_batch'][name]['median']:.0f} ms",
            ", ".join(f"{loss:.5f}" for loss in found["final_loss"][name]),
        ]
        for name in ("pipedream", "layerpipe")
    ]
    faster, rounds = median_text(found["speedup"]), found["speedup"]["repeats"]
    said = f"layerpipe is {faster} times as fast, median and range of {rounds} rounds;"
    heads = ["", "per batch, median", "final loss on data not trained on, by seed"]
    return f"{table(heads, rows)}\n\n{said} theory has {found['theory']:.2f}."


def wall_clock(found: dict[str, Any]) -> str:
    """When each system reached the accuracy, and how soon that is against one-thread BP of the same round."""
    rows = []
    for row in found["rows"]:
        if "reason" in row or row["seeds"] < ENOUGH:
            continue
        sooner, when = row["sooner"], row["seconds_to_target"]
        rows.append(
            [
                row["system"],
                f"{row['speed']['median']:.2f}",
                f"{row['mean_accuracy']:.2f} % ({row['accuracy']['min']:.2f} to {row['accuracy']['max']:.2f})",
                f"{row['target']:.2f} %",
                "never" if when is None else f"{when['median']:.1f} s",
                "-" if sooner is None else median_text(sooner),
                f"{row['reached']} of {row['seeds']}",
            ]
        )
    heads = [
        "2 cores",
        "speed",
        "final accuracy (range)",
        "to reach",
        "reached after",
        "times as soon (range)",
        "seeds",
    ]
    uneven = found["noise"]["slowest_over_fastest"]
    said = f"A step of one-thread BP, timed before every run, took up to {uneven:.2f} times its shortest time."
    return f"{table(heads, rows)}\n\n{said}"


def split_pays(results: Path) -> str:
    """LayerPipe's tasks against PipeDream, network by network."""
    rows, commands = [], []
    for network, told in SPLIT_NETWORKS.items():
        found = result(f"layerpipe_speed{network}", results)
        if found is None:
            rows.append([told, "not measured yet", "", "", ""])
            continue
        ratio = found["speedup"]
        rows.append(
            [
                told,
                f"{ratio['median']:.2f}",
                f"{ratio['min']:.2f} to {ratio['max']:.2f}",
                str(ratio["repeats"]),
                f"{found['theory']:.2f}",
            ]
        )
        commands.append(found["command"])
    heads = ["2 ranks, one thread each", "layerpipe over pipedream", "range", "rounds", "theory"]
    return sourced(table(heads, rows), commands)


#: Ending of the result file, and what the network is.
SPLIT_NETWORKS = {
    "": "linear layers, costs 1 : 2 : 4 : 3",
    "_conv5": "four convolutions of unequal cost, no batch norm",
    "_vgg11": "the eight convolutions of VGG-11, no batch norm",
}
#: Name of a table: the result file, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "demo": ("demo", demo),
    "saving": ("saving_cost", saving),
    "auxnet-step": ("auxnet_step_time", auxnet_step),
    "layerpipe-speed": ("layerpipe_speed", layerpipe_speed),
    "speed": ("pipeline_speed", speed),
    "speed-gpt": ("pipeline_speed_gpt", speed),
    "speed-revnet": ("pipeline_speed_revnet20", speed),
    "wall-clock": ("wall_clock", wall_clock),
    "many-ranks": ("many_ranks", many_ranks),
    "overhead": ("engine_overhead", overhead),
    "inline": ("inline_overhead", partial(ratios, "ratio to a hand-written loop")),
}
