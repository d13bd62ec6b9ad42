"""Speed-up and utilisation of methods over the number of devices: rows, a CSV file, and curves."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from ..advise.prediction import simulate_method
from ..errors import ConfigError
from ..methods import Method
from ..plan.layer_costs import LayerCost
from ..schedule.machine import Machine
from .picture import Picture

__all__ = ["SweepRow", "draw_sweep", "parse_counts", "sweep", "write_sweep"]

_MOST_COUNTS = 1000
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")


@dataclass(frozen=True)
class SweepRow:
    """One method on one number of devices."""

    method: str
    devices: int
    stages: int
    microbatches: int
    time_per_batch: float
    speedup: float
    utilisation: float
    bubble: float
    staleness: float
    memory_bytes: float
    communication_bytes: float
    replicas: int = 1


def parse_counts(text: str) -> list[int]:
    """Numbers of devices from text: `2..64`, `1,2,4`, `2..8,16`, or `2..64*2` for powers.

    >>> parse_counts("2..5,8"), parse_counts("2..64*2")
    ([2, 3, 4, 5, 8], [2, 4, 8, 16, 32, 64])
    """
    found: list[int] = []
    for part in text.split(","):
        span, _, factor = part.partition("*")
        low, dots, high = span.partition("..")
        try:
            first, last = int(low), int(high) if dots else int(low)
            ratio = int(factor) if factor else 0
        except ValueError:
            raise ConfigError(f"{text!r} are no numbers of devices: write 2..64, 1,2,4 or 2..64*2") from None
        if first < 1 or last < first:
            raise ConfigError(f"{part!r} is no range of devices: write it from small to large, from 1 on")
        if factor and (ratio < 2 or not dots):
            raise ConfigError(f"{part!r}: after * stands the factor, at least 2, between numbers of a range: 2..64*2")
        if not factor and len(found) + last - first >= _MOST_COUNTS:
            raise ConfigError(f"{part!r} are too many numbers of devices, more than {_MOST_COUNTS:,}: try *2")
        while first <= last:
            found.append(first)
            first = first * ratio if ratio else first + 1
    return found


def sweep(
    costs: Sequence[LayerCost],
    devices: Iterable[int],
    methods: Iterable[str | Method],
    *,
    batches: int | None = None,
    batch_size: int | None = None,
    machine: Machine | None = None,
    linear: Sequence[bool] | None = None,
    replicas: int = 1,
) -> list[SweepRow]:
    """Simulate every method on every number of devices.

    **Arguments:** `devices`: numbers of them; all others as in `simulate_method`.

    >>> layers = [LayerCost(name, 1, 1, 1) for name in "abcd"]
    >>> [round(row.speedup, 2) for row in sweep(layers, [2, 4], ["pipedream"])]
    [1.83, 3.67]
    """
    rows = []
    counts = list(devices)
    for method in methods:
        for count in counts:
            run = simulate_method(
                method,
                costs,
                count,
                batches=batches,
                batch_size=batch_size,
                machine=machine,
                linear=linear,
                replicas=replicas,
            )
            simulation = run.simulation
            rows.append(
                SweepRow(
                    run.method.name,
                    count,
                    run.stages,
                    run.microbatches,
                    run.time_per_batch,
                    run.speedup,
                    run.utilisation,
                    float(simulation.bubble),
                    max(run.lateness) / (run.microbatches * run.method.accumulate),
                    max(run.device_bytes()),
                    float(sum(simulation.link_bytes.values())) * run.microbatches,
                    replicas,
                )
            )
    return rows


def write_sweep(path: str | Path, rows: Sequence[SweepRow]) -> None:
    """Write the rows as CSV with a header."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(SweepRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def draw_sweep(rows: Sequence[SweepRow], *, title: str = "") -> Figure:
    """Speed-up (with the line that nothing can exceed) and utilisation over the number of devices."""
    figure = Picture(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = sorted({row.devices for row in rows})
    left.plot(counts, counts, color="#999999", linewidth=1, linestyle=":", label="ideal")
    # Curves that lie on each other stay visible by their markers.
    styles = zip(cycle(_LINES), cycle("os^vDx"))
    for method, (colour, marker) in zip(dict.fromkeys(row.method for row in rows), styles, strict=False):
        mine = sorted((row for row in rows if row.method == method), key=lambda row: row.devices)
        x = [row.devices for row in mine]
        look = {"color": colour, "marker": marker, "markersize": 5, "markerfacecolor": "none", "label": method}
        left.plot(x, [row.speedup for row in mine], **look)
        right.plot(x, [100 * row.utilisation for row in mine], **look)
    left.set(xlabel="devices", ylabel="speed-up over one device")
    right.set(xlabel="devices", ylabel="utilisation (%)", ylim=(0, 105))
    for axes in (left, right):
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure
