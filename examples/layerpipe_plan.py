"""LayerPipe, from costs to training: place forward, input gradient and weight gradient of every layer apart.

    python examples/layerpipe_plan.py

Layers that cost 1 : 2 : 4 : 3 cannot be cut well in two. Shows how much a placement of single tasks gains over the best
cut, as simulated; the plan goes through a file, as `unlatch plan -o` writes it, and is then trained.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.advise.prediction import simulate_method
from unlatch.methods import LayerPipe
from unlatch.plan import plan_to_json, read_plan
from unlatch.plan.layer_costs import LayerCost

COSTS = tuple(LayerCost(str(n), time, time, time) for n, time in enumerate((1, 2, 4, 3)))


def main() -> None:
    torch.set_num_threads(1)
    train, test = unlatch.data.load("digits")
    torch.manual_seed(0)
    widths = ((64, 64), (64, 128), (128, 128), (128, 10))
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in widths]
    model = nn.Sequential(nn.Sequential(nn.Flatten(), *layers[0]), *layers[1:])
    cut, tasks = (simulate_method(name, COSTS, 2).speedup for name in ("pipedream", "layerpipe"))
    print(f"simulated on 2 devices: pipedream {cut:.2f} times as fast as one, layerpipe {tasks:.2f}")

    method = LayerPipe(costs=COSTS, microbatches=4)
    start = partial(unlatch.parallelize, model, method, stages=2, loss_fn=cross_entropy)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        file.write_text(json.dumps(plan_to_json(start(optimizer=sgd).plan)))
        run = start(optimizer=sgd, plan=read_plan(file))
    print(run.plan)
    unlatch.Trainer(run).fit(unlatch.data.Loader(train, batch_size=64, shuffle=True), epochs=3)
    print(f"test accuracy {run.evaluate(unlatch.data.Loader(test))['accuracy']:.3f}")


if __name__ == "__main__":
    main()
