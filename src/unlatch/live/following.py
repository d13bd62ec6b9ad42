"""A run read from its folder again and again, while it writes, when it has ended, and if it goes away."""

from __future__ import annotations

import math
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import ConfigError
from ..io.metrics import Tail
from ..io.run_folder import is_held, is_run, live_file, settings_in
from ..problems import explain
from ..report.measures import measures_of
from ..report.record import Record, read_run
from ..runtime.events import Event

__all__ = ["Followed", "Sight", "State"]

State = Literal["starting", "running", "finished", "interrupted", "lost", "gone", "unreadable"]

#: Seconds without a sign after which one worries; where the file system does not tell who writes, a run is lost then.
_SILENCE = 60.0
#: More losses than this no screen tells apart.
_LOSSES = 4000
_STAGE = re.compile(r"stage(\d+)(?:_replica(\d+))?/(\w+)")


@dataclass(frozen=True)
class Sight:
    """What is to be seen of a run at one moment.

    **Arguments:**

    - `record`: as of a finished run; while it is under way, the summary says what is known so far.
    - `why`: what went wrong, if anything did.
    - `step`, `steps`, `epoch`, `epochs`: how far it is, and how far it is to go; `None` where that is not known.
    - `notes`: warnings, of all ranks.
    - `lanes`: whether the run tells what its stages do just now.
    """

    state: State
    record: Record
    why: str | None = None
    step: int = 0
    steps: int | None = None
    epoch: int = 0
    epochs: int | None = None
    notes: tuple[str, ...] = ()
    lanes: bool = False

    @property
    def over(self) -> bool:
        """Whether nothing more will come, unless somebody continues it."""
        return self.state not in ("starting", "running")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


