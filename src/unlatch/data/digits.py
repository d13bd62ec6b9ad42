"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: real data without a download."""

from __future__ import annotations

import torch

from ..lookup import import_extra
from .augment import Augment
from .tensors import TensorData, stratified

__all__ = ["digits"]

_WHITE = 16.0


def digits(seed: int = 0) -> tuple[TensorData, TensorData]:
    """Handwritten digits, four fifths for training, every class with its share in both parts.

    Images are float32 `(N, 1, 8, 8)`, normalised with the mean and deviation of the training part.

    **Arguments:**

    - `seed`: of the split.

    >>> train, test = digits()
    >>> len(train), len(test), train.sample_shape
    (1437, 360, (1, 8, 8))
    """
    # Slow to import, and only this set needs it.
    sets = import_extra("sklearn.datasets", "digits", "the data set 'digits', which comes with scikit-learn,")
    pixels, labels = sets.load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / _WHITE
    y = torch.from_numpy(labels).long()
    in_test = torch.zeros(len(y), dtype=torch.bool)
    in_test[stratified(y, -(-len(y) // 5), seed)] = True
    mean, std = x[~in_test].mean(), x[~in_test].std()
    x = (x - mean) / std
    augment = Augment(pad=1, flip=False, fill=float(-mean / std))
    whole = TensorData(x, y, 10, augment=augment)
    return whole.take((~in_test).nonzero().squeeze(1)), whole.take(in_test.nonzero().squeeze(1))
