"""Blocks around the parts of a model of `transformers`.

Nothing of what such a model does is written down here again. The model's own `forward` runs in all blocks, in variants
of the model that lack some of its parts:

- the *entrance* has the embeddings and stops before the first layer;
- a *layer* is the model's own, called with just what the model would hand to it;
- the *exit* starts after the last layer: norm and head.

What a layer is handed beside the hidden states (causal masks, rotary embeddings) is found by asking a variant of the
model whose layers only take notes. So it need not travel: the mask and the positions of the batch do, and every stage
makes the rest of them, once per micro-batch.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import PlanError
from .tree import Tree

__all__ = ["TRAVELS", "Asked", "Entrance", "Exit", "Layer", "Layout", "Parts", "Role", "answer_of", "has_parameters"]

HIDDEN = "hidden_states"
#: What layers may depend on beside the hidden states, as far as a batch has it.
TRAVELS = ("attention_mask", "position_ids")


class Layout(NamedTuple):
    """Where the body of a model has its run of layers, and which of its modules come before and after them.

    What else has parameters comes after; what has none serves the layers (rotary embeddings).
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()


class Entrance(nn.Module):
    """From the batch to what the first layer is given."""

    def __init__(self, parts: Parts, options: Mapping[str, Any], keeps: Sequence[str]) -> None:
        super().__init__()
        self._first = _First()
        self._main, self._options, self._keeps = str(parts.body.main_input_name), dict(options), tuple(keeps)
        self.inside = parts.variant([StandIn(parts.layers[0], self._first.note)], Role.BEFORE)

    def forward(self, x: Tree) -> Tree:
        """A plain tensor where nothing has to travel beside it."""
        given = dict(x) if isinstance(x, Mapping) else {self._main: x}
        with self._first.noting() as found:
            self.inside(**given, **self._options)
        beside = {name: _compact(name, given[name]) for name in self._keeps if name in given}
        return {HIDDEN: found[0], **beside} if beside else found[0]


class Layer(nn.Module):
    """One of the model's layers, called as the model calls it."""

    def __init__(self, layer: nn.Module, asked: Asked, index: int) -> None:
        super().__init__()
        self.inside = layer
        self._asked, self._index = asked, index

    def forward(self, state: Tree) -> Tree:
        """The state with other hidden states."""
        hidden, beside = _apart(state)
        args, named = self._asked.given(hidden, beside)[self._index]
        found = self.inside(hidden, *args, **named)
        hidden = found[0] if isinstance(found, tuple) else found
        return {**state, HIDDEN: hidden} if isinstance(state, Mapping) else hidden


