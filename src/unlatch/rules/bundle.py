"""The rules of one method, in one place: what a stage keeps, which weights it sees, how it updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ConfigError
from .activations import Activation, Graph
from .gradients import FromAbove, Gradient
from .updates import UpdateRule
from .weights import BackwardWeights, Current, ForwardWeights, Newest

__all__ = ["Rules"]


@dataclass(frozen=True)
class Rules:
    """How a stage behaves, whatever the schedule. Each part is an object that does its work and answers for it.

    **Arguments:**

    - `activation`: what is kept from forward to backward: `Graph`, `Input` or `Reverse`.
    - `forward`: the weights that forwards see: `Newest`, `Lagging` or `Predicted`.
    - `backward`: the weights that backwards see: `Current`, `Stash`, `Latest` or `Average`.
    - `gradient`: what becomes of gradients: `FromAbove`, `Shrunk`.
    - `update`: how they are applied.

    >>> Rules().weight_copies(late=3)
    0
    """

    activation: Activation = field(default_factory=Graph)
    forward: ForwardWeights = field(default_factory=Newest)
    backward: BackwardWeights = field(default_factory=Current)
    gradient: Gradient = field(default_factory=FromAbove)
    update: UpdateRule = field(default_factory=UpdateRule)

    def __post_init__(self) -> None:
        if self.forward.prediction is not None and self.backward.taken_at == "average":
            raise ConfigError(
                f"{self.forward.name} forward weights do not go with backward weights {self.backward.name!r}: these "
                "reconstruct the weights of the past, but the forward ran at weights expected for the time of the "
                "backward. Take 'stash' (exactly those), 'latest' or 'current' (what they were expected to be)"
            )
        in_graph = self.forward.differs if self.activation.keeps_graph else self.forward.differs_at_last
        if in_graph and not self.backward.bears_updates:
            raise ConfigError(
                f"{self.forward.name} forward weights do not go with backward weights {self.backward.name!r} in a kept "
                "graph: it would meet other weights than its forward did. Take 'stash' or 'latest'"
            )

    @property
    def mixes(self) -> bool:
        """Whether a backward combines activations of its forward with other weights than those of its forward."""
        return self.activation.keeps_graph and self.backward.taken_at != "forward"

    def weight_copies(self, late: int) -> int:
        """Tensors of the size of the weights besides these, where up to `late` updates come before a backward."""
        if late == 0:
            return 0
        return self.backward.copies(self.forward.crossed(late)) + self.forward.copies + self.gradient.copies
