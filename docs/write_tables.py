"""Writes the tables of README.md and docs/ from the result files of `benchmarks/` and `studies/`, between markers.

    python docs/write_tables.py [--check]

A page says `<!-- table: speed -->`, and what follows up to `<!-- end of table -->` is this script's. With `--check`
nothing is written, and the exit code is 1 if a page and its results disagree; `tests/test_tables.py` asks the same.
A benchmark that has not been run yet leaves a line that says how to run it. `<!-- table: study-NAME -->` is what the
study `studies/NAME.toml` found; `<!-- table: answer-NAME -->` says what that means for its question,
`<!-- table: foretold-NAME -->` how it compares with what `unlatch compare studies/NAME.toml --predict` had written down
before, and `<!-- table: grid-NAME -->` has the differences to the baselines only, by what labels begin with (columns)
and go on with (rows).
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import paper_claims
from study_answers import ANSWERS

from unlatch.advise.advice import EXPECTED, earned
from unlatch.config.study import load_study
from unlatch.io.results import read_results
from unlatch.report.foretold import Judged, correlations, judged, read_foretold
from unlatch.report.paired import ENOUGH, paired
from unlatch.report.study import StudyReport, study_report

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "studies"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MARKED = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end of table -->", re.S)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, *, prose: int = 0) -> str:
    """Markdown; the first `words` and the last `prose` columns are flush left.

    >>> print(table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    rule = "".join("|---" if n < words or n >= len(heads) - prose else "|---:" for n in range(len(heads)))
    lines = ["| " + " | ".join(heads) + " |", rule + "|", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines)


def ratio_rows(found: dict[str, Any]) -> list[list[str]]:
    """Name, median and range of every ratio, the largest first."""
    ordered = sorted(found["ratio"].items(), key=lambda item: -item[1]["median"])
    return [[name, f"{r['median']:.2f}", f"{r['min']:.2f} to {r['max']:.2f}", str(r["repeats"])] for name, r in ordered]


def speed(found: dict[str, Any]) -> str:
    return table(["2 ranks, one thread each", "ratio to one process", "range", "rounds"], ratio_rows(found))


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
        text = f"{share['median']:.2f} ({share['min']:.2f} to {share['max']:.2f})"
        cells.setdefault(row["method"], {})[row["ranks"]] = text
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


def pairs(
    label: Callable[[dict[str, Any]], str],
    base: Callable[[str], str],
    runs: Sequence[dict[str, Any]],
    beside: str = "bp",
) -> str:
    """Runs of a benchmark over equal seeds, in pairs. Fewer than three seeds are no row; the same numbers are one.

    **Arguments:** `label`: what a run is of; `base`: the label of what it is compared with, in words `beside`.
    """
    found: dict[str, dict[int, float]] = {}
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(label(run), {})[run["seed"]] = run["accuracy"]
        losses.setdefault(label(run), {})[run["seed"]] = run["loss"]
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


def growth(found: dict[str, Any]) -> str:
    blocks = sorted({row["blocks"] for row in found["rows"]})
    methods = list(dict.fromkeys(row["method"] for row in found["rows"]))
    size = {(row["method"], row["blocks"]): row["activations"] for row in found["rows"]}
    heads = ["activations at the fuller rank, MB", *(f"{count} blocks" for count in blocks), "growth"]
    rows = [
        [name, *(f"{size[name, count] / 1e6:.1f}" for count in blocks), f"{found['growth'][name]:.2f}"]
        for name in methods
    ]
    return table(heads, rows)


def memory(found: dict[str, Any]) -> str:
    keys = [(row["depth"], row["stages"]) for row in found["rows"]]
    heads = ["fullest stage, MB (predicted over measured)", *(f"{d} layers, K={k}" for d, k in dict.fromkeys(keys))]
    cells: dict[str, dict[tuple[int, int], str]] = {}
    for row, key in zip(found["rows"], keys, strict=True):
        ratio = "" if row["ratio"] is None else f" ({row['ratio']:.2f})"
        cells.setdefault(row["method"], {})[key] = f"{max(row['measured']) / 1e6:.1f}{ratio}"
    rows = [[name, *(mine.get(key, "-") for key in dict.fromkeys(keys))] for name, mine in cells.items()]
    return table(heads, rows)


def largest(found: dict[str, Any]) -> str:
    rows = [[row["system"], str(row["blocks"]), row["note"]] for row in found["largest"]]
    limit = found["limit_bytes"] / 1e6
    return table([f"trains within {limit:.0f} MB per rank", "blocks", ""], rows)


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


def ratios(head: str, found: dict[str, Any]) -> str:
    return table(["", head, "range", "rounds"], ratio_rows(found))


def _median(one: dict[str, Any], digits: int = 2) -> str:
    return f"{one['median']:.{digits}f} ({one['min']:.{digits}f} to {one['max']:.{digits}f})"


def saving(found: dict[str, Any]) -> str:
    """What a checkpoint in the middle of a round costs, in time and on disk."""
    rows = [
        [
            name,
            *(_median(row[kind]) for kind in ("exact", "drained")),
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
            f"{_median(found['ratio'])}, {found['ratio']['repeats']} rounds",
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
    faster, rounds = _median(found["speedup"]), found["speedup"]["repeats"]
    said = f"layerpipe is {faster} times as fast, median and range of {rounds} rounds;"
    heads = ["", "per batch, median", "final loss on data not trained on, by seed"]
    return f"{table(heads, rows)}\n\n{said} theory has {found['theory']:.2f}."


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
                "-" if sooner is None else f"{sooner['median']:.2f} ({sooner['min']:.2f} to {sooner['max']:.2f})",
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
        path = results / f"layerpipe_speed{network}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
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
    said = ", ".join(f"`{command}`" for command in dict.fromkeys(commands))
    return table(heads, rows) + (f"\n\nFrom {said}." if said else "")


#: Ending of the result file, and what the network is.
SPLIT_NETWORKS = {
    "": "linear layers, costs 1 : 2 : 4 : 3",
    "_conv5": "four convolutions of unequal cost, no batch norm",
    "_vgg11": "the eight convolutions of VGG-11, no batch norm",
}


class Case(NamedTuple):
    """A row of the decision table: what is expected are templates over the facts of `_facts`."""

    case: str
    method: str
    settings: str
    expect: Sequence[str]


#: An expectation names its kind: measured, simulated, or by theory. What has no result file says so by itself.
CASES = (
    Case(
        "the network is small, or fits one process and is fast enough",
        "plain PyTorch",
        "none; `bp` inline to compare",
        [
            "measured: the engine costs {inline[unlatch, 1 stage][median]:.2f} of a hand-written loop on ResNet-20",
            "by theory: stages that compute less than a message takes gain nothing",
        ],
    ),
    Case(
        "the result must be that of backpropagation",
        "`1f1b`, then `zb-h1`",
        "`microbatches` of 2K to 4K",
        [
            "measured: `1f1b` on 2 ranks {speed[1f1b][median]:.2f} times one process "
            "({speed[1f1b][min]:.2f} to {speed[1f1b][max]:.2f})",
            "by theory: gradients of bp; idle share (K-1)/(M+K-1)",
        ],
    ),
    Case(
        "throughput, memory to spare",
        "`pipedream`",
        "defaults, Nesterov momentum or AdamW",
        [
            "measured: {speed[pipedream][median]:.2f} times one process on 2 ranks "
            "({speed[pipedream][min]:.2f} to {speed[pipedream][max]:.2f})",
            "measured: {digits[pipedream, K=2]} points to bp on digits, 2 stages",
            "measured: {cifar[pipedream, K=4]} points on CIFAR-10, 4 stages, 3 epochs; `fdg` "
            "{cifar[fdg, K=4].mean:+.2f}",
        ],
    ),
    Case(
        "throughput, memory for inputs but not for graphs",
        "`dtrp`",
        "defaults; 4 stages and more: look at `run.advice`",
        [
            "measured: {speed[dtrp][median]:.2f} times one process on 2 ranks; by theory 1.75 where a "
            "backward takes two forwards",
            "measured: {digits[dtrp, K=4]} points to bp on digits, 4 stages",
            "measured: {cifar[dtrp, K=4]} points on CIFAR-10, 4 stages, 3 epochs",
        ],
    ),
    Case(
        "activations do not fit, and the network may be reversible",
        "`petra`",
        '`microbatches=4, order="1f1b"` at 4 stages',
        [
            "measured: activations grow by {growth[petra]:.2f} from 8 to 32 blocks per stage, under 1f1b by "
            "{growth[1f1b]:.2f}",
            "measured: {petra[cifar10, K=4, petra M=4 1f1b].mean:+.2f} points to its own bp on 10,000 images of "
            "CIFAR-10, {petra[cifar10, K=4, petra M=4 1f1b].seeds} seeds",
            "measured: {cifar[petra, K=4, 1f1b]} points on all 50,000, 3 epochs; ticked "
            "{cifar[petra, K=4, ticked].mean:+.2f}",
        ],
    ),
    Case(
        "few layers of very unequal cost",
        "`layerpipe`",
        "`unlatch plan`, then `train --plan`",
        [
            "measured: {layerpipe[median]:.2f} times pipedream on a chain of costs 1:2:4:3, 2 ranks "
            "({layerpipe[min]:.2f} to {layerpipe[max]:.2f})",
            "simulated: little on ResNets",
        ],
    ),
    Case(
        "deep stages that should not wait for each other at all",
        "`auxnet`",
        '`stages=2`, cut where the AuxNet stays small; compare with `ablation="shallow"`',
        [
            "measured: a step takes {auxnet_step[median]:.2f} of one-process bp on 2 ranks (ResNet-56)",
            "measured: {auxnet[K2 auxnet].mean:+.2f} points at 2 stages, {auxnet[K3 auxnet].mean:+.2f} at 3, shallow "
            "{auxnet[K2 shallow].mean:+.2f}, {auxnet[K2 auxnet].seeds} seeds of 10,000 images of CIFAR-10",
        ],
    ),
    Case(
        "links with latency",
        "`dsp`, `fdg`",
        '`messages="bf16"` where bytes are the cost',
        [
            "simulated: a latency as long as a forward lengthens a batch of `dsp` by nothing, of `fdg` by a third, of "
            "`pipedream` by half ([shown](methods/dsp.md#picture))",
        ],
    ),
    Case(
        "8 to 4,096 devices",
        "`fdg` or `pipedream`; exact: `zb-h1`",
        "defaults, [replicas](replicas.md) beyond one stage per block",
        ["simulated: fastest in {scale[won]} of {scale[cases]} cases of [scale](scale.md); accuracy unknown"],
    ),
    Case(
        "a language model with AdamW",
        "`1f1b`, or `pipedream` with care",
        "`microbatches` of K and more",
        [
            "measured: bp reaches a loss of {gpt[median]:.2f} by nanoGPT's recipe, by which no delayed method has been "
            "trained",
            "measured: a shorter recipe, AdamW, 4 stages, loss to bp: `pipedream` with 4 micro-batches "
            "{text[adamw 0.9, pipedream, K=4, M=4]}, with 1 {text[adamw 0.9, pipedream, K=4, M=1].mean:+.2f}",
        ],
    ),
)


def _facts(results: Path) -> dict[str, Any]:
    """What templates may name; a result file that is not there leaves its names out."""
    facts: dict[str, Any] = {}
    sources: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
        "inline": ("inline_overhead", lambda found: found["ratio"]),
        "speed": ("pipeline_speed", _ours),
        "growth": ("petra_memory", lambda found: found["growth"]),
        "layerpipe": ("layerpipe_speed", lambda found: found["speedup"]),
        "auxnet_step": ("auxnet_step_time", lambda found: found["ratio"]),
        "gpt": ("char_gpt", lambda found: found["summary"]["bp"]),
        "scale": ("scale", _won),
    }
    for name, (file, pick) in sources.items():
        path = results / f"{file}.json"
        if path.is_file():
            facts[name] = pick(json.loads(path.read_text(encoding="utf-8")))
    for name, study in {"digits": "digits-methods", "cifar": "cifar-full", "text": "shakespeare"}.items():
        found = _points(study, results.parents[1] / "studies")
        facts |= {name: found} if found else {}
    return facts | _paired_facts(results)


def _paired_facts(results: Path) -> dict[str, Any]:
    """Of benchmarks with a line per run, what the tables say: differences over equal seeds, from three on."""
    facts: dict[str, Any] = {}
    for name, table_name in (("petra", "accuracy-petra"), ("auxnet", "accuracy-auxnet")):
        file, label, base = PAIRS[table_name]
        found: dict[str, dict[int, float]] = {}
        for run in read_results(results / f"{file}.jsonl"):
            found.setdefault(label(run), {})[run["seed"]] = run["accuracy"]
        both = {of: paired(values, found[base(of)]) for of, values in found.items()}
        told = {of: one for of, one in both.items() if one is not None and one.is_result}
        facts |= {name: told} if told else {}
    return facts


def _ours(found: dict[str, Any]) -> dict[str, Any]:
    """The ratios of the library's own methods, by their names."""
    own = "unlatch "
    return {name.removeprefix(own): ratio for name, ratio in found.get("ratio", {}).items() if name.startswith(own)}


def _won(found: dict[str, Any]) -> dict[str, int]:
    fastest = [row["fastest"] for row in found["best"]]
    return {"won": sum(name in ("fdg", "pipedream") for name in fastest), "cases": len(fastest)}


def decisions(results: Path) -> str:
    """Your case, a method, its settings, and what to expect."""
    facts = _facts(results)
    rows = [[c.case, c.method, c.settings, "<br>".join(_told(text, facts) for text in c.expect)] for c in CASES]
    return table(["your case", "method", "settings", "what to expect"], rows, words=4)


def _told(text: str, facts: dict[str, Any]) -> str:
    try:
        return text.format_map(facts)
    except KeyError as missing:
        return f"not measured yet: {missing.args[0]} (accuracies count from three seeds on)"


#: Methods with their page, idea, delay in micro-batches at stage k of K, and what is kept of a micro-batch.
METHOD_ROWS = (
    ("bp", "bp", "one batch at a time", "0", "graph"),
    ("gpipe", "gpipe", "all micro-batches forward, all backward, update", "0", "graph"),
    ("1f1b", "1f1b", "one forward, one backward, flush", "0", "graph"),
    ("zb-h1", "zero-bubble", "weight gradients fill the gaps", "0", "graph"),
    ("zb-h2", "zero-bubble", "as zb-h1, more under way", "0", "graph"),
    ("pipedream", "pipedream", "1F1B without flush, weights stashed", "K-k", "graph, old weights"),
    ("pipedream-2bw", "pipedream", "two weight versions everywhere", "1 update", "graph, one old version"),
    ("asyncpp", "asyncpp", "pipedream, momentum and step size by delay, for NAdam", "K-k", "graph, old weights"),
    ("xpipe", "xpipe", "pipedream, one prediction per mini-batch", "K-k", "graph, predicted weights"),
    ("paci", "paci", "pipedream without old weights", "K-k", "graph"),
    ("cgad", "cgad", "pipedream, stale gradients gated", "K-k", "graph, old weights"),
    ("ddg", "ddg-fr", "forward locked, backward delayed", "K-k", "graph, old weights"),
    ("fr", "ddg-fr", "as ddg, inputs replayed", "K-k", "input"),
    ("fdg", "fdg-adl", "ticked, all locks open", "2(K-k)", "graph, old weights"),
    ("adl", "fdg-adl", "fdg with accumulation", "2(K-k)", "graph, old weights"),
    ("dsp", "dsp", "ticked, inputs replayed, forward first", "2(K-k)", "input"),
    ("dtr", "dtr-dtrp", "as dsp, backward first", "2(K-k)", "input"),
    ("dtrp", "dtr-dtrp", "dtr with predicted forward weights", "2(K-k)", "input"),
    ("petra", "petra", "reversible stages invert their output", "2(K-k)", "nothing, or input"),
    ("layerpipe", "layerpipe", "forward, input and weight gradient placed apart", "as planned", "graph, old weights"),
    ("dgl", "dgl-dni", "a loss at every stage", "0", "graph"),
    ("dni", "dgl-dni", "a guessed gradient at every stage", "0", "graph"),
    ("auglocal", "auglocal", "dgl with heads made of later layers", "0", "graph"),
    ("auxnet", "auxnet", "all stages at once from predicted inputs", "0", "graph"),
    ("auxvar", "auxvar-sph", "as auxnet, inputs stored", "0", "graph"),
    ("sph", "auxvar-sph", "stored inputs, serial and parallel phases", "0", "graph"),
)


def method_table(results: Path) -> str:
    """Every method with what has been measured of it; a cell without a result stays empty, as with too few seeds."""

    def found(file: str) -> dict[str, Any]:
        path = results / f"{file}.json"
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return loaded

    accuracy = _points("digits-methods", results.parents[1] / "studies")
    # Reversible stages are measured on a network of their own; what they share with others counts on the usual one.
    speed = _ours(found("pipeline_speed_revnet20")) | _ours(found("pipeline_speed"))
    demo = {row["label"]: row for row in found("demo").get("rows", [])}
    rows = []
    for name, page, idea, delay, kept in METHOD_ROWS:
        points = pace = held = ""
        if name in demo:
            row, base = demo[name], demo[demo[name]["baseline"]]
            pace = f"{row['ratio']:.2f} (demo)"
            # Means over other seeds are no comparison.
            if len(row["accuracies"]) == len(base["accuracies"]) >= ENOUGH:
                points = f"{100 * (row['accuracy'] - base['accuracy']):+.1f} (demo)"
            held = f"{max(row['process_bytes']) / max(base['process_bytes']):.2f}"
        # Cases of methods that need other data or another network say so behind the number of stages.
        for case in (f"{name}, K=2", f"{name}, K=2, not augmented"):
            if case in accuracy:
                points = f"{accuracy[case].mean:+.1f}"
        if name in speed:
            pace = f"{speed[name]['median']:.2f}"
        rows.append([f"[`{name}`](docs/methods/{page}.md)", idea, delay, kept, points, pace, held])
    heads = ["method", "idea", "delay", "kept of a micro-batch", "accuracy", "speed", "memory"]
    commands = [found(file).get("command") for file in ("pipeline_speed", "pipeline_speed_revnet20", "demo")]
    commands += ["unlatch compare studies/digits-methods.toml"] if accuracy else []
    told = ", ".join(f"`{command}`" for command in commands if command)
    return table(heads, rows, words=4) + (f"\n\nFrom {told}." if told else "")


class Points(NamedTuple):
    """How far a case of a study is above its baseline, of accuracies in points; as text with its interval and seeds."""

    mean: float
    interval: tuple[float, float]
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.interval[0]:+.2f} to {self.interval[1]:+.2f}, {self.seeds} seeds)"


