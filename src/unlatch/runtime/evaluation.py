"""Evaluation through the pipeline: batches go up, sums of metrics come down, so every rank knows the result.

Each process answers a batch only after its successor did, in 1F1B order, which bounds the batches under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..nn.tree import batch_size, map_tensors
from .mail import ACK, EVALUATE, Mail, Message
from .stage import Stage

__all__ = ["evaluate"]

Sums = dict[str, float]


def evaluate(
    stages: dict[int, Stage],
    total: int,
    mail: Mail,
    loader: Iterable[tuple[Any, Any]] | None,
    *,
    behind: int,
    loss_fn: Callable[[Any, Any], Tensor],
) -> Sums:
    """Mean loss and accuracy over a loader, at the newest weights of every stage.

    **Arguments:**

    - `loader`: read only where stage 0 lives.
    - `behind`: processes above this one; so many batches may be under way there.
    """
    sums: Sums = {"samples": 0.0, "loss": 0.0, "correct": 0.0, "predictions": 0.0}
    lowest, highest = min(stages), max(stages)
    if lowest == 0 and loader is None:
        raise DataError("evaluate needs a loader on the rank that holds stage 0, got None")
    source = iter(loader) if lowest == 0 and loader is not None else None
    sent = answered = 0

    def answer() -> None:
        nonlocal answered
        message = mail.take(ACK, highest)
        assert message.scalars is not None
        _finish(message.scalars)
        answered += 1

    def _finish(found: Sums) -> None:
        for name, value in found.items():
            sums[name] += value
        if lowest > 0:
            mail.send(Message(ACK, lowest - 1, scalars=found))

    while (batch := _next(source, mail, lowest)) is not None:
        x, y = batch
        for index in sorted(stages):
            x = stages[index].evaluate(x)
        if highest == total - 1:
            _finish(_measure(x, y, loss_fn))
        else:
            mail.send(Message(EVALUATE, highest + 1, payload=(x, y)))
            sent += 1
            if sent - answered > behind:
                answer()
    if highest < total - 1:
        mail.send(Message(EVALUATE, highest + 1))
        while answered < sent:
            answer()
    return _summary(sums)


def _next(source: Any, mail: Mail, lowest: int) -> tuple[Any, Any] | None:
    if source is not None:
        found: tuple[Any, Any] | None = next(source, None)
        return found
    message = mail.take(EVALUATE, lowest)
    payload: tuple[Any, Any] | None = message.payload
    return payload


def _measure(outputs: Any, target: Any, loss_fn: Callable[[Any, Any], Tensor]) -> Sums:
    """Sums over one batch; accuracy where outputs are class scores and targets class numbers."""
    with torch.no_grad():
        outputs = map_tensors(lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, outputs)
        count = batch_size(outputs)
        sums = {"samples": float(count), "loss": float(loss_fn(outputs, target)) * count}
        if isinstance(outputs, Tensor) and isinstance(target, Tensor) and not target.is_floating_point():
            axis = _class_axis(outputs, target)
            if axis is not None:
                sums["correct"] = float((outputs.argmax(axis) == target).sum())
                sums["predictions"] = float(target.numel())
        return sums


def _class_axis(outputs: Tensor, target: Tensor) -> int | None:
    """Where the classes are: torch puts them second, language models last."""
    if target.dim() != outputs.dim() - 1:
        return None
    if target.shape == outputs.shape[:1] + outputs.shape[2:]:
        return 1
    return -1 if target.shape == outputs.shape[:-1] else None


def _summary(sums: Sums) -> Sums:
    samples = max(1.0, sums["samples"])
    result = {"loss": sums["loss"] / samples, "samples": sums["samples"]}
    if sums["predictions"]:
        result["accuracy"] = sums["correct"] / sums["predictions"]
    return result
