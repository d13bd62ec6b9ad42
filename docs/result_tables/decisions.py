"""The decision table: which method for which case, and what the result files let one expect of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unlatch.io.results import read_results
from unlatch.report.paired import paired

from .accuracy import PAIRS
from .common import by_seed, result, table
from .methods import own_ratios
from .studies import study_points


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
        'defaults; `order="1f1b"` is less late',
        [
            "measured: activations grow by {growth[petra]:.2f} from 8 to 32 blocks per stage, under 1f1b by "
            "{growth[1f1b]:.2f}",
            "measured: {petra[cifar10, K=4, petra M=4 1f1b].mean:+.2f} points to its own bp on 10,000 images of "
            "CIFAR-10, 4 micro-batches, {petra[cifar10, K=4, petra M=4 1f1b].seeds} seeds",
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
        "speed": ("pipeline_speed", own_ratios),
        "growth": ("petra_memory", lambda found: found["growth"]),
        "layerpipe": ("layerpipe_speed", lambda found: found["speedup"]),
        "auxnet_step": ("auxnet_step_time", lambda found: found["ratio"]),
        "gpt": ("char_gpt", lambda found: found["summary"]["bp"]),
        "scale": ("scale", _won),
    }
    for name, (file, pick) in sources.items():
        if (one := result(file, results)) is not None:
            facts[name] = pick(one)
    for name, study in {"digits": "digits-methods", "cifar": "cifar-full", "text": "shakespeare"}.items():
        found = study_points(study, results.parents[1] / "studies")
        facts |= {name: found} if found else {}
    return facts | _paired_facts(results)


def _paired_facts(results: Path) -> dict[str, Any]:
    """Of benchmarks with a line per run, what the tables say: differences over equal seeds, from three on."""
    facts: dict[str, Any] = {}
    for name, table_name in (("petra", "accuracy-petra"), ("auxnet", "accuracy-auxnet")):
        file, label, base = PAIRS[table_name]
        found = by_seed(read_results(results / f"{file}.jsonl"), label)
        both = {of: paired(values, found[base(of)]) for of, values in found.items()}
        told = {of: one for of, one in both.items() if one is not None and one.is_result}
        facts |= {name: told} if told else {}
    return facts


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
