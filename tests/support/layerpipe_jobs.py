"""Runs of LayerPipe with tasks placed on devices, for tests in one process and on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from rank_jobs import Outcome, copied_state, falling_lr, momentum_sgd
from small_nets import conv_net, images, tanh_net, vectors
from unlatch.methods import LayerPipe
from unlatch.methods.layerpipe.task_planning import executable
from unlatch.plan import Plan
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import plan_layerpipe

UNIT = (1, 1, 1, 1)
MIXED = (1, 2, 4, 3)


def chain_costs(times: Sequence[int], mode: str = "divisible") -> list[LayerCost]:
    """Layers whose three tasks take the same time; in mode `factor` a part of D is elementwise."""
    factor = Fraction(1, 8) if mode == "factor" else 0
    return [LayerCost(str(n), time, time, time, hadamard=factor) for n, time in enumerate(times)]


def task_plan(times: Sequence[int], devices: int, mode: str, extra_delay: int = 0) -> Plan:
    """The planner's placement for a model of as many blocks, without any adaptation to the model."""
    plan = plan_layerpipe(chain_costs(times, mode), devices, mode)
    names = [str(n) for n in range(len(times))]
    return executable(plan, names, [(n, n + 1) for n in range(len(times))], [1] * len(times), extra_delay=extra_delay)


def residual_net(blocks: int, width: int = 5) -> nn.Sequential:
    """Blocks that are no linear maps."""
    torch.manual_seed(0)
    return nn.Sequential(*[Residual(width) for _ in range(blocks)]).double()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.inner(x))


def tall_conv_net() -> nn.Sequential:
    """Convolutions that are linear maps with an elementwise function, and a head that is none; float32."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.LeakyReLU(0.1)),
        nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)),
    )
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


NETS = {"tanh": tanh_net, "residual": residual_net, "conv": tall_conv_net, "norm": conv_net}


def train_tasks(net: str, times: Sequence[int], devices: int, mode: str, **options: Any) -> Outcome:
    """Train with everything switched on and tell what must not depend on where it ran."""
    pictures, sizes = net in ("conv", "norm"), (12, 12, 12, 12, 12, 5)
    model = NETS[net]() if pictures else NETS[net](len(times))
    data = images(list(sizes)) if pictures else [vectors(1, size, seed=n)[0] for n, size in enumerate(sizes)]
    if mode == "stages":
        where: dict[str, Any] = {"split": [str(n) for n in range(1, devices)]}
    else:
        where = {"plan": task_plan(times, devices, mode, options.get("g", 0))}
    with unlatch.parallelize(
        model,
        LayerPipe(mode=mode, **{"microbatches": 2, **options}),
        stages=devices,
        loss_fn=cross_entropy if pictures else mse_loss,
        optimizer=momentum_sgd,
        lr_scheduler=falling_lr,
        clip_grad_norm=0.5,
        seed=3,
        **where,
    ) as run:
        steps, evaluations = [], []
        for number, (x, y) in enumerate(data):
            steps.append(run.step(x, y))
            if number % 2:
                evaluations.append(run.evaluate(data[:2]))
        steps += run.flush()
        state = copied_state(run.module())
        staleness = [s.predicted_staleness for s in run.statistics()]
    return {
        "steps": [(s.step, s.batch, s.loss) for s in steps],
        "evaluations": evaluations,
        "staleness": staleness,
        "state": state,
    }


def train_all_tasks(cases: Sequence[tuple[Any, ...]]) -> list[Outcome]:
    """Several runs, one after the other."""
    return [train_tasks(*case[:4], **(case[4] if len(case) > 4 else {})) for case in cases]
