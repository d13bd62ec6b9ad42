"""Settings become factories that travel to other processes and do there what they say."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from unlatch.config import LRCurve, from_mapping
from unlatch.errors import ConfigError
from unlatch.rules.updates import StagePlace, make_optimizer


def config(**sections: Any) -> Any:
    return from_mapping({"model": {"name": "mlp"}, **sections})


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def test_sgd_has_nesterov_momentum_unless_told_otherwise() -> None:
    group = config().optimizer_factory()(parameters()).param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.1, 0.9, True, 0)
    group = config(optimizer={"nesterov": False}).optimizer_factory()(parameters()).param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0.9, False)


@pytest.mark.parametrize("setting", [{"momentum": 0}, {"momentum": 0.0}, {"dampening": 0.5}])
def test_nesterov_gives_way_where_torch_forbids_it(setting: dict[str, Any]) -> None:
    group = config(optimizer=setting).optimizer_factory()(parameters()).param_groups[0]
    assert group["nesterov"] is False


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adamax", "ASGD", "RAdam", "Adadelta"]
)
def test_other_optimizers_keep_the_defaults_of_torch(name: str) -> None:
    made = config(optimizer={"name": name}).optimizer_factory()(parameters())
    assert made.defaults == getattr(torch.optim, name)(parameters()).defaults


def test_options_reach_the_optimizer() -> None:
    made = config(optimizer={"name": "AdamW", "betas": [0.8, 0.95], "eps": 1e-6, "lr": 1}).optimizer_factory()(
        parameters()
    )
    assert (made.defaults["betas"], made.defaults["eps"], made.defaults["lr"]) == ((0.8, 0.95), 1e-6, 1.0)


def test_muon_with_adamw_by_name() -> None:
    factory = config(optimizer={"name": "unlatch.optim:MuonAdamW", "lr": 0.01, "by_adamw": "first"}).optimizer_factory()
    named = [("first", torch.nn.Parameter(torch.ones(2, 2))), ("second", torch.nn.Parameter(torch.ones(2, 2)))]
    groups = make_optimizer(factory, [p for _, p in named], StagePlace(0, 1, names=("first", "second"))).param_groups
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(named[1][1])], [id(named[0][1])], []]
    assert {group["lr"] for group in groups} == {0.01}
    with pytest.raises(ConfigError, match=r"torch refuses Muon with .*unlatch\.optim:MuonAdamW"):
        config(optimizer={"name": "Muon"}).optimizer_factory()(parameters())


class Plain(torch.optim.SGD):
    """A user's own optimizer."""


def test_own_optimizer_class() -> None:
    made = config(optimizer={"name": f"{__name__}:Plain", "momentum": 0.5}).optimizer_factory()(parameters())
    assert type(made) is Plain
    assert (made.defaults["lr"], made.defaults["momentum"], made.defaults["nesterov"]) == (1e-3, 0.5, False)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "Adm"}, r"optimizer\.name: torch\.optim has no class 'Adm'; did you mean 'Adam'\?"),
        ({"name": "sgd"}, r"no class 'sgd'; did you mean 'SGD'\?"),
        ({"name": "Optimizer"}, r"no class 'Optimizer'"),
        ({"name": "LBFGS"}, r"LBFGS evaluates the whole model"),
        ({"name": "math:sqrt"}, r"not a torch\.optim\.Optimizer class"),
        ({"name": "nowhere.at.all:X"}, r"optimizer\.name 'nowhere\.at\.all:X': there is no module"),
        ({"name": "Adam", "momentum": 0.9}, r"optimizer\.momentum: Adam takes no 'momentum'"),
        ({"weight_decai": 0.9}, r"optimizer\.weight_decai: SGD takes no 'weight_decai'; did you mean 'weight_decay'\?"),
        ({"params": [1]}, r"optimizer\.params: SGD takes no 'params'"),
    ],
)
def test_bad_optimizers_are_refused_when_loading(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(optimizer=settings)


def test_what_torch_refuses_is_a_config_error() -> None:
    factory = config(optimizer={"name": "Adam", "betas": [2.0, 0.9]}).optimizer_factory()
    with pytest.raises(ConfigError, match=r"torch refuses Adam.*beta"):
        factory(parameters())


def rates(factory: Any, updates: int) -> list[float]:
    optimizer = torch.optim.SGD(parameters(), lr=2.0)
    scheduler = factory(optimizer)
    seen = []
    for _ in range(updates):
        seen.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        scheduler.step()
    return seen


def test_constant() -> None:
    assert rates(config(lr={"shape": "constant"}).lr_factory(5), 7) == [1.0] * 7
    assert rates(config(lr={"shape": "constant", "warmup": 0.4}).lr_factory(5), 4) == [0.5, 1.0, 1.0, 1.0]


def test_onecycle_rises_falls_to_zero_and_stays() -> None:
    seen = rates(config().lr_factory(10), 13)
    assert seen == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0, 0])


def test_cosine() -> None:
    seen = rates(config(lr={"shape": "cosine", "final": 0.1}).lr_factory(4), 6)
    reference = torch.optim.SGD(parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(reference, 4, eta_min=0.1)
    expected = []
    for _ in range(5):
        expected.append(reference.param_groups[0]["lr"])
        reference.step()
        scheduler.step()
    assert seen == pytest.approx([*expected, 0.1])


def test_step() -> None:
    seen = rates(config(lr={"shape": "step", "milestones": [0.5, 0.75], "factor": 0.5}).lr_factory(8), 8)
    assert seen == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("name", ["constant", "onecycle", "cosine", "step"])
@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("total", [0, 1, 2, 7])
def test_every_curve_stays_between_zero_and_one(name: str, warmup: float, total: int) -> None:
    curve = config(lr={"shape": name, "warmup": warmup}).lr.curve(total)
    assert all(0.0 <= curve(update) <= 1.0 for update in range(total + 5))
    assert total == 0 or curve(0) > 0, "the first update does something"


def test_unknown_curve() -> None:
    with pytest.raises(ValueError, match="'linear'"):
        LRCurve("linear", 3)(1)


def test_factories_travel_and_stages_share_nothing() -> None:
    settings = config(optimizer={"name": "Adam", "betas": [0.9, 0.99]})
    optimizer, lr = pickle.loads(pickle.dumps((settings.optimizer_factory(), settings.lr_factory(10))))
    assert (optimizer, lr) == (settings.optimizer_factory(), settings.lr_factory(10))
    first, second = (lr(optimizer(parameters())) for _ in range(2))
    state = first.state_dict()
    state["lr_lambdas"] = [{**state["lr_lambdas"][0], "total": 99}]
    first.load_state_dict(state)
    assert (first.lr_lambdas[0].total, second.lr_lambdas[0].total, lr.curve.total) == (99, 10, 10)


def my_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).sum()


def test_losses() -> None:
    assert config().loss_fn() is torch.nn.functional.cross_entropy
    assert config(run={"loss": "mse_loss"}).loss_fn() is torch.nn.functional.mse_loss
    assert config(run={"loss": f"{__name__}:my_loss"}).loss_fn() is my_loss
    with pytest.raises(ConfigError, match=r"run\.loss: .*'mse_los'; did you mean 'mse_loss'\?"):
        config(run={"loss": "mse_los"}).loss_fn()