#: JSON as Python writes it has NaN: a number that is none is unknown.
Number = Annotated[int | float | None, BeforeValidator(_finite)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Rank(BaseModel):
    """What `callbacks.Live` writes."""

    model_config = ConfigDict(extra="ignore")

    time: float
    rank: Count
    ranks: Count
    restarts: Count
    method: str
    method_in_full: str
    measures: dict[str, str]
    step: Count
    steps: Count | None
    epoch: Count
    epochs: Count
    samples_per_second: Number
    notes: list[str]
    ended: bool
    error: str | None
    stages: list[dict[str, Number]]
    kinds: dict[str, str] = {}
    events: list[tuple[Count, str, int, int, float, float, int]]


class Followed:
    """A run folder under observation.

    **Arguments:** `folder`: of a run, finished or not.

    >>> Followed("nowhere")
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: nowhere: no run there; expected the folder of a run, such as runs/dtr-1
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not _has_run(self.folder):
            raise ConfigError(f"{folder}: no run there; expected the folder of a run, such as runs/dtr-1")
        self._tail = Tail(self.folder)
        self._events: tuple[Event, ...] = ()
        self._finished: tuple[Any, Record] | None = None
        self._last = Sight("starting", Record(self.folder, {}))

    def look(self) -> Sight:
        """What is there now. Never raises for what it finds: what cannot be read is said in `why`."""
        try:
            if _has_run(self.folder):
                self._last = self._found()
            else:
                self._last = replace(self._last, state="gone", why="its folder is no longer there")
        except (ConfigError, OSError) as error:
            # A folder that is deleted just now is half there.
            gone = not _has_run(self.folder)
            why = "its folder is no longer there" if gone else str(error)
            self._last = replace(self._last, state="gone" if gone else "unreadable", why=why)
        return self._last

    def _found(self) -> Sight:
        # Asked before anything is read: what a run writes before it lets go is then seen.
        held = is_held(self.folder)
        rows, ranks = self._tail.look(), self._ranks()
        summed_up = self._summed_up(rows)
        ended = bool(ranks) and ranks[0].ended
        if summed_up is not None and (not held or ended):
            return self._over(summed_up, rows, ranks)
        under_way = self._alive(ranks) if held is None else held
        record = self._record(rows, ranks)
        state: State = ("running" if rows else "starting") if under_way else "lost"
        return self._sight(state, record, rows, ranks, _worry(ranks) if under_way else _cause(ranks))

    # ------------------------------------------------------------- what is there

    def _ranks(self) -> list[_Rank]:
        found = []
        for file in live_file(self.folder, 0).parent.glob("rank*.json"):
            try:
                found.append(_Rank.model_validate_json(file.read_bytes()))
            except FileNotFoundError:
                continue
            except ValidationError as error:
                raise ConfigError(f"{file}: {explain(error)[0]}; was it edited?") from None
        return sorted(found, key=lambda rank: rank.rank)

    def _summed_up(self, rows: Sequence[Mapping[str, Any]]) -> Record | None:
        """The run as its summary has it, if that is the last word: one that was continued says more in its metrics."""
        file = self.folder / "summary.json"
        try:
            found = file.stat()
        except FileNotFoundError:
            return None
        mark = (found.st_ino, found.st_mtime_ns, found.st_size, len(rows))
        if self._finished is None or self._finished[0] != mark:
            self._finished = mark, read_run(self.folder)
        record = self._finished[1]
        return record if not rows or rows[-1]["step"] <= record.summary.get("steps", math.inf) else None

    def _alive(self, ranks: Sequence[_Rank]) -> bool:
        files = [live_file(self.folder, rank.rank) for rank in ranks] + [self.folder / "metrics.jsonl", self.folder]
        return any(file.exists() and time.time() - file.stat().st_mtime < _SILENCE for file in files)

    # ------------------------------------------------------------ what it comes to

    def _over(self, record: Record, rows: Sequence[Mapping[str, Any]], ranks: Sequence[_Rank]) -> Sight:
        state: State = "interrupted" if record.summary.get("status") == "interrupted" else "finished"
        return self._sight(state, replace(record, losses=_fewer(record.losses)), rows, ranks, None)

    def _sight(
        self,
        state: State,
        record: Record,
        rows: Sequence[Mapping[str, Any]],
        ranks: Sequence[_Rank],
        why: str | None,
    ) -> Sight:
        summary, lead = record.summary, ranks[0] if ranks else None
        told = [*summary.get("notes", ()), *(note for rank in ranks for note in rank.notes)]
        return Sight(
            state=state,
            record=record,
            why=why,
            step=max(rows[-1]["step"] if rows else 0, lead.step if lead is not None else 0),
            steps=lead.steps if lead is not None else None,
            epoch=max((int(row["epoch/number"]) for row in record.epochs), default=0),
            epochs=lead.epochs if lead is not None else _planned(self.folder),
            notes=tuple(dict.fromkeys(told)),
            lanes=bool(ranks),
        )

    def _record(self, rows: Sequence[Mapping[str, Any]], ranks: Sequence[_Rank]) -> Record:
        """A run under way in the form of one that has ended."""
        losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
        epochs = [row for row in rows if "epoch/number" in row]
        self._events = _common(ranks) or self._events
        return Record(
            folder=self.folder,
            summary=_summary(epochs[-1] if epochs else {}, ranks),
            losses=_fewer(losses),
            epochs=tuple(epochs),
            measures=measures_of(rows),
            events=self._events,
        )


def _has_run(folder: Path) -> bool:
    return is_run(folder) or (folder / "summary.json").is_file()


def _worry(ranks: Sequence[_Rank]) -> str | None:
    """What is not as it should be with a run whose command is still there."""
    if any(rank.error is not None for rank in ranks):
        return f"{_cause(ranks)}; the command that started the ranks is there and may start them anew"
    silent = time.time() - max((rank.time for rank in ranks), default=time.time())
    if silent > _SILENCE:
        return f"nothing was heard of it for {silent:.0f} s: a long evaluation or batch, or a process that stands still"
    return None


def _cause(ranks: Sequence[_Rank]) -> str:
    errors = [f"rank {rank.rank}: {rank.error}" for rank in ranks if rank.error is not None]
    # The ranks that heard of it tell less than the one where it happened.
    first = min(errors, key=lambda text: "PeerLost" in text, default=None)
    return first or "it ended without a last word: it crashed or was killed"


def _planned(folder: Path) -> int | None:
    """Epochs that the settings ask for, if there are any that can be read."""
    try:
        found = tomllib.loads(settings_in(folder).read_text(encoding="utf-8"))["run"]["epochs"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def _summary(epoch: Mapping[str, Any], ranks: Sequence[_Rank]) -> dict[str, Any]:
    lead = ranks[0] if ranks else None
    stages = sorted((s for rank in ranks for s in rank.stages), key=lambda s: (s.get("replica") or 0, s["stage"] or 0))
    stages = stages or _stages_in(epoch)
    bubbles = [bubble for stage in stages if (bubble := stage.get("bubble")) is not None]
    speed = (lead.samples_per_second if lead is not None else None) or epoch.get("train/samples_per_second")
    known = {
        "accuracy": epoch.get("eval/accuracy"),
        "samples_per_second": speed,
        "bubble": sum(bubbles) / len(bubbles) if bubbles else None,
        "stages": [{**stage, "stage": int(stage["stage"] or 0)} for stage in stages],
    }
    if lead is not None:
        known |= {"method": lead.method, "method_in_full": lead.method_in_full, "processes": lead.ranks}
        known |= {"measures": lead.measures, "restarts": lead.restarts}
        known |= {"kinds": {kind: cost for rank in ranks for kind, cost in rank.kinds.items()}}
    return known


def _stages_in(epoch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the end of an epoch tells of each stage, where no rank tells of itself."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for name, value in epoch.items():
        if match := _STAGE.fullmatch(name):
            replica, stage = int(match[2] or 0), int(match[1])
            found.setdefault((replica, stage), {"stage": stage, "replica": replica})[match[3]] = value
    return [found[place] for place in sorted(found)]


def _common(ranks: Sequence[_Rank]) -> tuple[Event, ...]:
    """What the stages did in the time that all ranks tell of; nothing if there is none, as while some write."""
    parts = [[Event(*event) for event in rank.events] for rank in ranks if rank.events]
    if not parts:
        return ()
    begin = max(min(event.start for event in part) for part in parts)
    end = min(max(event.end for event in part) for part in parts)
    return tuple(
        sorted(
            (
                event._replace(start=event.start - begin, end=event.end - begin)
                for part in parts
                for event in part
                if event.start >= begin and event.end <= end
            ),
            key=lambda event: event.start,
        )
    )


def _fewer(losses: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """As many as are worth sending, each the mean of some that follow each other."""
    every = math.ceil(len(losses) / _LOSSES)
    if every <= 1:
        return tuple(losses)
    groups = (losses[n : n + every] for n in range(0, len(losses), every))
    return tuple((group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups)
