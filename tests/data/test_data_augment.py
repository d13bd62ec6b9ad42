"""Batched crop and flip against a loop over images, and normalisation against its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unlatch.data.augment import Augment, normalise
from unlatch.errors import ConfigError


def candidates(image: Tensor, augment: Augment) -> dict[tuple[int, int, bool], Tensor]:
    """All that augmentation may make of one image, by shift and mirroring, written out by slicing."""
    p = augment.pad
    padded = F.pad(image, (p, p, p, p), value=augment.fill)
    _, height, width = image.shape
    result = {}
    for dy in range(2 * p + 1):
        for dx in range(2 * p + 1):
            crop = padded[:, dy : dy + height, dx : dx + width]
            result[dy, dx, False] = crop
            if augment.flip:
                result[dy, dx, True] = crop.flip(2)
    return result


@settings(max_examples=25)
@given(
    channels=st.integers(1, 3),
    height=st.integers(2, 6),
    width=st.integers(2, 6),
    pad=st.integers(0, 3),
    flip=st.booleans(),
    as_bytes=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_each_image_is_a_crop_of_itself(
    channels: int, height: int, width: int, pad: int, flip: bool, as_bytes: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(1, 256, (4, channels, height, width), generator=generator, dtype=torch.uint8)
    augment = Augment(pad, flip, fill=0.0)
    if not as_bytes:
        images, augment = images / 255, Augment(pad, flip, fill=-0.5)
    out = augment(images, generator)
    assert out.shape == images.shape
    assert out.dtype == images.dtype
    for before, after in zip(images, out, strict=True):
        assert any(torch.equal(after, crop) for crop in candidates(before, augment).values())


def test_every_shift_and_mirroring_comes_about_equally_often() -> None:
    image = torch.randint(1, 256, (1, 3, 4), dtype=torch.uint8)
    augment = Augment(pad=1)
    out = augment(image.expand(9000, -1, -1, -1), torch.Generator().manual_seed(0))
    seen = {k: int((out == crop).flatten(1).all(1).sum()) for k, crop in candidates(image, augment).items()}
    assert sum(seen.values()) == 9000
    assert len(seen) == 18
    # 500 each, standard deviation 22.
    assert all(390 < count < 610 for count in seen.values())


def test_nothing_to_do_leaves_images_as_they_are() -> None:
    images = torch.randint(0, 256, (3, 1, 4, 5), dtype=torch.uint8)
    assert torch.equal(Augment(pad=0, flip=False)(images, torch.Generator()), images)


def test_the_original_batch_is_not_touched() -> None:
    images = torch.randint(0, 256, (3, 1, 4, 5), dtype=torch.uint8)
    before = images.clone()
    Augment()(images, torch.Generator())
    assert torch.equal(images, before)


def test_normalise_follows_its_formula() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    expected = torch.stack([(images[:, c].double() / 255 - mean[c]) / std[c] for c in range(3)], 1)
    out = normalise(images, mean, std)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(normalise(images, (), ()), images / 255)


def test_negative_pad_is_refused() -> None:
    with pytest.raises(ConfigError, match="pad -1"):
        Augment(pad=-1)
