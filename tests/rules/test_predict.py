"""Predicted weights against the optimizers really run, and the weights left alone meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from unlatch.errors import CheckpointMismatch, ConfigError
from unlatch.rules.predict import (
    ConstantGradient,
    Difference,
    Geometric,
    History,
    Linear,
    NoPrediction,
    Predictor,
    Regulator,
    predictor,
)
from unlatch.schedule.stability import PREDICTORS, geometric_factor

Make = Callable[[Sequence[Tensor]], Optimizer]
NAMES = list(PREDICTORS)
OPTIMIZERS: dict[str, Make] = {
    "heavy-ball": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02),
    "dampened": lambda p: SGD(p, lr=0.1, momentum=0.8, dampening=0.3),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    "plain": lambda p: SGD(p, lr=0.1),
    "maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.02),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, maximize=True, betas=(0.8, 0.9)),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.2, betas=(0.8, 0.95), eps=1e-3),
}


class Straight(Optimizer):
    """W <- W + u, whatever the gradients."""

    def __init__(self, params: Sequence[Tensor], u: Sequence[Tensor]) -> None:
        super().__init__(params, {"lr": 1.0})
        self.u = u

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p, u in zip(self.param_groups[0]["params"], self.u, strict=True):
            p.data.add_(u)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((3, 2), (4,), ())]


def step(params: Sequence[Tensor], optimizer: Optimizer, history: History, gradient: str | Sequence[Tensor]) -> None:
    for i, p in enumerate(params):
        if gradient == "random":
            p.grad = torch.randn_like(p)
        else:
            p.grad = torch.zeros_like(p) if gradient == "zero" else gradient[i].clone()  # type: ignore[union-attr]
    history.before_step(params)
    optimizer.step()
    history.after_step(params)
    optimizer.zero_grad(set_to_none=True)


def trained(make: Make, p: Predictor, steps: int = 5) -> tuple[list[nn.Parameter], Optimizer, History]:
    params = parameters()
    optimizer = make(params)
    history = p.history(params, optimizer)
    for _ in range(steps):
        step(params, optimizer, history, "random")
    return params, optimizer, history


def really(
    params: list[nn.Parameter], optimizer: Optimizer, gradient: str | Sequence[Tensor], steps: int
) -> list[Tensor]:
    """Where the optimizer itself gets in `steps` updates, found on copies."""
    twins, twin = copy.deepcopy((params, optimizer))
    none = History(twins)
    for _ in range(steps):
        step(twins, twin, none, gradient)
    return [t.detach() for t in twins]


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(float((x.detach() - y.detach()).abs().max()) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- exactness


def test_difference_is_exact_on_a_straight_line() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    params, x = list(net.parameters()), torch.randn(4, 5, dtype=torch.float64)
    optimizer = Straight(params, [0.1 * torch.randn_like(p) for p in params])
    history = Difference().history(params, optimizer)
    step(params, optimizer, history, "random")

    def forward(weights: Sequence[Tensor]) -> Tensor:
        return torch.func.functional_call(net, dict(zip(dict(net.named_parameters()), weights, strict=True)), x)

    predicted = forward(Difference().predict(params, optimizer, 3, history)).detach()
    unpredicted = forward(params).detach()
    for _ in range(3):
        step(params, optimizer, history, "random")
    assert (forward(params) - predicted).abs().max() < 1e-14
    assert (forward(params) - unpredicted).abs().max() > 0.01


@settings(max_examples=40)
@given(mu=st.floats(0.05, 0.99), lr=st.floats(1e-4, 1.0), s=st.integers(1, 12), nesterov=st.booleans())
def test_coasting_is_exact_without_new_gradients(mu: float, lr: float, s: int, nesterov: bool) -> None:
    coasting = predictor("coasting")
    params, optimizer, history = trained(lambda p: SGD(p, lr=lr, momentum=mu, nesterov=nesterov), coasting)
    assert not history.needs
    there = really(params, optimizer, "zero", s)
    assert distance(coasting.predict(params, optimizer, s, history), there) < 1e-12
    if s > 1:
        assert distance(Linear().predict(params, optimizer, s, history), there) > 1e-7


@settings(max_examples=20)
@given(mu=st.floats(0.05, 0.99), lr=st.floats(1e-4, 1.0), s=st.integers(1, 12), nesterov=st.booleans())
def test_geometric_is_exact_once_the_last_step_had_no_gradient(mu: float, lr: float, s: int, nesterov: bool) -> None:
    geometric = Geometric()
    params, optimizer, history = trained(lambda p: SGD(p, lr=lr, momentum=mu, nesterov=nesterov), geometric)
    step(params, optimizer, history, "zero")
    there = really(params, optimizer, "zero", s)
    assert distance(geometric.predict(params, optimizer, s, history), there) < 1e-12


@settings(max_examples=30)
@given(
    first=st.floats(0.0, 0.95),
    second=st.floats(0.5, 0.999),
    lr=st.floats(1e-4, 0.1),
    decay=st.floats(0.0, 0.5),
    s=st.integers(1, 9),
    amsgrad=st.booleans(),
)
def test_adamw_coasts_exactly(first: float, second: float, lr: float, decay: float, s: int, amsgrad: bool) -> None:
    geometric = Geometric()
    params, optimizer, history = trained(
        lambda p: AdamW(p, lr=lr, betas=(first, second), weight_decay=decay, amsgrad=amsgrad), geometric
    )
    assert not history.needs
    there = really(params, optimizer, "zero", s)
    assert distance(geometric.predict(params, optimizer, s, history), there) < 1e-12


def test_adam_coasts_exactly() -> None:
    geometric = Geometric()
    params, optimizer, history = trained(lambda p: Adam(p, lr=0.05), geometric, steps=2)
    there = really(params, optimizer, "zero", 6)
    assert distance(geometric.predict(params, optimizer, 6, history), there) < 1e-14
    assert distance(params, there) > 0.01


@pytest.mark.parametrize("s", [1, 2, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_constant_gradient_is_exact_when_the_last_gradient_returns(name: str, s: int) -> None:
    constant = ConstantGradient()
    params, optimizer, history = trained(OPTIMIZERS[name], constant)
    gradient = [torch.randn_like(p) for p in params]
    step(params, optimizer, history, gradient)
    there = really(params, optimizer, gradient, s)
    assert distance(constant.predict(params, optimizer, s, history), there) < 1e-13
    assert distance(params, there) > 1e-3


@settings(max_examples=30)
@given(
    mu=st.floats(0.0, 0.99),
    lr=st.floats(1e-4, 1.0),
    decay=st.floats(0.0, 0.1),
    dampening=st.floats(0.0, 0.9),
    s=st.integers(1, 12),
)
def test_linear_is_difference_at_constant_lr_with_heavy_ball(
    mu: float, lr: float, decay: float, dampening: float, s: int
) -> None:
    both = History(parameters(), {"update"})
    params = parameters()
    optimizer = SGD(params, lr=lr, momentum=mu, weight_decay=decay, dampening=dampening)
    for _ in range(4):
        step(params, optimizer, both, "random")
    linear, difference = (p.predict(params, optimizer, s, both) for p in (Linear(), Difference()))
    assert distance(linear, difference) < 1e-12
    assert distance(linear, params) > 0


def test_linear_is_exact_at_constant_velocity_with_nesterov() -> None:
    linear = Linear()
    params, optimizer, history = trained(lambda p: SGD(p, lr=0.1, momentum=0.5, nesterov=True), linear)
    steady = [0.5 * optimizer.state[p]["momentum_buffer"] for p in params]  # (1 - mu) v keeps v as it is
    there = really(params, optimizer, steady, 4)
    assert distance(linear.predict(params, optimizer, 4, history), there) < 1e-14


@pytest.mark.parametrize("name", ["adam", "amsgrad", "adamw"])
def test_linear_repeats_adams_last_step(name: str) -> None:
    params, optimizer, _ = trained(OPTIMIZERS[name], NoPrediction())
    history = History(params, {"update"})
    step(params, optimizer, history, "random")
    linear, difference = (p.predict(params, optimizer, 3, history) for p in (Linear(), Difference()))
    # They differ in the weights that decoupled decay looks at: W_n or W_{n-1}, one step apart.
    tolerance = 3 * 0.01 * 0.2 * 0.05 if name == "adamw" else 1e-14
    assert distance(linear, difference) < tolerance
    assert distance(linear, params) > 20 * tolerance


def test_geometric_under_nesterov_extends_the_whole_last_step() -> None:
    geometric = Geometric(Regulator(alpha=0.5, rho="geometric"))
    params, optimizer, history = trained(OPTIMIZERS["nesterov"], geometric)
    before = [p.detach().clone() for p in params]
    step(params, optimizer, history, "random")
    reach = 0.5 * geometric_factor(0.9, 5)
    expected = [p.detach() + reach * (p.detach() - b) for p, b in zip(params, before, strict=True)]
    assert distance(geometric.predict(params, optimizer, 5, history), expected) < 1e-13
    assert distance(predictor("coasting", alpha=0.5).predict(params, optimizer, 5, history), expected) > 0.01


# ---------------------------------------------------------------- identities and promises


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_true_weights_and_the_optimizer_stay_as_they_are(name: str, optimizer_name: str) -> None:
    p = predictor(name)
    params, optimizer, history = trained(OPTIMIZERS[optimizer_name], p)
    weights = [w.detach().clone() for w in params]
    versions = [w._version for w in params]
    state = copy.deepcopy(optimizer.state_dict())
    predicted = p.predict(params, optimizer, 3, history)
    assert all(torch.equal(w, old) for w, old in zip(params, weights, strict=True))
    assert [w._version for w in params] == versions
    for key, entry in optimizer.state_dict()["state"].items():
        for field, value in entry.items():
            old = state["state"][key][field]
            assert torch.equal(value, old) if isinstance(value, Tensor) else value == old
    assert not {t.data_ptr() for t in predicted} & {w.data_ptr() for w in params}
    assert not any(t.requires_grad for t in predicted)
    still = name == "none" or (optimizer_name == "plain" and name in ("geometric", "coasting"))
    assert (distance(predicted, params) == 0) == still


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_no_steps_ahead_and_no_update_so_far_predict_the_current_weights(name: str, optimizer_name: str) -> None:
    p = predictor(name)
    params, optimizer, history = trained(OPTIMIZERS[optimizer_name], p, steps=0)
    assert all(torch.equal(a, b) for a, b in zip(p.predict(params, optimizer, 4, history), params, strict=True))
    assert not optimizer.state  # looking must not enter anything
    step(params, optimizer, history, "random")
    for s in (0, -1):
        assert all(torch.equal(a, b) for a, b in zip(p.predict(params, optimizer, s, history), params, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_out_buffers_are_filled_and_returned(name: str) -> None:
    p = predictor(name)
    params, optimizer, history = trained(OPTIMIZERS["nesterov"], p)
    out = [torch.full_like(w, float("nan"), requires_grad=False) for w in params]
    result = p.predict(params, optimizer, 3, history, out)
    assert all(a is b for a, b in zip(result, out, strict=True))
    assert distance(result, p.predict(params, optimizer, 3, history)) == 0


@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adamw"])
def test_groups_keep_their_own_settings(name: str, kind: str) -> None:
    """Two groups in one optimizer predict as two optimizers do; foreign parameters stay."""
    p = predictor(name)
    settings = {
        "sgd": ({"lr": 0.1, "momentum": 0.9}, {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.1}),
        "nesterov": (
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            {"lr": 0.3, "momentum": 0.5, "nesterov": False, "weight_decay": 0.1},
        ),
        "adamw": ({"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.3}),
    }[kind]
    family = AdamW if kind == "adamw" else SGD
    params = parameters()
    alone = copy.deepcopy(params)
    foreign = nn.Parameter(torch.randn(2, dtype=torch.float64))
    # Listed in another order than the groups have them.
    joint = family([{"params": [params[2], params[0]], **settings[0]}, {"params": [params[1]], **settings[1]}], lr=1.0)
    apart = [family([alone[i]], **settings[0 if i != 1 else 1]) for i in range(3)]
    history = p.history([*params, foreign], joint)
    histories = [p.history([alone[i]], apart[i]) for i in range(3)]
    for _ in range(3):
        gradient = [torch.randn_like(w) for w in params]
        step([*params, foreign], joint, history, [*gradient, torch.ones_like(foreign)])
        for i in range(3):
            step([alone[i]], apart[i], histories[i], [gradient[i]])
    predicted = p.predict([*params, foreign], joint, 4, history)
    separate = [p.predict([alone[i]], apart[i], 4, histories[i])[0] for i in range(3)]
    assert distance(predicted[:3], separate) < 1e-15
    assert torch.equal(predicted[3], foreign)


@pytest.mark.parametrize("name", ["linear", "geometric", "coasting", "constant-gradient"])
@pytest.mark.parametrize("optimizer_name", ["heavy-ball", "nesterov", "adamw"])
def test_rates_are_those_of_the_coming_updates(name: str, optimizer_name: str) -> None:
    p = predictor(name)
    params, optimizer, history = trained(OPTIMIZERS[optimizer_name], p)
    rate = 0.25 * optimizer.param_groups[0]["lr"]
    scaled = p.predict(params, optimizer, 3, history, rates=[[rate] * 3])
    optimizer.param_groups[0]["lr"] = rate
    assert distance(scaled, p.predict(params, optimizer, 3, history)) == 0
    optimizer.param_groups[0]["lr"] = 0.0
    assert all(torch.equal(a, b) for a, b in zip(p.predict(params, optimizer, 3, history), params, strict=True))


def test_a_measured_difference_holds_its_lr_already() -> None:
    params, optimizer, history = trained(OPTIMIZERS["heavy-ball"], Difference())
    scaled, plain = (Difference().predict(params, optimizer, 3, history, rates=r) for r in ([[0.01] * 3], None))
    assert distance(scaled, plain) == 0


@pytest.mark.parametrize("name", ["linear", "geometric", "coasting", "difference", "constant-gradient"])
@pytest.mark.parametrize("optimizer_name", ["nesterov", "adam"])
def test_alpha_scales_the_displacement(name: str, optimizer_name: str) -> None:
    p = predictor(name)
    params, optimizer, history = trained(OPTIMIZERS[optimizer_name], p)
    full, half = (predictor(name, alpha=a).predict(params, optimizer, 4, history) for a in (1.0, 0.5))
    middle = [(w.detach() + f) / 2 for w, f in zip(params, full, strict=True)]
    assert distance(half, middle) < 1e-14
    assert distance(full, params) > 1e-4


def test_regulators_reach_the_predictors() -> None:
    params, optimizer, history = trained(OPTIMIZERS["heavy-ball"], Difference())
    capped = Difference(Regulator(rho="capped", cap=2)).predict(params, optimizer, 9, history)
    assert distance(capped, Difference().predict(params, optimizer, 2, history)) == 0
    fading = Difference(Regulator(rho="geometric")).predict(params, optimizer, 9, history)
    assert distance(fading, Geometric().predict(params, optimizer, 9, history)) < 1e-14
    constant = History(params, {"gradient"})
    step(params, optimizer, constant, "random")
    two = ConstantGradient(Regulator(rho="capped", cap=2)).predict(params, optimizer, 9, constant)
    assert distance(two, ConstantGradient().predict(params, optimizer, 2, constant)) == 0


# ---------------------------------------------------------------- optimizers and settings that do not fit


@pytest.mark.parametrize("name", ["linear", "geometric", "constant-gradient"])
def test_other_optimizers_are_sent_to_difference(name: str) -> None:
    params = parameters()
    optimizer = torch.optim.RMSprop(params, lr=0.01)
    with pytest.raises(ConfigError, match=r"not RMSprop.*'difference'"):
        predictor(name).history(params, optimizer)
    with pytest.raises(ConfigError, match=r"not RMSprop.*'difference'"):
        predictor(name).predict(params, optimizer, 1, History(params))


@pytest.mark.parametrize("family", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adadelta])
def test_difference_works_with_any_optimizer(family: type[Optimizer]) -> None:
    params, optimizer, history = trained(family, Difference())  # type: ignore[arg-type]
    before = [p.detach().clone() for p in params]
    step(params, optimizer, history, "random")
    expected = [3 * p.detach() - 2 * b for p, b in zip(params, before, strict=True)]
    assert distance(Difference().predict(params, optimizer, 2, history), expected) < 1e-13


def test_a_geometric_regulator_needs_momentum() -> None:
    params, _, history = trained(OPTIMIZERS["plain"], Difference())
    with pytest.raises(ConfigError, match="Adagrad has no momentum"):
        Difference(Regulator(rho="geometric")).predict(params, torch.optim.Adagrad(params), 1, history)


@pytest.mark.parametrize("name", ["difference", "geometric", "constant-gradient"])
def test_a_history_that_keeps_too_little_is_noticed(name: str) -> None:
    params, optimizer, history = trained(OPTIMIZERS["nesterov"], NoPrediction())
    with pytest.raises(ConfigError, match="history keeps nothing"):
        predictor(name).predict(params, optimizer, 1, history)


def test_lookup() -> None:
    assert predictor(None) == predictor("none") == NoPrediction()
    assert predictor(Difference()) == Difference()
    assert [predictor(name).name for name in NAMES] == NAMES
    assert predictor("geometric", alpha=0.5) == Geometric(Regulator(alpha=0.5, rho="geometric"))
    with pytest.raises(ConfigError, match="did you mean 'geometric'"):
        predictor("geometrc")
    with pytest.raises(ConfigError, match="expected one of none, difference"):
        predictor("xyz")


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Regulator(rho="cubic"),  # type: ignore[arg-type]
        lambda: Regulator(alpha=-1.0),
        lambda: Regulator(alpha=float("nan")),
        lambda: Regulator(rho="capped"),
        lambda: Regulator(rho="capped", cap=0),
        lambda: Regulator(cap=3),
        lambda: Regulator(rho="power"),
        lambda: Regulator(rho="power", power=-1.0),
        lambda: Geometric(Regulator(rho="steps")),
        lambda: Geometric(along="velocity"),  # type: ignore[arg-type]
        lambda: ConstantGradient(Regulator(rho="power", power=0.5)),
        lambda: ConstantGradient(Regulator(rho="capped", cap=1.5)),
    ],
)
def test_impossible_settings_are_refused(bad: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        bad()


@given(s=st.integers(-3, 40), alpha=st.floats(0.0, 2.0), mu=st.floats(0.0, 1.0))
def test_regulator_values(s: int, alpha: float, mu: float) -> None:
    n = max(s, 0)
    assert Regulator(alpha)(s) == pytest.approx(alpha * n)
    assert Regulator(alpha, "geometric")(s, mu) == pytest.approx(alpha * sum(mu**i for i in range(1, n + 1)), abs=1e-9)
    assert Regulator(alpha, "capped", cap=4)(s) == pytest.approx(alpha * min(n, 4))
    assert Regulator(alpha, "power", power=0.5)(s) == pytest.approx(alpha * n**0.5)


# ---------------------------------------------------------------- history


def test_history_keeps_only_what_is_needed_and_reuses_its_buffers() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    nothing, everything = History(params), History(params, {"update", "gradient"})
    for history in (nothing, everything):
        step(params, optimizer, history, "random")
    assert nothing.update is None
    assert nothing.gradient is None
    assert nothing.state_dict() == {}
    assert everything.update is not None
    kept = [t.data_ptr() for t in everything.update]
    before = [p.detach().clone() for p in params]
    gradient = [torch.randn_like(p) for p in params]
    step(params, optimizer, everything, gradient)
    assert [t.data_ptr() for t in everything.update] == kept
    assert distance([b - u for b, u in zip(before, everything.update, strict=True)], params) < 1e-15
    assert everything.gradient is not None
    assert all(torch.equal(a, b) for a, b in zip(everything.gradient, gradient, strict=True))


def test_parameters_without_gradient_are_predicted_to_stay() -> None:
    params, optimizer, history = trained(OPTIMIZERS["heavy-ball"], ConstantGradient(), steps=1)
    params[0].grad = torch.randn_like(params[0])
    history.before_step(params)
    optimizer.step()
    history.after_step(params)
    predicted = ConstantGradient().predict(params, optimizer, 2, history)
    assert not torch.equal(predicted[0], params[0])
    assert torch.equal(predicted[1], params[1])


@pytest.mark.parametrize("name", ["linear", "coasting", "constant-gradient"])
@pytest.mark.parametrize("optimizer_name", ["heavy-ball", "adam"])
def test_parameters_never_updated_are_predicted_to_stay(name: str, optimizer_name: str) -> None:
    p = predictor(name)
    params, optimizer, history = trained(OPTIMIZERS[optimizer_name], p, steps=0)
    params[0].grad = torch.randn_like(params[0])
    history.before_step(params)
    optimizer.step()
    history.after_step(params)
    predicted = p.predict(params, optimizer, 2, history)
    assert not torch.equal(predicted[0], params[0])
    assert torch.equal(predicted[1], params[1])
    assert len(optimizer.state) == 1


@pytest.mark.parametrize("name", NAMES)
def test_history_survives_a_checkpoint(name: str) -> None:
    p = predictor(name)
    params, optimizer, history = trained(OPTIMIZERS["nesterov"], p)
    resumed = p.history(params, optimizer)
    resumed.load_state_dict(history.state_dict())
    before, after = (p.predict(params, optimizer, 3, h) for h in (history, resumed))
    assert distance(before, after) == 0


def test_history_refuses_what_does_not_fit() -> None:
    params, _, history = trained(OPTIMIZERS["plain"], Difference())
    with pytest.raises(CheckpointMismatch, match="expected 1 tensors, got 3"):
        History(params[:1], {"update"}).load_state_dict(history.state_dict())
    with pytest.raises(ConfigError, match="cannot keep"):
        History(params, {"weights"})


def test_a_stage_without_parameters() -> None:
    history = History([], {"update", "gradient"})
    history.before_step([])
    history.after_step([])
    optimizer = SGD(parameters(), lr=0.1)
    assert Difference().predict([], optimizer, 2, history) == []
