"""Where batches enter: whatever form they have, what goes on is `(x, y)`, and the first one proves the chain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..data.pairs import pairs
from ..errors import DataError, PlanError
from ..nn.chain import Block, Model, as_module
from ..nn.chain_check import check_chain, check_own_loss
from ..nn.device import CPU, Device
from ..nn.foreign import foreign
from ..nn.tree import Tree

__all__ = ["Intake"]


class Intake:
    """Takes batches in.

    **Arguments:**

    - `model`, `blocks`, `starts`: what the first batch is tried on, a few rows of it.
    - `own_loss`: whether the loss is the model's own, and so must equal what the model says itself.
    - `proven`: whether a sample has been tried before.
    - `device`: where batches may be already.

    >>> import torch
    >>> from ..nn.chain import chain
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> intake = Intake(model, chain(model), [0])
    >>> x, y = intake(torch.zeros(4, 2), torch.zeros(4))
    >>> x.shape
    torch.Size([4, 2])
    """

    def __init__(
        self,
        model: Model,
        blocks: Sequence[Block],
        starts: Sequence[int],
        *,
        own_loss: bool = False,
        proven: bool = False,
        device: Device = CPU,
    ) -> None:
        self._model, self._blocks, self._starts = model, blocks, starts
        self._foreign = foreign(model)
        self._own_loss, self._device = own_loss, device
        # Torch's own modules in a row do what they say.
        self._proven = proven or all(
            type(part).__module__.startswith("torch.nn.") for part in as_module(model).modules()
        )

    def __call__(self, x: Tree, y: Tree = None) -> tuple[Tree, Tree]:
        """`(x, y)` from a batch of two parts, or from a dict where the model's library has such."""
        if self._foreign is not None:
            batch = x if y is None and isinstance(x, Mapping) else (x, y)
            x, y = self._foreign.taken_apart(batch, own_loss=self._own_loss)
        elif y is None and isinstance(x, Mapping) and "labels" in x:
            raise DataError(
                f"a batch is a pair here, step(x, y), got one dict of {', '.join(map(str, x))}: only models of a "
                "library with such batches take them apart themselves"
            )
        if not self._proven:
            # The model itself is on the CPU, wherever its stages are.
            self._prove(*self._device.on_host((x, y)))
            self._proven = True
        return x, y

    def pairs(self, loader: Iterable[Any], what: str) -> Iterator[tuple[Tree, Tree]]:
        """The batches of a loader; `what` needs them."""
        return pairs(loader, what, self, mappings=self._foreign is not None)

    def _prove(self, x: Tree, y: Tree) -> None:
        try:
            check_chain(self._blocks, self._model, self._starts, x)
            if self._own_loss:
                check_own_loss(as_module(self._model), x, y)
        except PlanError as error:
            # What a user's module raises it raises in training too, which then says for which stage and batch.
            if error.__cause__ is None or self._foreign is not None:
                raise