class Exit(nn.Module):
    """From what the last layer gave to the answer of the model."""

    def __init__(self, model: Any, parts: Parts, main: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._last = _Last()
        self._options = dict(options)
        self._main = "inputs_embeds" if main == "input_ids" else main
        body = parts.variant([StandIn(parts.layers[-1], self._last.give)], Role.AFTER, self._last.nothing)
        children = {name: body for name, part in model.named_children() if part is parts.body}
        self.inside = _variant(model, children) if model is not parts.body else body

    def forward(self, state: Tree) -> Tensor:
        """Scores, or the last hidden states of a model without a head."""
        hidden, beside = _apart(state)
        given = {"input_ids": beside["input_ids"]} if "input_ids" in beside else {self._main: _nothing_like(hidden)}
        with self._last.giving(hidden):
            return answer_of(self.inside(**given, **self._options))


class Role(Enum):
    """What a part of a model's body is for."""

    BEFORE = "makes hidden states of a batch"
    AFTER = "is applied to what the last layer gives"
    AROUND = "makes what layers are given beside hidden states"


class Parts:
    """The body of a model and what is to become of its parts in a variant."""

    def __init__(self, body: Any, layout: Layout) -> None:
        self.body = body
        self.layers: Any = body.get_submodule(layout.layers)
        self._layout = layout
        self._way = layout.layers.split(".")

    def role(self, name: str) -> Role:
        """Of a part of the body that is not on the way to its layers."""
        part = self.body.get_submodule(name)
        if name in self._layout.before:
            return Role.BEFORE
        if name in self._layout.after or has_parameters(part):
            return Role.AFTER
        # Dropout of embeddings, for the most part.
        return Role.BEFORE if type(part).__module__.startswith("torch.nn.") else Role.AROUND

    def named(self, role: Role) -> list[str]:
        """Parts of the body by what they are for."""
        return [name for name, _ in self.body.named_children() if name != self._way[0] and self.role(name) is role]

    def variant(
        self, layers: Sequence[nn.Module], keeps: Role, embedded: Callable[..., Any] | None = None
    ) -> nn.Module:
        """The body with other layers, and of its other parts only those for one thing.

        **Arguments:** `embedded`: what the embeddings answer where they are not kept.
        """
        others = [role for role in Role if role is not keeps]
        answers = {Role.BEFORE: embedded or _itself}
        children: dict[str, nn.Module] = {
            name: StandIn(self.body.get_submodule(name), answers.get(role, _itself))
            for role in others
            for name in self.named(role)
        }
        replaced: nn.Module = nn.ModuleList(layers)
        for depth in reversed(range(1, len(self._way))):
            holder = self.body.get_submodule(".".join(self._way[:depth]))
            replaced = _variant(holder, {self._way[depth]: replaced})
        return _variant(self.body, {**children, self._way[0]: replaced})


class StandIn(nn.Module):
    """In the place of a module that is elsewhere: another answer, the same attributes, but nothing that acts on it."""

    def __init__(self, original: nn.Module, answer: Callable[..., Any]) -> None:
        super().__init__()
        # Past nn.Module, which would make the original a part of this.
        self.__dict__["_original"], self.__dict__["_answer"] = original, answer

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.__dict__["_answer"](*args, **named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_original"], name)
        if inspect.ismethod(found):
            raise AttributeError(f"{name} of a module that is elsewhere")
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return self


class _First:
    """Takes down what the first layer is given."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    @contextmanager
    def noting(self) -> Iterator[list[Tensor]]:
        found: list[Tensor] = []
        self._found = found
        try:
            yield found
        finally:
            self._found = []

    def note(self, *args: Any, **named: Any) -> Tensor:
        hidden, _, _ = _handed(args, named)
        self._found.append(hidden)
        return hidden

    def __deepcopy__(self, memo: dict[int, Any]) -> _First:
        return self


class _Last:
    """Gives what the last layer gave."""

    def __init__(self) -> None:
        self._hidden: Tensor | None = None

    @contextmanager
    def giving(self, hidden: Tensor) -> Iterator[None]:
        self._hidden = hidden
        try:
            yield
        finally:
            self._hidden = None

    def give(self, *_: Any, **__: Any) -> Tensor | None:
        return self._hidden

    def nothing(self, *_: Any, **__: Any) -> Tensor:
        assert self._hidden is not None
        return _nothing_like(self._hidden)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Last:
        return self


Handed = tuple[tuple[Any, ...], dict[str, Any]]


class Asked:
    """What the model hands to each of its layers beside the hidden states, by asking it.

    The last answer is kept: the layers of a stage follow each other with the same micro-batch. Whether it still is the
    same is seen by the tensors that travel, which are other ones in every pass of every stage.
    """

    def __init__(self, parts: Parts, options: Mapping[str, Any]) -> None:
        self._main = "inputs_embeds" if parts.body.main_input_name == "input_ids" else str(parts.body.main_input_name)
        self._options = dict(options)
        self._notes: list[Handed] = []
        self._empty = torch.zeros(())
        self._model = parts.variant([StandIn(layer, self._note) for layer in parts.layers], Role.AROUND, self._nothing)
        # Hidden states begin with the type of the embeddings, which masks and rotations then have in all layers.
        self._like = next(parts.body.parameters())
        self._fits: Callable[[Tensor, Mapping[str, Tensor]], bool] = _never

    def given(self, hidden: Tensor, beside: Mapping[str, Tensor]) -> list[Handed]:
        """For each layer, further positional and named arguments."""
        if not self._fits(hidden, beside):
            self._fits, self._notes, self._empty = _never, [], _nothing_like(hidden, self._like)
            travels = {name: t for name, t in beside.items() if name in TRAVELS}
            # Training may use again what evaluation asked for.
            with torch.inference_mode(False), torch.no_grad():
                self._model(**{self._main: self._empty}, **travels, **self._options)
            self._fits = _same_as(hidden, beside)
        return self._notes

    def _nothing(self, *_: Any, **__: Any) -> Tensor:
        return self._empty

    def _note(self, *args: Any, **named: Any) -> Tensor:
        hidden, args, named = _handed(args, named)
        self._notes.append((args, named))
        return hidden

    def __deepcopy__(self, memo: dict[int, Any]) -> Asked:
        return self


def _never(hidden: Tensor, beside: Mapping[str, Tensor]) -> bool:
    return False


def _same_as(hidden: Tensor, beside: Mapping[str, Tensor]) -> Callable[[Tensor, Mapping[str, Tensor]], bool]:
    """A test whether other hidden states are of the same size and come with the very same tensors, unchanged."""
    shape, device = hidden.shape, hidden.device
    known = {name: (weakref.ref(t), _version(t)) for name, t in beside.items()}

    def same(hidden: Tensor, beside: Mapping[str, Tensor]) -> bool:
        if hidden.shape != shape or hidden.device != device or beside.keys() != known.keys():
            return False
        return all(
            ref() is beside[name] and _version(beside[name]) == version for name, (ref, version) in known.items()
        )

    return same


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _handed(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], named
    return named[HIDDEN], (), {name: value for name, value in named.items() if name != HIDDEN}


def _variant(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """The same module, of the same parameters, with some other children."""
    other: nn.Module = object.__new__(type(module))
    other.__dict__ = {**module.__dict__, "_modules": {**module._modules, **children}}
    # One that was put in the place of the class's runs the module that it was made for.
    other.__dict__.pop("forward", None)
    return other


def _apart(state: Tree) -> tuple[Tensor, Mapping[str, Tensor]]:
    if not isinstance(state, Mapping):
        return state, {}
    return state[HIDDEN], {name: t for name, t in state.items() if name != HIDDEN}


def _nothing_like(hidden: Tensor, like: Tensor | None = None) -> Tensor:
    """Zeros of the shape of hidden states that take no memory."""
    like = hidden if like is None else like
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(hidden.shape)


def _compact(name: str, tensor: Tensor) -> Tensor:
    """A mask of tokens says yes or no."""
    return tensor.bool() if name == "attention_mask" and tensor.dim() == 2 else tensor


def _itself(first: Any = None, *_: Any, **named: Any) -> Any:
    return first if first is not None else next(iter(named.values()), None)


def answer_of(found: Any) -> Tensor:
    """What a model's output holds: scores, or hidden states where it has no head."""
    for name in ("logits", "last_hidden_state"):
        answer = found.get(name)
        if isinstance(answer, Tensor):
            return answer
    raise PlanError(f"the model answers with {', '.join(found)}: a chain of blocks ends in one tensor, its logits")


def has_parameters(module: nn.Module) -> bool:
    """Whether there is something to train."""
    return next(module.parameters(), None) is not None
