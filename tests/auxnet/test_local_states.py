"""Local methods where more than one tensor passes between stages: tied weights, masks, skips; and tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from recording import feed
from tied_nets import (
    LENGTH,
    WIDTH,
    WORDS,
    Padded,
    SmallUNet,
    TiedLM,
    TiedThrice,
    padded,
    token_mean,
    token_sum,
    tokens,
)
from unlatch.errors import ConfigError, ShapeMismatch
from unlatch.methods import DGL, DNI, AugLocal, AuxNet, AuxVar, get
from unlatch.nn import chain
from unlatch.nn.auxiliary import Border, find_borders
from unlatch.nn.heads import GradientSynthesiser, local_head

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STAGES = 3
SPLITS = {TiedLM: ["layers.0", "head"], TiedThrice: ["layers.0", "head"], SmallUNet: ["middle", "up.1"]}


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def begun(model: nn.Module, method: Any, data: Any, loss_fn: Any = token_mean, **options: Any) -> unlatch.Run:
    split = options.pop("split", SPLITS.get(type(model)))
    return unlatch.parallelize(
        model, method, stages=STAGES, loss_fn=loss_fn, optimizer=SGD, split=split, sample=data[0], **options
    )


class Guess(nn.Module):
    """A linear synthesiser."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, target: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(h)
        return out

    def loss(self, h: Tensor, target: Tensor | None, gradient: Tensor) -> Tensor:
        return mse_loss(self(h), gradient)


class ByHand:
    """Three stages that share the embedding: what each does, without stations, schedules and messages.

    **Arguments:** `beside`: heads or, if it is about `guesses`, synthesisers of the first two stages.
    """

    def __init__(self, model: Any, beside: list[Any], *, guesses: bool) -> None:
        self.model, self.beside, self.guesses = model, beside, guesses
        self.shared: nn.Parameter = model.embed.weight
        parts: list[nn.Module] = [model.embed, model.layers, model.head.norm]
        # The embedding belongs to the first stage, wherever else it is used.
        self.own = [[p for p in part.parameters() if k == 0 or p is not self.shared] for k, part in enumerate(parts)]
        self.optimizers = [SGD(params) for params in self.own]
        learn: Any = partial(torch.optim.Adam, lr=0.01) if guesses else SGD
        self.learners = [learn(net.parameters()) for net in beside]
        #: Gradients of the embedding: on their way down, and arrived since the last update.
        self.coming: list[Tensor] = []
        self.arrived = torch.zeros_like(self.shared)
        self.lessons: list[list[tuple[Tensor, Tensor]]] = []

    def run(self, stage: int, h: Tensor, weight: Tensor) -> Tensor:
        """A stage with this value of the embedding."""
        if stage == 0:
            return nn.functional.embedding(h, weight)
        if stage == 2:
            out: Tensor = self.model.head.norm(h) @ weight.T
            return out
        for layer in self.model.layers:
            h = torch.func.functional_call(layer, {"words.weight": weight} if hasattr(layer, "words") else {}, (h,))
        return h

    def step(self, x: Tensor, y: Tensor) -> None:
        if self.guesses and len(self.lessons) == 2:
            self.learn()
        found, lesson, out = torch.zeros_like(self.shared), [], x
        value = self.shared.detach().clone()
        for stage in range(STAGES):
            h, weight = (out, self.shared) if stage == 0 else (out.detach(), value.clone())
            inputs = [t.requires_grad_() for t in (weight, h)] if stage else []
            out = self.run(stage, h, weight)
            net = self.beside[stage] if stage < 2 else nn.Identity()
            wanted = [*self.own[stage], *inputs]
            if self.guesses and stage < 2:
                grads = torch.autograd.grad(out, wanted, net(out).detach(), allow_unused=True)
            else:
                both = [*wanted, *net.parameters()]
                grads = torch.autograd.grad(token_mean(net(out), y), both, allow_unused=True)
                if stage < 2:
                    applied(self.learners[stage], list(net.parameters()), grads[len(wanted) :])
            own = list(grads[: len(self.own[stage])])
            if stage == 0:
                own[0] = own[0] + self.arrived
                self.arrived = torch.zeros_like(self.shared)
            else:
                of_weight, of_input = grads[len(own) : len(wanted)]
                found = found + of_weight if of_weight is not None else found
                lesson.append((h.detach(), of_input))
            applied(self.optimizers[stage], self.own[stage], own)
        self.lessons.append(lesson)
        self.coming.append(found)
        if len(self.coming) == STAGES:
            self.arrived = self.arrived + self.coming.pop(0)

    def learn(self) -> None:
        for net, learner, (h, gradient) in zip(self.beside, self.learners, self.lessons.pop(0), strict=True):
            params = list(net.parameters())
            applied(learner, params, torch.autograd.grad(net.loss(h, None, gradient), params))

    def flush(self) -> None:
        self.arrived = sum(self.coming, self.arrived)
        self.coming = []
        while self.guesses and self.lessons:
            self.learn()


