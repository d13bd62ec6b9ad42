"""Faults on purpose: what goes wrong, where and when, as plain data that travels to the ranks.

A fault strikes either a stage at its work on a batch (`runtime.faulty`) or a message on its way to a stage
(`transport.faulty_link`). Without faults neither file plays any part in a run.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import ConfigError
from .restarts import restarts

__all__ = ["Fault", "Faults", "InjectedFault", "Trigger"]

#: Where ranks find faults that nobody passed to `parallelize`.
VARIABLE = "UNLATCH_FAULTS"

What = Literal["kill", "stall", "fail", "poison", "delay", "corrupt", "drop", "duplicate", "reorder"]
During = Literal["forward", "backward", "update", "auxiliary"]


class InjectedFault(Exception):
    """What `Faults.fail` raises inside a stage, in the place of user code."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong. Made by the methods of `Faults`.

    **Arguments:**

    - `stage`: whose work is struck, or who the struck message is for.
    - `at`: the batch, or the number of the message among those of its name for that stage; both count from 0. `None`:
      again and again, at `every`-th ones.
    - `during`: only in this part of the work.
    - `message`: name of the struck message; `None` for a fault of the stage itself.
    - `attempt`: which start of the ranks is struck, counting restarts from 0; `None` for all.
    - `seconds`: how long a stall or delay lasts; for ever if `None`.
    - `jitter`, `seed`: whether a delay takes a random time up to `seconds`.
    - `part`: what is poisoned or damaged.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    what: What
    stage: int
    at: int | None = None
    every: int = 1
    during: During | None = None
    message: str | None = None
    attempt: int | None = 0
    seconds: float | None = None
    jitter: bool = False
    seed: int = 0
    part: Literal["header", "payload", "input", "gradient", "weight"] | None = None
    value: Literal["nan", "inf", "-inf"] = "nan"
    text: str = "injected fault"

    def __post_init__(self) -> None:
        if self.stage < 0 or (self.at is not None and self.at < 0) or self.every < 1:
            raise ConfigError(f"a fault needs stage and at >= 0 and every >= 1, got {self}")
        if self.seconds is not None and not 0 <= self.seconds < 1e6:
            raise ConfigError(f"a fault lasts 0 to 1,000,000 seconds, got {self.seconds}")

    def __str__(self) -> str:
        """As a line of a table: `kill stage 1 at batch 40`."""
        of = f"the {self.message} message for stage {self.stage}" if self.message else f"stage {self.stage}"
        unit = "number" if self.message else "batch"
        when = f"at {unit} {self.at}" if self.at is not None else f"every {self.every}"
        part = f" ({self.part})" if self.part else ""
        lasting = f" for {'up to ' if self.jitter else ''}{self.seconds:g} s" if self.seconds is not None else ""
        return f"{self.what} {of}{part} {when}{lasting}"