def _points(name: str, studies: Path) -> dict[str, Points]:
    """Differences of the cases of a study to their baselines, where that is a result."""
    lines = read_results(studies / "results" / f"{name}.jsonl")
    if not lines:
        return {}
    asked = load_study(studies / f"{name}.toml")
    report = study_report(asked, lines, asked.baseline or asked.cases[0].label, "")
    rows = [row for row in report.numbers() if row["is_result"] and row["interval_low"] is not None]
    scale = 100 if asked.measure.endswith("accuracy") else 1
    return {
        row["case"]: Points(
            scale * row["difference"], (scale * row["interval_low"], scale * row["interval_high"]), row["pairs"]
        )
        for row in rows
    }


def digits(results: Path) -> str:
    """What the best known methods lose on digits, by the number of stages."""
    found = _points("digits-methods", results.parents[1] / "studies")
    if not found:
        return "*Not measured yet: `unlatch compare studies/digits-methods.toml`.*"
    rows = [
        [f"`{name}`", *(str(found.get(f"{name}, K={stages}", "")) for stages in (2, 4))]
        for name in ("1f1b", "pipedream", "fdg", "dtr", "dtrp", "petra", "layerpipe", "dgl", "auxnet")
    ]
    heads = ["points to its own bp (95 % interval)", "2 stages", "4 stages"]
    return f"{table(heads, rows)}\n\nFrom `unlatch compare studies/digits-methods.toml`."


