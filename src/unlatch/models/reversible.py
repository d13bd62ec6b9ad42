"""The table of reversible models, for the registry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from torch import nn

from .irevnet import IRevNet
from .rev_transformer import RevGPT, RevViT
from .revnet import revnet18, revnet34, revnet50, revnet_cifar, revnet_fixed

__all__ = ["REVERSIBLE_MODELS"]

#: All take keyword options; those for images `classes` and `in_channels`.
REVERSIBLE_MODELS: Final[dict[str, Callable[..., nn.Module]]] = {
    "revnet18": revnet18,
    "revnet34": revnet34,
    "revnet50": revnet50,
    "revnet8": partial(revnet_cifar, 8),
    "revnet14": partial(revnet_cifar, 14),
    "revnet20": partial(revnet_cifar, 20),
    "revnet-fixed": revnet_fixed,
    "irevnet": IRevNet,
    "rev-vit": RevViT,
    "rev-gpt": RevGPT,
}
