"""Which methods of a run were called here, in which order, and whether one of them waits for other ranks.

Every method of a run is called on every rank. A rank that calls another one than the rest waits for them, and they for
it, for ever. So ranks that wait for long tell each other what they have called (`Health`), and an exchange between all
of them begins with the name of the call it belongs to (`World`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import OutOfStep

__all__ = ["LONG", "CallReport", "Calls", "first_difference", "out_of_step"]

#: Seconds of waiting after which it is worth a look whether all ranks do the same.
LONG = 2.0
# No rank is further ahead of another: a pipeline holds as many batches as it has stages, or a few times that.
_REMEMBERED = 128


@dataclass(frozen=True)
class CallReport:
    """What a rank tells the others.

    **Arguments:** `count`: calls so far; `recent`: the names of the last of them; `waits`: whether the rank has waited
    for others for long.
    """

    count: int = 0
    recent: tuple[str, ...] = ()
    waits: bool = False

    def named(self, number: int) -> str | None:
        """The call of this number, counting from 1; `None` if there was none yet, or it is too long ago."""
        place = number - 1 - self.count + len(self.recent)
        return self.recent[place] if 0 <= place < len(self.recent) else None


class Calls:
    """The calls of this rank.

    >>> calls = Calls()
    >>> for name in ("step", "save"):
    ...     with calls.of(name):
    ...         now = calls.now
    >>> now, calls.report()
    ('save', CallReport(count=2, recent=('step', 'save'), waits=False))
    """

    def __init__(self) -> None:
        self._count = 0
        self._recent: deque[str] = deque(maxlen=_REMEMBERED)
        self._under_way: list[str] = []
        self._since: float | None = None

    @property
    def now(self) -> str:
        """The innermost call under way; the one that makes the run if there is none."""
        return self._under_way[-1] if self._under_way else "parallelize"

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Inside, the method `name` is under way."""
        self._count += 1
        self._recent.append(name)
        self._under_way.append(name)
        try:
            yield
        finally:
            self._under_way.pop()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for others."""
        before, self._since = self._since, self._since or time.monotonic()
        try:
            yield
        finally:
            self._since = before

    def report(self) -> CallReport:
        """As it stands; safe on another thread."""
        since = self._since
        waits = since is not None and time.monotonic() - since >= LONG
        return CallReport(self._count, tuple(self._recent.copy()), waits)


def first_difference(reports: Mapping[int, CallReport]) -> dict[int, str] | None:
    """The first call, as far as it is remembered, that not all ranks have in common: its name by rank.

    >>> ahead, behind = CallReport(3, ("step", "step", "save")), CallReport(2, ("step", "step"))
    >>> first_difference({0: ahead, 1: behind})
    >>> first_difference({0: ahead, 1: CallReport(3, ("step", "step", "step"))})
    {0: 'save', 1: 'step'}
    """
    oldest = min((report.count - len(report.recent) for report in reports.values()), default=0)
    newest = max((report.count for report in reports.values()), default=0)
    for number in range(oldest + 1, newest + 1):
        told = {rank: name for rank, report in reports.items() if (name := report.named(number)) is not None}
        if len(set(told.values())) > 1:
            return told
    return None


def out_of_step(told: Mapping[int, str], describe: Callable[[int], str]) -> OutOfStep:
    """The error to raise where ranks call different methods.

    **Arguments:** `told`: what each rank called; `describe`: what a rank does.

    >>> print(out_of_step({0: "save", 1: "step"}, lambda rank: f"stage {rank}"))
    save is called on every rank: rank 0 (stage 0) called it, rank 1 (stage 1) called step instead: call the methods \
of a run equally often and in the same order on every rank; only what needs no run belongs under `if rank == 0`
    """
    by_name: dict[str, list[int]] = {}
    for rank, name in told.items():
        by_name.setdefault(name, []).append(rank)
    # All ranks do steps: what somebody did in the place of one is what was not meant for all.
    odd = min(by_name, key=lambda name: (name == "step", len(by_name[name])))
    others = [
        f"{_listed(ranks, describe)} called {'it' if name == odd else f'{name} instead'}"
        for name, ranks in sorted(by_name.items(), key=lambda item: item[0] != odd)
    ]
    return OutOfStep(
        f"{odd} is called on every rank: {', '.join(others)}: call the methods of a run equally often and in the same "
        "order on every rank; only what needs no run belongs under `if rank == 0`"
    )


def _listed(ranks: list[int], describe: Callable[[int], str]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({describe(ranks[0])})"
    return f"ranks {', '.join(map(str, ranks))}"
