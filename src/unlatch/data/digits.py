"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: real data without a download."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import ConfigError
from ..lookup import import_extra
from .augment import Augment
from .tensors import TensorData, stratified

__all__ = ["digits"]

_WHITE, _SIZE = 16.0, 8


def digits(seed: int = 0, size: int = _SIZE) -> tuple[TensorData, TensorData]:
    """Handwritten digits, four fifths for training, every class with its share in both parts.

    Images are float32 `(N, 1, size, size)`, normalised with the mean and deviation of the training part.

    **Arguments:**

    - `seed`: of the split.
    - `size`: pixels a side, 8 or a multiple of it: larger ones are interpolated and show no more, but give a network
      more to compute.

    >>> train, test = digits()
    >>> len(train), len(test), train.sample_shape
    (1437, 360, (1, 8, 8))
    >>> digits(size=16)[0].sample_shape
    (1, 16, 16)
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < _SIZE or size % _SIZE:
        raise ConfigError(f"data set 'digits': size is {_SIZE} or a multiple of it, got {size!r}")
    # Slow to import, and only this set needs it.
    sets = import_extra("sklearn.datasets", "digits", "the data set 'digits', which comes with scikit-learn,")
    pixels, labels = sets.load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).float().view(-1, 1, _SIZE, _SIZE) / _WHITE
    if size != _SIZE:
        x = F.interpolate(x, size=(size, size), mode="bilinear")
    y = torch.from_numpy(labels).long()
    in_test = torch.zeros(len(y), dtype=torch.bool)
    in_test[stratified(y, -(-len(y) // 5), seed)] = True
    mean, std = x[~in_test].mean(), x[~in_test].std()
    x = (x - mean) / std
    augment = Augment(pad=size // _SIZE, flip=False, fill=float(-mean / std))
    whole = TensorData(x, y, 10, augment=augment)
    return whole.take((~in_test).nonzero().squeeze(1)), whole.take(in_test.nonzero().squeeze(1))
