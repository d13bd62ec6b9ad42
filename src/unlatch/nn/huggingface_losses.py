"""The losses of models of `transformers`, as a sum and the number of things that it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["OwnLoss", "by_token", "causal", "classes", "loss_of", "numbers_per_sample"]

#: Of scores, labels and the model's configuration.
OwnLoss: TypeAlias = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]

_IGNORED = -100


def _cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    # In half precision the sum over a vocabulary would be worth little.
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    total = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=_IGNORED, reduction="sum")
    return total, (labels != _IGNORED).sum()


def causal(scores: Tensor, labels: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Every token is to say which one follows."""
    return _cross_entropy(scores[:, :-1], labels[:, 1:])


def by_token(scores: Tensor, labels: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """A class for every token, or for those that are masked."""
    return _cross_entropy(scores, labels)


def classes(scores: Tensor, labels: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Classes or numbers for a whole sample, by `config.problem_type` or else by what the labels are."""
    kind = _problem(labels, config)
    if kind == "single_label_classification":
        return _cross_entropy(scores, labels)
    distance = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
    return distance(scores, labels.reshape(scores.shape).to(scores.dtype), reduction="sum"), torch.tensor(
        labels.numel()
    )


def numbers_per_sample(labels: Tensor, config: Any) -> int:
    """How many labels a sample has."""
    return 1 if _problem(labels, config) == "single_label_classification" else int(config.num_labels)


def _problem(labels: Tensor, config: Any) -> str:
    if config.problem_type is not None:
        return str(config.problem_type)
    if config.num_labels == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


# By the end of the class's name, as the library itself chooses its losses.
_LOSSES: dict[str, OwnLoss] = {
    "ForCausalLM": causal,
    "LMHeadModel": causal,
    "ForMaskedLM": by_token,
    "ForTokenClassification": by_token,
    "ForSequenceClassification": classes,
    "ForImageClassification": classes,
}


def loss_of(model: object) -> OwnLoss | None:
    """What a model computes from its labels; `None` if its kind is not known."""
    for kind in type(model).__mro__:
        for ending, loss in _LOSSES.items():
            if kind.__name__.endswith(ending):
                return loss
    return None
