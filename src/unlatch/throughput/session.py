"""All systems take turns on the same ranks; what they reach becomes rows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnlatchError
from ..io.results import Results
from ..nn.tree import batch_size
from ..transport.launch import Ranks
from .resident import PeakResident
from .subject import Subject
from .systems import Independent, Plain, System, Unsuitable
from .timing import completions, steady_seconds

__all__ = ["Row", "compare", "lasting_ranks"]

#: Of the time there is, what the first round may take: a number from one round alone has no spread.
_FIRST = 0.6
#: Seconds that a measurement takes at least: ranks begin milliseconds apart, and clocks of small models are coarse.
_SHORTEST = 0.3
_TRIES = 4
#: Seconds after which a measurement counts as stuck.
_STUCK = 600.0


@dataclass(frozen=True)
class Row:
    """What one system reached.

    **Arguments:**

    - `system`, `method`: who.
    - `ranks`, `threads`: processes at work, and threads of each.
    - `samples_per_s`: median over the rounds.
    - `ratio`: to plain PyTorch with one thread: median over the rounds of the ratio within each.
    - `limit`: the same to as many independent processes as there are ranks.
    - `peak_bytes`: growth of resident memory at the fullest rank, model and optimizer included; largest of all rounds.
    - `rounds`: that were measured.
    - `spread`: smallest and largest ratio of a round.
    - `reason`: why it was not measured.
    - `starts`: the first block of each stage, where the model is cut.
    """

    system: str
    method: str
    ranks: int
    threads: int
    precision: str
    samples_per_s: float | None = None
    ratio: float | None = None
    limit: float | None = None
    peak_bytes: int | None = None
    rounds: int = 0
    spread: tuple[float, float] | None = None
    reason: str | None = None
    starts: tuple[int, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class _Candidate:
    system: System
    steps: int
    reason: str | None = None
    fitted: bool = False
    cut: tuple[int, ...] | None = None
    #: Round to samples per second, and to the growth of memory on each rank.
    speeds: dict[int, float] = field(default_factory=dict)
    peaks: dict[int, list[int]] = field(default_factory=dict)

    def measured(self, turn: int) -> dict[str, Any]:
        """A round, for a line of results."""
        return {"samples_per_s": self.speeds[turn], "peaks": self.peaks[turn], "cut": self.cut}

    def remember(self, line: Mapping[str, Any], turn: int) -> None:
        """Take a round from such a line."""
        self.speeds[turn], self.peaks[turn] = line["samples_per_s"], line["peaks"]
        self.cut = tuple(line["cut"]) if line["cut"] is not None else None


def compare(
    subject: Subject,
    systems: Sequence[System],
    ranks: int,
    *,
    rounds: int = 5,
    steps: int = 12,
    seconds: float | None = None,
    say: Callable[[str], object] = lambda line: None,
    results: Results | None = None,
) -> list[Row]:
    """Measure all systems in interleaved rounds, so that whatever else the machine does hits all of them alike.

    **Arguments:**

    - `systems`: in the order in which they take turns. `Plain()` and `Independent()` are what others are related to.
    - `ranks`: local processes.
    - `rounds`, `steps`: how often, and steps that count each time.
    - `seconds`: no measurement begins later; rows then have fewer rounds, or a reason.
    - `say`: is told how it goes.
    - `results`: a file with a line for every measurement; what is there is not measured again.

    **Returns:** a row per system. One that cannot train the model has the reason instead of numbers.
    """
    candidates = [_Candidate(system, steps) for system in systems]
    begun, samples = time.monotonic(), batch_size(subject.batch()[0])
    with lasting_ranks(ranks) as run:
        for turn in range(rounds):
            share = 1.0 if turn else _FIRST
            for one in candidates:
                if one.reason is not None or (turn and not one.speeds):
                    continue
                if seconds is not None and time.monotonic() - begun > share * seconds:
                    if not turn:
                        one.reason = f"not measured: the {seconds:.0f} s were over"
                    continue
                key = {"system": str(one.system), "round": turn, "steps": steps, "ranks": ranks}
                key["precision"] = subject.precision
                known = _known(results, key)
                if known is not None:
                    one.remember(known, turn)
                else:
                    _measure(one, subject, ranks, turn, samples, run)
                    if results is not None and one.reason is None:
                        results.add(key | one.measured(turn))
                say(f"round {turn + 1}/{rounds}: {one.system}: {_said(one, turn)}")
    return _rows(candidates, subject, ranks)


def _measure(
    one: _Candidate, subject: Subject, ranks: int, turn: int, samples: int, run: Callable[..., list[Any]]
) -> None:
    try:
        if not one.fitted:
            one.system, one.fitted = one.system.fitted(subject, ranks), True
        per_step, peaks = _steady(one, subject, run)
    except UnlatchError as error:
        one.reason = _first_line(error)
        return
    one.speeds[turn] = one.system.copies(ranks) * samples / per_step
    one.peaks[turn], one.cut = peaks, one.system.cut


def _known(results: Results | None, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
    rows = results.rows if results is not None else []
    return next((row for row in rows if all(row.get(name) == value for name, value in key.items())), None)


def _steady(one: _Candidate, subject: Subject, run: Callable[..., list[Any]]) -> tuple[float, list[int]]:
    """Seconds per step, with as many steps as a measurement of some length needs; and the peaks of memory."""
    for _ in range(_TRIES):
        found = [measured for measured in run(_on_rank, one.system, subject, one.steps) if measured is not None]
        warm = found[0][1]
        seconds = min(ends[-1] - ends[warm - 1] for ends, _, _ in found)
        if seconds >= _SHORTEST:
            with suppress(ValueError):  # the ranks were hardly at work together
                per_step = steady_seconds([ends for ends, _, _ in found], warm)
                return per_step, [peak for _, _, peak in found if peak is not None]
        one.steps = max(2 * one.steps, math.ceil(1.2 * _SHORTEST * one.steps / seconds))
    raise Unsuitable(f"no steady state in {_TRIES} trials, the last with {one.steps} steps")


def _on_rank(system: System, subject: Subject, steps: int) -> tuple[list[float], int, int | None] | None:
    """When each step was done on this rank, how many of them were warm, and the growth of memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(system.threads)
    meter = PeakResident()
    try:
        with meter.measuring():
            training = system.start(subject)
            dist.barrier()
            if training is None:
                return None
            ends = completions(training.step, steps, training.warm)
            training.close()
    finally:
        torch.set_num_threads(before)
    return ends, training.warm, meter.bytes


