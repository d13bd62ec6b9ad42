"""`reversible`: ordinary training with activation memory that does not grow with depth."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from unlatch.errors import ConfigError, PlanError
from unlatch.nn.reversible import Coupling, Merge, RevBlock, SpaceToDepth, Split, reversible


def branch(width: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
    )


class Head(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def network(depth: int = 4, width: int = 4, dropout: float = 0.0) -> nn.Sequential:
    """Stem, couplings, an invertible and a plain down-sampling in between, head."""
    return nn.Sequential(
        nn.Conv2d(2, 2 * width, 3, padding=1),
        Split(),
        *(Coupling(branch(width, dropout)) for _ in range(depth)),
        SpaceToDepth(2),
        RevBlock(branch(4 * width, dropout), branch(4 * width, dropout)),
        Merge(),
        nn.Conv2d(8 * width, 2 * width, 1),
        Split(),
        Coupling(branch(width, dropout)),
        Merge(),
        Head(2 * width),
    )


def step(model: nn.Module, x: Tensor, seed: int = 0) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Output, gradients by name, gradient of the input."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    out = model(x)
    (out.float() ** 2).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, x.grad


def assert_same(found: dict[str, Tensor], true: dict[str, Tensor], tol: float) -> None:
    assert set(found) == set(true)
    for name in true:
        scale = max(1.0, float(true[name].abs().max()))
        assert float((found[name] - true[name]).abs().max()) < tol * scale, name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bn", ["forward", "backward"])
def test_one_step_equals_the_stored_graph(bn: str, dropout: float) -> None:
    plain = network(dropout=dropout).double()
    light = reversible(copy.deepcopy(plain), bn=bn)  # type: ignore[arg-type]
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    (out, grads, grad_x), (out2, grads2, grad_x2) = step(plain, x), step(light, x)
    assert torch.equal(out, out2)
    assert_same(grads2, grads, 1e-12)
    assert grad_x is not None
    assert grad_x2 is not None
    assert float((grad_x - grad_x2).abs().max()) < 1e-12
    for name, tensor in plain.named_buffers():
        assert torch.allclose(tensor.double(), light.get_buffer(name).double(), rtol=1e-12, atol=1e-14), name


def test_many_steps_of_training_agree() -> None:
    torch.manual_seed(0)
    plain = network(dropout=0.2).double()
    light = reversible(copy.deepcopy(plain))
    data = torch.randn(8, 5, 2, 6, 6, dtype=torch.float64)
    for model in (plain, light):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for index, x in enumerate(data):
            step(model, x, seed=index)
            optimizer.step()
    assert_same(dict(light.state_dict()), dict(plain.state_dict()), 1e-10)


def test_a_single_coupling_and_a_tuple_as_input() -> None:
    block = Coupling(nn.Linear(3, 3)).double()
    light = reversible([block])
    a, b = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True).unbind()
    true = torch.autograd.grad(sum(t.tanh().sum() for t in block((a, b))), [a, b, *block.parameters()])
    found = torch.autograd.grad(sum(t.tanh().sum() for t in light((a, b))), [a, b, *block.parameters()])
    assert all(torch.allclose(x, y, atol=1e-14) for x, y in zip(found, true, strict=True))


def test_one_unused_output_stream() -> None:
    run = nn.Sequential(Coupling(nn.Linear(3, 3)), Coupling(nn.Linear(3, 3))).double()
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    for stream in (0, 1):
        (true,) = torch.autograd.grad(run(tuple(x.unbind()))[stream].sum(), x)
        (found,) = torch.autograd.grad(reversible(run)(tuple(x.unbind()))[stream].sum(), x)
        assert torch.allclose(true, found, atol=1e-14)


class Scale(nn.Module):
    """A module with an inverse of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return state[0] * self.log_scale.exp(), state[1] + state[0]

    def inverse(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = state[0] / self.log_scale.exp()
        return x, state[1] - x


def test_gradients_pass_modules_with_an_inverse_of_their_own() -> None:
    """Autograd calls the backward of a run without grad mode; all gradients below such a module used to be zero."""
    run = nn.Sequential(nn.Linear(6, 6), Split(), Scale(), Coupling(nn.Linear(3, 3)), Scale(), Scale(), Merge())
    run.double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (_, true, true_x), (_, found, found_x) = step(run, x), step(reversible(run), x)
    assert_same(found, true, 1e-12)
    assert true_x is not None
    assert found_x is not None
    assert float((found_x - true_x).abs().max()) < 1e-12


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    plain = network().double()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("3." in name)
    light = reversible(copy.deepcopy(plain))
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    _, grads, _ = step(plain, x)
    _, grads2, grad_x = step(light, x)
    assert grads
    assert_same(grads2, grads, 1e-12)
    assert grad_x is None


def test_everything_frozen_needs_no_graph() -> None:
    light = reversible(network())
    light.requires_grad_(False)
    assert not light(torch.randn(2, 2, 6, 6)).requires_grad


def test_gradient_only_of_the_input() -> None:
    plain = network().double().requires_grad_(False)
    light = reversible(copy.deepcopy(plain))
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    true, found = step(plain, x)[2], step(light, x)[2]
    assert true is not None
    assert found is not None
    assert float((true - found).abs().max()) < 1e-12


def test_shared_parameters() -> None:
    shared = nn.Linear(3, 3)
    run = nn.Sequential(Split(), Coupling(shared), Coupling(nn.Sequential(shared, nn.Tanh())), Merge()).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    (_, true, _), (_, found, _) = step(run, x), step(reversible(run), x)
    assert_same(found, true, 1e-12)


def test_evaluation_equals_the_plain_model() -> None:
    plain = network(dropout=0.5)
    step(plain, torch.randn(5, 2, 6, 6))
    light = reversible(plain).eval()
    x = torch.randn(3, 2, 6, 6)
    with torch.no_grad():
        assert torch.equal(light(x), plain.eval()(x))


def test_statistics_follow_a_forward_that_no_backward_can_follow() -> None:
    light = reversible(network(), bn="backward")
    with torch.no_grad():
        light(torch.randn(4, 2, 6, 6))
    assert all(int(tensor) == 1 for name, tensor in light.named_buffers() if name.endswith("num_batches_tracked"))


# ----------------------------------------------------------------------------------------------------------- precision


def test_autocast_is_restored_in_the_backward() -> None:
    plain = network()
    light = reversible(copy.deepcopy(plain))
    x = torch.randn(5, 2, 6, 6, requires_grad=True)

    def half_step(model: nn.Module) -> tuple[dict[str, Tensor], Tensor | None]:
        model.zero_grad()
        leaf = x.detach().clone().requires_grad_()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(leaf)
        (out.float() ** 2).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, leaf.grad

    dtypes: list[torch.dtype] = []
    for module in light.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    (true, _), (found, grad_x) = half_step(plain), half_step(light)
    assert set(dtypes) == {torch.bfloat16}
    assert grad_x is not None
    assert grad_x.dtype == torch.float32
    assert_same(found, true, 5e-2)
    single = step(plain, x)[1]
    worst = max(float((found[n] - single[n]).norm() / single[n].norm()) for n in single if "1.bias" not in n)
    assert 1e-4 < worst < 0.2


# -------------------------------------------------------------------------------------------------------------- memory


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # a freed storage's address could come back

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    out.sum().backward()
    return sum(storages.values())


def test_activation_memory_does_not_grow_with_depth() -> None:
    x = torch.randn(8, 2, 16, 16)
    light = {depth: saved_bytes(reversible(network(depth, width=8)), x) for depth in (4, 32)}
    stored = {depth: saved_bytes(network(depth, width=8), x) for depth in (4, 32)}
    assert light[32] == light[4]
    assert stored[32] > 4 * stored[4]
    assert light[4] < stored[4] / 2


def test_only_the_output_of_a_run_is_kept() -> None:
    x = torch.randn(8, 16, 6, 6)
    run = reversible(nn.Sequential(Split(), *(Coupling(branch(8)) for _ in range(3))))
    with saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        sizes: list[int] = []
        streams = run(x)
    assert sizes == [stream.nbytes for stream in streams] == [x.nbytes // 2] * 2


# ------------------------------------------------------------------------------------------- a good citizen of autograd


def test_names_and_parameters_are_those_of_the_model() -> None:
    plain = network()
    light = reversible(plain)
    assert list(light.state_dict()) == list(plain.state_dict())
    assert [id(p) for p in light.parameters()] == [id(p) for p in plain.parameters()]
    light.load_state_dict(network().state_dict())
    other = copy.deepcopy(light)
    step(other, torch.randn(2, 2, 6, 6))
    assert all(p.grad is None for p in plain.parameters())
    assert light.double() is light
    assert {p.dtype for p in plain.parameters()} == {torch.float64}


def test_hooks_of_a_parameter_run_once() -> None:
    light = reversible(nn.Sequential(Split(), Coupling(nn.Linear(2, 2)), Merge()))
    weight = light.get_parameter("1.f.weight")
    _, true, _ = step(light, torch.ones(1, 4))
    seen: list[str] = []
    weight.register_hook(lambda grad: seen.append("tensor") or grad * 0.5)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulate"))
    _, found, _ = step(light, torch.ones(1, 4))
    assert seen == ["tensor", "accumulate"]
    assert torch.allclose(found["1.f.weight"], true["1.f.weight"] / 2)


def test_gradients_can_be_asked_for_without_accumulating() -> None:
    light = reversible(network())
    grads = torch.autograd.grad(light(torch.randn(2, 2, 6, 6)).sum(), list(light.parameters()))
    assert all(grad.shape == p.shape for grad, p in zip(grads, light.parameters(), strict=True))
    assert all(p.grad is None for p in light.parameters())


def test_an_update_before_the_backward_is_an_error() -> None:
    light = reversible(nn.Sequential(Split(), Coupling(nn.Linear(2, 2)), Merge()))
    out = light(torch.randn(3, 4))
    with torch.no_grad():
        light.get_parameter("1.f.weight").add_(1.0)
    with pytest.raises(RuntimeError, match="modified in place between its forward and its backward"):
        out.sum().backward()


def test_an_output_changed_before_the_backward_is_an_error() -> None:
    light = reversible(nn.Sequential(Coupling(nn.Linear(2, 2)), Coupling(nn.Linear(2, 2))))
    y, _ = light((torch.randn(3, 2), torch.randn(3, 2)))
    with torch.no_grad():
        y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_model_without_reversible_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no block is reversible.*0, 1"):
        reversible(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'never'"):
        reversible(network(), bn="never")  # type: ignore[arg-type]
