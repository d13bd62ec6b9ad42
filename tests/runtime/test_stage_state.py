"""A stage that is saved with micro-batches under way, rebuilt and loaded goes on bit for bit like the untouched one."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from unlatch.methods import CGAD, XPipe
from unlatch.nn import Coupling
from unlatch.nn.chain import StageChain, chain
from unlatch.nn.tree import copied, flatten, map_tensors
from unlatch.rules.activations import Graph, Input, Reverse
from unlatch.rules.bundle import Rules
from unlatch.rules.predict import predictor
from unlatch.rules.weights import Average, Current, Lagging, Latest, Newest, Predicted, Stash
from unlatch.runtime.stage import Stage, StageOptions
from unlatch.transport.mail import Micro

DELAY, PARTS = 2, 2


def branch(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3))


def plain(width: int = 4) -> nn.Module:
    return nn.Sequential(branch(width), nn.Linear(width, width), nn.ReLU(inplace=True), branch(width))


OPTIMIZERS = {
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}


@dataclass
class Driver:
    """Drives one stage as a pipeline would, with random data in place of its neighbours."""

    rules: Rules
    index: int = 0
    count: int = 3
    optimizer: str = "nesterov"
    halves: bool = False
    reversible: bool = False
    delay: int = DELAY
    stage: Stage = field(init=False)
    done: list[Any] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stage = self.fresh()

    def fresh(self) -> Stage:
        torch.manual_seed(3)
        module: nn.Module = plain()
        if self.reversible:
            blocks = nn.Sequential(Coupling(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), Coupling(branch(2)))
            module = StageChain(chain(blocks))
        options = StageOptions(
            loss_fn=mse_loss,
            optimizer=OPTIMIZERS[self.optimizer],
            lr_scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 5, 9], gamma=0.5),
            clip_grad_norm=1.0,
        )
        return Stage(self.index, self.count, module.double(), self.rules, options, delay=self.delay)

    def micro(self, number: int) -> Micro:
        last = number % PARTS == PARTS - 1
        return Micro(number, number // PARTS, number % PARTS, PARTS, 6, 0.5, number // PARTS, last)

    def draw(self, number: int, what: int) -> Any:
        generator = torch.Generator().manual_seed(100 * number + what)
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        return (x[:, :2].clone(), x[:, 2:].clone()) if self.reversible else x

    def forward(self, number: int) -> None:
        target = self.draw(number, 1) if self.stage.last else None
        out = self.stage.forward(self.micro(number), self.draw(number, 0), target)
        self.outputs[number] = out
        self.done.append((self.stage.loss, map_tensors(Tensor.clone, out)))

    def backward(self, number: int, work: Any) -> None:
        cotangent = None if self.stage.last else flatten(self.draw(number, 2))[0]
        self.done.append(work(self.micro(number), cotangent, self.outputs.pop(number)).gradients)

    def actions(self, micros: int) -> list[tuple[str, int]]:
        """Two updates behind; in halves, the gradient of the weights comes one micro-batch after that of the input."""
        behind, listed = PARTS * self.delay, []
        for number in range(micros + behind + 1):
            listed += [("F", number)] if number < micros else []
            now, late = number - behind, number - behind - 1
            if self.halves:
                listed += [("I", now)] if 0 <= now < micros else []
                listed += [("W", late), ("U", late)] if 0 <= late < micros else []
            elif 0 <= now < micros:
                listed += [("B", now), ("U", now)]
        return [(kind, n) for kind, n in listed if kind != "U" or self.micro(n).ends]

    def do(self, kind: str, number: int) -> None:
        if kind == "F":
            self.forward(number)
        elif kind == "W":
            self.stage.backward_weights(self.micro(number))
        elif kind == "U":
            self.stage.update()
        else:
            self.backward(number, self.stage.backward if kind == "B" else self.stage.backward_input)

    def end(self) -> Any:
        return self.done, self.stage.state()


def same(one: Any, other: Any) -> None:
    tensors, structure = flatten(one)
    others, other_structure = flatten(other)
    assert structure == other_structure
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def check(driver: Driver, micros: int = 12) -> None:
    """Save, rebuild and load after every single action."""
    untouched = copy.deepcopy(driver.rules)
    actions = driver.actions(micros)
    for action in actions:
        driver.do(*action)
    broken = Driver(
        untouched, driver.index, driver.count, driver.optimizer, driver.halves, driver.reversible, driver.delay
    )
    for action in actions:
        broken.do(*action)
        state = copied(broken.stage.state())
        broken.stage = broken.fresh()
        with torch.no_grad():
            for p in broken.stage.params:
                p.add_(1.0)
        broken.stage.load(state)
        same(broken.stage.state(), state)
    same(broken.end(), driver.end())


GRAPHS = [Rules(Graph(), Newest(), backward) for backward in (Stash(), Latest(), Average())]
INPUTS = [Rules(Input(), Newest(), backward) for backward in (Current(), Stash(), Latest(), Average())]
COUNTED_FIRST = Rules(Input("forward"), Newest(), Latest())
PREDICTED = [
    Rules(kept, Predicted(predictor(name)), backward)
    for kept, backward in ((Graph(), Stash()), (Graph(), Latest()), (Input(), Current()), (Input(), Stash()))
    for name in ("geometric", "difference")
]


def named(rules: Any) -> str:
    if not isinstance(rules, Rules):
        return str(rules)
    return "-".join((rules.activation.name, rules.forward.name, rules.backward.name))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("rules", [*GRAPHS, *INPUTS, *PREDICTED], ids=named)
def test_a_stage_that_was_saved_goes_on_alike(rules, index):
    check(Driver(rules, index))


@pytest.mark.parametrize("rules", [*GRAPHS, *INPUTS[1:], COUNTED_FIRST], ids=named)
def test_a_pending_second_half_is_saved_as_well(rules):
    check(Driver(rules, 1, halves=True))


def test_a_half_without_an_update_in_between():
    """Under torch's own check a second half must come before the update, as in zero-bubble schedules."""
    driver, broken = Driver(Rules(), 1), Driver(Rules(), 1)
    for d in (driver, broken):
        for number in range(4):
            d.forward(number)
        d.backward(0, d.stage.backward_input)
        d.backward(1, d.stage.backward_input)
        d.stage.backward_weights(d.micro(0))
        d.backward(2, d.stage.backward)
    state = copied(broken.stage.state())
    broken.stage = broken.fresh()
    broken.stage.load(state)
    for d in (driver, broken):
        d.stage.backward_weights(d.micro(1))
        d.backward(3, d.stage.backward)
        d.stage.update()
    same(broken.end(), driver.end())


