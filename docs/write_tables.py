"""Writes the tables of README.md and docs/ from the result files of `benchmarks/` and `studies/`, between markers.

    python docs/write_tables.py [--check]

A page says `<!-- table: speed -->`, and what follows up to `<!-- end of table -->` is this script's. With `--check`
nothing is written, and the exit code is 1 if a page and its results disagree; `tests/test_tables.py` asks the same.
A benchmark that has not been run yet leaves a line that says how to run it. `<!-- table: study-NAME -->` is what the
study `studies/NAME.toml` found.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unlatch.config.study import load_study
from unlatch.io.results import read_results
from unlatch.report.paired import paired
from unlatch.report.study import study_report

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


def pairs(label: Callable[[dict[str, Any]], str], base: Callable[[str], str], runs: Sequence[dict[str, Any]]) -> str:
    """Runs of a benchmark over equal seeds, in pairs. Fewer than three seeds are no row; the same numbers are one.

    **Arguments:** `label`: what a run is of; `base`: the label of what it is compared with.
    """
    found: dict[str, dict[int, float]] = {}
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(label(run), {})[run["seed"]] = run["accuracy"]
        losses.setdefault(label(run), {})[run["seed"]] = run["loss"]
    rows: dict[tuple[float, ...], list[str]] = {}
    for name, values in found.items():
        both = paired(values, found[base(name)])
        if both is not None and both.is_result and both.interval is not None:
            mine = [values[seed] for seed in both.differences]
            cells = [f"{statistics.fmean(mine):.2f} %", f"{min(mine):.2f} to {max(mine):.2f}"]
            ends = " to ".join(f"{end:+.2f}" for end in both.interval)
            compared = ["", ""] if name == base(name) else [f"{both.mean:+.2f}", ends]
            numbers = (*mine, *(losses[name][seed] for seed in both.differences))
            same = rows.setdefault(numbers, [name, *cells, *compared, str(both.seeds)])
            same[0] = same[0] if same[0] == name else f"{same[0]} = {name}"
    heads = ["", "test accuracy", "range", "points to bp, paired", "95 % interval", "seeds"]
    return table(heads, rows.values())


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


#: Name of a table: the result file, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "demo": ("demo", demo),
    "speed": ("pipeline_speed", speed),
    "speed-gpt": ("pipeline_speed_gpt", speed),
    "speed-revnet": ("pipeline_speed_revnet20", speed),
    "many-ranks": ("many_ranks", many_ranks),
    "overhead": ("engine_overhead", overhead),
    "memory-petra": ("petra_memory", growth),
    "memory": ("memory_depth", memory),
    "largest-model": ("memory_depth", largest),
    "prediction": ("simulated_vs_measured", prediction),
    "simulator": ("simulate_speed", simulator),
    "scale-blocks": ("scale", partial(scale, "1,000 blocks")),
    "scale-transformer": ("scale", partial(scale, "7 B transformer")),
    "scale-memory": ("scale", scale_memory),
    "scale-best": ("scale", scale_best),
}

#: Of benchmarks with a line per run: the result files, what a run is of, and what that is compared with.
PAIRS: dict[str, tuple[str, Callable[[dict[str, Any]], str], Callable[[str], str]]] = {
    "accuracy-digits": (
        "accuracy_digits",
        lambda run: f"{run['method']}, K={run['stages']}",
        lambda _: "bp, K=2",
    ),
    "accuracy-layerpipe": ("layerpipe_digits", lambda run: run["method"], lambda _: "bp"),
    "accuracy-auxnet": ("auxnet_accuracy", lambda run: run["setting"], lambda _: "bp"),
    "accuracy-petra": (
        "petra_accuracy",
        lambda run: (
            f"{run['task']}, K={run['stages']}, {run['method']}" + (", choice" if run["phase"] != "test" else "")
        ),
        lambda name: f"{name.partition(',')[0]}, K=1, bp",
    ),
}


def study(name: str, folder: Path = STUDIES) -> str:
    """What a study found: the cases that are results, each beside its baseline."""
    file = folder / f"{name}.toml"
    if not file.is_file():
        raise SystemExit(f"there is no study {name!r} in {folder}")
    lines = read_results(folder / "results" / f"{name}.jsonl")
    command = f"unlatch compare studies/{name}.toml"
    if not lines:
        return f"*Not measured yet: `{command}`.*"
    asked = load_study(file)
    report = study_report(asked, lines, asked.baseline or asked.cases[0].label, command)
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
    return f"{table([*heads, *(['baseline'] if several else [])], rows)}\n\nFrom `{command}`.{said}"


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


def made(name: str, results: Path = RESULTS) -> str:
    """A table, with the command that its numbers come from."""
    if name.startswith("study-"):
        return study(name.removeprefix("study-"))
    if name in PAIRS:
        file, label, base = PAIRS[name]
        command = json.loads((results / f"{file}.json").read_text(encoding="utf-8"))["command"]
        return f"{pairs(label, base, read_results(results / f'{file}.jsonl'))}\n\nFrom `{command}`."
    if name not in TABLES:
        raise SystemExit(f"there is no table {name!r}; known: {', '.join([*TABLES, *PAIRS])}")
    file, make = TABLES[name]
    path = results / f"{file}.json"
    if not path.is_file():
        return f"*Not measured yet: there is no result file `{file}.json`.*"
    found = json.loads(path.read_text(encoding="utf-8"))
    return f"{make(found)}\n\nFrom `{found['command']}`."


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
