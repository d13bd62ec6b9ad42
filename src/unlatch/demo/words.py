"""What came of it, in words that follow from the measured numbers, good or bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from ..io.space import bytes_text
from ..report.comparison import Row
from ..table import number_text
from .entries import NETWORK, PROCESSES, TWIN, Entry

__all__ = ["closing_lines", "introduction", "sentence"]

#: Differences of speed and memory below it are within what two measurements of the same thing differ by.
_SMALL = 0.03


def introduction(seeds: int, epochs: int) -> list[str]:
    """What the columns are."""
    length = f"{epochs} epoch{'s'[: epochs > 1]}, {seeds} seed{'s'[: seeds > 1]}"
    return [
        f"{NETWORK} and its reversible twin {TWIN} on digits of 16x16, batches of 64, {length}; bp in one process, all "
        f"others in {PROCESSES}, with one thread each.",
        f"ratio: speed against bp of the same network; {PROCESSES} is the limit for {PROCESSES} processes.",
        "bubble: share of the time in which a process waits.",
        "staleness: updates between the forward and the backward of a batch, measured and as theory has it, per stage.",
        "peak kept: most bytes held for batches under way, per process.",
        "old weights: most outdated copies of a stage's weights.",
    ]


def sentence(entry: Entry, rows: Mapping[str, Row], notes: Mapping[str, str]) -> str:
    """What to see in a row."""
    fields = _fields(rows[entry.label])
    other = _fields(rows[entry.beside]) if entry.beside in rows else dict.fromkeys(fields, "no measurement")
    words = entry.look.format(
        **fields, **{f"other_{name}": text for name, text in other.items()}, notes=notes.get(entry.label, "")
    )
    return f"{words[:1].upper()}{words[1:]}."


def _fields(row: Row) -> dict[str, str]:
    late, copies = max(row.staleness, default=0.0), sum(row.weight_copies)
    error = max((e for e in row.input_errors if e is not None), default=None)
    return {
        "ratio": number_text(row.ratio, ".2f"),
        "bubble": "no measured share" if row.bubble is None else f"{row.bubble:.0%}",
        "late": f"{late:.2g} update{'' if late == 1 else 's'}",
        "copies": f"{copies} old cop{'y' if copies == 1 else 'ies'} of weights",
        "kept": bytes_text(_fullest(row)),
        "accuracy": "no accuracy" if row.accuracy is None else f"{row.accuracy:.1%}",
        "error": "no measured size" if error is None else f"{error:.1g}",
    }


def _fullest(row: Row) -> int:
    return max(row.process_bytes, default=0)


def closing_lines(entries: Sequence[Entry], rows: Mapping[str, Row]) -> list[str]:
    """A line per system: what it gained and what it paid, against its own baseline and the row that it is beside."""
    methods = {entry.label: entry.method for entry in entries}
    lines = []
    for entry in entries:
        if not entry.system:
            continue
        row, base = rows[entry.label], rows[entry.baseline]
        others = [rows[entry.beside]] if entry.beside in rows and entry.beside != entry.baseline else []
        # What is left of a method when parts are taken away is no rival in speed or memory, and only it is in accuracy.
        rivals = [other for other in others if methods[other.label] != entry.method]
        parts = [other for other in others if other not in rivals]
        found = [*_speed(row, rivals), *_memory(row, [base, *rivals]), *_delay(row), *_accuracy(row, [base, *parts])]
        lines.append(f"{entry.system} {_balance(found)}")
    return lines


class _Verdict(StrEnum):
    GAINED = "gained"
    PAID = "paid"
    EVEN = "even"


_Found = tuple[_Verdict, str]


def _balance(found: Sequence[_Found]) -> str:
    by = {verdict: "; ".join(words for kind, words in found if kind is verdict) for verdict in _Verdict}
    even = f" Even: {by[_Verdict.EVEN]}." if by[_Verdict.EVEN] else ""
    return f"gained: {by[_Verdict.GAINED] or 'nothing'}. Paid: {by[_Verdict.PAID] or 'nothing'}.{even}"


def _better(better: bool) -> _Verdict:
    return _Verdict.GAINED if better else _Verdict.PAID


def _speed(row: Row, rivals: Sequence[Row]) -> Iterator[_Found]:
    if row.ratio is None:
        return
    if row.ratio > 1 + _SMALL:
        yield _Verdict.GAINED, f"{row.ratio:.2f} times the speed of one process"
    else:
        yield _Verdict.PAID, f"{PROCESSES} processes for {row.ratio:.2f} times the speed of one"
    for other in rivals:
        if other.ratio and abs(row.ratio / other.ratio - 1) > _SMALL:
            yield _better(row.ratio > other.ratio), f"{row.ratio / other.ratio:.2f} times the speed of {other.label}"


def _memory(row: Row, others: Sequence[Row]) -> Iterator[_Found]:
    mine = _fullest(row)
    for verdict in (_Verdict.GAINED, _Verdict.PAID):
        told = [
            f"{bytes_text(theirs)} under {other.label}"
            for other in others
            if (theirs := _fullest(other)) and abs(mine / theirs - 1) > _SMALL and _better(mine < theirs) is verdict
        ]
        if told:
            yield verdict, f"{bytes_text(mine)} kept in the fuller process ({', '.join(told)})"


def _delay(row: Row) -> Iterator[_Found]:
    told = _fields(row)
    if max(row.staleness, default=0.0) > 0:
        yield _Verdict.PAID, f"gradients up to {told['late']} late"
    else:
        yield _Verdict.GAINED, "no gradient is late"
    if sum(row.weight_copies):
        yield _Verdict.PAID, told["copies"]
    if any(error is not None for error in row.input_errors):
        yield _Verdict.PAID, f"activations computed back with a relative error of up to {told['error']}"


def _accuracy(row: Row, others: Sequence[Row]) -> Iterator[_Found]:
    for other in others:
        if row.accuracy is None or other.accuracy is None:
            continue
        points = round(100 * (row.accuracy - other.accuracy), 1)
        spread = round(100 * max(max(one.accuracies) - min(one.accuracies) for one in (row, other)), 1)
        words = f"{points:+.1f} points of accuracy against {other.label}"
        if not points:
            yield _Verdict.EVEN, f"the accuracy of {other.label}"
        elif abs(points) <= spread:
            yield _Verdict.EVEN, f"{words}, where seeds differ by {spread:.1f}"
        else:
            alone = min(len(row.accuracies), len(other.accuracies)) == 1
            yield _better(points > 0), f"{words}{', with one seed' if alone else ''}"
