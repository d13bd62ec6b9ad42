"""Real data sets as tensors or in files, and a loader whose batches depend on seed, epoch and index only.

>>> from unlatch import data
>>> train, test = data.load("digits")
>>> x, y = next(iter(data.Loader(train, batch_size=32, shuffle=True)))
>>> x.shape, y.shape
(torch.Size([32, 1, 8, 8]), torch.Size([32]))
"""

from __future__ import annotations

from .augment import Augment, ResizedCrop
from .loader import Loader
from .registry import load, names, problems
from .tensors import TensorData

__all__ = ["Augment", "Loader", "ResizedCrop", "TensorData", "load", "names", "problems"]
