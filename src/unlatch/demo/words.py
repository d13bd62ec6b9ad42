"""What came of it, in words that follow from the measured numbers, good or bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..io.space import bytes_text
from ..report.comparison import Row
from .entries import NETWORK, PROCESSES, TWIN, Entry

__all__ = ["closing_lines", "introduction", "sentence"]

#: Differences of speed and memory below it are within what two measurements of the same thing differ by.
_SMALL = 0.03


def introduction(seeds: int, epochs: int) -> list[str]:
    """What the columns are."""
    return [
        f"{NETWORK} and its reversible twin {TWIN} on digits of 16x16, batches of 64, {epochs} epochs, {seeds} seed(s), "
        f"{PROCESSES} processes with one thread each.",
        f"ratio: speed against bp of the same network in one process; {PROCESSES} is the limit for {PROCESSES} processes.",
        "bubble: share of the time in which a process waits.",
        "staleness: updates between the forward and the backward of a batch, measured and as theory has it, per stage.",
        "peak kept: most bytes held for batches under way. old weights: most outdated copies of a stage's weights.",
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
    return [_closing(entry, rows) for entry in entries if entry.system]


def _closing(entry: Entry, rows: Mapping[str, Row]) -> str:
    row, base = rows[entry.label], rows[entry.baseline]
    found = [*_speed(row), *_memory(row, base), *_accuracy(row, base), *_delay(row)]
    if entry.beside in rows and entry.beside != entry.baseline:
        found += _beside(row, rows[entry.beside])
    gained, paid = ([words for good, words in found if good is wanted] for wanted in (True, False))
    return f"{entry.system} gained: {'; '.join(gained) or 'nothing'}. Paid: {'; '.join(paid) or 'nothing'}."


def _speed(row: Row) -> Iterator[tuple[bool, str]]:
    if row.ratio is None:
        return
    if row.ratio > 1 + _SMALL:
        yield True, f"{row.ratio:.2f} times the speed of one process"
    else:
        yield False, f"{PROCESSES} processes for {row.ratio:.2f} times the speed of one"


def _memory(row: Row, base: Row) -> Iterator[tuple[bool, str]]:
    mine, other = _fullest(row), _fullest(base)
    if other and abs(mine / other - 1) > _SMALL:
        yield mine < other, f"{bytes_text(mine)} kept in the fuller process, {bytes_text(other)} in {base.label}"


def _accuracy(row: Row, base: Row, name: str = "") -> Iterator[tuple[bool, str]]:
    if row.accuracy is None or base.accuracy is None:
        return
    points = 100 * (row.accuracy - base.accuracy)
    spread = 100 * max(max(one.accuracies) - min(one.accuracies) for one in (row, base))
    chance = f", less than the seeds differ ({spread:.1f})" if abs(points) < spread else ""
    if round(points, 1):
        yield points > 0, f"{points:+.1f} points of accuracy against {name or base.label}{chance}"


def _delay(row: Row) -> Iterator[tuple[bool, str]]:
    late, copies = max(row.staleness, default=0.0), sum(row.weight_copies)
    error = max((e for e in row.input_errors if e is not None), default=None)
    yield (False, f"gradients up to {_fields(row)['late']} late") if late else (True, "no gradient is late")
    if copies:
        yield False, f"{_fields(row)['copies']}"
    if error is not None:
        yield False, f"activations computed back with an error of up to {_fields(row)['error']}"


def _beside(row: Row, other: Row) -> Iterator[tuple[bool, str]]:
    """Against a relative on the same processes."""
    if row.ratio and other.ratio and abs(row.ratio / other.ratio - 1) > _SMALL:
        yield row.ratio > other.ratio, f"{row.ratio / other.ratio:.2f} times the speed of {other.label}"
    yield from _memory(row, other)
    yield from _accuracy(row, other)
