"""Models as chains of blocks, in plain PyTorch.

>>> import torch
>>> from unlatch import models
>>> model = models.build("resnet20", in_channels=1)
>>> model(torch.zeros(2, 1, 28, 28)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

from .base import Chain
from .gpt import GPT, next_token_loss
from .mlp import MLP
from .registry import build, metrics_for, names, options_for, problems
from .resnet import ResNet
from .resnet_cifar import CifarResNet
from .vgg import VGG
from .wide_resnet import WideResNet

__all__ = [
    "GPT",
    "MLP",
    "VGG",
    "Chain",
    "CifarResNet",
    "ResNet",
    "WideResNet",
    "build",
    "metrics_for",
    "names",
    "next_token_loss",
    "options_for",
    "problems",
]
