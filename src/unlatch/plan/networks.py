"""Well-known networks as chains of convolutions and fully connected layers, and what their tasks cost by calculation.

Costs are counted in multiply-accumulates (`mac_costs`) or in cycles of a systolic array (`systolic_costs`).

Residual networks are flattened into the order of their convolutions, the projection of a shortcut before the block that
it bypasses. A shortcut lies across every cut inside its block and is counted there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..errors import PlanError
from ..lookup import call, find
from .layer_costs import LayerCost, as_chain

__all__ = [
    "LayerShape",
    "mac_costs",
    "network_names",
    "network_shapes",
    "output_stationary",
    "systolic_costs",
    "weight_stationary",
]


@dataclass(frozen=True)
class LayerShape:
    """One convolution (square) or one fully connected layer (sizes and kernel 1) of one sample.

    >>> LayerShape("conv", 3, 64, kernel=3, size_in=224, size_out=224).macs
    86704128
    """

    name: str
    channels_in: int
    channels_out: int
    kernel: int = 1
    size_in: int = 1
    size_out: int = 1
    groups: int = 1
    #: Width and height after pooling, which is part of the layer.
    size_sent: int = 1
    #: Elements of shortcuts that cross a cut after this layer.
    shortcut: int = 0

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward of one sample; those of D and of G are as many."""
        return self.size_out**2 * self.weights

    @property
    def weights(self) -> int:
        """Number of weights, without bias."""
        return self.channels_out * (self.channels_in // self.groups) * self.kernel**2

    @property
    def sent(self) -> int:
        """Elements of one sample that cross a cut after this layer."""
        return self.channels_out * self.size_sent**2 + self.shortcut


def _convolution(
    name: str, inputs: int, outputs: int, kernel: int, size: int, stride: int = 1, pool: int = 1, groups: int = 1
) -> LayerShape:
    """A convolution whose output is `size` wide and high; then `pool` shrinks it."""
    return LayerShape(name, inputs, outputs, kernel, size * stride, size, groups, size // pool)


def alexnet() -> list[LayerShape]:
    """AlexNet with its two groups, for images of 227 x 227."""
    conv = [
        LayerShape("conv1", 3, 96, 11, 227, 55, size_sent=27),
        LayerShape("conv2", 96, 256, 5, 27, 27, groups=2, size_sent=13),
        LayerShape("conv3", 256, 384, 3, 13, 13, size_sent=13),
        LayerShape("conv4", 384, 384, 3, 13, 13, groups=2, size_sent=13),
        LayerShape("conv5", 384, 256, 3, 13, 13, groups=2, size_sent=6),
    ]
    return [*conv, LayerShape("fc6", 9216, 4096), LayerShape("fc7", 4096, 4096), LayerShape("fc8", 4096, 1000)]


def vgg(repeats: tuple[int, ...]) -> list[LayerShape]:
    """VGG with `repeats` convolutions in each of its five parts, for images of 224 x 224."""
    layers: list[LayerShape] = []
    inputs, size = 3, 224
    for part, (width, count) in enumerate(zip((64, 128, 256, 512, 512), repeats, strict=True), start=1):
        for number in range(1, count + 1):
            pool = 2 if number == count else 1
            layers.append(_convolution(f"conv{part}_{number}", inputs, width, 3, size, pool=pool))
            inputs = width
        size //= 2
    return [*layers, LayerShape("fc6", 512 * 49, 4096), LayerShape("fc7", 4096, 4096), LayerShape("fc8", 4096, 1000)]


def resnet(
    repeats: tuple[int, ...], bottleneck: bool, *, projections: bool = True, early_stride: bool = False
) -> list[LayerShape]:
    """ResNet with `repeats` blocks in each of its four parts, for images of 224 x 224."""
    layers = [_convolution("conv1", 3, 64, 7, 112, stride=2, pool=2)]
    inputs, size = 64, 56
    for part, (width, count) in enumerate(zip((64, 128, 256, 512), repeats, strict=True), start=2):
        for number in range(1, count + 1):
            stride = 2 if number == 1 and part > 2 else 1
            size //= stride
            outputs = 4 * width if bottleneck else width
            name = f"conv{part}_{number}"
            block = _residual(name, inputs, width, outputs, size, stride, bottleneck, early_stride)
            layers += [layer for layer in block if projections or layer.name != f"{name}p"]
            inputs = outputs
    layers[-1] = replace(layers[-1], size_sent=1)
    return [*layers, LayerShape("fc", inputs, 1000)]


def _residual(
    name: str, inputs: int, width: int, outputs: int, size: int, stride: int, bottleneck: bool, early_stride: bool
) -> list[LayerShape]:
    before = size * stride
    if bottleneck:
        between = size if early_stride else before
        inner = [
            _convolution(f"{name}a", inputs, width, 1, between, before // between),
            _convolution(f"{name}b", width, width, 3, size, between // size),
            _convolution(f"{name}c", width, outputs, 1, size),
        ]
    else:
        inner = [
            _convolution(f"{name}a", inputs, width, 3, size, stride),
            _convolution(f"{name}b", width, outputs, 3, size),
        ]
    projects = stride > 1 or inputs != outputs
    bypass = outputs * size**2 if projects else inputs * before**2
    chain = [replace(layer, shortcut=bypass) for layer in inner[:-1]] + inner[-1:]
    if projects:
        # After the projection both its result and the block's own input are still needed above.
        projection = _convolution(f"{name}p", inputs, outputs, 1, size, stride)
        chain.insert(0, replace(projection, shortcut=inputs * before**2))
    return chain


_NETWORKS: dict[str, Callable[..., list[LayerShape]]] = {
    "alexnet": alexnet,
    "vgg16": partial(vgg, (2, 2, 3, 3, 3)),
    "vgg19": partial(vgg, (2, 2, 4, 4, 4)),
    "resnet18": partial(resnet, (2, 2, 2, 2), False),
    "resnet34": partial(resnet, (3, 4, 6, 3), False),
    "resnet50": partial(resnet, (3, 4, 6, 3), True),
    "resnet101": partial(resnet, (3, 4, 23, 3), True),
    "resnet152": partial(resnet, (3, 8, 36, 3), True),
}


def network_names() -> list[str]:
    """The names that `network_shapes` knows.

    >>> network_names()[:3]
    ['alexnet', 'vgg16', 'vgg19']
    """
    return list(_NETWORKS)


def network_shapes(name: str, **options: bool) -> list[LayerShape]:
    """The layers of a network by name.

    **Arguments:**

    - `name`: one of `network_names()`.
    - `options`: for ResNets, `projections=False` leaves out the convolutions in shortcuts, and `early_stride=True` puts
      the stride of a bottleneck into its first 1 x 1 (as published first) instead of its 3 x 3 (as torchvision does).

    >>> round(sum(layer.macs for layer in network_shapes("vgg16")) / 1e9, 3)
    15.47
    """
    return call(f"network {name!r}", find("network", name, _NETWORKS), options, ours=True)


# ------------------------------------------------------------ what tasks cost


def mac_costs(
    shapes: Sequence[LayerShape], *, batch: int = 1, elements: int = 1, bytes_per_number: int = 4
) -> list[LayerCost]:
    """Cycles of F, D and G, all the same: `ceil(MAC / elements)`.

    **Arguments:**

    - `shapes`: of the layers, in order.
    - `batch`: samples of a mini-batch.
    - `elements`: multiply-accumulates that a device does per cycle.
    - `bytes_per_number`: size of activations and weights.

    >>> mac_costs([LayerShape("fc", 10, 10)], batch=2, elements=3)[0].F
    67
    """
    if min(batch, elements) < 1:
        raise PlanError(f"expected at least 1 sample and 1 processing element, got batch={batch}, elements={elements}")
    costs = []
    for shape in shapes:
        cycles = -(-batch * shape.macs // elements)
        sent, weights = batch * shape.sent * bytes_per_number, shape.weights * bytes_per_number
        costs.append(LayerCost(shape.name, cycles, cycles, cycles, sent, weights))
    return as_chain(costs)


def weight_stationary(m: int, k: int, n: int, rows: int, columns: int) -> int:
    """Cycles of an (m x k) by (k x n) product whose first factor stays in the array.

    >>> weight_stationary(4, 4, 10, 4, 4)
    20
    """
    return -(-k // rows) * -(-m // columns) * (2 * rows + columns + n - 2)


def output_stationary(m: int, k: int, n: int, rows: int, columns: int) -> int:
    """Cycles of an (m x k) by (k x n) product whose result stays in the array.

    >>> output_stationary(4, 10, 4, 4, 4)
    20
    """
    return -(-m // rows) * -(-n // columns) * (2 * rows + columns + k - 2)


def systolic_costs(
    shapes: Sequence[LayerShape], *, batch: int = 1, rows: int = 128, columns: int = 128, bytes_per_number: int = 4
) -> list[LayerCost]:
    """Cycles of F, D and G on a systolic array; the groups of a convolution run one after the other.

    Each task is a matrix product, cut into tiles of the size of the array. F and D keep weights in the array and let
    activations pass (weight-stationary), G keeps its result in place and lets both factors pass (output-stationary). A
    tile takes `2R + C + T - 2` cycles, T being the length of what passes; this is the model of SCALE-Sim. With it the
    three tasks of a layer differ, most of all where mini-batches are small.

    >>> [(layer.F, layer.D, layer.G) for layer in systolic_costs([LayerShape("fc", 8, 4)] * 2, rows=4, columns=4)]
    [(22, 0, 22), (22, 22, 22)]
    """
    if min(batch, rows, columns) < 1:
        raise PlanError(f"expected positive sizes, got batch={batch}, rows={rows}, columns={columns}")
    costs = []
    for shape in shapes:
        outputs, inputs = shape.channels_out // shape.groups, shape.channels_in // shape.groups
        pixels_out, pixels_in = batch * shape.size_out**2, batch * shape.size_in**2
        taps = shape.kernel**2
        forward = weight_stationary(outputs, inputs * taps, pixels_out, rows, columns)
        input_gradient = weight_stationary(inputs, outputs * taps, pixels_in, rows, columns)
        weight_gradient = output_stationary(outputs, pixels_out, inputs * taps, rows, columns)
        costs.append(
            LayerCost(
                shape.name,
                shape.groups * forward,
                shape.groups * input_gradient,
                shape.groups * weight_gradient,
                activation_bytes=batch * shape.sent * bytes_per_number,
                weight_bytes=shape.weights * bytes_per_number,
            )
        )
    return as_chain(costs)
