"""Makes what the stages of local methods are given: AuxNets, tables, heads, synthesisers; and checks that they fit."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ShapeMismatch
from ..methods.auxnet import AuxNet
from ..methods.auxvar import AuxVar
from ..methods.border import BorderMethod
from ..methods.local import DGL, DNI
from ..nn.auxiliary import Border, capacity, check_auxnet, coarse_parts, find_borders, measure_blocks
from ..nn.heads import GradientSynthesiser, local_head
from ..nn.randomness import replayable
from ..nn.ranged import Ranged
from ..nn.tree import batch_size, map_tensors
from ..rules.updates import StagePlace
from ..runtime.border_worker import BorderWorker
from ..runtime.clock import Clock
from ..runtime.events import Recorder
from ..runtime.greedy_worker import GreedyWorker, HeadWorker, SynthesisWorker
from ..runtime.mail import Mail
from ..runtime.shared_auxnet import SharedAuxNetSource
from ..runtime.sources import AuxNetSource
from ..runtime.stage import Stage
from ..runtime.synthesis import Synthesis
from ..runtime.table_source import Roster, TableSource
from ..runtime.table_worker import TableWorker
from ..runtime.trained import Trained
from ..runtime.worker import Worker
from .build import Blueprint
from .local_loss import check_loss

__all__ = ["Workshop"]

log = logging.getLogger("unlatch")
_STREAM = 1 << 33


class Workshop:
    """Makes workers; knows the borders of the network and checks that the method can handle them."""

    def __init__(self, blueprint: Blueprint, mail: Mail, recorder: Recorder, losses: dict[int, float]) -> None:
        self.blueprint, self.mail, self.recorder, self.losses = blueprint, mail, recorder, losses
        self.method = blueprint.method
        self.stages = len(blueprint.plan.starts)
        self.borders: dict[int, Border] = {}
        self.output: tuple[int, ...] = ()
        self.dtype = next((p.dtype for b in blueprint.blocks for p in b.module.parameters()), torch.float32)
        self._trained = {id(p) for b in blueprint.blocks for p in b.module.parameters()}
        if self.stages > 1:
            self._look()

    def _look(self) -> None:
        """Run the sample through the network once."""
        blueprint, name = self.blueprint, self.method.name
        if blueprint.sample is None:
            raise ConfigError(f"{name} builds networks that fit the borders between stages: pass sample=(x, y)")
        if not blueprint.mean_loss:
            raise ConfigError(
                f'{name} weighs its local losses against a mean over samples: loss_reduction must be "mean"'
            )
        x, y = blueprint.sample
        found = find_borders(blueprint.blocks, blueprint.plan.starts, x)
        self.borders = {border.stage: border for border in found}
        output = measure_blocks(blueprint.blocks, x)[-1]
        check_loss(name, blueprint.options.loss_fn, output, map_tensors(lambda t: t[:2], y))
        if isinstance(output, Tensor):
            self.output = tuple(output.shape[1:])
        vectors = any(len(border.shape) == 1 for border in found)
        normalised = isinstance(self.method, BorderMethod) and self.method.border_norm
        if vectors and normalised and batch_size(x) <= blueprint.parts:
            log.warning(
                "border_norm compares channels over a batch, and a single vector has no variance: with (micro-)batches "
                "of one sample all predictions are alike. Use larger batches, or border_norm=False."
            )

    def worker(self, stage: Stage) -> Worker:
        """The worker of one stage."""
        clock = Clock(stage, self.recorder)
        if isinstance(self.method, BorderMethod):
            return self._border_worker(stage, clock, self.method)
        kinds: dict[type, type[GreedyWorker]] = {DGL: HeadWorker, DNI: SynthesisWorker}
        kind = next((kinds[c] for c in type(self.method).__mro__ if c in kinds), None)
        if kind is None:
            raise ConfigError(f"there is no executor for the local method {self.method.name!r}")
        worker = kind(stage, self.stages, self.mail, clock, self.losses)
        if isinstance(worker, HeadWorker) and not stage.last:
            worker.head = self._head(stage.index)
        elif isinstance(worker, SynthesisWorker) and not stage.last:
            worker.synthesis = self._synthesis(stage.index)
        return worker

    def _border_worker(self, stage: Stage, clock: Clock, method: BorderMethod) -> Worker:
        place = (stage, self.stages, self.mail, method, clock, self.losses)
        if isinstance(method, AuxVar):
            roster = Roster(method.capacity)
            worker = TableWorker(*place, TableSource(method, stage.index, roster) if stage.index else None)
            worker.roster = roster
            return worker
        assert isinstance(method, AuxNet)
        source = self._auxnet(stage.index, method) if stage.index else None
        guesses = method.multiplier == "synthesiser" and not stage.last
        return BorderWorker(*place, source, self._synthesis(stage.index) if guesses else None)

    def _auxnet(self, stage: int, method: AuxNet) -> AuxNetSource:
        border, options = self.borders[stage], self.blueprint.options
        if method.factory is not None:
            with replayable(options.seed, stage + _STREAM, 0):
                made = _made(f"factory of the AuxNet of stage {stage}", method.factory, border)
            parts: list[nn.Module] = [self._own(check_auxnet(made, border), f"the AuxNet of stage {stage}")]
        else:
            parts = coarse_parts(border, self.blueprint.plan.starts, method.depth, shared=method.shared)
        net = Ranged(parts, border.shape, rescale=method.border_norm)
        check_auxnet(net, border)
        optimizer = _given(method.aux_optimizer, options.optimizer)
        clip, place = (
            None if method.shared else options.clip_grad_norm,
            StagePlace(stage, len(self.blueprint.plan.starts)),
        )
        trained = Trained(net, optimizer, options.lr_scheduler, clip, place)
        size = capacity(net, border)
        if size.flop_ratio > 0.5:
            log.warning(
                "the AuxNet of stage %d costs %.0f %% of the blocks it stands for, so little is gained: cut later or "
                "into fewer stages, or pass a smaller one (factory=...)",
                stage,
                100 * size.flop_ratio,
            )
        kind = SharedAuxNetSource if method.shared else AuxNetSource
        return kind(method, trained, stage, options, size)

    def _own(self, net: Any, described: str) -> nn.Module:
        """The network itself, if no other part of the run trains any of its weights."""
        if not isinstance(net, nn.Module):
            raise ConfigError(f"{described} must be a torch.nn.Module, got {type(net).__name__}")
        mine = {id(p) for p in net.parameters()}
        if mine & self._trained:
            raise ConfigError(
                f"{described} shares weights with the network or with another one beside it; on separate ranks they "
                "would drift apart. Return a new module for every stage (copy.deepcopy makes one)."
            )
        self._trained |= mine
        return net

    def _synthesis(self, stage: int) -> Synthesis:
        """A guesser of the gradient at the output of `stage`."""
        method, border = self.method, self.borders[stage + 1]
        classes = self.output[0] if len(self.output) == 1 else 0
        rate, make, conditioned = 1e-3, None, True
        if isinstance(method, DNI):
            rate, make, conditioned = method.learning_rate, method.synthesiser, method.conditioned
        elif isinstance(method, AuxNet):
            rate = method.synthesiser_lr
        known = classes if conditioned and self._has_classes() else 0
        with replayable(self.blueprint.options.seed, stage + _STREAM, 1):
            if make is None:
                net: nn.Module = GradientSynthesiser(border.shape, known)
            else:
                net = _made(f"synthesiser function of stage {stage}", make, border.shape, known)
        self._own(net, f"the synthesiser of stage {stage}").to(self.dtype)
        if not callable(getattr(net, "loss", None)):
            raise ConfigError(
                f"the synthesiser of stage {stage} is a {type(net).__name__} without loss(h, target, gradient): give "
                "it one, as unlatch.nn.heads.GradientSynthesiser has"
            )
        return Synthesis(Trained(net, lambda params: torch.optim.Adam(params, lr=rate)))

    def _has_classes(self) -> bool:
        assert self.blueprint.sample is not None
        y = self.blueprint.sample[1]
        return isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point()

    def _head(self, stage: int) -> Trained:
        method, border, options = self.method, self.borders[stage + 1], self.blueprint.options
        assert isinstance(method, DGL)
        with replayable(options.seed, stage + _STREAM, 2):
            if method.head is not None:
                net = _made(f"head function of stage {stage}", method.head, border.shape, self.output)
            else:
                net = local_head(border.shape, self.output, f"the end of stage {stage}").to(self.dtype)
        self._check_head(self._own(net, f"the head of stage {stage}"), stage)
        optimizer = _given(method.head_optimizer, options.optimizer)
        place = StagePlace(stage, len(self.blueprint.plan.starts))
        return Trained(net, optimizer, options.lr_scheduler, options.clip_grad_norm, place)

    def _check_head(self, net: nn.Module, stage: int) -> None:
        shape = self.borders[stage + 1].shape
        try:
            with torch.no_grad():
                trial = net.eval()(torch.zeros(2, *shape, dtype=self.dtype))
        except Exception as error:
            raise ShapeMismatch(
                f"the head of stage {stage} fails on {shape} per sample, what the stage puts out: "
                f"{type(error).__name__}: {error}"
            ) from error
        got = tuple(trial.shape[1:]) if isinstance(trial, Tensor) else type(trial).__name__
        if got != self.output:
            raise ShapeMismatch(f"the head of stage {stage} puts out {got} per sample, the network {self.output}")


def _made(what: str, make: Any, *arguments: Any) -> Any:
    """What a user's function returns; its failure is told with what it was called with."""
    try:
        return make(*arguments)
    except Exception as error:
        shown = ", ".join(type(a).__name__ if isinstance(a, Border) else repr(a) for a in arguments)
        raise ConfigError(f"the {what}, called with ({shown}), failed: {type(error).__name__}: {error}") from error


def _given(factory: Any, default: Any) -> Any:
    # A factory may be an object that counts as false, such as one that lists what it made.
    return default if factory is None else factory
