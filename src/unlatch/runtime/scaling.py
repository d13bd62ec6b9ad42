"""Loss scaling for half precision, in a chain whose stages update at different times.

Small gradients vanish in float16, so the last stage multiplies the loss by a scale, gradients travel scaled, and every
stage divides its own by the scale before it applies them. Where they overflowed, it leaves that update out.

Stages must divide by what the loss was multiplied by, however late they come to it. So a scale belongs to an *update*:
all micro-batches that contribute to it have the same one, and it goes down the chain with their gradients. News of an
overflow goes up with the forwards, as the newest update that a stage below left out and its scale; the last stage
then halves its scale, unless it has done so since. While nothing overflows it doubles it, once in a while, as
`torch.amp.GradScaler` does. Scales are powers of two: multiplying and dividing by them rounds nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LossScale", "News"]

#: The newest update that was left out, and its scale.
News = tuple[int, float]

FIRST = 2.0**16
#: Updates without an overflow after which the scale is doubled.
INTERVAL = 2000


class LossScale:
    """What one stage knows of scales; the last stage decides on them.

    >>> scale = LossScale()
    >>> scale.of(0)
    65536.0
    >>> scale.updated(overflowed=True); scale.of(1)
    32768.0
    """

    def __init__(self) -> None:
        self._next = FIRST
        self._good = 0
        self._halved_for = -1
        self._of: dict[int, float] = {}
        #: What is told to the stages above.
        self.news: News = (-1, 0.0)

    def of(self, update: int) -> float:
        """The scale of the gradients that an update will apply; of the last stage's, decided when first asked."""
        return self._of.setdefault(update, self._next)

    def told(self, update: int, scale: float) -> None:
        """Hear from above by what the gradients of an update are scaled."""
        self._of[update] = scale

    def hear(self, news: News) -> None:
        """Hear from below, or from one's own update, which update overflowed last."""
        self.news = max(self.news, news)
        update, scale = self.news
        # A scale that is smaller by now has not been tried yet.
        if update > self._halved_for and scale >= self._next:
            self._next, self._good, self._halved_for = scale / 2, 0, update

    @property
    def due(self) -> float:
        """The scale of the gradients that the next update applies; 1 if it has none."""
        return self._of[min(self._of)] if self._of else 1.0

    def updated(self, *, overflowed: bool) -> None:
        """An update was made, or left out since its gradients overflowed."""
        if not self._of:
            return
        update = min(self._of)
        scale = self._of.pop(update)
        if overflowed:
            self.hear((update, scale))
            return
        self._good += 1
        if self._good == INTERVAL:
            self._next, self._good = 2 * self._next, 0

    def state(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "next": self._next,
            "good": self._good,
            "halved_for": self._halved_for,
            "of": dict(self._of),
            "news": list(self.news),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._next, self._good, self._halved_for = state["next"], state["good"], state["halved_for"]
        self._of = dict(state["of"])
        update, scale = state["news"]
        self.news = (update, scale)
