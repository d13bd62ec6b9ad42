"""Models by name, and the options with which each suits given data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..lookup import call, find, import_function, unknown_options
from ..metrics import Metric, accuracy, perplexity
from .gpt import GPT
from .mlp import MLP
from .plain_conv import PlainConv
from .resnet import resnet18, resnet34, resnet50
from .resnet_cifar import CifarResNet
from .reversible import REVERSIBLE_MODELS
from .vgg import VGG
from .wide_resnet import WideResNet

__all__ = ["build", "metrics_for", "names", "options_for", "problems"]

_SMALL_IMAGE = 64


@dataclass(frozen=True)
class _Entry:
    make: Callable[..., nn.Module]
    suit: Callable[[Sequence[int], int], dict[str, Any]]


def _image(shape: Sequence[int], classes: int) -> dict[str, Any]:
    if len(shape) != 3:
        raise ConfigError(f"this model takes images (channels, height, width), the data are of shape {tuple(shape)}")
    return {"in_channels": shape[0], "classes": classes}


def _sized(option: str, shape: Sequence[int], classes: int) -> dict[str, Any]:
    size = "small" if max(shape[1:], default=0) <= _SMALL_IMAGE else "imagenet"
    return {**_image(shape, classes), option: size}


def _flat(shape: Sequence[int], classes: int) -> dict[str, Any]:
    return {"widths": (math.prod(shape), 128, 128, 128, classes)}


def _patches(shape: Sequence[int], classes: int) -> dict[str, Any]:
    options = _image(shape, classes)
    if shape[1] != shape[2]:
        raise ConfigError(f"this model takes square images, the data are of shape {tuple(shape)}")
    return {**options, "image": shape[1]}


def _text(shape: Sequence[int], classes: int) -> dict[str, Any]:
    if len(shape) != 1:
        raise ConfigError(f"this model takes sequences of tokens (length,), the data are of shape {tuple(shape)}")
    return {"vocabulary": classes, "context": shape[0]}


#: How reversible models suit data, where it is not by channels and classes alone.
_SUITS: dict[str, Callable[[Sequence[int], int], dict[str, Any]]] = {
    **{name: partial(_sized, "stem") for name in ("revnet18", "revnet34", "revnet50")},
    "rev-vit": _patches,
    "rev-gpt": _text,
}

_MODELS: dict[str, _Entry] = {
    "mlp": _Entry(MLP, _flat),
    **{f"resnet{depth}": _Entry(partial(CifarResNet, depth), _image) for depth in (8, 14, 20, 32, 56, 110)},
    "resnet18": _Entry(resnet18, partial(_sized, "stem")),
    "resnet34": _Entry(resnet34, partial(_sized, "stem")),
    "resnet50": _Entry(resnet50, partial(_sized, "stem")),
    "wrn28-10": _Entry(partial(WideResNet, 28, 10), _image),
    "vgg11": _Entry(partial(VGG, 11), partial(_sized, "head")),
    "vgg16": _Entry(partial(VGG, 16), partial(_sized, "head")),
    "plain-conv": _Entry(PlainConv, _image),
    "gpt": _Entry(GPT, _text),
    **{name: _Entry(make, _SUITS.get(name, _image)) for name, make in REVERSIBLE_MODELS.items()},
}


def names() -> list[str]:
    """The names that `build` knows.

    >>> names()[:3]
    ['mlp', 'resnet8', 'resnet14']
    """
    return list(_MODELS)


def build(name: str, **options: Any) -> nn.Module:
    """Make a model by name.

    **Arguments:**

    - `name`: one of `names()`, or `package.module:function` for a function (or class) of your own.
    - `options`: handed to the model; an unknown one is refused with the list of those it takes.

    **Returns:** an `nn.Module`; those of this package have `blocks()`.

    >>> sum(p.numel() for p in build("resnet20").parameters())
    269722
    >>> len(build("unlatch.models.resnet_cifar:CifarResNet", depth=26).blocks())
    14
    """
    model: nn.Module = call(f"model {name!r}", _maker(name), options, ours=":" not in name)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r} returned {type(model).__name__}: expected a torch.nn.Module")
    return model


def problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a name, or with names of options, as far as it shows without building the model.

    >>> problems("math:sqrt", {}), problems("mlp", {"widhts": [2]})  # doctest: +ELLIPSIS
    ([], ["model 'mlp': there is no option 'widhts'. Did you mean 'widths'? Its options: widths, ..."])
    """
    try:
        return [f"model {name!r}: {problem}" for problem in unknown_options(_maker(name), options)]
    except ConfigError as error:
        return [str(error)]


def _maker(name: str) -> Callable[..., nn.Module]:
    return import_function("model", name) if ":" in name else find("model", name, _MODELS).make


def options_for(name: str, shape: Sequence[int], classes: int) -> dict[str, Any]:
    """The options that make the named model suit data with samples of `shape` and this many classes.

    Nothing for a function of your own.

    >>> options_for("resnet18", (3, 32, 32), 10)
    {'in_channels': 3, 'classes': 10, 'stem': 'small'}
    """
    return {} if ":" in name else find("model", name, _MODELS).suit(shape, classes)


def metrics_for(name: str) -> tuple[Metric, ...] | None:
    """What evaluation should measure beside the loss; `None` leaves it to the shapes of outputs and targets.

    Language models of this package give scores `(N, T, vocabulary)`, to be compared with targets of the same position.

    >>> import torch
    >>> [sorted(metric(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long))) for metric in metrics_for("gpt")]
    [['accuracy'], ['perplexity']]
    """
    reads_text = ":" not in name and find("model", name, _MODELS).suit is _text
    return (accuracy(axis=-1), perplexity(axis=-1)) if reads_text else None
