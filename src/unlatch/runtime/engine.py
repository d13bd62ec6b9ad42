"""Follows a schedule with the stages of this process. Inline it holds all of them, distributed a contiguous few.

The loop is the same in both cases, which is why both give the same weights: what differs is only who fills the mail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import ConfigError, StageFailed, TransportError, UnlatchError
from ..nn.tree import batch_size, map_tensors, split_batch
from ..schedule import Action, Kind, Schedule, with_updates
from .events import Event, Recorder
from .mail import BACKWARD, FORWARD, Mail, Message
from .micro import Micro
from .stage import Returned, Stage
from .wire import dense

__all__ = ["Engine", "Finished"]

Part = tuple[Micro, Any, Any]
NOTHING: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that is through: its mean loss, and by how many updates the local stages were behind."""

    batch: int
    loss: float
    samples: int
    staleness: dict[int, int]


class Engine:
    """Executes actions in schedule order.

    **Arguments:**

    - `stages`: the stages of this process by index.
    - `schedule`: over all stages of the network.
    - `mail`: messages in and out.
    - `microbatches`: parts a batch is cut into (fewer when it has fewer samples).
    - `accumulate`: batches per update.
    - `mean_loss`: whether the loss is a mean over samples, so that parts are weighted by their size.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        schedule: Schedule,
        mail: Mail,
        *,
        microbatches: int = 1,
        accumulate: int = 1,
        mean_loss: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.mail = mail
        self.microbatches = microbatches
        self.accumulate = accumulate
        self.mean_loss = mean_loss
        self.recorder = recorder or Recorder()
        self.lowest = min(stages)
        self.leads = self.lowest == 0
        self.batches = 0
        self._micros: dict[int, Micro] = {}
        self._ends: dict[int, int] = {}
        self._origin = self._fed = self._done = 0
        self._update = self._in_update = 0
        self._losses: dict[int, float] = {}
        self._batch_loss, self._batch_samples = 0.0, 0

    # -------------------------------------------------------------- one batch

    def step(self, x: Any = None, y: Any = None) -> list[Finished] | None:
        """Feed one batch. Only the process with stage 0 looks at `x` and `y`; the others learn of it by message.

        **Returns:** the batches that finished, or `None` if the leading process announced the end of the data.
        """
        parts: Iterable[Part] = NOTHING
        if self.leads:
            parts = cut = self._cut(x, y)
            count = len(cut)
        else:
            first = self.mail.peek(FORWARD, self.lowest)
            if first.micro is None:
                self.mail.take(FORWARD, self.lowest)
                self.announce_end()
                return None
            count = first.micro.count
        self._run(self.schedule.feed(self._fed, count), iter(parts))
        self._fed += count
        self.batches += 1
        finished = self._collect(self._fed - self.schedule.delay(0))
        if self.schedule.flushes:
            self._restart()
        return finished

    def announce_end(self) -> None:
        """Tell the processes further up that no batch comes next."""
        above = max(self.stages) + 1
        if above < self.schedule.stages:
            self.mail.send(Message(FORWARD, above))

    def drain(self) -> list[Finished]:
        """Finish every batch under way; the gradients of an incomplete accumulation are applied as they are."""
        self._run(self.schedule.drain(self._fed), iter(NOTHING))
        for stage in self.stages.values():
            if stage.unapplied:
                self._update_stage(stage, stage.version)
        if self._in_update:
            self._update, self._in_update = self._update + 1, 0
        finished = self._collect(self._fed)
        self._restart()
        return finished

    @property
    def between_updates(self) -> bool:
        """Whether the next batch begins an update; only the process that cuts batches knows."""
        return self._in_update == 0

    @property
    def next_update(self) -> int:
        """The first update that no batch fed so far contributes to."""
        return self._update + (self._in_update > 0)

    def counters(self) -> dict[str, int]:
        """How far the run is; meaningful only while the pipeline is empty."""
        return {"batches": self.batches, "micros": self._origin, "updates": self._update}

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Continue counting where a checkpoint left off."""
        self.batches, self._origin, self._update = (counters[k] for k in ("batches", "micros", "updates"))
        for stage in self.stages.values():
            stage.updater.version = self._update

    def route(self, path: str | None = None) -> dict[int, Any]:
        """What evaluation runs through, by stage: the network itself, or another path that the method knows."""
        if path not in (None, "serial"):
            raise ConfigError(f'this method knows no path {path!r} to evaluate: only "serial", the network itself')
        return dict(self.stages)

    def method_statistics(self) -> list[Any]:
        """What a method measured about itself, for the stages of this process."""
        return []

    def extra_tensors(self) -> dict[str, Tensor]:
        """What a method trains or stores beside the network, for a checkpoint."""
        return {}

    def extra_settings(self) -> dict[str, Any]:
        """Plain numbers that belong to `extra_tensors`."""
        return {}

    def load_extra(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Take over what `extra_tensors` and `extra_settings` returned, as far as it is there."""

    def _cut(self, x: Any, y: Any) -> list[Part]:
        """Cut a batch into micro-batches, each with its identity card."""
        total = batch_size(x)
        if max(self.stages) < self.schedule.stages - 1:
            # It leaves this process when the sender gets to it; by then the caller may use its memory for the next one.
            y = map_tensors(Tensor.clone, y)
        pieces = split_batch((x, y), self.microbatches)
        self._in_update += 1
        ends = self._in_update == self.accumulate
        parts = []
        for index, (xi, yi) in enumerate(pieces):
            size = batch_size(xi)
            micro = Micro(
                id=self._origin + self._fed + index,
                batch=self.batches,
                index=index,
                count=len(pieces),
                size=size,
                scale=size / total if len(pieces) > 1 and self.mean_loss else 1.0,
                update=self._update,
                ends=ends and index == len(pieces) - 1,
            )
            parts.append((micro, xi, yi))
        if ends:
            self._update, self._in_update = self._update + 1, 0
        return parts

    def _collect(self, done: int) -> list[Finished]:
        """Report the batches whose last part has now been through stage 0, the same ones in every process."""
        finished = []
        for number in range(self._done, done):
            micro = self._micros.pop(number)
            self._ends.pop(number, None)
            self._batch_loss += micro.scale * self._losses.pop(micro.id)
            self._batch_samples += micro.size
            behind = self.recorder.behind(micro.id)
            if micro.index == micro.count - 1:
                finished.append(Finished(micro.batch, self._batch_loss, self._batch_samples, behind))
                self._batch_loss, self._batch_samples = 0.0, 0
        self._done = max(self._done, done)
        return finished

    def _restart(self) -> None:
        """The pipeline is empty: the schedule's ids count from 0 again."""
        self._origin += self._fed
        self._fed = self._done = 0

    # ---------------------------------------------------------------- actions

    def _run(self, actions: Iterable[Action], parts: Iterator[Part]) -> None:
        for kind, index, number in with_updates(actions, self._ends):
            stage = self.stages.get(index)
            if stage is None:
                continue
            if kind is Kind.F:
                self._forward(stage, number, parts)
            elif kind is Kind.B:
                self._backward(stage, self._micros[number], Kind.B, stage.backward)
            elif kind is Kind.I:
                self._backward(stage, self._micros[number], Kind.I, stage.backward_input)
            elif kind is Kind.W:
                self._timed(stage, Kind.W, self._micros[number], stage.backward_weights, self._micros[number])
            else:
                self._update_stage(stage, number)

    def _forward(self, stage: Stage, number: int, parts: Iterator[Part]) -> None:
        if stage.first:
            micro, inputs, target = next(parts)
        else:
            message = self.mail.take(FORWARD, stage.index, self._micros.get(number))
            assert message.micro is not None
            micro, (inputs, target) = message.micro, message.payload
            if micro.id != self._origin + number:
                raise TransportError(
                    f"stage {stage.index} expected the forward message of micro-batch {self._origin + number}, got "
                    f"that of {micro} (id {micro.id})"
                )
        self._micros[number] = micro
        if micro.ends:
            self._ends[number] = micro.update
        outputs = self._timed(stage, Kind.F, micro, stage.forward, micro, inputs, target if stage.last else None)
        if stage.last:
            assert stage.loss is not None
            self._losses[micro.id] = stage.loss
        else:
            payload = (map_tensors(dense, outputs), target)
            self.mail.send(Message(FORWARD, stage.index + 1, micro, payload, stage.version))

    def _backward(self, stage: Stage, micro: Micro, kind: Kind, work: Callable[..., Returned]) -> None:
        cotangent, outputs = None, None
        if not stage.last:
            message = self.mail.take(BACKWARD, stage.index, micro)
            assert message.scalars is not None
            self._losses[micro.id] = message.scalars["loss"]
            cotangent, outputs = message.payload
        returned = self._timed(stage, kind, micro, work, micro, cotangent, outputs)
        if not stage.first:
            scalars = {"loss": self._losses[micro.id]}
            payload = map_tensors(dense, (returned.gradients, returned.inputs))
            self.mail.send(Message(BACKWARD, stage.index - 1, micro, payload, stage.version, scalars))

    def _update_stage(self, stage: Stage, number: int) -> None:
        self._timed(stage, Kind.U, number, stage.update)

    def _timed(self, stage: Stage, kind: Kind, subject: Micro | int, work: Callable[..., Any], *args: Any) -> Any:
        """Do it, record it, and say where it failed if it does."""
        version, start = stage.version, time.perf_counter()
        try:
            result = work(*args)
        except UnlatchError:
            raise
        except Exception as error:
            what = {Kind.F: "forward", Kind.U: "update"}.get(kind, "backward")
            of = f"update {subject}" if kind is Kind.U else f"the {what} of {subject}"
            raise StageFailed(f"stage {stage.index} failed in {of}: {type(error).__name__}: {error}") from error
        end = time.perf_counter()
        number = subject if isinstance(subject, int) else subject.id
        version = stage.seen if kind is Kind.F else version
        self.recorder.add(Event(stage.index, kind.value, number, version, start, end, stage.kept_bytes))
        return result