def applied(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: Any) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [TiedLM, TiedThrice])
@pytest.mark.parametrize("name", ["dgl", "dni"])
def test_tied_weights_are_trained_as_by_hand(name: str, kind: Callable[[], nn.Module]) -> None:
    """What later stages find for the embedding joins the update after it has come down, also across a flush."""
    model, data = kind(), tokens(11)
    nets: list[nn.Module] = [nn.Linear(WIDTH, WORDS) if name == "dgl" else Guess() for _ in range(2)]
    twin, beside = copy.deepcopy(model), copy.deepcopy(nets)
    made = iter(nets)
    method = (
        DGL(head=lambda border, output: next(made))
        if name == "dgl"
        else DNI(synthesiser=lambda shape, classes: next(made), learning_rate=0.01)
    )
    loop = ByHand(twin, beside, guesses=name == "dni")
    with begun(model, method, data) as run:
        for part in (data[:6], data[6:8], data[8:]):
            feed(run, part)
            for x, y in part:
                loop.step(x, y)
            loop.flush()
            for one, other in zip((model, *nets), (twin, *beside), strict=True):
                for (where, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=0, atol=1e-13, msg=where)
        torch.testing.assert_close(model.embed.weight.grad, loop.arrived, rtol=0, atol=1e-13)
        assert model.head.linear.weight is model.embed.weight


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["dgl", "dni", "auglocal"])
def test_gradients_on_their_way_are_saved(name: str, accumulate: int, exact: bool, tmp_path: Any) -> None:
    """With batches under way they are in messages and at stages between; after a flush they wait for an update."""
    data = padded(12)

    def rebuilt() -> tuple[unlatch.Run, nn.Module]:
        torch.manual_seed(2)
        model = TiedThrice()
        return begun(model, get(name, accumulate=accumulate), data, token_sum), model

    def finished(run: unlatch.Run, model: nn.Module) -> list[Any]:
        losses = [result.loss for result in feed(run, data[5:])]
        late = model.embed.weight.grad
        return [*losses, 0.0 if late is None else late, *(t.clone() for t in model.state_dict().values())]

    untouched, model = rebuilt()
    for x, y in data[:5]:
        untouched.step(x, y)
    state = untouched.state() if exact else None
    untouched.save(tmp_path / "checkpoint", exact=exact)
    expected = finished(untouched, model)
    for way in ("file", "memory") if exact else ("file",):
        run, twin = rebuilt()
        # Whatever the rebuilt run had before is gone.
        for x, y in data[7:10]:
            run.step(x, y)
        run.load(tmp_path / "checkpoint") if way == "file" else run.restore(state)
        for one, other in zip(finished(run, twin), expected, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def masked(batches: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for x, _ in tokens(batches):
        lengths = torch.randint(1, LENGTH + 1, (len(x), 1), generator=generator)
        target = torch.randint(WORDS, (len(x),), generator=generator)
        found.append(({"tokens": x, "mask": torch.arange(LENGTH) < lengths}, target))
    return found


def test_a_mask_rides_along() -> None:
    """A head sees the one tensor of real numbers, wherever in the state it is."""
    model, data = Padded(), masked()
    nets = [nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * WIDTH, WORDS)) for _ in range(2)]
    twin, heads = copy.deepcopy(model), copy.deepcopy(nets)
    made = iter(nets)
    with begun(model, DGL(head=lambda border, output: next(made)), data, cross_entropy, split=["layer", "head"]) as run:
        feed(run, data)
    params = [
        [*twin.embed.parameters(), *heads[0].parameters()],
        [*twin.layer.parameters(), *heads[1].parameters()],
        list(twin.head.parameters()),
    ]
    optimizers = [SGD(own) for own in params]
    for x, y in data:
        state = x
        for stage, block in enumerate(twin.blocks()):
            out = block(state)
            loss = cross_entropy(heads[stage](out["hidden"]) if stage < 2 else out, y)
            applied(optimizers[stage], params[stage], torch.autograd.grad(loss, params[stage]))
            state = {name: t.detach() for name, t in out.items()} if stage < 2 else None
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", ["dgl", "dni", "auglocal"])
def test_masks_with_networks_that_are_built(method: str) -> None:
    data = masked(8)
    with begun(Padded(), method, data, cross_entropy, split=["layer", "head"]) as run:
        assert len(feed(run, data)) == len(data)


