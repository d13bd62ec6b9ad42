"""Claim (DTR, Figures 2 and 3: the weight delay, and the delay regulator; its meaning is inferred): s updates ahead, a
prediction is nearer to the coming weights than the present weights are, for every delay s_k = 2(K-k)-1 of K = 2 to 5;
and where s is large the saturating regulator R(s) = mu + ... + mu^s misses by less than R(s) = s. Reached, from s = 3
on; but a constant gradient is further off than no prediction from s = 5 on.

    python benchmarks/delay_regulator.py [--seeds 3]

ResNet-8 on digits under backpropagation (heavy ball, momentum 0.9, learning rate 0.1, batches of 64, 8
epochs). After every fifth update each predictor tells the weights s updates ahead, and s updates later it is compared
with them: the miss is the distance of prediction and weights, divided by the distance that the weights have moved.
1 is what is missed without prediction. Of the rounds of a seed the median counts. Nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write
from torch import Tensor
from torch.nn.functional import cross_entropy

from unlatch.data import Loader, load
from unlatch.models import build
from unlatch.rules.predict import ConstantGradient, Difference, Linear, Predictor, Regulator

DELAYS = (1, 3, 5, 7)
EPOCHS, EVERY, MOMENTUM = 8, 5, 0.9
REGULATORS = {
    "steps": Regulator(),
    "geometric": Regulator(rho="geometric"),
    "half of the steps": Regulator(alpha=0.5),
    "capped at 3": Regulator(rho="capped", cap=3),
}
PREDICTORS: dict[str, Predictor] = {
    **{f"velocity, {name}": Linear(regulator) for name, regulator in REGULATORS.items()},
    "difference": Difference(),
    "constant gradient": ConstantGradient(),
}


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return float(torch.stack([(x - y).square().sum() for x, y in zip(a, b, strict=True)]).sum().sqrt())


def trained(seed: int) -> dict[str, dict[int, float]]:
    """For each predictor and delay, the median miss along one training."""
    torch.manual_seed(seed)
    model = build("resnet8", in_channels=1)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=MOMENTUM, weight_decay=5e-4)
    histories = {name: one.history(params, optimizer) for name, one in PREDICTORS.items()}
    waiting: dict[int, list[tuple[str, int, list[Tensor], list[Tensor]]]] = {}
    misses: dict[str, dict[int, list[float]]] = {name: {s: [] for s in DELAYS} for name in PREDICTORS}
    training = Loader(load("digits")[0], 64, shuffle=True, seed=seed, augment=True, drop_last=True)
    update = 0
    for _ in range(EPOCHS):
        for x, y in training:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for history in histories.values():
                history.before_step(params)
            optimizer.step()
            for history in histories.values():
                history.after_step(params)
            update += 1
            now = [p.detach().clone() for p in params]
            for name, s, before, told in waiting.pop(update, ()):
                misses[name][s].append(distance(told, now) / distance(before, now))
            if update % EVERY == 0:
                for name, one in PREDICTORS.items():
                    for s in DELAYS:
                        told = one.predict(params, optimizer, s, histories[name])
                        waiting.setdefault(update + s, []).append((name, s, now, told))
    return {name: {s: statistics.median(found) for s, found in by.items()} for name, by in misses.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [trained(seed) for seed in range(args.seeds)]
    rows: list[dict[str, Any]] = []
    for name in PREDICTORS:
        for s in DELAYS:
            misses = {seed: run[name][s] for seed, run in enumerate(runs)}
            rows.append({"predictor": name, "steps": s, "miss": misses})
            print(f"{name:26} s={s}: {', '.join(f'{miss:.3f}' for miss in misses.values())}")
    curves = {name: [regulator(s, MOMENTUM) for s in range(1, 10)] for name, regulator in REGULATORS.items()}
    print(write("delay_regulator", {"rows": rows, "regulators": curves}, args.out))


if __name__ == "__main__":
    main()