def paper(name: str, results: Path) -> str:
    """A paper's tables and figures beside ours, with verdicts."""
    return table(paper_claims.HEADS, paper_claims.paper(name, results), words=len(paper_claims.HEADS))


def paper_summary(results: Path) -> str:
    """How many tables and figures of each paper held."""
    return table(["rows of", *paper_claims.VERDICTS], paper_claims.summary(results))


#: Tables made of several result files.
COMBINED: dict[str, Callable[[Path], str]] = {
    "decisions": decisions,
    "methods": method_table,
    "accuracy-digits": digits,
    "paper-verdicts": paper_summary,
    **{f"paper-{name}": partial(paper, name) for name in paper_claims.PAPERS},
    "split-pays": split_pays,
}

#: Name of a table: the result file, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "demo": ("demo", demo),
    "saving": ("saving_cost", saving),
    "auxnet-step": ("auxnet_step_time", auxnet_step),
    "auxnet-shares": ("auxnet_shares", auxnet_shares),
    "layerpipe-speed": ("layerpipe_speed", layerpipe_speed),
    "layerpipe-gains-mac": ("layerpipe_speedup", partial(layerpipe_gains, "mac")),
    "layerpipe-gains-systolic": ("layerpipe_speedup", partial(layerpipe_gains, "systolic 16x16, batch 1")),
    "layerpipe-summary": ("layerpipe_speedup", layerpipe_summary),
    "petra-inputs": ("petra_exactness", petra_inputs),
    "petra-cosines": ("petra_exactness", petra_cosines),
    "speed": ("pipeline_speed", speed),
    "speed-gpt": ("pipeline_speed_gpt", speed),
    "speed-revnet": ("pipeline_speed_revnet20", speed),
    "wall-clock": ("wall_clock", wall_clock),
    "many-ranks": ("many_ranks", many_ranks),
    "overhead": ("engine_overhead", overhead),
    "memory-petra": ("petra_memory", growth),
    "memory": ("memory_depth", memory),
    "largest-model": ("memory_depth", largest),
    "advice-digits": ("advice_check", advice),
    "prediction": ("simulated_vs_measured", prediction),
    "simulator": ("simulate_speed", simulator),
    "scale-blocks": ("scale", partial(scale, "1,000 blocks")),
    "scale-transformer": ("scale", partial(scale, "7 B transformer")),
    "scale-memory": ("scale", scale_memory),
    "scale-best": ("scale", scale_best),
    "inline": ("inline_overhead", partial(ratios, "ratio to a hand-written loop")),
}