def test_no_gradient_returns_along_a_skip() -> None:
    """Its value goes up; the stage that remembers it learns from its own head alone."""
    data = [(torch.randn(3, WIDTH), torch.randn(3, WIDTH)) for _ in range(4)]
    model = SmallUNet()
    twin = copy.deepcopy(model)
    nets = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    head = copy.deepcopy(nets[0])
    made = iter(nets)
    with begun(model, DGL(head=lambda border, output: next(made)), data, mse_loss) as run:
        feed(run, data)
    first = list(twin.down)
    params = [p for part in (*first, head) for p in part.parameters()]
    optimizer = SGD(params)
    for x, y in data:
        loss = mse_loss(head(first[1](first[0](x))), y)
        applied(optimizer, params, torch.autograd.grad(loss, params))
    for p, q in zip(model.down.parameters(), twin.down.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


def test_heads_of_later_layers_are_given_the_tied_weight() -> None:
    """It is no weight of their own, so they have none for it, and find no gradient for it."""
    data = tokens(3)
    with begun(TiedLM(4), AugLocal(longest=1, shortest=1), data, split=["layers.1", "head"]) as run:
        head = run.stations[0].trained()["head"].module
        assert [tuple(p.shape) for p in head.parameters()] == [(WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)]
        assert len(feed(run, data)) == 3


@pytest.mark.parametrize(("border", "output"), [((LENGTH, 8), (LENGTH, 30)), ((LENGTH, 8), (4,))])
def test_automatic_heads_of_tokens_take_any_length(border: tuple[int, ...], output: tuple[int, ...]) -> None:
    found = local_head(border, output)(torch.randn(3, 9, 8))
    assert found.shape == ((3, 9, 30) if len(output) == 2 else (3, 4))


def test_a_guess_for_tokens_takes_any_length() -> None:
    guess = GradientSynthesiser((LENGTH, WIDTH))
    h, gradient = torch.randn(64, LENGTH, WIDTH), torch.randn(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(guess.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        guess.loss(h, None, h @ gradient).backward()
        optimizer.step()
    longer = torch.randn(8, 9, WIDTH)
    assert (guess(longer) - longer @ gradient).norm() < 0.5 * (longer @ gradient).norm()


class Embeds(nn.Module):
    """An AuxNet for tokens."""

    def __init__(self, border: Border) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(WORDS, border.shape[-1]), nn.Linear(border.shape[-1], border.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.embed(x))
        return out


@pytest.mark.parametrize("method", [AuxNet(factory=Embeds), AuxNet(), AuxVar(capacity=64)], ids=["own", "built", "var"])
def test_predicted_tokens(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "unlatch")
    data = 3 * tokens(2)
    with begun(TiedLM(tied=False), method, data) as run:
        before = copy.deepcopy(run.module())
        assert len(feed(run, data)) == len(data)
        assert all(not torch.equal(p, q) for p, q in zip(before.parameters(), run.module().parameters(), strict=True))


@pytest.mark.parametrize("method", ["auxnet", "auxvar", "sph"])
@pytest.mark.parametrize(
    ("model", "data", "loss", "words"),
    [
        (TiedLM, tokens(1), token_mean, r"the weight 'embed.weight' of an earlier stage .*tie_word_embeddings=False"),
        (Padded, masked(1), cross_entropy, r"here it is a dict of 'mask', 'hidden'.* pack sequences"),
    ],
    ids=["tied", "mask"],
)
def test_what_comes_with_a_predicted_tensor_is_refused(
    method: str, model: Any, data: Any, loss: Any, words: str
) -> None:
    split = ["layers.0", "head"] if model is TiedLM else ["layer", "head"]
    with pytest.raises(ShapeMismatch, match=rf"{method} predicts what stage 1 \(block '{split[0]}'\) .* {words}"):
        begun(model(), method, data, loss, split=split)


def test_an_auxnet_that_does_not_take_tokens_is_told_what_it_needs() -> None:
    words = r"fails on the raw data \(torch.int64 .*factory=.*begins with an embedding"
    with pytest.raises(ShapeMismatch, match=words):
        begun(TiedLM(tied=False), AuxNet(factory=lambda border: nn.Linear(LENGTH, WIDTH)), tokens(1))


def test_a_loss_that_counts_needs_whole_batches() -> None:
    data = padded(2)
    for method in (DGL(microbatches=2), DNI(microbatches=2), AuxNet(microbatches=2)):
        with pytest.raises(ConfigError, match=rf"{method.name} weighs .* set microbatches=1, got 2"):
            begun(TiedLM(tied=False), method, data, token_sum)


def test_a_state_that_is_put_together_otherwise_is_named() -> None:
    (border,) = find_borders(chain(Padded()), [0, 1], masked(1)[0][0])
    assert border.shape == (LENGTH, WIDTH)
    with pytest.raises(ShapeMismatch, match=r"had a tensor at \['hidden'\] .* this batch has \['mask'\]"):
        border.reading.tensor({"mask": torch.ones(2, LENGTH)})
