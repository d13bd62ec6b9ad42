"""Tables of what benchmarks found about accuracy and gradients: runs over equal seeds in pairs, errors, verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unlatch.report.paired import paired

from .common import by_seed, table


def pairs(
    label: Callable[[Mapping[str, Any]], str],
    base: Callable[[str], str],
    runs: Sequence[Mapping[str, Any]],
    beside: str = "bp",
) -> str:
    """Runs of a benchmark over equal seeds, in pairs. Fewer than three seeds are no row; the same numbers are one.

    **Arguments:** `label`: what a run is of; `base`: the label of what it is compared with, in words `beside`.
    """
    found, losses = by_seed(runs, label), by_seed(runs, label, "loss")
    rows: dict[tuple[float, ...], list[str]] = {}
    for name, values in found.items():
        both = paired(values, found[base(name)])
        # What all others stand beside has a row of its own beside bp only.
        if both is not None and both.is_result and (beside == "bp" or name != base(name)):
            mine = [values[seed] for seed in both.differences]
            cells = [f"{statistics.fmean(mine):.2f} %", f"{min(mine):.2f} to {max(mine):.2f}"]
            ends = " to ".join(f"{end:+.2f}" for end in both.interval) if both.interval else "-"
            compared = ["", ""] if name == base(name) else [f"{both.mean:+.2f}", ends]
            numbers = (*mine, *(losses[name][seed] for seed in both.differences))
            same = rows.setdefault(numbers, [name, *cells, *compared, str(both.seeds)])
            same[0] = same[0] if same[0] == name else f"{same[0]} = {name}"
    heads = ["", "test accuracy", "range", f"points to {beside}, paired", "95 % interval", "seeds"]
    return table(heads, rows.values())


def advice(found: dict[str, Any]) -> str:
    """How often verdicts were right, by network."""
    rows = []
    for name, head in (("set on", "set on: perceptron"), ("other network", "other: CNN")):
        one = found[name]
        rows.append(
            [
                head,
                f"{one['same class']} of {one['settings']}",
                f"{one['warned rightly']} of {one['warned']}",
                f"{one['lost without a warning']} of {one['lost']}",
                f"{one['rank correlation']:+.2f}",
            ]
        )
    heads = ["network", "verdicts right", "warnings right", "losses without a warning", "Spearman, all optimizers"]
    return table(heads, rows)


def petra_inputs(found: dict[str, Any]) -> str:
    """Relative errors of reconstructed inputs by learning rate, and at the rate of the pictures by setting."""
    settings = found["reconstruction_by_setting"]
    stages = list(settings["petra"])
    lines = {f"petra, learning rate {rate}": by for rate, by in found["reconstruction_by_rate"].items() if float(rate)}
    lines |= {name: by for name, by in settings.items() if name != "petra"}
    rows = [[name, *(f"{by[stage]:.2g}" for stage in stages)] for name, by in lines.items()]
    return table(["median error of reconstructed inputs", *(f"stage {stage}" for stage in stages)], rows)


def petra_cosines(found: dict[str, Any]) -> str:
    """Cosines of gradients to those of backpropagation at the weights that they are applied to."""
    lines = found["cosine_at_current"]
    stages = list(next(iter(lines.values())))
    rows = [[name, *(f"{by[stage]:.2f}" for stage in stages)] for name, by in lines.items()]
    return table(["median cosine", *(f"stage {stage}" for stage in stages)], rows)


#: Name of a table: the result file, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "petra-inputs": ("petra_exactness", petra_inputs),
    "petra-cosines": ("petra_exactness", petra_cosines),
    "advice-digits": ("advice_check", advice),
}

def petra_case(run: Mapping[str, Any]) -> str:
    """What a run of `petra_accuracy` is of."""
    chosen = ", choice" if run["phase"] != "test" else ""
    return f"{run['task']}, K={run['stages']}, {run['method']}{chosen}"


#: Of benchmarks with a line per run: the result files, what a run is of, and what that is compared with.
PAIRS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str], Callable[[str], str]]] = {
    "accuracy-auxnet": ("auxnet_accuracy", lambda run: run["setting"], lambda _: "bp"),
    "accuracy-auxnet-beside-shallow": (
        "auxnet_accuracy",
        # The shallow network is the same at 2 and 3 stages.
        lambda run: run["setting"].replace("K3 shallow", "K2 shallow"),
        lambda name: "late shallow" if name.startswith("late") else "K2 shallow",
    ),
    "accuracy-petra": (
        "petra_accuracy",
        petra_case,
        lambda name: f"{name.partition(',')[0]}, K=1, bp",
    ),
}
