"""What is planned is what is simulated is what is trained: messages, repeated forwards and buffers, exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unlatch
from recording import feed, listening
from unlatch.errors import PlanError
from unlatch.methods import LayerPipe
from unlatch.methods.layerpipe.entries import TaskLayout
from unlatch.methods.layerpipe.task_planning import executable
from unlatch.methods.layerpipe.workload import task_workload
from unlatch.nn.tree import tree_bytes
from unlatch.plan import Plan
from unlatch.plan.dataflow import Dataflow, Sizes, layer_kinds
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.schedule import buffers, simulate, streams
from unlatch.transport.mail import Mail

BATCHES = 9


class Bent(nn.Module):
    """A layer that is no linear map."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(x))


class LayerSpec(NamedTuple):
    """A layer of a random chain: what its tasks take, what it is, how wide its output is."""

    time: int
    shape: str
    width: int


def built(specs: list[LayerSpec]) -> nn.Sequential:
    torch.manual_seed(0)
    widths = [3, *(spec.width for spec in specs)]
    blocks: list[nn.Module] = []
    for spec, inputs, outputs in zip(specs, widths, widths[1:], strict=False):
        if spec.shape == "bent":
            blocks.append(Bent(inputs, outputs))
        else:
            linear = nn.Linear(inputs, outputs)
            blocks.append(nn.Sequential(linear, nn.Tanh()) if spec.shape == "tanh" else linear)
    return nn.Sequential(*blocks).double()


def planned(specs: list[LayerSpec], devices: int, mode: str, g: int) -> Plan:
    factor = Fraction(1, 8) if mode == "factor" else 0
    costs = [LayerCost(str(n), spec.time, spec.time, spec.time, hadamard=factor) for n, spec in enumerate(specs)]
    plan = plan_layerpipe(costs, devices, mode, linear=[spec.shape != "bent" for spec in specs])
    names = [str(n) for n in range(len(specs))]
    return executable(plan, names, [(n, n + 1) for n in range(len(specs))], [1] * len(specs), extra_delay=g)


def flow_of(plan: Plan, specs: list[LayerSpec]) -> Dataflow:
    """The reading of the plan, without a look at the model: several blocks in one layer are no linear map."""
    layers = [specs[start:end] for start, end in plan.spans]
    linear = [len(layer) == 1 and layer[0].shape != "bent" for layer in layers]
    factors = [is_map and layer[0].shape == "tanh" for is_map, layer in zip(linear, layers, strict=True)]
    return Dataflow(plan.tasks, len(layers), layer_kinds(plan.tasks, linear), factors)


def sizes_of(plan: Plan, specs: list[LayerSpec], model: nn.Sequential, samples: int) -> Sizes:
    row = samples * torch.finfo(torch.double).bits // 8
    weights = [sum(p.nbytes for p in model[start:end].parameters()) for start, end in plan.spans]
    outputs = [row * specs[end - 1].width for _, end in plan.spans]
    return Sizes(outputs, weights, data=row * 3, target=outputs[-1], samples=samples)


@contextmanager
def counting() -> Iterator[Counter[int]]:
    """Forwards of linear layers, by the identity of their weights; hooks would make them something else."""
    found: Counter[int] = Counter()
    forward = nn.Linear.forward

    def counted(layer: nn.Linear, x: Tensor) -> Tensor:
        found[id(layer)] += 1
        return forward(layer, x)

    with patch.object(nn.Linear, "forward", counted):
        yield found


@contextmanager
def allowed() -> Iterator[dict[tuple[str, int], int]]:
    """Room that runs make for messages from now on."""
    found: dict[tuple[str, int], int] = {}
    allow = Mail.allow

    def listen(mail: Mail, room: Any) -> None:
        found.update(room)
        allow(mail, room)

    with patch.object(Mail, "allow", listen):
        yield found


layers = st.builds(LayerSpec, st.integers(1, 9), st.sampled_from(["tanh", "plain", "bent"]), st.integers(1, 6))


@settings(max_examples=60)
@given(
    specs=st.lists(layers, min_size=2, max_size=5),
    devices=st.integers(2, 4),
    mode=st.sampled_from(["divisible", "atomic", "factor"]),
    g=st.integers(0, 2),
    samples=st.integers(1, 9),
)
def test_predicted_and_executed_agree(specs, devices, mode, g, samples):
    try:
        plan = planned(specs, devices, mode, g)
    except PlanError:  # more devices than this chain has work for
        assume(False)
    model = built(specs)
    flow, sizes = flow_of(plan, specs), sizes_of(plan, specs, model, samples)
    layout = TaskLayout(flow, devices)

    data = [(torch.randn(samples, 3).double(), torch.randn(samples, specs[-1].width).double()) for _ in range(BATCHES)]
    with allowed() as room, listening() as messages, counting() as forwards:
        run = unlatch.parallelize(
            model,
            LayerPipe(mode=mode, microbatches=1, extra_delay=g),
            stages=devices,
            loss_fn=mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            plan=plan,
            sample=data[0],  # tried here, so that the first batch is not
        )
        forwards.clear()
        feed(run, data)

    # One schedule.
    assert run.schedule == layout.schedule

    # Messages from device to device: those of the dataflow for every micro-batch, and those of the simulator.
    senders = {(name, receiver): sender for e in run.schedule.entries for name, sender, receiver in e.incoming}
    sent: dict[tuple[str, int, int], list[int]] = {}
    for message in messages:
        sender = senders[message.kind, message.stage]
        if layout.devices[sender] != layout.devices[message.stage]:
            sent.setdefault((message.kind, sender, message.stage), []).append(tree_bytes(message.payload))
    costs = [LayerCost("", 1, 1, 1)] * len(flow.layers)
    workload = task_workload(layout, costs, sizes=sizes)
    simulated = simulate(streams(layout.schedule, [1] * BATCHES, devices=layout.devices), workload).sent
    assert {route: (len(found), sum(found)) for route, found in sent.items()} == simulated
    between = Counter((name, layout.devices[a], layout.devices[b]) for name, a, b in sent)
    predicted = flow.messages(sizes)
    assert between == Counter(message[:3] for message in predicted)
    assert sum(map(sum, sent.values())) == BATCHES * sum(message.bytes for message in predicted)

    # Forwards: every layer once, and once more on each device that rebuilds it.
    again = Counter(layer for layer, _ in flow.repeated_forwards())
    for layer, (start, end) in enumerate(plan.spans):
        linears = [part for part in model[start:end].modules() if isinstance(part, nn.Linear)]
        assert [forwards[id(part)] for part in linears] == [BATCHES * (1 + again[layer])] * len(linears)

    # Buffers: the room for messages. One more is for the end of the data.
    found = buffers(streams(layout.schedule, [1] * (2 * layout.schedule.depth + 2))).room
    assert {box: room[box] for box in senders} == {(name, to): count + 1 for (name, _, to), count in found.items()}
