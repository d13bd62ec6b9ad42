"""Train on two local processes started from Python, and see that the weights do not depend on the number of processes.

    python examples/two_processes.py

`launch` sends the function to fresh interpreters: define it at the top level of a module, and call `launch` under
`if __name__ == "__main__"`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import unlatch

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


def train(method: str) -> tuple[float, dict[str, Tensor]]:
    """The same program on every rank; without a process group it runs inline."""
    data, test = unlatch.data.load("digits")
    torch.manual_seed(0)  # the same initial weights on every rank; this is checked
    model = unlatch.models.build("mlp", widths=(64, 128, 128, 10))
    # The cut is named: an automatic one follows measured times, which may differ from run to run.
    with unlatch.parallelize(model, method, stages=2, loss_fn=cross_entropy, optimizer=SGD, split=["layers.1"]) as run:
        unlatch.Trainer(run).fit(unlatch.data.Loader(data, batch_size=64, shuffle=True), epochs=3)
        accuracy = run.evaluate(unlatch.data.Loader(test))["accuracy"]
        return accuracy, {name: t.clone() for name, t in run.module().state_dict().items()}


def main() -> None:
    torch.set_num_threads(1)  # as many as each rank has: the number of threads changes the order of sums
    accuracy, alone = train("pipedream")
    print(f"inline: test accuracy {accuracy:.3f}")
    for rank, (accuracy, state) in enumerate(unlatch.launch(train, processes=2, args=("pipedream",))):
        same = all(torch.equal(alone[name], t) for name, t in state.items())
        print(f"rank {rank}: test accuracy {accuracy:.3f}, same weights as inline, bit for bit: {same}")


if __name__ == "__main__":
    main()
