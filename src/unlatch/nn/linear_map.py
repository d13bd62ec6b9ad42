"""Layers of one linear map and an elementwise function, whose two gradients need no graph.

With z = W a and output f(z), the gradient of the input is W^T (e f'(z)) and that of the weights (e f'(z)) a^T, for a
gradient e of the output. So another process can compute either from tensors it is sent, without a forward of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LinearMap", "linear_map"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: Derivatives that follow from the function's value: of gradient, output and module.
_DERIVATIVES: dict[type[nn.Module], Callable[[Tensor, Tensor, Any], Tensor]] = {
    nn.ReLU: lambda e, out, f: torch.ops.aten.threshold_backward(e, out, 0),
    nn.Tanh: lambda e, out, f: torch.ops.aten.tanh_backward(e, out),
    nn.Sigmoid: lambda e, out, f: torch.ops.aten.sigmoid_backward(e, out),
    nn.LeakyReLU: lambda e, out, f: torch.ops.aten.leaky_relu_backward(e, out, f.negative_slope, True),
}


@dataclass(frozen=True)
class LinearMap:
    """A linear or convolution layer, and the function that is applied to each element of its output, if any.

    >>> layer = linear_map([nn.Linear(2, 1, bias=False), nn.ReLU()])
    >>> delta = layer.derivative(torch.ones(1, 1), torch.tensor([[3.0]]))
    >>> layer.weight_gradients(delta, torch.tensor([[5.0, 7.0]]))
    [tensor([[5., 7.]])]
    """

    layer: nn.Linear | nn.Conv2d
    function: nn.Module | None = None

    def derivative(self, gradient: Tensor, outputs: Tensor) -> Tensor:
        """From the gradient of the output to that of the linear map's result."""
        if self.function is None:
            return gradient
        return _DERIVATIVES[type(self.function)](gradient, outputs, self.function)

    def input_gradient(self, delta: Tensor, weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The gradient of an input of this shape, at these weights (and bias)."""
        if isinstance(self.layer, nn.Linear):
            return delta @ weights[0]
        # Only the shape of the input matters, so its memory is never touched.
        inputs = delta.new_empty(tuple(shape)).to(memory_format=_memory_format(delta))
        found: Tensor = self._convolution(delta, inputs, weights[0], [True, False, False])[0]
        return found

    def weight_gradients(self, delta: Tensor, inputs: Tensor) -> list[Tensor]:
        """The gradients of weight and, if there is one, bias."""
        if isinstance(self.layer, nn.Linear):
            rows = delta.flatten(0, -2)
            found = [rows.t() @ inputs.flatten(0, -2)]
            return found if self.layer.bias is None else [*found, rows.sum(0)]
        biased = self.layer.bias is not None
        results = self._convolution(delta, inputs, self.layer.weight, [False, True, biased])
        return list(results[1:] if biased else results[1:2])

    def _convolution(self, delta: Tensor, inputs: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
        conv = self.layer
        assert isinstance(conv, nn.Conv2d)
        return torch.ops.aten.convolution_backward(
            delta,
            inputs,
            weight,
            [conv.out_channels],
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0, 0],
            conv.groups,
            wanted,
        )


def linear_map(modules: Sequence[nn.Module]) -> LinearMap | None:
    """The linear map that a run of modules is, or `None` if it is something else.

    Anything out of the ordinary (hooks, frozen weights, parametrisations, padding by reflection) is something else.

    >>> linear_map([nn.Sequential(nn.Conv2d(3, 8, 3), nn.Identity()), nn.Tanh()]).function
    Tanh()
    >>> linear_map([nn.Linear(2, 2), nn.Dropout()]) is None
    True
    """
    parts = [part for module in modules for part in _flat(module)]
    if not 1 <= len(parts) <= 2 or (len(parts) == 2 and not _is_elementwise(parts[1])):
        return None
    layer = parts[0]
    # A subclass may do anything in its forward.
    if type(layer) is nn.Conv2d:
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    else:
        plain = type(layer) is nn.Linear
    params = list(layer.parameters())
    trained = all(p.requires_grad and p.is_floating_point() and not _hooked_parameter(p) for p in params)
    if not plain or not trained or any(_hooked(part) for module in modules for part in module.modules()):
        return None
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return LinearMap(layer, parts[1] if len(parts) == 2 else None)


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for part in module:
            yield from _flat(part)
    elif type(module) is not nn.Identity:
        yield module


def _is_elementwise(module: nn.Module) -> bool:
    if type(module) is nn.LeakyReLU and module.negative_slope <= 0:
        return False
    return type(module) in _DERIVATIVES


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


def _hooked_parameter(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _memory_format(like: Tensor) -> torch.memory_format:
    last = like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
