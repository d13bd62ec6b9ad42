"""Ready optimizer factories: no decay for norms and biases, Muon for matrices with AdamW for the rest."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from recording import stages_of
from unlatch.errors import ConfigError
from unlatch.rules.updates import StagePlace, make_optimizer

MUON = partial(unlatch.optim.MuonAdamW, lr=0.01, weight_decay=0.05)


class Reader(nn.Module):
    """Embedding, layers, norm, head, under names that a language model would have."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def blocks(self):
        return [self.embed, *self.layers, self.head]


def tokens(count: int, seed: int = 1) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(11, (6,), generator=generator), torch.randint(11, (6,), generator=generator))
        for _ in range(count)
    ]


def start(optimizer, method="bp", stages=3, seed=0, **options):
    split = ["layers.1", "head"][: stages - 1]
    return unlatch.parallelize(
        Reader(seed), method, stages=stages, split=split, loss_fn=cross_entropy, optimizer=optimizer, **options
    )


def train(run, data):
    for x, y in data:
        run.step(x, y)
    run.flush()
    return copy.deepcopy(run.module().state_dict())


def same(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_factory_is_given_names_of_the_whole_model():
    seen = {}

    def named_only(named):
        seen.update(named)
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    model = Reader()
    start_model = partial(unlatch.parallelize, model, stages=3, split=["layers.1", "head"], loss_fn=cross_entropy)
    start_model(optimizer=named_only)
    assert seen == dict(model.named_parameters())

    def all_three(params, stage, named, lr=0.1):
        assert [p for _, p in named] == params
        assert tuple(name for name, _ in named) == stage.names
        return torch.optim.SGD(params, lr=lr * (1 + stage.index))

    run = start_model(optimizer=partial(all_three, lr=0.5))
    assert [s.updater.optimizer.param_groups[0]["lr"] for s in stages_of(run)] == [0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    "factory",
    [
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        lambda params, named: torch.optim.SGD([p for _, p in named], lr=0.1),
        lambda params, stage, named: torch.optim.SGD([p for _, p in named], lr=0.1),
        lambda params, place, named: torch.optim.SGD([p for _, p in named], lr=0.1 / place.count),
        lambda params, *, named: torch.optim.SGD([p for _, p in named], lr=0.1),
        lambda params, place, /, *, named: torch.optim.SGD([p for _, p in named], lr=0.1 / place.count),
        partial(lambda params, lr, named: torch.optim.SGD([p for _, p in named], lr=lr), lr=0.1),
        partial(lambda named, lr: torch.optim.SGD([p for _, p in named], lr=lr), lr=0.1),
    ],
)
def test_wherever_the_argument_stands(factory):
    w = nn.Parameter(torch.zeros(1))
    assert make_optimizer(factory, [w], StagePlace(0, 1, names=("w",))).param_groups[0]["params"] == [w]


def test_a_factory_that_makes_no_optimizer_is_named():
    with pytest.raises(ConfigError, match=r"must return a torch.optim.Optimizer, got list for stage 0"):
        start(lambda params: [torch.optim.SGD(params, lr=0.1)])


def test_norms_and_biases_do_not_decay():
    factory = unlatch.optim.decay_matrices(torch.optim.AdamW, lr=0.01, weight_decay=0.1, spared="embed")
    run = start(pickle.loads(pickle.dumps(factory)))
    model = run.module()
    decaying = [p for s in stages_of(run) for p in s.updater.optimizer.param_groups[0]["params"]]
    names = {name for name, p in model.named_parameters() if any(p is q for q in decaying)}
    assert names == {"layers.0.0.weight", "layers.1.0.weight", "layers.2.0.weight", "head.weight"}
    assert all(len(s.updater.optimizer.param_groups) == 2 for s in stages_of(run))


def by_hand(data):
    """Torch's own Muon and AdamW beside each other."""
    model = Reader()
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if name.startswith("layers") and p.dim() == 2]
    decaying = [named["embed.weight"], named["head.weight"]]
    others = [p for p in named.values() if p.dim() == 1]
    muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (muon, adamw)]
    for x, y in data:
        cross_entropy(model(x), y).backward()
        for one in (muon, adamw, *schedulers):
            one.step()
        model.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("stages", [1, 3])
def test_muon_with_adamw_is_both_of_them_by_hand(stages):
    falling = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    run = start(MUON, stages=stages, lr_scheduler=falling)
    assert same(by_hand(tokens(5)), train(run, tokens(5)))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("method", ["bp", "pipedream"])
def test_muon_goes_on_bit_for_bit_after_a_checkpoint(method, exact, tmp_path):
    falling = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    run = start(MUON, method, lr_scheduler=falling)
    for x, y in tokens(4):
        run.step(x, y)
    run.save(tmp_path / "checkpoint", exact=exact)
    unbroken = train(run, tokens(4, seed=2))
    again = start(MUON, method, seed=5, lr_scheduler=falling)
    again.load(tmp_path / "checkpoint")
    assert same(unbroken, train(again, tokens(4, seed=2)))


def test_a_drained_checkpoint_of_muon_fits_another_cut(tmp_path):
    run = start(MUON)
    train(run, tokens(3))
    run.save(tmp_path / "checkpoint", exact=False)
    other = start(MUON, stages=1, seed=5)
    other.load(tmp_path / "checkpoint")
    assert same(train(run, tokens(3, seed=2)), train(other, tokens(3, seed=2)))


def test_muon_is_copied_and_loaded_as_one():
    (x, y), model = tokens(1)[0], Reader()

    def step(model, optimizer):
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    one = MUON(model.named_parameters())
    step(model, one)
    twin, copied = copy.deepcopy((model, one))
    third = copy.deepcopy(model)
    loaded = MUON(third.named_parameters())
    loaded.load_state_dict(copy.deepcopy(one.state_dict()))
    for owner, optimizer in ((model, one), (twin, copied), (third, loaded)):
        optimizer.param_groups[0]["lr"] = 0.5
        step(owner, optimizer)
    assert same(model.state_dict(), twin.state_dict())
    assert same(model.state_dict(), third.state_dict())
    with pytest.raises(ConfigError, match="MuonAdamW cannot take in another group"):
        one.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_prediction_refuses_muon_but_for_differences():
    with pytest.raises(ConfigError, match=r"knows SGD, Adam and AdamW, not MuonAdamW: use predictor 'difference'"):
        start(MUON, unlatch.methods.get("dtrp", predict="linear"))
    run = start(MUON, unlatch.methods.get("dtrp", predict="difference"))
    train(run, tokens(6))


def test_what_is_wrong_is_named(monkeypatch):
    with pytest.raises(ConfigError, match="is no regular expression"):
        unlatch.optim.decay_matrices(torch.optim.SGD, weight_decay=0.1, spared="(")
    with pytest.raises(ConfigError, match="expected parameters with their names"):
        unlatch.optim.MuonAdamW(Reader().parameters())
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"has no Muon: install torch 2\.9 or newer"):
        MUON(Reader().named_parameters())
