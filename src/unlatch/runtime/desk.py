"""What lies on a processor's desk: tensors of micro-batches under way, each until its last use."""

from __future__ import annotations

from typing import Any

from ..nn.tree import tree_bytes

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
        self._lying: dict[tuple[str, int], tuple[Any, int, int]] = {}
        self.nbytes = self.peak_bytes = 0

    def put(self, name: str, micro: int, value: Any, uses: int) -> None:
        """Keep a value for some uses; for none, not at all."""
        if uses > 0:
            nbytes = tree_bytes(value)
            self._lying[name, micro] = (value, uses, nbytes)
            self.nbytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def holds(self, name: str, micro: int) -> bool:
        """Whether a value is here."""
        return (name, micro) in self._lying

    def use(self, name: str, micro: int) -> Any:
        """The value; gone after its last use."""
        value, uses, nbytes = self._lying[name, micro]
        if uses > 1:
            self._lying[name, micro] = (value, uses - 1, nbytes)
        else:
            del self._lying[name, micro]
            self.nbytes -= nbytes
        return value
