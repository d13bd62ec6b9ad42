"""Networks that are cut inside of a block, trained by any method."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import unlatch
from small_nets import on_plain_nets
from unlatch.methods import LayerPipe, Method
from unlatch.models.gpt import GPT, next_token_loss
from unlatch.models.resnet_cifar import CifarResNet

Outcome = tuple[list[float | None], dict[str, Tensor]]
#: Inside of a residual block, and between attention and perceptron, where one tensor passes.
SKIP, STREAM = "layer2.0:1", "layers.1:1"


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return CifarResNet(8, in_channels=1, width=4)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocabulary=7, context=6, depth=2, width=8, heads=2)


def pictures(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 1, 8, 8, generator=generator), torch.randint(10, (6,), generator=generator))
        for _ in range(count)
    ]


def texts(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(7, (2, 4, 6), generator=generator)) for _ in range(count)]  # type: ignore[misc]


def begun(method: str | Method, split: str, **options: Any) -> unlatch.Run:
    """A run of two stages, cut there."""
    model, data, loss = (gpt, texts, next_token_loss) if split == STREAM else (resnet, pictures, None)
    chosen = on_plain_nets(method, 2)
    if isinstance(chosen, LayerPipe):
        # Its other modes place tasks of whole blocks.
        chosen = LayerPipe(mode="stages")
    return unlatch.parallelize(
        model(),
        chosen,
        stages=2,
        loss_fn=loss or nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        split=[split],
        sample=data(1)[0],
        **options,
    )


def trained(method: str | Method, split: str, **options: Any) -> Outcome:
    with begun(method, split, **options) as run:
        data = texts(3) if split == STREAM else pictures(3)
        steps = [run.step(x, y) for x, y in data] + run.flush()
        state = {name: t.detach().clone() for name, t in run.module().state_dict().items()}
    return [step.loss for step in steps], state


def trained_each(cases: list[tuple[str, str]]) -> list[Outcome]:
    return [trained(method, split) for method, split in cases]
