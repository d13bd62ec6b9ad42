"""Optimizer factories for `parallelize`: no decay for norms and biases, and Muon for matrices with AdamW for the rest.

A factory is called once per stage. One with an argument `named` is given the parameters with the names that they have
in the whole model, so what it decides by name does not depend on where the model is cut. Every factory here makes the
same groups at every stage, even if empty: a checkpoint then fits any number of stages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from .errors import ConfigError

__all__ = ["EMBEDDINGS_AND_HEADS", "Joined", "MuonAdamW", "decay_matrices"]

#: What embeddings and heads are usually called.
EMBEDDINGS_AND_HEADS = r"emb|\bwte\b|\bwpe\b|head|classifier|\bscore\b"

NamedOne = tuple[str, Tensor]
Named = Iterable[NamedOne]


def decay_matrices(
    make: Callable[..., Optimizer], *, weight_decay: float, spared: str | None = None, **settings: Any
) -> Callable[..., Optimizer]:
    """A factory that lets weights of two dimensions and more decay, and spares biases and the scales of norms.

    **Arguments:**

    - `make`: an optimizer class, or a function from groups of parameters to an optimizer.
    - `weight_decay`: of what decays.
    - `spared`: a regular expression; what has it in its name does not decay either, such as `"emb"`.
    - `settings`: passed to `make`.

    >>> factory = decay_matrices(torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
    >>> layer = torch.nn.Linear(2, 2)
    >>> [(group["weight_decay"], len(group["params"])) for group in factory(layer.named_parameters()).param_groups]
    [(0.1, 1), (0.0, 1)]
    """
    return partial(_decaying, make=make, weight_decay=weight_decay, spared=_pattern(spared), settings=settings)


def _decaying(
    named: Named,
    *,
    make: Callable[..., Optimizer],
    weight_decay: float,
    spared: re.Pattern[str] | None,
    settings: dict[str, Any],
) -> Optimizer:
    def decays(name: str, p: Tensor) -> bool:
        return p.dim() > 1 and not (spared is not None and spared.search(name))

    decaying, others = _parted(named, decays)
    groups = [
        {"params": _without_names(decaying), "weight_decay": weight_decay},
        {"params": _without_names(others), "weight_decay": 0.0},
    ]
    return make(groups, **settings)


class Joined(Optimizer):
    """Several optimizers as one: one `state_dict`, one list of groups, one `step`; learning-rate schedulers see all.

    **Arguments:** `parts`: optimizers of different parameters. From now on they share their groups and state with
    this one, so use them through it only.

    >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> both = Joined([torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.Adam(b.parameters(), lr=0.01)])
    >>> [group["lr"] for group in both.param_groups]
    [0.1, 0.01]
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts: tuple[Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = tuple(parts)
        self._share()

    def _share(self) -> None:
        groups: Iterator[dict[str, Any]] = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: later nobody could tell which of the optimizers is meant."""
        if self._parts:
            raise ConfigError(
                f"{type(self).__name__} cannot take in another group: make it anew, of optimizers that have all groups"
            )
        super().add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        """One step of each."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        for part in self._parts:
            part.step()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Whoever loads a state replaces groups and state by new ones.
        self._share()


class MuonAdamW(Joined):
    """Muon for hidden matrices; AdamW for embeddings, heads, norms, biases and whatever has not two dimensions.

    Use it as `optimizer=partial(unlatch.optim.MuonAdamW, lr=1e-3)`.

    **Arguments:**

    - `named`: the parameters with their names in the model, as `named_parameters()` gives them.
    - `lr`: of Muon. Its steps are scaled to the size of AdamW's, so that the same rate serves both.
    - `adamw_lr`: of AdamW, if it is another one.
    - `weight_decay`: of all that has two dimensions or more; norms and biases do not decay.
    - `momentum`: of Muon. `betas`: of AdamW.
    - `by_adamw`: a regular expression; matrices that have it in their name are left to AdamW. The default finds
      embeddings and heads by their usual names. In a model whose layers have numbers for names, say which are meant:
      `r"^0\\.|^7\\."`.

    >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "up": torch.nn.Linear(4, 4)})
    >>> [len(group["params"]) for group in MuonAdamW(model.named_parameters()).param_groups]
    [1, 1, 1]
    """

    def __init__(
        self,
        named: Named,
        lr: float = 1e-3,
        *,
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        by_adamw: str | None = EMBEDDINGS_AND_HEADS,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(f"torch {torch.__version__} has no Muon: install torch 2.9 or newer")
        theirs = _pattern(by_adamw)

        def is_hidden_matrix(name: str, p: Tensor) -> bool:
            return p.dim() == 2 and not (theirs is not None and theirs.search(name))

        hidden, others = _parted(named, is_hidden_matrix)
        muon = torch.optim.Muon(
            [{"params": _without_names(hidden)}],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = decay_matrices(AdamW, weight_decay=weight_decay, lr=lr if adamw_lr is None else adamw_lr, betas=betas)
        super().__init__([muon, adamw(others)])


def _parted(named: Named, belongs: Callable[[str, Tensor], bool]) -> tuple[list[NamedOne], list[NamedOne]]:
    """The parameters for which something holds, and the others."""
    pairs = list(named)
    for pair in pairs:
        if not isinstance(pair, tuple):
            raise ConfigError(
                "expected parameters with their names, as model.named_parameters() gives them, got a "
                f"{type(pair).__name__} without one"
            )
    found = [belongs(name, p) for name, p in pairs]
    return list(compress(pairs, found)), list(compress(pairs, map(not_, found)))


def _without_names(named: Named) -> list[Tensor]:
    return [p for _, p in named]


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"{text!r} is no regular expression ({error}): names are searched for it") from None
