"""Held-out training samples: never trained on, always the same, and no test samples."""

from __future__ import annotations

import pytest
import torch

from unlatch.data import TensorData, load
from unlatch.errors import DataError


def images(part: TensorData) -> list[tuple[float, ...]]:
    return [tuple(x.flatten().tolist()) for x in part.x]


def test_the_parts_are_those_of_the_training_part():
    whole, _ = load("digits")
    rest, held = load("digits", holdout=300)
    assert (len(rest), len(held)) == (len(whole) - 300, 300)
    assert sorted(images(rest) + images(held)) == sorted(images(whole))
    assert held.y.bincount().min() >= 25


def test_a_subset_is_drawn_from_what_is_left():
    _, held = load("digits", holdout=300)
    some, same = load("digits", holdout=300, train_size=100)
    assert same.x.equal(held.x)
    assert not set(images(some)) & set(images(held))


@pytest.mark.parametrize("stride", [2, 3, 4, 5])
def test_of_a_text_the_end_is_held_out_and_no_character_of_it_is_seen(stride):
    text = torch.arange(100)  # every position is a character of its own
    windows = TensorData(text[:-1].unfold(0, 4, stride), text[1:].unfold(0, 4, stride), 100)
    rest, held = windows.hold_out(5)
    assert len(held) == 5
    assert held.x[-1].equal(windows.x[-1])
    assert max(rest.y.max(), rest.x.max()) < held.x.min()
    assert len(rest) >= len(windows) - 5 - 4 // stride


@pytest.mark.parametrize("count", [0, 1437, 5000])
def test_what_leaves_nothing_is_refused(count):
    with pytest.raises(DataError, match=f"{count} samples to hold out: expected 1 to 1436 of 1437"):
        load("digits", holdout=count)
