"""Small trained attachments to the output of a stage: a classifier of its own, or a guess of the gradient to come."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShapeMismatch
from .channels import channel_shape, widened

__all__ = ["GradientSynthesiser", "local_head"]


def _pointwise(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def _perceptron(inputs: int, outputs: int) -> list[nn.Module]:
    hidden = min(256, max(inputs, outputs))
    return [
        *(nn.Linear(inputs, hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, outputs),
    ]


class _MeanOverPositions(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(1)


def local_head(border: tuple[int, ...], output: tuple[int, ...], where: str = "this border") -> nn.Sequential:
    """A head that turns a stage's output into outputs of the whole network (Belilovsky et al. 2019).

    Images are averaged down to at most 4x4, pass three 1x1 convolutions with batch norm and a perceptron of three
    layers; vectors pass the perceptron alone. Tokens `(position, channel)` pass a layer norm first; where every token
    has an output, a linear map follows, as in language models, otherwise the mean over positions and the perceptron. So
    sequences may be of any length.

    **Arguments:**

    - `border`, `output`: shapes of one sample of the stage's and of the network's output.
    - `where`: named in the error for shapes that have no automatic head.

    >>> local_head((16, 8, 8), (10,))(torch.zeros(2, 16, 8, 8)).shape
    torch.Size([2, 10])
    >>> local_head((5, 16), (5, 30))(torch.zeros(2, 9, 16)).shape
    torch.Size([2, 9, 30])
    """
    if len(border) == 3 and len(output) == 1:
        channels, height, width = border
        pool = nn.AdaptiveAvgPool2d((min(4, height), min(4, width)))
        convs = [layer for _ in range(3) for layer in _pointwise(channels, channels)]
        pooled = channels * min(4, height) * min(4, width)
        return nn.Sequential(pool, *convs, nn.Flatten(), *_perceptron(pooled, output[0]))
    if len(border) == len(output) == 1:
        return nn.Sequential(*_perceptron(border[0], output[0]))
    if len(border) == len(output) and border[:-1] == output[:-1]:
        return nn.Sequential(nn.LayerNorm(border[-1]), nn.Linear(border[-1], output[-1]))
    if len(border) == 2 and len(output) == 1:
        return nn.Sequential(nn.LayerNorm(border[-1]), _MeanOverPositions(), *_perceptron(border[-1], output[0]))
    if len(output) == 1:
        return nn.Sequential(nn.Flatten(), *_perceptron(prod(border), output[0]))
    raise ShapeMismatch(
        f"there is no automatic head from {border} at {where} to outputs {output}: pass head=, a function of both "
        "shapes"
    )


class GradientSynthesiser(nn.Module):
    """Guesses the gradient at a stage's output from that output and, for class targets, from the label.

    Three layers, the last of which starts at zero, so that the first guesses are zero. The scale of the gradients is
    tracked apart from the network, which sees targets of size one.

    **Arguments:**

    - `shape`: of one sample of the stage's output.
    - `classes`: number of classes; 0 leaves the label out.

    >>> guess = GradientSynthesiser((3,), classes=2)
    >>> guess(torch.ones(4, 3), torch.tensor([0, 1, 0, 1])).abs().max()
    tensor(0., grad_fn=<MaxBackward1>)
    """

    scale: Tensor
    seen: Tensor

    def __init__(self, shape: tuple[int, ...], classes: int = 0) -> None:
        super().__init__()
        self.classes = classes
        images = len(shape) == 3
        channels = shape[0] if images else shape[-1]

        def layer(inputs: int) -> nn.Module:
            return nn.Conv2d(inputs, channels, 3, padding=1) if images else nn.Linear(inputs, channels)

        self.first, self.second, self.third = layer(channels), layer(channels), layer(channels)
        nn.init.zeros_(self.third.weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.third.bias)  # type: ignore[arg-type]
        self.label = nn.Embedding(classes, channels) if classes else None
        self._label_shape = (-1, *channel_shape(shape)[1:])
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        z = self.first(widened(h))
        if self.label is not None and target is not None:
            # Labels below 0 are those that losses ignore: nothing is known there.
            known = (target >= 0).to(z.dtype).unsqueeze(-1)
            z = z + (self.label(target.clamp_min(0)) * known).view(self._label_shape)
        z = F.relu(z)
        z = F.relu(self.second(z))
        guess: Tensor = self.third(z) * self.scale
        return guess.to(h.dtype)

    def loss(self, h: Tensor, target: Tensor | None, gradient: Tensor) -> Tensor:
        """Mean squared error of the guess, in units of the gradient's own size, which is tracked here."""
        gradient = widened(gradient)
        size = gradient.square().mean().sqrt()
        weight = 0.1 if int(self.seen) else 1.0
        self.scale = self.scale.lerp(size.to(self.scale.dtype), weight)
        self.seen += 1
        unit = torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))
        return F.mse_loss(widened(self(h, target)) / unit, gradient / unit)