@pytest.mark.parametrize("backward", [Current(), Stash(), Average()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("index", [0, 1])
def test_a_reversible_stage(backward, index):
    check(Driver(Rules(Reverse(), Newest(), backward), index, reversible=True))


@pytest.mark.parametrize("rules", [Rules(), GRAPHS[0], Rules(Graph(), Lagging(), Stash())], ids=named)
def test_the_last_stage_with_its_loss(rules):
    check(Driver(rules, 2, delay=0))


def test_lagging_weights():
    check(Driver(Rules(Graph(), Lagging(), Stash()), 0, delay=1))


@pytest.mark.parametrize("rules", [GRAPHS[0], PREDICTED[0], PREDICTED[4]], ids=named)
def test_other_optimizers(rules):
    check(Driver(rules, 0, optimizer="adamw"))


@pytest.mark.parametrize("method", [XPipe(), XPipe(predict="difference"), CGAD(shrink=0.9)], ids=lambda m: m.name)
def test_rules_that_methods_bring(method):
    check(Driver(method.rules(), 1))


def test_a_copied_state_is_plain_and_its_own():
    driver = Driver(GRAPHS[0], 0)
    for action in driver.actions(6)[:14]:
        driver.do(*action)
    state = copied(driver.stage.state())
    before = copy.deepcopy(state)
    for number in range(10, 13):
        driver.forward(number)
    driver.stage.update()
    same(state, before)
    json.dumps(flatten(state)[1])


def test_a_gradient_that_waits_in_an_accumulation_is_kept():
    driver = Driver(INPUTS[0], 0, delay=0)
    driver.forward(0)
    driver.backward(0, driver.stage.backward)
    again = driver.fresh()
    again.load(copied(driver.stage.state()))
    assert not again.unapplied
    for p, q in zip(driver.stage.params, again.params, strict=True):
        assert torch.equal(p.grad, q.grad)
        assert p.grad is not q.grad
