"""Where a stage's predicted input comes from: a network that is trained beside the stage, or a table of samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...nn.auxiliary import Capacity
from ...nn.rescaled import Rescaled
from ...runtime.stage import StageOptions
from ...runtime.trained import Trained
from ...transport.mail import Micro
from .mismatch import corrected
from .records import BorderValues

if TYPE_CHECKING:
    from .border import BorderMethod

__all__ = ["AuxNetSource", "Raw", "SharedAuxNetSource", "Shortcut", "Source"]

# Keeps the random numbers of an AuxNet apart from those of its stage, whose stream is (seed, stage, micro).
_STREAM = 1 << 32


class Raw(NamedTuple):
    """The data and targets of a micro-batch, as they were fed."""

    x: Any
    y: Any


class Source(ABC):
    """Makes predicted inputs and learns from what became of them."""

    #: How large it is against what it stands for, if it is a network.
    capacity: Capacity | None = None

    def __init__(self, method: BorderMethod) -> None:
        self.method = method
        self.rule = method.border_rule()

    @abstractmethod
    def predict(self, micro: Micro, raw: Raw, *, keep: bool) -> Tensor:
        """The input of the stage for this micro-batch, detached; `keep` what the correction will need."""

    @abstractmethod
    def correct(self, micro: Micro, raw: Raw, values: BorderValues) -> None:
        """Learn from a micro-batch."""

    @abstractmethod
    def distil(self, micro: Micro, raw: Raw, x: Tensor) -> None:
        """Learn from the state of a serial pass alone."""

    def multiplier(self, raw: Raw) -> Tensor | None:
        """The multiplier of this micro-batch, where it is kept here."""
        return None

    def update(self, batches: int) -> None:  # noqa: B027 - most have nothing to do here
        """Apply what was learned over `batches` batches."""

    def reduce(self, above: list[Tensor] | None) -> list[Tensor]:
        """Add the gradients from above to one's own. **Returns:** the sums for the stage below."""
        raise NotImplementedError(f"{type(self).__name__} is not shared")

    def spread(self, below: list[Tensor] | None) -> list[Tensor]:
        """Take over the complete sums from below. **Returns:** them for the stage above."""
        raise NotImplementedError(f"{type(self).__name__} is not shared")

    def evaluate(self, x: Any) -> Tensor:
        """The predicted input for data that is only evaluated."""
        raise ConfigError(f"{self.method.name} stores inputs of known samples and cannot predict those of new ones")

    def trained(self) -> dict[str, Trained]:
        """What is trained here, by name."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What is stored here and belongs into a checkpoint."""
        return {}

    def load_tensors(self, found: dict[str, Tensor]) -> None:  # noqa: B027 - most have nothing to do here
        """Take over what `tensors` returned."""

    def jump(self, values: BorderValues) -> Tensor:
        """The gradient in the predicted input of everything it is meant to lower."""
        method = self.method
        adjoint = 0.0 if method.ablation == "no-adjoint" else method.adjoint
        total = torch.zeros_like(values.lam)
        if values.p is not None and adjoint:
            total = total + adjoint * values.p
        if values.kappa is not None and method.kappa_input:
            total = total - method.kappa_input * values.kappa
        if values.x is not None and method.imitate:
            total = total + (values.beta * method.imitate) * self.rule.gradient(values.lam, values.x)
        return total


