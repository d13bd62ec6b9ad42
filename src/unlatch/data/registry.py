"""Data sets by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ConfigError, DataError
from ..lookup import call, find, import_function, unknown_options
from .cifar import cifar10, cifar100
from .digits import digits
from .fashion_mnist import fashion_mnist
from .image_folder import imagefolder
from .imagenet32 import imagenet32
from .shakespeare import shakespeare
from .tensors import TensorData

__all__ = ["load", "names", "problems"]

_SETS: dict[str, Callable[..., Any]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "fashion-mnist": fashion_mnist,
    "imagenet32": imagenet32,
    "imagefolder": imagefolder,
    "shakespeare": shakespeare,
}

#: Of the draw of held-out samples; not that of subsets, which users may set.
_HOLDOUT_SEED = 20


def names() -> list[str]:
    """The names that `load` knows.

    >>> names()
    ['digits', 'cifar10', 'cifar100', 'fashion-mnist', 'imagenet32', 'imagefolder', 'shakespeare']
    """
    return list(_SETS)


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    train_size: int | None = None,
    test_size: int | None = None,
    subset_seed: int = 0,
    holdout: int | None = None,
    **options: Any,
) -> tuple[TensorData, TensorData]:
    """Training and test part of a data set, or with `holdout` two parts of its training part.

    **Arguments:**

    - `name`: one of `names()`, or `package.module:function` for a function of your own that returns training and test
      part, each a `TensorData` or a pair of tensors `(x, y)`.
    - `data_dir`: folder with the files; the environment variable `UNLATCH_DATA` unless given. Handed to your function
      only if it has an argument of this name.
    - `train_size`, `test_size`, `subset_seed`: use fixed stratified subsets of this size.
    - `holdout`: so many training samples, always the same ones, take the place of the test part, which is not touched;
      they are held out before any subset is drawn. For whatever is chosen by comparing: nothing may be chosen on test
      samples.
    - `options`: handed to the data set.

    >>> train, test = load("digits", train_size=100)
    >>> len(train), len(test), train.classes
    (100, 360, 10)
    >>> [len(part) for part in load("digits", holdout=287)]
    [1150, 287]
    """
    make = _maker(name)
    if "data_dir" in inspect.signature(make).parameters:
        options["data_dir"] = data_dir
    train, test = _both(name, call(f"data set {name!r}", make, options, ours=":" not in name))
    if holdout is not None:
        train, test = train.hold_out(holdout, _HOLDOUT_SEED)
    if train_size is not None:
        train = train.subset(train_size, subset_seed)
    if test_size is not None:
        test = test.subset(test_size, subset_seed)
    return train, test


def problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a name, or with names of options of `load`, as far as it shows without reading anything.

    >>> problems("digits", {"sead": 1})
    ["data set 'digits': there is no option 'sead'. Did you mean 'seed'? Its options: seed, size"]
    """
    own = [option for option in options if option not in inspect.signature(load).parameters]
    try:
        return [f"data set {name!r}: {problem}" for problem in unknown_options(_maker(name), own)]
    except ConfigError as error:
        return [str(error)]


def _maker(name: str) -> Callable[..., Any]:
    return import_function("data set", name) if ":" in name else find("data set", name, _SETS)


def _both(name: str, result: object) -> tuple[TensorData, TensorData]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise DataError(f"data set {name!r} returned {type(result).__name__}: expected a pair (train, test)")
    train, test = result
    return _as_data(name, "training", train), _as_data(name, "test", test)


def _as_data(name: str, part: str, value: object) -> TensorData:
    if isinstance(value, TensorData):
        return value
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(item, Tensor) for item in value):
        x, y = value
        if not y.is_floating_point():
            return TensorData(x, y.long(), int(y.max()) + 1)
    raise DataError(
        f"data set {name!r} returned a {part} part of type {type(value).__name__}: expected a TensorData, or a pair "
        "of tensors (x, y) in which y holds classes"
    )