@dataclass(frozen=True)
class Faults:
    """What is to go wrong in a run, for tests of one's own recovery. Each method returns a new object with one more.

    Pass it to `unlatch.parallelize(..., faults=...)`, or put `to_json()` into the environment variable
    `UNLATCH_FAULTS` of the ranks. A fault strikes once, and only in the first start of the ranks: after a restart
    (`UNLATCH_RESTARTS`, `TORCHELASTIC_RESTART_COUNT`) the same batch passes, unless `attempt` says otherwise.

    **Arguments:** `log`: a file to which every fault adds a line of JSON when it strikes, with the `time.monotonic()`
    of that moment.

    >>> faults = Faults().kill(stage=1, at=40).delay(stage=0, ms=50, every=2)
    >>> print(*faults, sep="; ")
    kill stage 1 at batch 40; delay stage 0 every 2 for 0.05 s
    >>> Faults.from_json(faults.to_json()) == faults
    True
    """

    faults: tuple[Fault, ...] = ()
    log: str | None = None

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)

    # ------------------------------------------------------------ of a stage

    def kill(self, stage: int, at: int, *, during: During | None = None, attempt: int | None = 0) -> Faults:
        """The process of a stage kills itself (SIGKILL) when the stage comes to this batch."""
        return self._and(Fault(what="kill", stage=stage, at=at, during=during, attempt=attempt))

    def stall(
        self,
        stage: int,
        at: int,
        *,
        seconds: float | None = None,
        during: During | None = None,
        attempt: int | None = 0,
    ) -> Faults:
        """The process of a stage is stopped (SIGSTOP), with all its threads; it goes on after `seconds`, if given."""
        return self._and(Fault(what="stall", stage=stage, at=at, seconds=seconds, during=during, attempt=attempt))

    def fail(
        self,
        stage: int,
        at: int,
        *,
        text: str = "injected fault",
        during: During | None = None,
        attempt: int | None = 0,
    ) -> Faults:
        """An exception as if user code had raised it."""
        return self._and(Fault(what="fail", stage=stage, at=at, text=text, during=during, attempt=attempt))

    def poison(
        self,
        stage: int,
        at: int,
        *,
        part: Literal["input", "gradient", "weight"] = "input",
        value: Literal["nan", "inf", "-inf"] = "nan",
        attempt: int | None = 0,
    ) -> Faults:
        """One number becomes NaN or infinite: of what the stage's forward takes, or of a gradient before its update,
        or of a weight before a forward."""
        during: During = "update" if part == "gradient" else "forward"
        return self._and(
            Fault(what="poison", stage=stage, at=at, part=part, value=value, during=during, attempt=attempt)
        )

    def delay(
        self,
        stage: int,
        ms: float,
        *,
        at: int | None = None,
        every: int = 1,
        message: str | None = None,
        during: During | None = None,
        jitter: bool = False,
        seed: int = 0,
        attempt: int | None = None,
    ) -> Faults:
        """The stage works later, or messages of this name reach it later, by `ms` (with `jitter`: up to `ms`, drawn
        from `seed`)."""
        return self._and(
            Fault(
                what="delay",
                stage=stage,
                at=at,
                every=every,
                during=during,
                message=message,
                attempt=attempt,
                seconds=ms / 1000,
                jitter=jitter,
                seed=seed,
            )
        )

    # --------------------------------------------------------- of a message

    def corrupt(
        self,
        stage: int,
        nth: int,
        *,
        message: str = "forward",
        part: Literal["header", "payload"] = "payload",
        attempt: int | None = 0,
    ) -> Faults:
        """A bit of the `nth` message for a stage flips on its way. Small tensors travel with the header."""
        return self._and(Fault(what="corrupt", stage=stage, at=nth, message=message, part=part, attempt=attempt))

    def drop(self, stage: int, nth: int, *, message: str = "forward", attempt: int | None = 0) -> Faults:
        """The `nth` message for a stage never leaves. It is missed when the next one from the same rank arrives."""
        return self._and(Fault(what="drop", stage=stage, at=nth, message=message, attempt=attempt))

    def duplicate(self, stage: int, nth: int, *, message: str = "forward", attempt: int | None = 0) -> Faults:
        """The `nth` message for a stage is sent twice."""
        return self._and(Fault(what="duplicate", stage=stage, at=nth, message=message, attempt=attempt))

    def reorder(self, stage: int, nth: int, *, message: str = "forward", attempt: int | None = 0) -> Faults:
        """The `nth` message for a stage is overtaken by the next one from the same rank."""
        return self._and(Fault(what="reorder", stage=stage, at=nth, message=message, attempt=attempt))

    def _and(self, fault: Fault) -> Faults:
        return replace(self, faults=(*self.faults, fault))

    # ----------------------------------------------------------------- travel

    def to_json(self) -> str:
        """As text for `UNLATCH_FAULTS`; what has its default is left out."""
        defaults = {f.name: f.default for f in fields(Fault) if f.default is not MISSING}
        listed = [{k: v for k, v in asdict(f).items() if k not in defaults or v != defaults[k]} for f in self]
        return json.dumps({"faults": listed, "log": self.log})

    @classmethod
    def from_json(cls, text: str) -> Faults:
        """Read what `to_json` wrote."""
        try:
            found: dict[str, Any] = TypeAdapter(dict[str, Any]).validate_json(text)
            listed = TypeAdapter(list[Fault]).validate_json(json.dumps(found.pop("faults", [])))
            log = TypeAdapter(str | None).validate_python(found.pop("log", None))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the text"
            raise ConfigError(
                f"faults cannot be read: {place}: {first['msg']}; expected Faults(...).to_json()"
            ) from None
        if found:
            raise ConfigError(f"faults cannot be read: unknown {', '.join(map(repr, found))}; expected faults and log")
        return cls(tuple(listed), log)

    @classmethod
    def from_environment(cls) -> Faults:
        """Those of `UNLATCH_FAULTS`; none if it is not set."""
        text = os.environ.get(VARIABLE)
        return cls.from_json(text) if text else cls()

    def of_this_start(self) -> Faults:
        """Without those that belong to another start of the ranks."""
        return replace(self, faults=tuple(f for f in self if f.attempt in (None, restarts())))


class Trigger:
    """Decides when a fault strikes, and writes it down.

    >>> trigger = Trigger(Fault(what="drop", stage=1, at=2, message="forward"))
    >>> [trigger.pulled(number) for number in (1, 2, 2, 3)]
    [False, True, False, False]
    """

    def __init__(self, fault: Fault, log: str | None = None) -> None:
        self.fault = fault
        self._log = log
        self._spent = False
        self._random = random.Random(f"{fault.seed}/{fault.stage}/{fault.message}")

    def pulled(self, number: int, span: int = 1) -> bool:
        """Whether the fault strikes now. **Arguments:** `span`: so many are at stake; `number` is the last of them."""
        fault = self.fault
        if fault.at is None:
            # Too many to write down.
            return number % fault.every == 0
        if self._spent or not number - span < fault.at <= number:
            return False
        self._spent = True
        if self._log is not None:
            line = json.dumps({"fault": str(fault), "pid": os.getpid(), "time": time.monotonic()})
            with open(self._log, "a", encoding="utf-8", buffering=1) as file:
                file.write(line + "\n")
        return True

    def linger(self) -> None:
        """Sleep as long as the fault says."""
        seconds = self.fault.seconds or 0.0
        time.sleep(self._random.uniform(0.0, seconds) if self.fault.jitter else seconds)