class AuxNetSource(Source):
    """A network from raw data to the stage's input.

    **Arguments:**

    - `net`: the network with its optimizer; its module is a `Rescaled`.
    - `stage`: whose input it predicts.
    """

    def __init__(
        self, method: BorderMethod, net: Trained, stage: int, options: StageOptions, capacity: Capacity | None
    ) -> None:
        super().__init__(method)
        self.net = net
        self.capacity = capacity
        self._fits = method.fits
        self._stage = stage
        self._options = options
        self._kept: dict[int, Tensor] = {}

    @property
    def module(self) -> Rescaled:
        assert isinstance(self.net.module, Rescaled)
        return self.net.module

    def evaluate(self, x: Any) -> Tensor:
        self.module.eval()
        try:
            with torch.no_grad():
                found: Tensor = self.module(x)
                return found
        finally:
            self.module.train()

    def _run(self, micro: Micro, raw: Raw) -> Tensor:
        options = self._options
        with options.random(self._stage + _STREAM, micro.id), options.autocast():
            found: Tensor = self.module(raw.x)
            return found

    def predict(self, micro: Micro, raw: Raw, *, keep: bool) -> Tensor:
        if not keep:
            with torch.no_grad():
                return self._run(micro, raw)
        out = self._kept[micro.id] = self._run(micro, raw)
        return out.detach()

    def correct(self, micro: Micro, raw: Raw, values: BorderValues) -> None:
        out = self._kept.pop(micro.id, None)
        if out is None:
            # Fitted one iteration after use: the prediction is made again at the newest weights.
            out = self._run(micro, raw)
            values = BorderValues(out.detach(), values.x, values.p, values.kappa, values.beta)
        jump = self.jump(values)
        if self._fits and values.x is not None:
            self._fit(micro, raw, out, values, jump)
        else:
            self._backward(out, jump)
        if values.x is not None:
            self.module.observe(values.x)

    def _fit(self, micro: Micro, raw: Raw, out: Tensor, values: BorderValues, jump: Tensor) -> None:
        """Correct the auxiliary variable, then fit the network to it, in the units of the Lagrangian."""
        weight, stiffness = values.beta * self.method.imitate, self.rule.stiffness(values.lam)
        aim = corrected(values.lam, jump, self.method.theta, weight, stiffness)
        for left in range(self._fits, 0, -1):
            self._backward(out, (out.detach() - aim) * (weight * stiffness / self.method.theta))
            if left > 1:
                # Several fits are one update of the run, as far as its learning rate is concerned.
                self.net.update(schedule=False)
                out = self._run(micro, raw)

    def distil(self, micro: Micro, raw: Raw, x: Tensor) -> None:
        out = self._run(micro, raw)
        self._backward(out, self.rule.gradient(out, self.rule.filter(x)) * micro.scale)
        self.module.observe(x)

    def _backward(self, out: Tensor, cotangent: Tensor) -> None:
        if out.requires_grad:
            torch.autograd.backward([out], [cotangent.to(out.dtype)])

    def update(self, batches: int) -> None:
        self.net.update(batches)

    def trained(self) -> dict[str, Trained]:
        return {"auxnet": self.net}


class SharedAuxNetSource(AuxNetSource):
    """A copy of the first parts of the shared network, up to this stage's tap.

    The gradient of a part is the sum over all taps above it. Sums go down from the last stage, each adding its own, and
    the totals go up again, so that all copies take the same step.
    """

    def _gradients(self, parts: int) -> list[Tensor]:
        """Of the first `parts` parts, in a fixed order; zeros where nothing was found."""
        return [
            p.grad if p.grad is not None else torch.zeros_like(p)
            for part in list(self.module.parts)[:parts]
            for p in part.parameters()
        ]

    def _set(self, gradients: list[Tensor]) -> None:
        owners = [p for part in self.module.parts for p in part.parameters()]
        for p, gradient in zip(owners, gradients, strict=False):
            p.grad = gradient.clone()

    def reduce(self, above: list[Tensor] | None) -> list[Tensor]:
        if above is not None:
            own = self._gradients(len(self.module.parts))
            self._set([a + b for a, b in zip(own, above, strict=True)])
        return self._copies(self._stage - 1)

    def spread(self, below: list[Tensor] | None) -> list[Tensor]:
        if below is not None:
            self._set(below)
        return self._copies(self._stage)

    def update(self, batches: int) -> None:
        # Copies hold different numbers of parts, so the norm that is limited must be that of a part.
        if self._options.clip_grad_norm is not None:
            for part in self.module.parts:
                nn.utils.clip_grad_norm_(part.parameters(), self._options.clip_grad_norm)
        super().update(batches)

    def _copies(self, parts: int) -> list[Tensor]:
        return [gradient.clone() for gradient in self._gradients(parts)]


class Shortcut:
    """The short way through the network, for evaluation: raw data, predicted input of the last stage, last stage."""

    def __init__(self, stage: Any, source: Source | None) -> None:
        self._stage, self._source = stage, source

    def through(self, stage: Any) -> Shortcut:
        """The same way, with something else that has `last` and `evaluate` in place of the stage."""
        return Shortcut(stage, self._source)

    def evaluate(self, inputs: Any) -> Any:
        """Hand raw data on, or at the last stage use it."""
        if not self._stage.last or self._source is None:
            return self._stage.evaluate(inputs) if self._stage.last else inputs
        return self._stage.evaluate(self._source.evaluate(inputs))
