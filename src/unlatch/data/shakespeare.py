"""Tiny Shakespeare: predict the next character."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from .files import data_folder, missing, read_bytes
from .tensors import TensorData

__all__ = ["shakespeare"]

_FILES = ("tinyshakespeare.txt", "tinyshakespeare/input.txt")


def shakespeare(
    data_dir: str | Path | None = None, *, context: int = 128, stride: int | None = None, test_fraction: float = 0.1
) -> tuple[TensorData, TensorData]:
    """Windows of characters as tokens `(N, context)`, and the same windows one character later.

    `classes` is the number of different characters in the whole text; the test part is its end.

    **Arguments:**

    - `context`: characters per window.
    - `stride`: distance between windows; `context` unless given, so that they do not overlap.
    - `test_fraction`: share of the text kept for testing.
    """
    if context < 1 or (stride is not None and stride < 1) or not 0 < test_fraction < 1:
        raise ConfigError(
            f"context {context}, stride {stride}, test_fraction {test_fraction}: expected numbers > 0, the fraction < 1"
        )
    wanted = " or ".join(_FILES)
    root = data_folder(data_dir, wanted)
    path = next((root / name for name in _FILES if (root / name).is_file()), None)
    if path is None:
        raise missing("shakespeare", root, wanted, "https://github.com/karpathy/char-rnn (data/tinyshakespeare)")
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}") from error
    letters, tokens = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    cut = len(tokens) - int(len(tokens) * test_fraction)
    if min(cut, len(tokens) - cut) <= context:
        raise DataError(
            f"{path} has {len(tokens)} characters: too short for windows of {context} in both parts; "
            "fetch it again or set a smaller context"
        )
    whole = torch.from_numpy(tokens.astype(np.int64))
    step = stride or context
    return _windows(whole[:cut], context, step, len(letters)), _windows(whole[cut:], context, step, len(letters))


def _windows(tokens: Tensor, context: int, stride: int, classes: int) -> TensorData:
    # Views into one text: overlapping windows cost no memory.
    return TensorData(tokens[:-1].unfold(0, context, stride), tokens[1:].unfold(0, context, stride), classes)