#: Of benchmarks with a line per run: the result files, what a run is of, and what that is compared with.
PAIRS: dict[str, tuple[str, Callable[[dict[str, Any]], str], Callable[[str], str]]] = {
    "accuracy-auxnet": ("auxnet_accuracy", lambda run: run["setting"], lambda _: "bp"),
    "accuracy-auxnet-beside-shallow": (
        "auxnet_accuracy",
        # The shallow network is the same at 2 and 3 stages.
        lambda run: run["setting"].replace("K3 shallow", "K2 shallow"),
        lambda name: "late shallow" if name.startswith("late") else "K2 shallow",
    ),
    "accuracy-petra": (
        "petra_accuracy",
        lambda run: (
            f"{run['task']}, K={run['stages']}, {run['method']}" + (", choice" if run["phase"] != "test" else "")
        ),
        lambda name: f"{name.partition(',')[0]}, K=1, bp",
    ),
}


def _report(name: str, folder: Path, measure: str | None = None) -> StudyReport:
    """All that is known of a study, perhaps nothing yet; by another measure than its own if told."""
    file = folder / f"{name}.toml"
    if not file.is_file():
        raise SystemExit(f"there is no study {name!r} in {folder}")
    lines, asked = read_results(folder / "results" / f"{name}.jsonl"), load_study(file)
    asked = asked if measure is None else replace(asked, measure=measure)
    return study_report(asked, lines, asked.baseline or asked.cases[0].label, f"unlatch compare studies/{name}.toml")


