"""What lies on a processor's desk: tensors of micro-batches under way, each until its last use."""

from __future__ import annotations

from typing import Any

from ..errors import StageFailed
from ..nn.tree import Tree, flatten, tree_bytes

__all__ = ["Desk"]


class Desk:
    """Values by name and micro-batch, with the number of uses they are waiting for.

    >>> desk = Desk()
    >>> desk.put("input/0", 7, "x", uses=2)
    >>> desk.use("input/0", 7), desk.holds("input/0", 7)
    ('x', True)
    >>> desk.use("input/0", 7), desk.holds("input/0", 7)
    ('x', False)
    """

    def __init__(self) -> None:
        self._lying: dict[tuple[str, int], _Item] = {}
        self.nbytes = self.peak_bytes = 0

    def put(self, name: str, micro: int, value: Any, uses: int) -> None:
        """Keep a value for some uses; for none, not at all."""
        if uses > 0:
            item = _Item(value, uses)
            self._lying[name, micro] = item
            self.nbytes += item.nbytes
            self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def holds(self, name: str, micro: int) -> bool:
        """Whether a value is here."""
        return (name, micro) in self._lying

    def use(self, name: str, micro: int) -> Any:
        """The value; gone after its last use."""
        item = self._lying[name, micro]
        if item.stamps != _stamps(item.value):
            raise StageFailed(
                f"{name} of micro-batch {micro} was changed in place while it was under way: pass a fresh tensor, or a "
                "copy, to every step()"
            )
        item.uses -= 1
        if not item.uses:
            del self._lying[name, micro]
            self.nbytes -= item.nbytes
        return item.value


class _Item:
    """A value, its uses to come, its size, and torch's counters of in-place changes."""

    __slots__ = ("nbytes", "stamps", "uses", "value")

    def __init__(self, value: Tree, uses: int) -> None:
        self.value, self.uses = value, uses
        self.nbytes = tree_bytes(value)
        self.stamps = _stamps(value)


def _stamps(value: Tree) -> tuple[int, ...]:
    return tuple(0 if t.is_inference() else t._version for t in flatten(value)[0])
