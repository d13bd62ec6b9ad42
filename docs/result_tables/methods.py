"""The table of all methods, with what has been measured of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unlatch.report.paired import ENOUGH

from .common import result, sourced, table
from .studies import study_points

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
    pipelines, reversible, demonstration = (
        result(file, results) or {} for file in ("pipeline_speed", "pipeline_speed_revnet20", "demo")
    )
    accuracy = study_points("digits-methods", results.parents[1] / "studies")
    # Reversible stages are measured on a network of their own; what they share with others counts on the usual one.
    speed = own_ratios(reversible) | own_ratios(pipelines)
    demo = {row["label"]: row for row in demonstration.get("rows", [])}
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
    commands = [found.get("command") for found in (pipelines, reversible, demonstration)]
    commands += ["unlatch compare studies/digits-methods.toml"] if accuracy else []
    return sourced(table(heads, rows, words=4), commands)


def own_ratios(found: dict[str, Any]) -> dict[str, Any]:
    """The ratios of the library's own methods, by their names."""
    own = "unlatch "
    return {name.removeprefix(own): ratio for name, ratio in found.get("ratio", {}).items() if name.startswith(own)}
