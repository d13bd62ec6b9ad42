"""What is measured at a stage while it computes: bytes, versions, how well inputs are reconstructed; who looks on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..nn.chain import Block, StageChain
from ..nn.inverse_check import check_blocks
from ..nn.tree import Tree, unflatten
from ..rules.kept import Kept
from ..transport.mail import Micro
from .metering import PeakMeter, Scale
from .reconstruction import Reconstruction

if TYPE_CHECKING:
    from .stage import Stage

__all__ = ["Measured", "Observer"]

_COUNTS = ("kept_bytes", "peak_bytes", "peak_versions", "stored_bytes", "most_in_flight")


class Measured:
    """The measuring half of a `Stage`. Graphs are weighed once for each shape of input, which takes time.

    **Arguments:**

    - `module`: of the stage; its weights and buffers are there anyway and weigh nothing.
    - `inverse_tolerance`: relative error with which its inverse passes; that of `check_blocks` if `None`.
    """

    def __init__(self, module: nn.Module, inverse_tolerance: float | None = None) -> None:
        self.kept_bytes = self.peak_bytes = self.peak_versions = 0
        self.stored_bytes = self.most_in_flight = 0
        self.reconstruction = Reconstruction()
        self._module = module
        self._inverse_tolerance = inverse_tolerance
        self.inverse_checked = False
        self._known: dict[tuple[Any, ...], int] = {}
        self._beside: dict[int, int] = {}

    def weighed(self, kept: Kept, nbytes: int) -> None:
        """Take note of the bytes that are kept of a micro-batch now."""
        self.kept_bytes += nbytes - kept.nbytes
        kept.nbytes = nbytes
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes)

    def forward_done(self, in_flight: int) -> None:
        """Take note of the moment after a forward, with so many micro-batches under way."""
        self.stored_bytes = max(self.stored_bytes, self.kept_bytes)
        self.most_in_flight = max(self.most_in_flight, in_flight)

    def graph_bytes(self, kept: Kept) -> int | None:
        """What the graph of a micro-batch takes, if one of its shape was weighed before."""
        return self._known.get(_shapes(kept.inputs))

    @contextmanager
    def weighing(self, kept: Kept) -> Iterator[Scale]:
        """Weigh the graph that is made inside."""
        scale = Scale([*self._module.parameters(), *self._module.buffers()])
        yield scale
        for t in [*kept.inputs, *(kept.outputs or [])]:
            scale(t)
        self._known[_shapes(kept.inputs)] = scale.total
        self.weighed(kept, scale.total)

    @contextmanager
    def weighing_beside(self, micro: int, nets: Iterable[nn.Module], inputs: Sequence[Tensor]) -> Iterator[None]:
        """Weigh the graph that networks beside the stage make inside; it counts until `freed_beside`."""
        shapes = ("beside", *_shapes(inputs))
        scale = None
        if shapes not in self._known:
            scale = Scale(t for net in nets for t in (*net.parameters(), *net.buffers()))
        with nullcontext() if scale is None else saved_tensors_hooks(partial(_passed, scale), _same):
            yield
        if scale is not None:
            self._known[shapes] = scale.total
        self._beside[micro] = self._known[shapes]
        self.kept_bytes += self._beside[micro]
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes)

    def freed_beside(self, micro: int) -> None:
        """That graph is gone."""
        self.kept_bytes -= self._beside.pop(micro, 0)

    @contextmanager
    def metering(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Find the most bytes that graphs inside, made and freed one by one, hold at once."""
        shapes = _shapes(tensors)
        known = self._known.get(shapes)
        meter = PeakMeter([*self._module.parameters(), *self._module.buffers()]) if known is None else None
        with meter.measuring() if meter is not None else nullcontext():
            yield
        if meter is not None:
            known = self._known[shapes] = meter.peak
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes + (known or 0))

    def sampled(self, kept: Kept) -> Tree:
        """A few numbers of the input, to measure its reconstruction with."""
        return self.reconstruction.sample(kept.micro.id, unflatten(kept.spec, kept.inputs))

    def reconstructed(self, kept: Kept, inputs: Tree) -> None:
        """Measure a reconstruction."""
        self.reconstruction.compare(kept.micro.id, kept.probe, inputs)

    def check_inverse(self, kept: Kept) -> None:
        """Before any update: with a wrong inverse a stage would learn, but from inputs that never were."""
        self.inverse_checked = True
        if all(bool(t.isfinite().all()) for t in kept.inputs):
            check_blocks(_blocks(self._module), unflatten(kept.spec, kept.inputs), self._inverse_tolerance)

    def measured_state(self) -> dict[str, Any]:
        """All counts so far."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "errors": list(self.reconstruction.history),
            "worst": self.reconstruction.worst,
            "inverse_checked": self.inverse_checked,
        }

    def load_measured(self, state: dict[str, Any]) -> None:
        """Take over what `measured_state` returned."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.reconstruction = Reconstruction()
        self.reconstruction.history.extend(tuple(pair) for pair in state["errors"])
        self.reconstruction.worst = state["worst"]
        self.inverse_checked = state["inverse_checked"]


class Observer(Protocol):
    """Whoever looks over a stage's shoulder, such as a probe of gradients. Must leave everything as it is."""

    def forward(self, stage: Stage, micro: Micro, inputs: Tree, target: Tree) -> None:
        """A forward begins; the stage's parameters show the weights that it will see."""

    def update(self, stage: Stage, divisor: float) -> None:
        """The gradients in `.grad` are about to be divided by `divisor` and applied."""


def _passed(scale: Scale, t: Tensor) -> Tensor:
    scale(t)
    return t


def _same(t: Tensor) -> Tensor:
    return t


def _shapes(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((t.shape, t.dtype) for t in tensors)


def _blocks(module: nn.Module) -> list[Block]:
    if isinstance(module, StageChain):
        return [Block(name, block) for name, block in zip(module.names, module.blocks, strict=True)]
    return [Block(type(module).__name__, module)]
