"""What cannot work is refused before training, with what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from rank_jobs import conv_run, plain_sgd
from small_nets import images, tanh_net, vectors
from unlatch.errors import ConfigError, DataError, PlanError, ShapeMismatch
from unlatch.methods import DGL, DNI, SPH, AuxNet, AuxVar

X, Y = images([12])[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0.0}, "beta must be above 0, got 0.0"),
        ({"beta": -1}, "beta must be above 0, got -1"),
        ({"beta": ((0, 1.0), (5, 0.0))}, "beta must be above 0"),
        ({"beta": ((5, 1.0), (0, 2.0))}, "must grow"),
        ({"beta": "large"}, "beta must be above 0, got 'large'"),
        ({"theta": 0.0}, "theta must be above 0 and at most 1"),
        ({"theta": 1.5}, "theta must be above 0 and at most 1"),
        ({"pull": -1.0}, "pull must be at least 0"),
        ({"true_share": 2.0}, "true_share must be at least 0 and at most 1"),
        ({"form": "dual"}, "form must be one of penalty, lagrangian"),
        ({"form": "lagrangian", "multiplier": "magic"}, "none, replay, synthesiser, rebuild"),
        ({"multiplier": "replay"}, "the penalty has none"),
        ({"form": "lagrangian", "multiplier": "none"}, "the Lagrangian needs one"),
        ({"aux_steps": 2}, 'need correction="explicit"'),
        ({"correction": "explicit", "imitate": 0.0}, "imitate must be above 0"),
        ({"form": "lagrangian", "shared": True}, "different batches"),
        ({"form": "lagrangian", "multiplier": "synthesiser", "kappa_input": 1.0}, "kappa_input must be 0"),
        ({"stage_steps": 2, "accumulate": 2}, "one update per batch"),
        ({"shared": True, "microbatches": 2}, "one update per batch"),
        ({"depth": 0}, "depth must be a whole number, at least 1"),
        ({"data": "guess"}, "data must be one of send, build"),
        ({"ablation": "everything"}, "ablation must be one of"),
        ({"units": "median"}, "units must be one of mean, sum"),
        ({"beta": float("inf")}, "beta must be finite and above 0, got inf"),
        ({"serial_from": -3}, "serial_from must be a whole number, at least 0, got -3"),
        ({"serial_from": "half"}, "serial_from must be a whole number"),
        ({"depth": True}, "depth must be a whole number, at least 1, got True"),
        ({"border_norm": "no"}, "border_norm must be true or false, got 'no'"),
        ({"shared": "no"}, "shared must be true or false, got 'no'"),
        ({"synthesiser_lr": 0}, "synthesiser_lr must be above 0 and finite, got 0"),
        ({"aux_optimizer": 3}, "aux_optimizer must be a function of the parameters, got 3"),
        ({"factory": "small"}, "factory must be a function of a Border .* 'package.module:function', got 'small'"),
        ({"factory": "torch.nn:Identiti"}, "no function 'Identiti' in it. Did you mean 'Identity'"),
        ({"factory": nn.Linear(2, 2)}, r"got a finished network \(Linear\)"),
        ({"form": "lagrangian", "multiplier": 3}, "or a function, got 3"),
    ],
)
def test_settings(options, words):
    with pytest.raises(ConfigError, match=words):
        AuxNet(**options)


def test_settings_of_the_relatives():
    with pytest.raises(ConfigError, match="learning_rate must be above 0"):
        DNI(learning_rate=0.0)
    with pytest.raises(ConfigError, match="capacity must be a whole number, at least 1, got 0"):
        AuxVar(capacity=0)
    with pytest.raises(ConfigError, match="a multiplier needs the whole border"):
        SPH(form="lagrangian")
    with pytest.raises(ConfigError, match="learning_rate must be above 0 and finite, got 'x'"):
        DNI(learning_rate="x")
    with pytest.raises(ConfigError, match="conditioned must be true or false"):
        DNI(conditioned="maybe")
    with pytest.raises(ConfigError, match=r"synthesiser must be a function of \(border_shape, classes\), got 3"):
        DNI(synthesiser=3)
    with pytest.raises(ConfigError, match=r"head must be a function of \(border_shape, output_shape\), got 3"):
        DGL(head=3)


def test_a_border_inside_a_block_cannot_be_asked_for():
    """Stages start at blocks and nowhere else, so such a border has no name."""
    with pytest.raises(PlanError, match=r"no block is called '1\.1'"):
        conv_run("auxnet", 2, split=["1.1"])


@pytest.mark.parametrize("net", [nn.Conv2d(3, 9, 3, padding=1), nn.Conv2d(3, 8, 3), nn.Flatten()])
def test_an_auxnet_of_the_wrong_shape(net):
    with pytest.raises(ShapeMismatch, match=r"the AuxNet of stage 1 puts out \(.*\) per sample, but .* \(8, 8, 8\)"):
        conv_run(AuxNet(factory=lambda border: net), 2)


def test_an_auxnet_that_is_no_module():
    with pytest.raises(ShapeMismatch, match=r"must be a torch\.nn\.Module, got function"):
        conv_run(AuxNet(factory=lambda border: lambda x: x), 2)


def test_an_auxnet_of_integers():
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1].expand(-1, 8, -1, -1).long()

    with pytest.raises(ShapeMismatch, match=r"puts out \(8, 8, 8\) of torch\.int64 per sample"):
        conv_run(AuxNet(factory=lambda border: Rounds()), 2)


@pytest.mark.parametrize(
    "net", [nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1).double()], ids=["channels", "type"]
)
def test_an_auxnet_that_does_not_take_the_raw_data(net):
    with pytest.raises(ShapeMismatch, match=r"stage 1 fails on the raw data \(torch\.float32 \(2, 3, 8, 8\)\)"):
        conv_run(AuxNet(factory=lambda border: net), 2)


@pytest.mark.parametrize("factory", [lambda: nn.Identity(), lambda border: border.missing, nn.Linear])
def test_a_factory_that_fails(factory):
    with pytest.raises(ConfigError, match=r"the factory of the AuxNet of stage 1, called with \(Border\), failed: "):
        conv_run(AuxNet(factory=factory), 2)


def test_networks_beside_the_model_share_no_weights():
    """Inline they would move together, on separate ranks they could not."""
    common = nn.Conv2d(3, 8, 3, padding=1)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    with pytest.raises(ConfigError, match="the head of stage 1 shares weights"):
        unlatch.parallelize(
            nn.Sequential(common, nn.Conv2d(8, 8, 3), nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 5))),
            DGL(head=lambda border, output: head),
            stages=3,
            loss_fn=cross_entropy,
            optimizer=plain_sgd,
            split=["1", "2"],
            sample=(X, Y),
        )
    net = nn.Sequential(common, nn.Conv2d(8, 5, 8), nn.Flatten())
    with pytest.raises(ConfigError, match="the AuxNet of stage 1 shares weights with the network"):
        unlatch.parallelize(
            net,
            AuxNet(factory=lambda border: net[0]),
            stages=2,
            loss_fn=cross_entropy,
            optimizer=plain_sgd,
            split=["1"],
            sample=(X, Y),
        )


@pytest.mark.parametrize(
    ("multiplier", "got"),
    [(lambda *_: torch.zeros(3), r"shape \(3,\)"), (lambda *_: 1.0, "float"), (print, "NoneType")],
)
def test_a_multiplier_function_of_the_wrong_shape(multiplier, got):
    run = conv_run(AuxNet(form="lagrangian", multiplier=multiplier), 2)
    with pytest.raises(ConfigError, match=rf"tensor of shape \(12, 8, 8, 8\) for border 1.*got {got}"):
        run.step(X, Y)


def test_heads_and_synthesisers_that_do_not_fit():
    with pytest.raises(ShapeMismatch, match=r"the head of stage 0 fails on \(8, 8, 8\) per sample"):
        conv_run(DGL(head=lambda border, output: nn.Linear(3, 5)), 2)
    with pytest.raises(ConfigError, match=r"the head of stage 0 must be a torch\.nn\.Module, got NoneType"):
        conv_run(DGL(head=lambda border, output: None), 2)
    with pytest.raises(ConfigError, match=r"the head function of stage 0, called with \(\(8, 8, 8\), \(5,\)\), failed"):
        conv_run(DGL(head=lambda border: None), 2)
    with pytest.raises(ConfigError, match=r"a Linear without loss\(h, target, gradient\)"):
        conv_run(DNI(synthesiser=lambda shape, classes: nn.Linear(3, 3)), 2)


def test_a_head_of_the_wrong_shape():
    head = nn.Sequential(nn.Flatten(), nn.Linear(512, 3))
    with pytest.raises(ShapeMismatch, match=r"the head of stage 0 puts out \(3,\) per sample, the network \(5,\)"):
        conv_run(DGL(head=lambda border, output: head), 2)


@pytest.mark.parametrize("method", ["auxnet", "auxvar", "sph", "dgl", "dni"])
def test_a_sample_is_needed(method):
    with pytest.raises(ConfigError, match=rf"{method} .* pass sample=\(x, y\)"):
        conv_run(method, 2, sample=None)


def total(out: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out, y, reduction="sum")


def separate(out: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out, y, reduction="none")


def constant(out: Tensor, y: Tensor) -> Tensor:
    return torch.ones(())


def number(out: Tensor, y: Tensor) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (total, "it sums over samples"),
        (separate, r"one number, got a tensor of shape \(2,\)"),
        (constant, "no gradient"),
        (number, "returns a tensor, the mean over samples, or a pair"),
    ],
)
def test_an_unsuitable_loss(loss, words):
    with pytest.raises((ConfigError, ShapeMismatch), match=words):
        conv_run("auxnet", 2, loss_fn=loss)


def test_a_declared_sum():
    with pytest.raises(ConfigError, match='loss_reduction must be "mean"'):
        conv_run("auxnet", 2, loss_reduction="sum")


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_a_border_with_more_than_one_tensor():
    net = nn.Sequential(nn.Linear(5, 5), Pair(), Sum(), nn.Linear(5, 5)).double()
    with pytest.raises(ShapeMismatch, match=r"stage 1 \(block '2'\) takes tuple .* Cut elsewhere"):
        unlatch.parallelize(
            net, "auxnet", stages=2, loss_fn=mse_loss, optimizer=plain_sgd, split=["2"], sample=vectors(1)[0]
        )


def test_stored_variables_refuse_data_that_never_repeats():
    run = conv_run(AuxVar(capacity=20), 2)
    first, second = images([12, 12])
    run.step(*first)
    with pytest.raises(DataError, match=r"24 different samples, more than the 20 .* augmentation"):
        run.step(*second)


def test_a_probe_of_another_path():
    with pytest.raises(ConfigError, match="knows no path 'auxiliary'"):
        conv_run("bp", 2).evaluate([(X, Y)], path="auxiliary")
    with pytest.raises(ConfigError, match="cannot predict"):
        conv_run("auxvar", 2).evaluate([(X, Y)], path="auxiliary")


def test_recalibration_on_nothing():
    run = conv_run("auxnet", 2)
    before = [b.clone() for b in run.module().buffers()]
    with pytest.raises(DataError, match="no batch to estimate the statistics"):
        run.evaluate_recalibrated([(X, Y)], [])
    assert all(torch.equal(a, b) for a, b in zip(before, run.module().buffers(), strict=True))


def test_failures_name_stage_and_batch():
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(5, 5).double(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            if self.calls > 1:
                raise ValueError("out of luck")
            return self.layer(x)

    ((x, y),) = vectors(1)
    run = unlatch.parallelize(
        tanh_net(4),
        AuxNet(factory=lambda border: Breaks()),
        stages=2,
        loss_fn=mse_loss,
        optimizer=plain_sgd,
        split=["2"],
        sample=(x, y),
    )
    run.step(x, y)
    where = r"stage 1 failed in the auxiliary work P \(predict\) of batch 1: ValueError: out of luck"
    with pytest.raises(unlatch.errors.StageFailed, match=where):
        run.step(x, y)
