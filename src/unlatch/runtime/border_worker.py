"""One stage of a method with auxiliary variables: predicted input, local loss, correction."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..methods.border import BorderMethod
from ..nn.statistics import frozen_statistics
from ..rules.border import relaxed_multiplier
from .border_records import Meeting, measure_border
from .clock import Clock
from .echo import Echo
from .encounter import Encounter
from .jobs import ADJOINT, INPUT, LOSS, MULTIPLIER, STATE, Job
from .mail import Mail
from .sources import Shortcut, Source
from .stage import Stage
from .synthesis import Synthesis
from .trained import Trained
from .worker import DOWN, UP, SerialPart, Worker

__all__ = ["BorderWorker"]


class BorderWorker(Worker):
    """Drives one stage, its predicted inputs, and its part of the borders below and above.

    **Arguments:**

    - `stages`: how many there are.
    - `source`: of predicted inputs; stage 0 has none.
    - `synthesis`: guesses multipliers for the border above, where the method asks for that.
    """

    phases = (
        ("acquaint", UP),
        ("serial_forward", UP),
        ("serial_backward", DOWN),
        ("predict", UP),
        ("forward", UP),
        ("backward", UP),
        ("rebuild", UP),
        ("backward_again", UP),
        ("update", UP),
        ("correct", UP),
        ("reduce", DOWN),
        ("spread", UP),
        ("learn", UP),
        ("loss", DOWN),
    )

    def __init__(
        self,
        stage: Stage,
        stages: int,
        mail: Mail,
        method: BorderMethod,
        clock: Clock,
        losses: dict[int, float],
        source: Source | None = None,
        synthesis: Synthesis | None = None,
    ) -> None:
        super().__init__(stage, mail, clock, losses)
        self.method, self.rule = method, method.border_rule()
        self.source, self.synthesis = source, synthesis
        self.capacity = source.capacity if source is not None else None
        self.multiplier: Any = getattr(method, "multiplier", "none")
        self.replays = self.multiplier == "replay"
        self.shallow = method.ablation == "shallow"
        self.frozen = method.ablation == "frozen" and not stage.last
        self.idle = self.shallow and not stage.last
        self.now: Encounter | None = None
        self.serial: Job | None = None
        self._serial = SerialPart(self)
        self._echo = Echo(stage) if method.echo != 0.0 and stage.last and source is not None else None
        self._before: Encounter | None = None
        self._delay = stages - 1 - stage.index if self.replays else 0
        self._line: deque[Job | None] = deque()
        self._statistics = frozen_statistics(stage.module)
        self._batches = self._closed = 0

    def open(self, job: Job | None) -> None:
        serial = job is not None and self.method.is_serial(job.micro.batch)
        self.serial = job if serial else None
        self._line.append(None if serial else job)
        self._before = self.now
        turn = self._line.popleft() if len(self._line) > self._delay else None
        self.now = Encounter(turn) if turn is not None and not self.idle else None
        self._passing = turn
        self._closed = 0

    # ----------------------------------------------------------------- serial

    def acquaint(self) -> None:
        """Stored inputs of new samples come from a pass through the network; networks need no such thing."""

    def serial_forward(self) -> None:
        """Plain backpropagation, first half."""
        if self.serial is not None:
            self._serial.forward(self.serial)

    def serial_backward(self) -> None:
        """Plain backpropagation, second half; the predicted inputs learn from the true ones."""
        if self.serial is not None:
            inputs = self._serial.backward(self.serial)
            if self.source is not None:
                self.clock("aux_backward", self.serial.micro, self.source.distil, self.serial, inputs)
                self._count(self.serial)

    # --------------------------------------------------------------- parallel

    def predict(self) -> None:
        """Make the stage's input; the stage below is told."""
        if self.now is None or self.source is None:
            return
        now, job = self.now, self.now.job
        now.lam = self.clock("aux_forward", job.micro, self.source.predict, job, keep=not self.replays)
        now.kappa = self.source.multiplier(job)
        if callable(self.multiplier):
            now.kappa = self.clock("border", job.micro, given_multiplier, self.multiplier, self.index, job, now.lam)
        if not self.replays and not self.shallow:
            self.send(INPUT, -1, job, self._for_below(now, None if callable(self.multiplier) else now.kappa))

    def _for_below(self, now: Encounter, kappa: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The predicted input, shifted by the multiplier where one tensor can stand for both."""
        assert now.lam is not None
        weight = self._beta(now.job) * self.method.pull
        if kappa is None or self.rule.normalise or self.rule.downsample > 1 or not weight:
            return self.rule.filter(now.lam), kappa
        return now.lam - kappa * (self.method.kappa_stage / (weight * self.rule.stiffness(now.lam))), None

    def forward(self) -> None:
        """Run the stage; the stage above is told what came out."""
        if self.now is None:
            return
        now, job, stage = self.now, self.now.job, self.stage
        now.inputs = job.x if stage.first else self._mixed(now)
        context: Any = torch.no_grad() if self.frozen else nullcontext()
        with context:
            now.out = self._run(now)
        if not stage.last:
            self.send(STATE, 1, job, self.rule.filter(now.out))
            return
        assert stage.loss is not None
        self.losses[job.micro.id] = stage.loss
        self.send(LOSS, -1, job, None, {"loss": stage.loss})

    def _run(self, now: Encounter) -> Any:
        target = now.job.y if self.stage.last else None
        return self.clock("forward", now.job.micro, self.stage.forward, now.job.micro, now.inputs, target)

    def _mixed(self, now: Encounter) -> Tensor:
        assert now.lam is not None
        share = self.method.share_at(now.job.micro.update)
        if share == 0.0 or self.shallow:
            return now.lam
        now.x = self.take(STATE, now.job).payload
        return now.lam.lerp(now.x, share)

    def backward(self) -> None:
        """Go back from the loss, or from the mismatch at the border above."""
        if self.now is None:
            return
        now, job, stage = self.now, self.now.job, self.stage
        if not stage.last:
            now.lam_above, now.kappa_above = self.take(INPUT, job).payload
            if self.synthesis is not None:
                now.kappa_above = self.clock("border", job.micro, self.synthesis.guess, now.out, job.y)
            elif callable(self.multiplier):
                now.kappa_above = self.clock(
                    "border", job.micro, given_multiplier, self.multiplier, self.index + 1, job, now.out
                )
        if self.multiplier != "rebuild" or stage.last:
            self._backward(now)
        elif not stage.first:
            self._backward(now, again=True)
            if stage.updater.optimizer is not None:
                stage.updater.optimizer.zero_grad(set_to_none=True)
        if self.source is not None and self.replays:
            self.send(INPUT, -1, job, self._for_below(now, now.p))
        if self.source is not None and self.multiplier == "synthesiser":
            self.send(ADJOINT, -1, job, now.p)

    def _backward(self, now: Encounter, *, again: bool = False) -> None:
        micro, seeds = now.job.micro, None
        if not self.stage.last:
            seeds = [None if self.frozen else self.clock("border", micro, self._seed, now)]
        part = "trial" if again else "backward"
        found = self.clock(part, micro, self.stage.backward, micro, seeds, again=again).gradients
        now.p = found[0] if found else None

    def _seed(self, now: Encounter) -> Tensor:
        """What the backward of this stage starts from: the gradient of its own local loss."""
        assert now.lam_above is not None
        seed = (self._beta(now.job) * self.method.pull) * self.rule.gradient(now.out, now.lam_above)
        if now.kappa_above is not None:
            seed = seed + self.method.kappa_stage * now.kappa_above
        return seed.to(now.out.dtype)

    def rebuild(self) -> None:
        """Make a multiplier out of this iteration's gradient, for the stage below to go back once more."""
        if self.now is None or self.source is None or self.multiplier != "rebuild":
            return
        now = self.now
        assert now.lam is not None
        assert now.p is not None
        if now.x is None:
            now.x = self.take(STATE, now.job).payload
        seed = (self._beta(now.job) * self.method.pull) * self.rule.gradient(now.x, now.lam)
        now.kappa = relaxed_multiplier(seed, now.p, self.method.theta)
        self.send(MULTIPLIER, -1, now.job, now.kappa)

    def backward_again(self) -> None:
        """The backward that counts, where the first one only served to make multipliers."""
        if self.now is not None and not self.stage.last and self.multiplier == "rebuild":
            self.now.kappa_above = self.take(MULTIPLIER, self.now.job).payload
            self._backward(self.now)

    def update(self) -> None:
        """Apply the gradients; repeat with the same inputs and aims if several steps are asked for."""
        if self.now is None or not self.now.job.micro.ends:
            return
        now, micro = self.now, self.now.job.micro
        if self._echo is not None:
            self.clock("echo", micro, self._echo.mix, self.method.echo_at(micro.update))
        p, out = now.p, now.out
        for _ in range(0 if self.frozen else self.method.stage_steps - 1):
            with self.stage.updater.unscheduled():
                self.clock("update", micro, self.stage.update)
            with self._statistics:
                now.out = self._run(now)
            self._backward(now)
        self.clock("update", micro, self.stage.update)
        now.p, now.out = p, out

    def correct(self) -> None:
        """Correct the predicted input of the micro-batch whose state is there now."""
        met = self._before if self.replays else self.now
        if self.source is None or met is None:
            return
        assert met.lam is not None
        job, kappa = met.job, met.p if self.replays else met.kappa
        x = met.x if met.x is not None or self.shallow else self.take(STATE, job).payload
        meeting = Meeting(met.lam, x, met.p, kappa, self._beta(job))
        if x is not None and job.micro.ends and job.micro.update % self.method.measure == 0:
            self.records.append(measure_border(self.method, self.rule, meeting, job.micro.update))
        self.clock("aux_backward", job.micro, self.source.correct, job, meeting)
        if self._echo is not None and x is not None:
            self._echo.hear(job, x)
        self._count(job)

    def _count(self, job: Job) -> None:
        """Note a finished micro-batch of the predictions; they are updated at the end of a group."""
        assert self.source is not None
        self._batches += job.micro.index == job.micro.count - 1
        if job.micro.ends:
            self._closed, self._batches = self._batches, 0
            if not self.source.shared:
                self.clock("aux_backward", job.micro, self.source.update, self._closed)

    def reduce(self) -> None:
        """Add up the gradients of a shared network, from the last stage down."""
        if self.source is not None and self.source.shared and self._closed:
            self.source.reduce(self)

    def spread(self) -> None:
        """Hand the sums up again, and update all copies alike."""
        if self.source is not None and self.source.shared and self._closed:
            self.source.spread(self)
            self.source.update(self._closed)

    def learn(self) -> None:
        """Teach the synthesiser what the gradient was."""
        if self.synthesis is not None and self.now is not None:
            now = self.now
            gradient = self.take(ADJOINT, now.job).payload
            self.clock("border", now.job.micro, self.synthesis.learn, now.out, now.job.y, gradient)

    def loss(self) -> None:
        """Pass the loss on, so that every rank knows it."""
        if self._passing is not None and not self.stage.last:
            message = self.take(LOSS, self._passing)
            assert message.scalars is not None
            self.losses[self._passing.micro.id] = message.scalars["loss"]
            self.send(LOSS, -1, self._passing, None, message.scalars)

    def finish(self) -> None:
        super().finish()
        if self._batches and self.source is not None:
            self.source.update(self._batches)
            self._batches = 0

    def route(self, path: str | None) -> Any:
        if path == "auxiliary" or (path is None and self.shallow):
            return Shortcut(self.stage, self.source)
        return super().route(path)

    def trained(self) -> dict[str, Trained]:
        found = self.source.trained() if self.source is not None else {}
        return {**found, "synthesiser": self.synthesis.net} if self.synthesis is not None else found

    def _beta(self, job: Job) -> float:
        return self.method.beta_at(job.micro.update) * job.micro.scale


def given_multiplier(function: Any, border: int, job: Job, like: Tensor) -> Tensor:
    """What a user's function says, if it fits the border."""
    found = function(border, job.x, job.y)
    if not isinstance(found, Tensor) or found.shape != like.shape:
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"the multiplier function must return a tensor of shape {tuple(like.shape)} for border {border}, the state "
            f"of this batch there, got {got}"
        )
    return found.detach()