@contextmanager
def lasting_ranks(count: int, patience: float = _STUCK) -> Iterator[Callable[..., list[Any]]]:
    """A function that runs a job on local ranks; after a failure, which ends them, on new ones.

    **Arguments:** `patience`: seconds after which a job counts as stuck.
    """
    alive: list[Ranks] = []

    def run(*job: Any) -> list[Any]:
        if not alive:
            alive.append(Ranks(count))
        try:
            return alive[0].run(*job, timeout=patience)
        except UnlatchError:
            alive.pop().close(force=True)
            raise

    try:
        yield run
    finally:
        for ranks in alive:
            ranks.close()


def _rows(candidates: Sequence[_Candidate], subject: Subject, ranks: int) -> list[Row]:
    base = _speeds_of(candidates, Plain())
    limit = _speeds_of(candidates, Independent())
    rows = []
    for one in candidates:
        system = one.system
        ratios = _ratios(one.speeds, base)
        rows.append(
            Row(
                system.system,
                system.method,
                system.processes(ranks),
                system.threads,
                subject.precision,
                statistics.median(one.speeds.values()) if one.speeds else None,
                statistics.median(ratios) if ratios else None,
                statistics.median(shares) if (shares := _ratios(one.speeds, limit)) else None,
                max((peak for peaks in one.peaks.values() for peak in peaks), default=None),
                len(one.speeds),
                (min(ratios), max(ratios)) if ratios else None,
                one.reason,
                one.cut,
            )
        )
    return rows


def _speeds_of(candidates: Sequence[_Candidate], wanted: System) -> dict[int, float]:
    return next((one.speeds for one in candidates if one.system == wanted), {})


def _ratios(speeds: dict[int, float], others: dict[int, float]) -> list[float]:
    return [speed / others[turn] for turn, speed in speeds.items() if turn in others]


def _said(one: _Candidate, turn: int) -> str:
    return f"{one.speeds[turn]:,.0f} samples/s" if one.reason is None else f"left out: {one.reason}"


def _first_line(error: UnlatchError) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
