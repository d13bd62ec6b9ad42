"""Runs the workers of a method with local losses. To a `Run` it looks like the engine that follows a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import DataError
from ..nn.tree import map_tensors
from ..schedule import Schedule
from .engine import Engine, Finished
from .events import Recorder
from .jobs import BATCH, Job, check_same, checksum
from .local_statistics import LocalStatistics
from .mail import FORWARD, Mail, Message
from .stage import Stage
from .wire import dense
from .worker import Worker

__all__ = ["LocalEngine"]

log = logging.getLogger("unlatch")


class LocalEngine(Engine):
    """One tick per micro-batch, phase by phase.

    **Arguments** (besides those of `Engine`):

    - `workers`: one for each stage of this process.
    - `losses`: where the workers note losses.
    - `lag`: ticks between the entry of a micro-batch and its report.
    - `raw_data`: whether every stage needs the raw batch, which then travels from rank to rank.
    - `builds_data`: whether every rank is fed the raw batch by its own caller instead.
    - `layout`: position of the first block of each stage; what is trained beside the network belongs to it.
    - `before_update`: called in every tick before weights change, where the whole network is in this process.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        schedule: Schedule,
        mail: Mail,
        workers: Mapping[int, Worker],
        losses: dict[int, float],
        *,
        lag: int,
        raw_data: bool,
        builds_data: bool = False,
        layout: Sequence[int] = (),
        before_update: Callable[[], None] | None = None,
        recorder: Recorder | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stages, schedule, mail, recorder=recorder, **options)
        self.workers = [workers[index] for index in sorted(workers)]
        self.lag = lag
        self.before_update = before_update
        self._losses = losses
        self._raw_data = raw_data
        self._builds_data = builds_data
        self._layout = list(layout)
        self._handled = [0, 0]
        self._above = max(stages) + 1
        # The first message of a batch, from which the other ranks learn of it.
        self._opening = BATCH if raw_data else FORWARD
        self.leads = self.leads or builds_data
        mail.capacity = max(mail.capacity, lag + 3)

    def step(self, x: Any = None, y: Any = None) -> list[Finished] | None:
        if self._builds_data and self.lowest > 0 and self.mail.peek(BATCH, self.lowest).micro is None:
            self.announce_end()
            return None
        jobs = self._own_jobs(x, y) if self.leads else self._announced_jobs()
        if jobs is None:
            return None
        count = 0
        for job in jobs:
            self._micros[self._fed + count] = job.micro
            self._tick(job)
            count += 1
        self._fed += count
        self.batches += 1
        self._handled = [self._handled[0] + count, self._handled[1] + 1]
        finished = self._collect(self._fed - self.lag)
        if self.lag == 0:
            self._restart()
        return finished

    def _own_jobs(self, x: Any, y: Any) -> Iterator[Job]:
        """Cut the batch of this rank's caller; tell the next rank, or compare with what the first rank has."""
        for micro, part, target in self._cut(x, y):
            job = Job(micro, map_tensors(dense, part), map_tensors(dense, target))
            if self._raw_data and self._has_neighbours:
                self._pass_batch(job, self._expected(job))
            yield job

    def _expected(self, job: Job) -> float:
        if self.lowest == 0:
            return checksum((job.x, job.y))
        message = self.mail.take(BATCH, self.lowest)
        assert message.micro is not None
        assert message.scalars is not None
        if message.micro != job.micro:
            raise DataError(
                f"stage {self.lowest} is fed {job.micro} ({job.micro.size} samples), stage 0 {message.micro} "
                f'({message.micro.size} samples): with data="build" every rank needs a loader of the same batches'
            )
        check_same(job, message.scalars["checksum"], self.lowest)
        return message.scalars["checksum"]

    def _announced_jobs(self) -> Iterator[Job] | None:
        """The micro-batches of the next batch as they arrive; `None` at the end of the data."""
        first = self.mail.peek(self._opening, self.lowest)
        if first.micro is None:
            self.mail.take(self._opening, self.lowest)
            self.announce_end()
            return None
        return self._arriving(first.micro.count)

    def _arriving(self, count: int) -> Iterator[Job]:
        for _ in range(count):
            if not self._raw_data:
                micro = self.mail.peek(FORWARD, self.lowest).micro
                assert micro is not None
                yield Job(micro)
                continue
            message = self.mail.take(BATCH, self.lowest)
            assert message.micro is not None
            assert message.scalars is not None
            job = Job(message.micro, *message.payload)
            check_same(job, message.scalars["checksum"], self.lowest)
            self._pass_batch(job, message.scalars["checksum"])
            yield job

    def _pass_batch(self, job: Job, digest: float) -> None:
        if self._above < self.schedule.stages:
            payload = None if self._builds_data else (job.x, job.y)
            self.mail.send(Message(BATCH, self._above, job.micro, payload, scalars={"checksum": digest}))

    @property
    def _has_neighbours(self) -> bool:
        return len(self.stages) < self.schedule.stages

    def announce_end(self) -> None:
        if self._builds_data and self.lowest > 0 and self.mail.take(BATCH, self.lowest).micro is not None:
            raise DataError(
                f"the loader of stage {self.lowest} ends after {self.batches} batches, before that of stage 0: with "
                'data="build" every rank needs a loader of the same batches'
            )
        if self._above < self.schedule.stages:
            self.mail.send(Message(self._opening, self._above))

    def _tick(self, job: Job | None) -> None:
        for worker in self.workers:
            worker.open(job)
        for phase, downwards in self.workers[0].phases:
            if phase == "update" and self.before_update is not None:
                self.before_update()
            for worker in reversed(self.workers) if downwards else self.workers:
                getattr(worker, phase)()

    def drain(self) -> list[Finished]:
        for _ in range(self.lag if self._fed else 0):
            self._tick(None)
        for worker in self.workers:
            worker.finish()
        if self._in_update:
            self._update, self._in_update = self._update + 1, 0
        finished = self._collect(self._fed)
        self._restart()
        return finished

    def route(self, path: str | None = None) -> dict[int, Any]:
        own = {worker.index: worker.route(path) for worker in self.workers}
        return own if all(part is not None for part in own.values()) else super().route(path)

    def method_statistics(self) -> list[LocalStatistics]:
        probed = getattr(self.before_update, "probe", None)
        return [
            LocalStatistics(
                stage=worker.index,
                seconds=dict(worker.clock.seconds),
                micros=self._handled[0],
                batches=self._handled[1],
                records=list(worker.records),
                cosines=list(probed.found[worker.index]) if probed is not None else [],
                capacity=worker.capacity,
            )
            for worker in self.workers
        ]

    # ------------------------------------------------------------- checkpoint

    def extra_tensors(self) -> dict[str, Tensor]:
        """What is trained or stored beside the network, under `stage<k>/...`."""
        found: dict[str, Tensor] = {}
        for worker in self.workers:
            for name, trained in worker.trained().items():
                found |= {f"stage{worker.index}/{name}/{key}": t for key, t in trained.tensors().items()}
            found |= {f"stage{worker.index}/table/{key}": t for key, t in worker.stored().items()}
        return found

    def extra_settings(self) -> dict[str, Any]:
        """Learning rates and schedules of the same, and the cut that it belongs to."""
        settings: dict[str, Any] = {
            f"stage{worker.index}/{name}": trained.settings()
            for worker in self.workers
            for name, trained in worker.trained().items()
        }
        return {"layout": self._layout, **settings}

    def load_extra(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Take over what a checkpoint of the same method and cut has; leave fresh what it does not.

        All ranks decide alike, so that copies stay in step and all agree on which samples are stored.
        """
        if tensors and settings.get("layout") != self._layout:
            log.warning(
                "the checkpoint is of a run cut at blocks %s, this one is cut at %s: what is trained beside the "
                "network (AuxNets, heads, stored variables) begins anew",
                settings.get("layout"),
                self._layout,
            )
            tensors = {}
        for worker in self.workers:
            for name, trained in worker.trained().items():
                own = _below(tensors, f"stage{worker.index}/{name}/")
                if own and trained.load_tensors(own):
                    trained.load_settings(settings.get(f"stage{worker.index}/{name}", {}))
                elif own:
                    log.warning(
                        "the %s of stage %d in the checkpoint is another network than the one of this run, which "
                        "begins anew",
                        name,
                        worker.index,
                    )
            worker.load_stored(_below(tensors, f"stage{worker.index}/table/"))


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