def _unmeasured(report: StudyReport) -> str | None:
    """What stands in place of a table whose study has no line yet."""
    return None if any(case.lines for case in report.cases) else f"*Not measured yet: `{report.command}`.*"


def answer(name: str, folder: Path = STUDIES) -> str:
    """What a study says to its question."""
    if name not in ANSWERS:
        raise SystemExit(f"there is no answer of the study {name!r}; known: {', '.join(ANSWERS)}")
    report = _report(name, folder)
    if missing := _unmeasured(report):
        return missing
    heads, rows, said = ANSWERS[name](report)
    return "\n\n".join([table(heads, rows), *said, f"From `{report.command}`."])


def study(name: str, folder: Path = STUDIES) -> str:
    """What a study found: the cases that are results, each beside its baseline."""
    report = _report(name, folder)
    if missing := _unmeasured(report):
        return missing
    command = report.command
    several = len(report.baselines) > 1
    beside = "to its baseline" if several else f"to {report.baselines[0]}"
    heads = ["case", report.what, beside, "95 % interval", "seeds"]
    rows = []
    for row in report.numbers():
        if row["is_result"]:
            rows.append(_study_row(row, 100.0 if row["measure"].endswith("accuracy") else 1.0))
            rows[-1] += [row["baseline"]] if several else []
    left_out = len(report.cases) - len(rows)
    said = f" {left_out} cases are left out: too few seeds, or runs that did not come to their end." if left_out else ""
    return f"{table([*heads, *(['baseline'] if several else [])], rows)}\n\nFrom `{command}`.{_beyond(report)}{said}"


