"""How a processor of a LayerPipe plan gets and hands on tensors: by message, or over its own desk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..nn.tree import Tree, map_tensors
from ..plan.task_routes import Place, Routes, rows
from .desk import Desk
from .mail import Mail, Message
from .micro import Micro
from .stage import Gradients
from .wire import dense

__all__ = ["Exchange"]


class Exchange:
    """The desk of one processor and its mail.

    **Arguments:**

    - `number`: which processor.
    - `routes`: who needs what.
    - `addresses`: where each processor receives messages.
    - `losses`: by micro-batch; they ride on every message once they are known.
    """

    def __init__(
        self, number: int, routes: Routes, addresses: Sequence[int], mail: Mail, losses: dict[int, float]
    ) -> None:
        self.number = number
        self.routes = routes
        self.desk = Desk()
        self._addresses = addresses
        self._mail = mail
        self._losses = losses

    def deliver(self, name: str, micro: Micro, payload: Callable[[int], Tree], version: int = 0) -> None:
        """Hand a tensor to everybody who uses it; `payload` makes what a user gets."""
        for user in self.routes.users(name):
            value = payload(user)
            if user == self.number:
                self.desk.put(name, micro.id, value, self.routes.uses(name, user))
            else:
                self.send(name, user, micro, value, version)

    def send(self, name: str, user: int, micro: Micro, value: Tree, version: int = 0) -> None:
        """Send to one processor."""
        loss = self._losses.get(micro.id)
        scalars = None if loss is None else {"loss": loss}
        payload = map_tensors(dense, value)
        self._mail.send(Message(name, self._addresses[user], micro, payload, version, scalars))

    def take(self, name: str, micro: Micro) -> Any:
        """What was sent here; waits for it."""
        message = self._mail.take(name, self._addresses[self.number], micro)
        if message.scalars is not None:
            self._losses[micro.id] = message.scalars["loss"]
        return message.payload

    def fetch(self, name: str, micro: Micro) -> Any:
        """Use a tensor: from the desk, or from the mail if it has not been used yet."""
        if not self.desk.holds(name, micro.id):
            self.desk.put(name, micro.id, self.take(name, micro), self.routes.uses(name, self.number))
        return self.desk.use(name, micro.id)

    def gradient(self, layer: int, micro: Micro) -> Gradients | None:
        """The gradient of a layer's output, ready for its tasks; `None` if the layer has it in its own graph."""
        return self._joined("grad", layer, self.routes.gradient_sources(layer), micro)

    def raw_gradient(self, layer: int, micro: Micro) -> Gradients:
        """The same without its elementwise factor."""
        found = self._joined("raw", layer, self.routes.raw_sources(layer), micro)
        assert found is not None
        return found

    def _joined(self, kind: str, layer: int, sources: Sequence[int], micro: Micro) -> Gradients | None:
        parts: list[Gradients] = [self.fetch(f"{kind}/{layer}/{source}", micro) for source in sources]
        if len(parts) < 2:
            return parts[0] if parts else None
        return [torch.cat([part[0] for part in parts if part[0] is not None])]

    def deliver_gradient(
        self, kind: str, layer: int, micro: Micro, gradient: Gradients, share: Place, count: int = 0
    ) -> None:
        """Send rows of the gradient of a layer's output to those who need some of them.

        **Arguments:** `share`: which rows these are; `count`: of how many, if not of as many as there are.
        """

        def part(user: int) -> Gradients:
            needed = self.routes.needed_rows(layer, user) if kind == "grad" else None
            if needed is None:
                return gradient
            (found,) = gradient
            assert found is not None
            total = found.shape[0] if share.whole else count
            begin, end = rows(share, total)
            first, last = rows(needed, total)
            # A copy starts where the memory of a received tensor would: kernels may depend on alignment.
            return [found[max(begin, first) - begin : max(0, min(end, last) - begin)].clone()]

        self.deliver(f"{kind}/{layer}/{self.number}", micro, part)
