"""Makes networks that are trained beside the stages (AuxNets, heads, synthesisers) and checks that they fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError, ShapeMismatch
from ...nn.auxiliary import Border, capacity, check_auxnet, coarse_parts, find_borders, measure_blocks
from ...nn.border_state import BorderState
from ...nn.carry import Carrier
from ...nn.chain import as_module
from ...nn.heads import GradientSynthesiser, local_head
from ...nn.randomness import replayable
from ...nn.rescaled import Rescaled
from ...nn.tree import batch_size, map_tensors
from ...rules.updates import StagePlace
from ...runtime.blueprint import Blueprint
from ...runtime.trained import Trained
from .loss import check_loss
from .synthesis import Synthesis

__all__ = ["Networks"]

log = logging.getLogger("unlatch")
_STREAM = 1 << 33
#: A perceptron of four layers learns digits up to here and diverges at ten times as much: studies/digits-auxnet-pull.
_MOST_PULL = 3.0


class Networks:
    """Knows the borders between the stages of a network, and makes what fits them.

    **Arguments:** `name`: of the method, for errors.
    """

    def __init__(self, name: str, blueprint: Blueprint) -> None:
        self.name, self.blueprint = name, blueprint
        self.borders: dict[int, Border] = {}
        self.output: tuple[int, ...] = ()
        self.dtype = next((p.dtype for b in blueprint.blocks for p in b.module.parameters()), torch.float32)
        # The weights themselves, not only their ids, which others could get once these are gone.
        self._trained = {id(p): p for b in blueprint.blocks for p in b.module.parameters()}
        if blueprint.stages > 1:
            self._look()

    def _look(self) -> None:
        """Run the sample through the network once."""
        blueprint, name = self.blueprint, self.name
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
        few = map_tensors(lambda t: t[:2], y)
        check_loss(name, blueprint.options.loss_fn, output, few, blueprint.microbatches)
        if isinstance(output, Tensor):
            self.output = tuple(output.shape[1:])

    def reading(self, stage: int) -> BorderState | None:
        """Where the tensors of what `stage` takes in are; `None` for the first, which takes raw data."""
        border = self.borders.get(stage)
        return border.reading if border is not None else None

    def require_single_tensors(self) -> None:
        """Refuse borders where anything travels beside the tensor that is predicted."""
        for border in self.borders.values():
            if isinstance(border.state, Tensor):
                continue
            block = self.blueprint.blocks[self.blueprint.plan.starts[border.stage]].name
            tied = list(border.reading.weights)
            raise ShapeMismatch(
                f"{self.name} predicts what stage {border.stage} (block '{block}') takes in, which must be one tensor: "
                + (
                    f"here the weight '{self._original_name(tied[0])}' of an earlier stage comes with it. Untie it "
                    "(config.tie_word_embeddings=False in models of Hugging Face), keep the blocks that share it in "
                    "one stage (split=[...])"
                    if tied
                    else f"here it is {_parts(border.state)}. Cut elsewhere (split=[...]); pack sequences to one "
                    "length, so that no mask is needed"
                )
                + ", or use dgl, auglocal, dni, or a method that sends gradients."
            )

    def _original_name(self, carried: str) -> str:
        """What a weight that is carried is called in the model."""
        carriers = [block.module for block in self.blueprint.blocks if isinstance(block.module, Carrier)]
        weight = next(module.weight(carried) for module in carriers if carried in module.shown)
        return next(name for name, p in as_module(self.blueprint.model).named_parameters() if p is weight)

    def warn_of_single_vectors(self) -> None:
        """Channels of vectors are compared over the batch, which must have more than one sample for that."""
        sample = self.blueprint.sample
        vectors = any(len(border.shape) == 1 for border in self.borders.values())
        if vectors and sample is not None and batch_size(sample[0]) <= self.blueprint.microbatches:
            log.warning(
                "border_norm compares channels over a batch, and a single vector has no variance: with (micro-)batches "
                "of one sample all predictions are alike. Use larger batches, or border_norm=False."
            )

    def warn_of_strong_pull(self, weight: float) -> None:
        """Stages that do not normalise feel the whole weight of a border loss in their steps."""
        starts = self.blueprint.plan.starts
        bare = [
            str(stage)
            for stage, (start, end) in enumerate(pairwise(starts))
            if not any(_normalises(block.module) for block in self.blueprint.blocks[start:end])
        ]
        if bare and weight > _MOST_PULL:
            log.warning(
                "nothing normalises in stage %s, so that its steps grow with the weight of the border loss, here %g: "
                "training may diverge, and the network end at chance while the AuxNet and the last stage alone do "
                "well. Let beta times pull be at most %g, or use blocks with batch or layer norm.",
                ", ".join(bare),
                weight,
                _MOST_PULL,
            )

    def auxnet(
        self,
        stage: int,
        factory: Callable[[Border], nn.Module] | None,
        optimizer: Any,
        *,
        depth: int,
        shared: bool,
        rescale: bool,
    ) -> tuple[Trained, Any]:
        """A network from raw data to the input of `stage`, and how large it is against what it stands for."""
        border, options = self.borders[stage], self.blueprint.options
        if factory is not None:
            with replayable(options.seed, stage + _STREAM, 0):
                made = _made(f"factory of the AuxNet of stage {stage}", factory, border)
            parts: list[nn.Module] = [self._own(check_auxnet(made, border), f"the AuxNet of stage {stage}")]
        else:
            parts = coarse_parts(border, self.blueprint.plan.starts, depth, shared=shared)
        net = Rescaled(parts, border.shape, rescale=rescale)
        check_auxnet(net, border)
        clip, make = None if shared else options.clip_grad_norm, _given(optimizer, options.optimizer)
        place, size = self._place(stage, net), capacity(net, border)
        net = options.device.moved(net)
        trained = Trained(net, place, make, options.lr_scheduler, clip, checks=options.checks_finite)
        if size.flop_ratio > 0.5:
            log.warning(
                "the AuxNet of stage %d costs %.0f %% of the blocks it stands for, so little is gained: cut later or "
                "into fewer stages, or pass a smaller one (factory=...)",
                stage,
                100 * size.flop_ratio,
            )
        return trained, size

    def _place(self, stage: int, net: nn.Module) -> StagePlace:
        names = tuple(name for name, p in net.named_parameters() if p.requires_grad)
        return StagePlace(stage, self.blueprint.stages, names=names)

    def _own(self, net: Any, described: str) -> nn.Module:
        """The network itself, if no other part of the run trains any of its weights."""
        if not isinstance(net, nn.Module):
            raise ConfigError(f"{described} must be a torch.nn.Module, got {type(net).__name__}")
        mine = {id(p): p for p in net.parameters()}
        if mine.keys() & self._trained.keys():
            raise ConfigError(
                f"{described} shares weights with the network or with another one beside it; on separate ranks they "
                "would drift apart. Return a new module for every stage (copy.deepcopy makes one)."
            )
        self._trained |= mine
        return net

    def synthesiser(
        self, stage: int, rate: float, make: Callable[..., nn.Module] | None = None, *, conditioned: bool = True
    ) -> Synthesis:
        """A guesser of the gradient at the output of `stage`."""
        border = self.borders[stage + 1]
        classes = self.output[0] if len(self.output) == 1 else 0
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
        checks, place = self.blueprint.options.checks_finite, self._place(stage, net)
        net = self.blueprint.options.device.moved(net)
        return Synthesis(Trained(net, place, lambda params: torch.optim.Adam(params, lr=rate), checks=checks))

    def _has_classes(self) -> bool:
        assert self.blueprint.sample is not None
        y = self.blueprint.sample[1]
        return isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point()

    def head(
        self, stage: int, make: Callable[..., nn.Module] | None, optimizer: Any, *, sees_state: bool = False
    ) -> Trained:
        """A network from the output of `stage`, its main tensor or all of it, to outputs of the whole network."""
        border, options = self.borders[stage + 1], self.blueprint.options
        with replayable(options.seed, stage + _STREAM, 2):
            if make is not None:
                net = _made(f"head function of stage {stage}", make, border.shape, self.output)
            else:
                net = local_head(border.shape, self.output, f"the end of stage {stage}").to(self.dtype)
        seen = border.state if sees_state else torch.zeros(2, *border.shape, dtype=self.dtype)
        self._check_head(self._own(net, f"the head of stage {stage}"), stage, seen)
        return Trained(
            options.device.moved(net),
            self._place(stage, net),
            _given(optimizer, options.optimizer),
            options.lr_scheduler,
            options.clip_grad_norm,
            checks=options.checks_finite,
        )

    def _check_head(self, net: nn.Module, stage: int, seen: Any) -> None:
        shape = self.borders[stage + 1].shape
        try:
            with torch.no_grad():
                trial = net.eval()(map_tensors(Tensor.clone, seen))
        except Exception as error:
            raise ShapeMismatch(
                f"the head of stage {stage} fails on {shape} per sample, what the stage puts out: "
                f"{type(error).__name__}: {error}"
            ) from error
        got = tuple(trial.shape[1:]) if isinstance(trial, Tensor) else type(trial).__name__
        if got != self.output:
            raise ShapeMismatch(f"the head of stage {stage} puts out {got} per sample, the network {self.output}")


def _normalises(module: nn.Module) -> bool:
    # By name, since models of others bring layers of their own, as LlamaRMSNorm.
    return any("norm" in type(part).__name__.lower() for part in module.modules())


def _parts(state: Any) -> str:
    kind = f"a {type(state).__name__}"
    return f"{kind} of {', '.join(map(repr, state))}" if isinstance(state, dict) else kind


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