def _beyond(report: StudyReport) -> str:
    """How many differences are more than chance, each by itself and among all of them."""
    judged = [row for row in report.numbers() if row["chance_among_all"] is not None]
    alone, among = (sum(row[name] <= 0.05 for row in judged) for name in ("chance", "chance_among_all"))
    if not judged:
        return ""
    return (
        f" Beyond chance by themselves: {alone} of {len(judged)} differences; as one of {report.comparisons} different "
        f"computations (Holm): {among}."
    )


def foretold(name: str, folder: Path = STUDIES) -> str:
    """How well what was expected agrees with what was found: rank correlations, then verdicts."""
    told = read_foretold(folder / "results" / f"{name}.predicted.json")
    if told is None:
        raise SystemExit(f"nothing was foretold for the study {name!r} in {folder}")
    said = f"Written down on {told['made_at'][:10]} at commit `{str(told['commit'])[:9]}`, before any run"
    report = _report(name, folder)
    if _unmeasured(report):
        silent = sum(row["margin"] is None for row in told["cases"])
        return (
            f"*Not measured yet: `unlatch compare studies/{name}.toml`. {said}: {len(told['cases'])} cases, about "
            f"{silent} of which the advisor says nothing.*"
        )
    cases = judged(report, told)
    rows = [
        [
            one.group,
            one.ranking,
            str(one.cases),
            f"{one.spearman:+.2f} ({one.spearman_interval[0]:+.2f} to {one.spearman_interval[1]:+.2f})",
            f"{one.kendall:+.2f} ({one.kendall_interval[0]:+.2f} to {one.kendall_interval[1]:+.2f})",
            f"{one.chance:.3f}" if one.chance >= 0.001 else "< 0.001",
        ]
        for one in correlations(cases)
    ]
    heads = ["optimizer", "ranked by", "cases", "Spearman (95 %)", "Kendall (95 %)", "as good by chance"]
    left_out = len(told["cases"]) - len(cases)
    rest = f" {left_out} cases have no result (yet)." if left_out else ""
    return (
        f"{table(heads, rows, words=2)}\n\n{_verdicts(judged(_report(name, folder, 'accuracy'), told))}\n\n"
        f"{said}; runs from `{report.command}`.{rest}"
    )


