"""Tables of what was counted, planned or simulated, and of how well that predicts what is measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from .common import table


def prediction(found: dict[str, Any]) -> str:
    rows = [
        [name, f"{r['median']:.2f}", f"{r['min']:.2f} to {r['max']:.2f}", str(r["repeats"])]
        for name, r in ((name, row["ratio"]) for name, row in found["rows"].items())
    ]
    return table(["method", "predicted over measured", "range", "rounds"], rows)


def simulator(found: dict[str, Any]) -> str:
    rows = [[name, f"{case['actions']:,}", f"{case['seconds']:.1f} s"] for name, case in found["cases"].items()]
    return table(["case", "actions", "time"], rows)


def scale(network: str, found: dict[str, Any]) -> str:
    """Samples per second, memory and lateness at each number of devices and link."""
    mine = [row for row in found["rows"] if row["network"] == network and row["reason"] is None]
    methods = list(dict.fromkeys(row["method"] for row in mine))
    cells: dict[tuple[int, str], dict[str, str]] = {}
    for row in mine:
        text = f"{row['samples_per_s']:,.3g} ({row['utilisation']:.0%})"
        cells.setdefault((row["devices"], row["link"]), {})[row["method"]] = text
    rows = [[str(d), link, *(by.get(name, "-") for name in methods)] for (d, link), by in cells.items()]
    return table(["devices", "link", *methods], rows, words=2)


def scale_memory(found: dict[str, Any]) -> str:
    """Memory and lateness, which do not depend on the link."""
    link = found["rows"][0]["link"]
    rows = [
        [
            row["network"],
            str(row["devices"]),
            str(row["stages"]),
            str(row["replicas"]),
            row["method"],
            f"{row['memory_bytes'] / 1e9:.2f} GB",
            f"{row['staleness']:.2f}",
        ]
        for row in found["rows"]
        if row["link"] == link and row["reason"] is None
    ]
    heads = ["network", "devices", "stages", "pipelines", "method", "fullest device", "updates late"]
    return table(heads, rows, words=1)


def scale_best(found: dict[str, Any]) -> str:
    rows = [
        [row["network"], str(row["devices"]), row["link"], row["fastest"], row["fastest_exact"], row["smallest"]]
        for row in found["best"]
    ]
    return table(["network", "devices", "link", "fastest", "fastest exact", "least memory"], rows, words=6)


def auxnet_shares(found: dict[str, Any]) -> str:
    """The cost of AuxNets beside what they stand for, and of the slowest rank beside the whole network."""
    rows = [
        [
            f"{row['model']}, K={len(row['ranks'])}",
            ", ".join(f"{100 * share:.0f} %" for share in row["auxnets"]),
            " / ".join(f"{share:.2f}" for share in row["ranks"]),
            f"{row['step']:.2f}",
        ]
        for row in found["rows"]
    ]
    return table(["", "AuxNets, of what they stand for", "work of each rank", "step"], rows)


def layerpipe_gains(model: str, found: dict[str, Any]) -> str:
    """Interval of the best straight pipeline over that of layerpipe's planner, by network and devices."""
    rows = [
        [name, *(f"{gain:.2f}" for gain in by[model]["divisible"]), f"{statistics.fmean(by[model]['divisible']):.2f}"]
        for name, by in found["networks"].items()
    ]
    return table(["network", *map(str, found["devices"]), "mean"], rows)


def layerpipe_summary(found: dict[str, Any]) -> str:
    """All cost models over all networks and numbers of devices."""
    rows = [
        [
            row["model"],
            f"{row['mean']:.2f}",
            f"{row['mean_anywhere']:.2f}",
            f"{row['best_at_7_to_9']:.2f} ({row['network']})",
            ", ".join(row["networks_at_1.8"]) or "none",
            f"{row['less_traffic']:.0%}",
            f"{row['less_than_replicas']:.0%}",
        ]
        for row in found["summary"]
    ]
    heads = [
        "costs",
        "mean",
        "tasks anywhere",
        "best at 7 to 9",
        "1.8 or more at 7 to 9",
        "less traffic",
        "than replicas",
    ]
    return table(heads, rows)


#: Name of a table: the result file, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "prediction": ("simulated_vs_measured", prediction),
    "simulator": ("simulate_speed", simulator),
    "scale-blocks": ("scale", partial(scale, "1,000 blocks")),
    "scale-transformer": ("scale", partial(scale, "7 B transformer")),
    "scale-memory": ("scale", scale_memory),
    "scale-best": ("scale", scale_best),
    "auxnet-shares": ("auxnet_shares", auxnet_shares),
    "layerpipe-gains-mac": ("layerpipe_speedup", partial(layerpipe_gains, "mac")),
    "layerpipe-gains-systolic": ("layerpipe_speedup", partial(layerpipe_gains, "systolic 16x16, batch 1")),
    "layerpipe-summary": ("layerpipe_speedup", layerpipe_summary),
}
