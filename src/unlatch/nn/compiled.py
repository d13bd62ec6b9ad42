"""A module's training forward as compiled code, in a form that late backwards, swapped weights and replays can bear.

    shape of the input -> code of its own        results depend on the shape alone, not on which shape came first;
                                                 what stands beside tensors is part of the shape, as torch reads it once
    batch norm         -> copies of statistics   what a graph saved stays as it was when later forwards count
    input              -> a copy                 blocks may write into it; nothing has to be found out first

All else is as without: weights are read when the code runs, so whatever the parameters show is used; autograd saves
the weights themselves, so hooks on saved tensors find them; random numbers come from torch's generators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import CompileFailed
from .chain import StageChain
from .tree import Tree, flatten, map_tensors

__all__ = ["MOST_SHAPES", "Compilation", "Compiled"]

log = logging.getLogger("unlatch")
#: Shapes of input that get code of their own. Further ones run uncompiled.
MOST_SHAPES = 8
_AVERAGES = ("running_mean", "running_var")
_NUMBERS = count()


@dataclass(frozen=True)
class Compilation:
    """How stages are compiled: arguments of `torch.compile`.

    **Arguments:**

    - `backend`: by its name.
    - `fullgraph`: whether a stage must become one graph. If it may break, torch shares code between stages, and
      gives up compiling what was compiled often: then inline and ranks agree within rounding only.
    - `dynamic`: one code for all shapes instead of one for each.
    - `options`: of the backend.
    """

    backend: str = "inductor"
    fullgraph: bool = True
    dynamic: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def code(self, module: nn.Module) -> Callable[[Tree], Tree]:
        """The module as compiled code that shares nothing with any other; it is made when it is first called."""
        run = module.compose if isinstance(module, StageChain) else module

        def forward(inputs: Tree) -> Tree:
            return run(map_tensors(Tensor.clone, inputs))

        # Torch keeps what it compiled, and what it learned about shapes, by code object and by the name of that.
        name = f"stage_forward_{next(_NUMBERS)}"
        own = forward.__code__.replace(co_name=name)
        function = FunctionType(own, forward.__globals__, name, None, forward.__closure__)
        compiled: Callable[[Tree], Tree] = torch.compile(
            function,
            backend=self.backend,
            fullgraph=self.fullgraph,
            dynamic=self.dynamic,
            options=dict(self.options) or None,
        )
        return compiled


class Compiled:
    """Runs the forward of a module as compiled code.

    **Arguments:**

    - `title`: what errors call the module.
    - `tell`: is given what the user should know, once.

    >>> double = Compiled(nn.Linear(1, 1, bias=False), Compilation("eager"), "stage 0")
    >>> double.state()
    []
    """

    def __init__(
        self, module: nn.Module, how: Compilation, title: str, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self._module, self._how, self._title = module, how, title
        self._tell, self._told = tell, False
        self._norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        self._codes: dict[str, Callable[[Tree], Tree]] = {}

    def __call__(self, inputs: Tree) -> Tree:
        code = self._code_for(inputs)
        if code is None:
            return self._module(inputs)
        with self._statistics_lent():
            try:
                return code(inputs)
            except Exception as error:
                if not _of_compiler(error):
                    raise
                cause = error
        # A mistake in the model, or in its input, is told as it would be without compiling.
        self._module(inputs)
        raise CompileFailed(
            f"{self._title} cannot be compiled (backend {self._how.backend!r}): {_gist(cause)}. {self._way_out(cause)}"
        ) from cause

    def state(self) -> list[str]:
        """The shapes that have code: beyond so many, which they are depends on the batches so far."""
        return list(self._codes)

    def load(self, shapes: Iterable[str]) -> None:
        """Take over what `state` returned."""
        self._codes = {shape: self._codes.get(shape) or self._how.code(self._module) for shape in shapes}

    def _code_for(self, inputs: Tree) -> Callable[[Tree], Tree] | None:
        shape = "any" if self._how.dynamic else _shape(inputs)
        code = self._codes.get(shape)
        if code is None and len(self._codes) < MOST_SHAPES:
            code = self._codes[shape] = self._how.code(self._module)
        if code is None and not self._told:
            self._told = True
            text = (
                f"{self._title} has code for {MOST_SHAPES} shapes of input; {shape} and other new ones run uncompiled. "
                "Give batches fewer shapes (drop_last, padding to a few lengths, tensors in place of numbers that "
                'change), or take compile={"dynamic": True}'
            )
            log.warning("%s", text)
            self._tell(text)
        return code

    @contextmanager
    def _statistics_lent(self) -> Iterator[None]:
        """Let batch norm count in copies of its averages, and take these over afterwards.

        Compiled code may save the averages for a backward that does not need them. A later forward would change them.
        """
        counting = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        if not counting or not torch.is_grad_enabled():
            yield
            return
        averages = [
            (norm._buffers, name, average)
            for norm in counting
            for name in _AVERAGES
            if (average := norm._buffers[name]) is not None
        ]
        copies = [average.clone() for _, _, average in averages]
        for (buffers, name, _), copy in zip(averages, copies, strict=True):
            buffers[name] = copy
        try:
            yield
        finally:
            for buffers, name, average in averages:
                buffers[name] = average
        for (_, _, average), copy in zip(averages, copies, strict=True):
            # As torch's own batch norm, without a mark for autograd: a graph of an uncompiled pass has them saved, too.
            average.data.copy_(copy)

    def _way_out(self, error: Exception) -> str:
        if self._how.fullgraph and "Unsupported" in type(error).__name__:
            return 'Change what breaks the graph, let it break with compile={"fullgraph": False}, or leave compile off'
        if type(error).__name__ == "FailOnRecompileLimitHit":
            return (
                "A Python value that the forward reads (a counter, a rate) changes from batch to batch, and torch "
                "makes code for each: make it a buffer or another tensor, or leave compile off"
            )
        return "Leave compile off, or name another backend"


def _shape(inputs: Tree) -> str:
    tensors, structure = flatten(inputs)
    told = ", ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in tensors)
    return told if isinstance(structure, str) else f"{told} in {structure}"


def _of_compiler(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._functorch", "torch._inductor"))


def _gist(error: Exception) -> str:
    """What a compiler says, without its pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}".rstrip(".")
