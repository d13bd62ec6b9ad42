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

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .tree import Tree

__all__ = ["TRAVELS", "Asked", "Entrance", "Exit", "Layer", "Layout", "Parts", "answer_of", "has_parameters"]

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

    def __init__(self, parts: Parts, path: str, options: Mapping[str, Any], keeps: Sequence[str]) -> None:
        super().__init__()
        self.path_in_model = path
        self._first = _First()
        self._main, self._options, self._keeps = str(parts.body.main_input_name), dict(options), tuple(keeps)
        self.inside = parts.variant([StandIn(parts.layers[0], self._first.note)], entrance=True)

    def forward(self, x: Tree) -> Tree:
        """A plain tensor where nothing has to travel beside it."""
        given = dict(x) if isinstance(x, Mapping) else {self._main: x}
        with self._first.noting() as found:
            self.inside(**given, **self._options)
        beside = {name: _compact(name, given[name]) for name in self._keeps if name in given}
        return {HIDDEN: found[0], **beside} if beside else found[0]


class Layer(nn.Module):
    """One of the model's layers, called as the model calls it."""

    def __init__(self, layer: nn.Module, path: str, asked: Asked, index: int) -> None:
        super().__init__()
        self.path_in_model = path
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
        self.path_in_model = ""
        self._last = _Last()
        self._options = dict(options)
        self._main = "inputs_embeds" if main == "input_ids" else main
        body = parts.variant([StandIn(parts.layers[-1], self._last.give)], entrance=False)
        children = {name: body for name, part in model.named_children() if part is parts.body}
        self.inside = _variant(model, children) if model is not parts.body else body

    def forward(self, state: Tree) -> Tensor:
        """Scores, or the last hidden states of a model without a head."""
        hidden, beside = _apart(state)
        given = {"input_ids": beside["input_ids"]} if "input_ids" in beside else {self._main: _nothing_like(hidden)}
        with self._last.giving(hidden):
            return answer_of(self.inside(**given, **self._options))


class Parts:
    """The body of a model and what is to become of its parts in a variant."""

    def __init__(self, body: Any, layout: Layout) -> None:
        self.body = body
        self.layers: Any = body.get_submodule(layout.layers)
        self._layout = layout
        self._way = layout.layers.split(".")

    def comes_after(self, name: str, part: nn.Module) -> bool:
        """Whether a part of the body belongs to the exit."""
        if name in (*self._layout.before, self._way[0]):
            return False
        return name in self._layout.after or has_parameters(part)

    def variant(self, layers: Sequence[nn.Module], *, entrance: bool | None) -> nn.Module:
        """The body with other layers, and with those of its parts that belong to the entrance or to the exit.

        With neither (`None`) it has no parameters, and only those parts that say what layers are given.
        """
        children: dict[str, nn.Module] = {}
        for name, part in self.body.named_children():
            if name == self._way[0]:
                continue
            before, after = name in self._layout.before, self.comes_after(name, part)
            plain = type(part).__module__.startswith("torch.nn.")
            if before and entrance is not True:
                # Of the size of the hidden states, which they are asked for with.
                children[name] = StandIn(part, _first_embedding)
            elif after and entrance is not False:
                children[name] = StandIn(part, _itself)
            elif not before and not after and (entrance is not None or plain) and not (entrance and plain):
                # Rotary embeddings, whose results nobody uses here; dropout, which would draw random numbers in vain.
                children[name] = StandIn(part, _itself)
        replaced: nn.Module = nn.ModuleList(layers)
        for depth in reversed(range(1, len(self._way))):
            holder = self.body.get_submodule(".".join(self._way[:depth]))
            replaced = _variant(holder, {self._way[depth]: replaced})
        return _variant(self.body, {**children, self._way[0]: replaced})


class StandIn(nn.Module):
    """In the place of a module that is elsewhere: another answer, the same attributes."""

    def __init__(self, original: nn.Module, answer: Callable[..., Any]) -> None:
        super().__init__()
        # Past nn.Module, which would make the original a part of this.
        self.__dict__["_original"], self.__dict__["_answer"] = original, answer

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.__dict__["_answer"](*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return self


class _First:
    """Takes down what the first layer is given."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    @contextmanager
    def noting(self) -> Iterator[list[Tensor]]:
        self._found = []
        yield self._found
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
        self._model = parts.variant([StandIn(layer, self._note) for layer in parts.layers], entrance=None)
        # Hidden states begin with the type of the embeddings, which masks and rotations then have in all layers.
        self._like = next(parts.body.parameters())
        self._key: Callable[[Tensor, Mapping[str, Tensor]], bool] = lambda *_: False

    def given(self, hidden: Tensor, beside: Mapping[str, Tensor]) -> list[Handed]:
        """For each layer, further positional and named arguments."""
        if not self._key(hidden, beside):
            self._notes = self._answers(hidden, beside)
            self._key = _same_as(hidden, beside)
        return self._notes

    def _answers(self, hidden: Tensor, beside: Mapping[str, Tensor]) -> list[Handed]:
        self._notes = []
        empty = _nothing_like(hidden, self._like)
        real = {name: torch.ones_like(t, device=empty.device) if t.is_meta else t for name, t in beside.items()}
        travels = {name: t for name, t in real.items() if name in TRAVELS}
        with torch.inference_mode(False), torch.no_grad():
            self._model(**{self._main: empty}, **travels, **self._options)
        if hidden.is_meta:
            return [_moved(one, hidden.device) for one in self._notes]
        return self._notes

    def _note(self, *args: Any, **named: Any) -> Tensor:
        hidden, args, named = _handed(args, named)
        self._notes.append((args, named))
        return hidden

    def __deepcopy__(self, memo: dict[int, Any]) -> Asked:
        return self


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


def _moved(handed: Any, device: torch.device) -> Any:
    if isinstance(handed, Tensor):
        return handed.to(device)
    if isinstance(handed, tuple | list):
        return type(handed)(_moved(one, device) for one in handed)
    return {name: _moved(one, device) for name, one in handed.items()} if isinstance(handed, dict) else handed


def _variant(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """The same module, of the same parameters, with some other children."""
    other: nn.Module = object.__new__(type(module))
    other.__dict__ = {**module.__dict__, "_modules": {**module._modules, **children}}
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


def _first_embedding(*args: Any, **named: Any) -> Any:
    """Of those that make hidden states: they are handed in ready."""
    given = [value for value in (named.get("inputs_embeds"), *args, *named.values()) if isinstance(value, Tensor)]
    return next((t for t in given if t.is_floating_point()), torch.zeros(()))


def answer_of(found: Any) -> Tensor:
    """What a model's output holds: scores, or hidden states where it has no head."""
    found = found.logits if "logits" in found else found.last_hidden_state
    assert isinstance(found, Tensor)
    return found


def has_parameters(module: nn.Module) -> bool:
    """Whether there is something to train."""
    return next(module.parameters(), None) is not None