def _verdicts(cases: Sequence[Judged]) -> str:
    """What was said of cases, and what of that came true in points of accuracy."""
    rows = []
    for verdict, expected in EXPECTED.items():
        points = [-100 * case.worse for case in cases if case.foretold["verdict"] == verdict]
        if points:
            right = sum(earned(one) == verdict for one in points)
            middle, least, most = (
                f"{one:+.1f}" if math.isfinite(one) else "diverged"
                for one in (statistics.median(points), min(points), max(points))
            )
            rows.append([expected, str(len(points)), str(right), middle, f"{least} to {most}"])
    return table(["said", "cases", "came true", "points to bp, median", "range"], rows)


def grid(name: str, folder: Path = STUDIES) -> str:
    """Differences to the baselines; a star where zero is outside of the 95 % interval."""
    report = _report(name, folder)
    if missing := _unmeasured(report):
        return missing
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for case in report.cases:
        found = report.against(case)
        if case.diverged:
            text = "diverged"
        elif found is None:
            continue
        else:
            text = f"{found.mean:+.3f}{' *' if found.apart else ''}" if report.why_none(case) is None else "-"
        column, _, row = case.labels[0].partition(", ")
        columns[column] = None
        cells.setdefault(row, {})[column] = text
    rows = [[row, *(by.get(column, "") for column in columns)] for row, by in cells.items()]
    return f"{table([f'{report.study.measure}, to bp', *columns], rows)}\n\nFrom `{report.command}`."


