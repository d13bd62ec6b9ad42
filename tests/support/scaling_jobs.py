"""Training in half precision with a scaled loss, some batches of which overflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import unlatch
from small_nets import on_plain_nets
from unlatch.nn.randomness import replayable
from unlatch.runtime import scaling

Outcome = tuple[list[float], list[Tensor]]
BATCHES, SAVED_AT = 9, 5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)], nn.Linear(6, 6))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def data(large: Sequence[int] = (), factor: float = 30.0) -> list[tuple[Tensor, Tensor]]:
    """Batches; the `large` ones have targets whose gradients overflow at the first scale, though not at half of it."""
    generator = torch.Generator().manual_seed(5)
    made = [(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)) for _ in range(BATCHES)]
    return [(x, y * factor if number in large else y) for number, (x, y) in enumerate(made)]


def begun(method: str, stages: int, **options: Any) -> unlatch.Run:
    splits: dict[int, list[str]] = {1: [], 2: ["2"], 3: ["1", "3"]}
    return unlatch.parallelize(
        net(),
        on_plain_nets(method, stages),
        stages=stages,
        split=splits[stages],
        loss_fn=nn.functional.mse_loss,
        optimizer=sgd,
        precision="fp16",
        **{"distributed": False, **options},
    )


def plain_loop(batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], list[Tensor], float]:
    """The same with torch's own scaler."""
    model = net()
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=scaling.FIRST)
    losses = []
    for number, (x, y) in enumerate(batches):
        with replayable(0, 0, number), torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        losses.append(float(loss.detach()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()], scaler.get_scale()


def ended(run: unlatch.Run, first: int) -> Outcome:
    steps = [run.step(x, y) for x, y in data(large=(3, 4, 7))[first:]] + run.flush()
    return [s.loss for s in steps if s.loss is not None], [t.clone() for t in run.module().state_dict().values()]


def trained(method: str, path: str | None, distributed: bool | None = None) -> Outcome:
    """Train on, and save on the way; tell of what came after."""
    with begun(method, 3, distributed=distributed) as run:
        for x, y in data(large=(3, 4, 7))[:SAVED_AT]:
            run.step(x, y)
        if path is not None:
            run.save(path)
        return ended(run, SAVED_AT)


def resumed(method: str, path: str) -> Outcome:
    with begun(method, 3, distributed=None) as run:
        run.load(path)
        return ended(run, SAVED_AT)


def same(one: Outcome, other: Outcome) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
