"""Runs side by side: one row per method or run, several runs of one method (other seeds) drawn together."""

from __future__ import annotations

import statistics as stats
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..io.space import bytes_text
from ..table import Table, number_text
from .record import Record

__all__ = ["Row", "comparison_table", "rows_of"]


@dataclass(frozen=True)
class Row:
    """What is compared.

    **Arguments:**

    - `accuracies`: of each run; evaluation accuracy after the last epoch.
    - `speed`: samples per second, median over runs.
    - `ratio`: to the baseline's speed, median over pairs of runs; `None` without a baseline.
    - `staleness`, `predicted`, `peak_bytes`, `weight_copies`: per stage.
    - `input_errors`: per stage, the largest relative error of a reconstructed input; `None` where none is.
    - `baseline`: the label of the row that `ratio` is to.
    - `process_bytes`: per process, what its stages kept at most.
    - `sentence`: what to see in it.
    """

    label: str
    accuracies: tuple[float, ...]
    speed: float | None
    ratio: float | None
    bubble: float | None
    staleness: tuple[float, ...]
    predicted: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    weight_copies: tuple[int, ...]
    input_errors: tuple[float | None, ...] = ()
    baseline: str | None = None
    process_bytes: tuple[int, ...] = ()
    sentence: str = ""

    @property
    def accuracy(self) -> float | None:
        """Mean over runs."""
        return stats.mean(self.accuracies) if self.accuracies else None

    def as_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return {**vars(self), "accuracy": self.accuracy}


def rows_of(
    groups: Mapping[str, Sequence[Record]], baseline: str | Mapping[str, str | None] | None = None
) -> list[Row]:
    """One row per group of runs that differ only by chance.

    **Arguments:**

    - `groups`: runs by label.
    - `baseline`: the label whose speed counts as 1; or for every label its own, where not all train the same network.
    """
    own = baseline if isinstance(baseline, Mapping) else dict.fromkeys(groups, baseline)
    return [_row(label, records, own.get(label), groups) for label, records in groups.items()]


def _speeds(records: Sequence[Record]) -> list[float | None]:
    return [record.summary["samples_per_second"] for record in records]


def _ratio(speeds: Sequence[float | None], base: Sequence[float | None]) -> float | None:
    """Runs of the same number took turns, so whatever else the machine did hit both: the median of their ratios."""
    return _median([a / b if a and b else None for a, b in zip(speeds, base, strict=False)])


def _row(label: str, records: Sequence[Record], baseline: str | None, groups: Mapping[str, Sequence[Record]]) -> Row:
    base = _speeds(groups[baseline]) if baseline is not None else []
    stages = [list(column) for column in zip(*(r.summary["stages"] for r in records), strict=False)]
    return Row(
        label=label,
        accuracies=tuple(r.summary["accuracy"] for r in records if r.summary["accuracy"] is not None),
        speed=_median(_speeds(records)),
        ratio=_ratio(_speeds(records), base),
        bubble=_median([r.summary["bubble"] for r in records]),
        staleness=tuple(stats.mean(s["staleness"] for s in column) for column in stages),
        predicted=tuple(column[0]["predicted_staleness"] for column in stages),
        peak_bytes=tuple(max(s["peak_bytes"] for s in column) for column in stages),
        weight_copies=tuple(max(s["weight_copies"] for s in column) for column in stages),
        input_errors=tuple(_worst(s.get("reconstruction_error") for s in column) for column in stages),
        baseline=baseline,
        process_bytes=_by_process(stages),
    )


def _by_process(stages: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[int, ...]:
    """Most bytes kept by each process; its stages may have kept theirs at different times."""
    kept: dict[int, int] = {}
    for number, column in enumerate(stages):
        rank = column[0].get("rank", number)
        kept[rank] = kept.get(rank, 0) + max(s["peak_bytes"] for s in column)
    return tuple(kept[rank] for rank in sorted(kept))


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stats.median(known) if known else None


def comparison_table(rows: Sequence[Row], first: str = "method", *, sentences: bool = True) -> Table:
    """The rows as text. Staleness and memory have one number per stage, the one nearest the data first.

    Where processes have several stages each, memory is theirs.

    **Arguments:** `sentences`: whether what to see in the rows is a column, if it is said of any.
    """
    told = sentences and any(row.sentence for row in rows)
    shared = any(1 < len(row.process_bytes) < len(row.peak_bytes) for row in rows)
    several = any(len(row.accuracies) > 1 for row in rows)
    reconstructs = any(error is not None for row in rows for error in row.input_errors)
    heads = (
        first,
        "test accuracy" + (" (range)" if several else ""),
        "samples/s",
        "ratio",
        "bubble",
        "staleness",
        "predicted",
        "peak kept per process" if shared else "peak kept per stage",
        "old weights",
        *(("input error",) if reconstructs else ()),
        *(("what to see",) if told else ()),
    )
    body = tuple(
        (
            row.label,
            _accuracy_text(row),
            number_text(row.speed),
            number_text(row.ratio, ".2f"),
            number_text(row.bubble, ".0%"),
            " / ".join(f"{s:.3g}" for s in row.staleness) or "-",
            " / ".join(f"{s:.3g}" for s in row.predicted) or "-",
            " / ".join(bytes_text(b) for b in (row.process_bytes if shared else row.peak_bytes)) or "-",
            " / ".join(str(n) for n in row.weight_copies) or "-",
            *((" / ".join(number_text(e, ".2g") for e in row.input_errors) or "-",) if reconstructs else ()),
            *((row.sentence,) if told else ()),
        )
        for row in rows
    )
    return Table(heads, body, left=(0, len(heads) - 1) if told else (0,))


def _accuracy_text(row: Row) -> str:
    if row.accuracy is None:
        return "-"
    lowest, highest = min(row.accuracies), max(row.accuracies)
    return f"{row.accuracy:.1%}" + (f" ({lowest:.1%} to {highest:.1%})" if len(row.accuracies) > 1 else "")