def _study_row(row: dict[str, Any], scale: float) -> list[str]:
    unit, digits = (" %", 2) if scale > 1 else ("", 4)
    mean, (difference, *ends) = (
        f"{scale * row['mean']:.{digits}f}{unit}",
        (
            "-" if row[name] is None else f"{scale * row[name]:+.{digits}f}"
            for name in ("difference", "interval_low", "interval_high")
        ),
    )
    return [row["case"], mean, difference, " to ".join(ends) if "-" not in ends else "-", str(row["seeds"])]


#: What is made of a study: the beginning of the table's name, before that of the study.
STUDY_TABLES: dict[str, Callable[[str], str]] = {
    "study": study,
    "answer": answer,
    "foretold": foretold,
    "grid": grid,
}


def made(name: str, results: Path = RESULTS) -> str:
    """A table, with the command that its numbers come from."""
    for kind, make in STUDY_TABLES.items():
        if name.startswith(f"{kind}-"):
            return make(name.removeprefix(f"{kind}-"))
    if name in PAIRS:
        file, label, base = PAIRS[name]
        command = json.loads((results / f"{file}.json").read_text(encoding="utf-8"))["command"]
        beside = name.partition("-beside-")[2] or "bp"
        return f"{pairs(label, base, read_results(results / f'{file}.jsonl'), beside)}\n\nFrom `{command}`."
    if name in COMBINED:
        return COMBINED[name](results)
    if name not in TABLES:
        raise SystemExit(f"there is no table {name!r}; known: {', '.join((*TABLES, *PAIRS, *COMBINED))}")
    file, make_of = TABLES[name]
    path = results / f"{file}.json"
    if not path.is_file():
        return f"*Not measured yet: there is no result file `{file}.json`.*"
    found = json.loads(path.read_text(encoding="utf-8"))
    command = found.get("command", f"python benchmarks/{file}.py")
    return f"{make_of(found)}\n\nFrom `{command}`."


def rewritten(text: str, results: Path = RESULTS) -> str:
    """A page with all its tables made anew."""
    return MARKED.sub(lambda m: f"<!-- table: {m[1]} -->\n{made(m[1], results)}\n<!-- end of table -->", text)


def main() -> None:
    check, stale = "--check" in sys.argv[1:], []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale.append(page)
            if not check:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{'disagrees with its results' if check else 'written'}: {page.relative_to(ROOT)}")
    raise SystemExit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
