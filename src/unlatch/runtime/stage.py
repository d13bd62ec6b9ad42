"""What one stage can do: forward, backward, its two halves, update. It knows nothing of who calls, or when.

Both executors drive this class, so whatever it computes is the same inline and distributed. How it goes about it is up
to its rules: a stage holds what is kept, and asks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from ..nn.chain import name_in_model
from ..nn.tree import Tree, flatten, map_tensors
from ..rules.activations import Returned
from ..rules.bundle import Rules
from ..rules.gradients import Gradients
from ..rules.kept import Kept
from ..rules.updates import StagePlace
from ..rules.weights import weights_at
from ..transport.mail import Micro
from .measuring import Observer
from .passes import Passes, StageOptions
from .scaling import LossScale
from .updating import Updater

__all__ = ["Gradients", "Kept", "Returned", "Stage", "StageOptions"]

_AS_THEY_ARE = nullcontext()


class Stage(Passes):
    """One stage of the network with its optimizer, its rules, and what it keeps for batches under way.

    **Arguments:**

    - `index`, `stages`: its place.
    - `delay`: most updates that pass between its forward and its backward.
    - `hands_down_input`: whether the stage below reconstructs its input and needs this stage's to do so.
    - `counts_add_up`: as for `Passes`.
    """

    def __init__(
        self,
        index: int,
        stages: int,
        module: nn.Module,
        rules: Rules,
        options: StageOptions,
        *,
        delay: int = 0,
        hands_down_input: bool = False,
        counts_add_up: bool = True,
    ) -> None:
        super().__init__(index, stages, module, options, counts_add_up=counts_add_up)
        self.rules = rules
        self.hands_down_input = hands_down_input
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.params = [p for _, p in named]
        place = StagePlace(index, stages, delay, tuple(name_in_model(module, name) for name, _ in named))
        self.updater = Updater(
            self.params,
            rules.update,
            place,
            options.optimizer,
            options.lr_scheduler,
            lr_scale=options.lr_scale,
            clip_grad_norm=options.clip_grad_norm,
            checks=options.checks_finite,
        )
        self.activation = rules.activation.at(index, stages, module)
        self.reverses, self.recomputes = self.activation.inverts, self.activation.keeps_input
        self.forward_view = rules.forward.at(self.params, self.updater.optimizer, place)
        self.backward_view = rules.backward.at(self.params, place)
        self.gradient_view = rules.gradient.at(self.params, place)
        self.updater.views = (self.forward_view, self.backward_view, self.gradient_view)
        self.seen = 0
        self.observer: Observer | None = None
        #: What is kept of micro-batches under way, by their id.
        self.kept: dict[int, Kept] = {}
        #: By id of a micro-batch under way, what its loss is a mean over; empty unless the loss function counts.
        self.counts: dict[int, float] = {}
        self._batches, self._counted = 0, 0.0
        self._gradients_final = False

    @property
    def version(self) -> int:
        """Updates made so far."""
        return self.updater.version

    def _progress(self) -> str:
        return f", {self.updater.progress}"

    # ---------------------------------------------------------------- forward

    def forward(self, micro: Micro, inputs: Tree, target: Tree = None) -> Tree:
        """Take one micro-batch forward and keep what its backward will need.

        **Returns:** the detached output, or at the last stage `None` (the loss is in `self.loss`).
        """
        here = self.options.device.here
        leaves, spec = flatten(here(inputs))
        target = here(target)
        kept = Kept(micro, self.version, [t.detach() for t in leaves], spec, target)
        with self._forward_weights(kept):
            self.backward_view.note(kept)
            if self.observer is not None:
                self.observer.forward(self, micro, inputs, target)
            outputs = self.activation.forward(self, kept)
        self.kept[micro.id] = kept
        self.forward_done(len(self.kept))
        return None if self.last else map_tensors(Tensor.detach, outputs)

    def _forward_weights(self, kept: Kept) -> AbstractContextManager[None]:
        """Show the forward the weights that its rule wants; inside, the backward's rule is to take note of them."""
        lasting = self.activation.keeps_graph or self.backward_view.holds_storage
        values, self.seen = self.forward_view.values(
            kept.micro, self.version, self.updater.coming_rates, lasting=lasting
        )
        kept.version = self.seen
        return self._showing(values)

    def _showing(self, values: list[Tensor] | None) -> AbstractContextManager[None]:
        return weights_at(self.params, values) if values is not None else _AS_THEY_ARE

    def recording(self, kept: Kept) -> AbstractContextManager[None]:
        """Make a graph that will be used later."""
        known = self.graph_bytes(kept)
        if known is None:
            return self._recording_weighed(kept)
        self.weighed(kept, known)
        return self.backward_view.recording(kept)

    @contextmanager
    def _recording_weighed(self, kept: Kept) -> Iterator[None]:
        with self.weighing(kept) as scale, self.backward_view.recording(kept, scale):
            yield

    # --------------------------------------------------------------- backward

    def backward(
        self, micro: Micro, cotangent: Gradients | None = None, outputs: Tree = None, *, again: bool = False
    ) -> Returned:
        """Take one micro-batch backward; gradients of the weights add up in `.grad`.

        **Arguments:**

        - `cotangent`: one gradient (or `None`) per tensor of the stage's output.
        - `outputs`: the output itself, which a reversible stage starts from.
        - `again`: whether the same micro-batch will go backward once more; its graph is kept.
        """
        kept = self.kept[micro.id]
        age = self.version - kept.version
        if cotangent is not None:
            cotangent = self.gradient_view.received(cotangent, age)
        with self._backward_weights(kept), self.gradient_view.collecting(age):
            returned = self.activation.backward(self, kept, cotangent, outputs, again=again)
        if not again:
            self._forget(micro)
        return returned

    def backward_input(self, micro: Micro, cotangent: Gradients | None = None, outputs: Tree = None) -> Returned:
        """First half of a backward: only the gradient of the stage's input; the weights' half can wait."""
        kept = self.kept[micro.id]
        if cotangent is not None:
            cotangent = self.gradient_view.received(cotangent, self.version - kept.version)
        with self._backward_weights(kept):
            return self.activation.backward_input(self, kept, cotangent)

    def backward_weights(self, micro: Micro) -> None:
        """Second half of a backward: add the gradients of the weights."""
        kept = self.kept[micro.id]
        assert kept.pending is not None
        with self._backward_weights(kept), self.gradient_view.collecting(self.version - kept.version):
            kept.pending.weight_gradients()
        self._forget(micro)

    def _backward_weights(self, kept: Kept) -> AbstractContextManager[None]:
        """Show the backward the weights that its rule wants."""
        return self._showing(self.backward_view.shown(kept, self.version))

    def _forget(self, micro: Micro) -> None:
        self.weighed(self.kept.pop(micro.id), 0)
        self._collected(micro)

    def _collected(self, micro: Micro) -> None:
        """The gradient of a micro-batch is among those that the next update applies."""
        if micro.index == micro.count - 1:
            self._batches += 1
        if self.counts_add_up:
            self._counted += self.counts.get(micro.id, 0.0)

    # ----------------------------------------------------------------- update

    def update(self) -> None:
        """Apply the gradients collected since the last update."""
        self.finish_gradients()
        self._gradients_final = False
        held = {kept.version for kept in self.kept.values() if kept.needs_old_weights}
        stashed = self.backward_view.holds_storage and bool(held)
        self.updater.step(elsewhere=stashed or self.forward_view.holds_storage)
        if self.scaling is not None:
            self.scaling.updated(overflowed=self.updater.left_out)
        if stashed:
            self.peak_versions = max(self.peak_versions, len(held))

    def finish_gradients(self) -> None:
        """Give the gradients collected since the last update their final form, unless they have it."""
        if self._gradients_final:
            return
        divisor = self._divisor()
        self._batches, self._counted = 0, 0.0
        if self.observer is not None:
            self.observer.update(self, divisor)
        self.updater.divide(divisor)
        if self.scaling is not None:
            # At a scale of 1 nothing is scaled: what is not finite then has another cause.
            self.updater.tolerant = self.scaling.due > 1.0
        self._gradients_final = True

    def _divisor(self) -> float:
        """What makes the gradients collected so far those of a mean."""
        averages, batches = self.rules.update.averages, max(1, self._batches)
        if self._counted:
            divisor = self._counted if averages else self._counted / batches
        else:
            divisor = float(batches) if averages else 1.0
        return divisor if self.scaling is None else divisor * self.scaling.due

    def forget_scale(self) -> None:
        """Begin anew with the scale of the loss, where there is one: numbers of updates may go back."""
        if self.scaling is not None:
            self.scaling = LossScale()

    @property
    def unapplied(self) -> bool:
        """Whether gradients of complete batches wait for an update."""
        return self._batches > 0

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """All that the stage has and keeps, as a tree of plain values and of the tensors in use.

        A graph cannot be copied. It is described by its input, the weights or other tensors that it holds, and its
        micro-batch, which its random numbers follow from. Buffers that a forward depends on, other than batch norm's,
        are taken as they are at the end.
        """
        return {
            "module": dict(self.module.state_dict()),
            "updater": self.updater.state(),
            "kept": [{"micro": asdict(kept.micro), **kept.state()} for kept in self.kept.values()],  # type: ignore[call-overload]
            "batches": self._batches,
            "counted": self._counted,
            "seen": self.seen,
            "loss": None if self.loss is None else float(self.loss),
            "count": self.count,
            "measured": self.measured_state(),
            "scaling": self.scaling.state() if self.scaling is not None else None,
            "compiled": self.compiled.state() if self.compiled is not None else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue where the stage was whose `state` this is; it was made alike. The tensors are used as they are."""
        self.module.load_state_dict(state["module"])
        self.updater.load(state["updater"])
        if self.scaling is not None and state.get("scaling") is not None:
            self.scaling.load(state["scaling"])
        if self.compiled is not None:
            self.compiled.load(state.get("compiled", []))
        self.kept = {}
        for saved in state["kept"]:
            kept = Kept.from_state(Micro(**saved["micro"]), saved)
            if saved["graph"]:
                with self._backward_weights(kept), self.backward_view.recording(kept, replay=saved["saved"]):
                    self.activation.rebuild(self, kept, saved["pending"])
            self.kept[kept.micro.id] = kept
        self._batches, self._counted = state["batches"], state["counted"]
        self._gradients_final = False
        self.seen, self.loss, self.count = state["seen"], state["loss"], state["count"]
        self.load_measured(state["measured"])
