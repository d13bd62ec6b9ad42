"""Batches depend on seed, epoch and index only; every sample comes once per epoch; a position can be resumed."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlatch.data import Augment, Loader, TensorData
from unlatch.data.tensors import stratified
from unlatch.errors import CheckpointMismatch, ConfigError, DataError


def images(count: int = 23) -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return TensorData(x, torch.arange(count), count, (0.5,) * 3, (0.25,) * 3, Augment(pad=2))


def ids(loader: Loader) -> list[list[int]]:
    return [y.tolist() for _, y in loader]


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 12), st.booleans(), st.booleans(), st.integers(-5, 2**63))
def test_each_sample_comes_once_per_epoch(count: int, size: int, shuffle: bool, drop_last: bool, seed: int) -> None:
    if drop_last and size > count:
        size = count
    loader = Loader(images(count), size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    batches = ids(loader)
    assert len(batches) == len(loader)
    assert all(len(batch) == size for batch in batches[:-1])
    seen = [i for batch in batches for i in batch]
    assert len(set(seen)) == len(seen) == (count // size * size if drop_last else count)
    if not shuffle:
        assert seen == list(range(len(seen)))


def test_samples_keep_their_targets() -> None:
    data = images()
    for x, y in Loader(data, 5, shuffle=True):
        torch.testing.assert_close(x, (data.x[y] / 255 - 0.5) / 0.25)


def test_epochs_differ_and_pass_by_themselves() -> None:
    loader = Loader(images(), 5, shuffle=True)
    first, second = ids(loader), ids(loader)
    assert loader.epoch == 2
    assert first != second
    loader.set_epoch(0)
    assert ids(loader) == first
    assert ids(Loader(images(), 5, shuffle=True, seed=1)) != first


def test_leaving_early_starts_the_same_epoch_again() -> None:
    loader = Loader(images(), 5, shuffle=True)
    first = next(iter(loader))[1].tolist()
    assert loader.epoch == 0
    assert ids(loader)[0] == first


def test_batches_do_not_touch_or_use_the_global_random_state() -> None:
    loader = Loader(images(), 5, shuffle=True, augment=True)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    expected = loader.batch(3, 2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = loader.batch(3, 2)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))


def test_a_batch_is_the_same_alone_and_in_the_iteration() -> None:
    loader = Loader(images(), 5, shuffle=True, seed=7, augment=True)
    loader.set_epoch(4)
    for index, (x, y) in enumerate(loader):
        alone = Loader(images(), 5, shuffle=True, seed=7, augment=True).batch(4, index)
        assert torch.equal(x, alone[0])
        assert torch.equal(y, alone[1])


def test_augmentation_differs_between_batches_epochs_and_seeds() -> None:
    data = TensorData(images().x[:1].expand(40, -1, -1, -1), torch.zeros(40, dtype=torch.long), 1, augment=Augment())
    loader = Loader(data, 20, augment=True)
    batches = [loader.batch(0, 0), loader.batch(0, 1), loader.batch(1, 0), Loader(data, 20, False, 1, True).batch(0, 0)]
    for i, (a, _) in enumerate(batches):
        assert all(not torch.equal(a, b) for b, _ in batches[i + 1 :])


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_resume_continues_exactly(stop: int) -> None:
    def fresh() -> Loader:
        return Loader(images(), 5, shuffle=True, augment=True)

    whole = [batch for loader in [fresh()] for _ in range(2) for batch in loader]
    loader, taken = fresh(), []
    for batch in loader:
        if len(taken) == stop:
            break
        taken.append(batch)
        state = loader.state_dict()
    if stop == 0:
        state = fresh().state_dict()
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed.set_epoch(state["epoch"])
    taken += list(resumed)
    taken += [] if stop == 5 else list(resumed)
    assert len(taken) == len(whole) == 10
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(taken, whole, strict=True))


def test_another_epoch_drops_a_loaded_position() -> None:
    loader = Loader(images(), 5)
    next(iter(loader))
    other = Loader(images(), 5)
    other.load_state_dict(loader.state_dict())
    other.set_epoch(1)
    assert len(ids(other)) == 5


def test_position_of_another_loader_is_refused() -> None:
    state = Loader(images(), 5, seed=3).state_dict()
    with pytest.raises(CheckpointMismatch, match=r"with seed=3, batch_size=5, this one has seed=0, batch_size=4"):
        Loader(images(), 4).load_state_dict(state)


def test_channels_last_holds_the_same_values() -> None:
    data = images()
    (x, _), (expected, _) = (Loader(data, 5, True, 0, True, channels_last=c).batch(0, 0) for c in (True, False))
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert expected.is_contiguous()
    assert torch.equal(x, expected)


def test_batches_are_copies() -> None:
    data = TensorData(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), 2)
    x, y = next(iter(Loader(data, 4)))
    x += 1
    y += 1
    assert not data.x.any()
    assert not data.y.any()


def test_settings_without_sense_are_refused() -> None:
    data = images()
    with pytest.raises(ConfigError, match="batch size 0"):
        Loader(data, 0)
    with pytest.raises(ConfigError, match="batch size 24 gives no batch: expected 1 to 23"):
        Loader(data, 24, drop_last=True)
    plain = TensorData(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), 2)
    with pytest.raises(ConfigError, match="no augmentation of its own"):
        Loader(plain, 2, augment=True)
    with pytest.raises(ConfigError, match=r"only images .* shape \(4, 2\)"):
        Loader(plain, 2, augment=Augment())
    with pytest.raises(IndexError, match="batch 5 of an epoch with 5"):
        Loader(data, 5).batch(0, 5)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=80), st.floats(0, 1), st.integers(0, 99))
def test_subsets_give_each_class_its_share(labels: list[int], part: float, seed: int) -> None:
    y = torch.tensor(labels)
    count = max(1, round(part * len(y)))
    index = stratified(y, count, seed)
    assert len(index) == count
    assert index.tolist() == sorted(set(index.tolist()))
    assert torch.equal(index, stratified(y, count, seed))
    share = y[index].bincount(minlength=7) - y.bincount(minlength=7) * count / len(y)
    assert share.abs().max() < 1


def test_subset_keeps_pairs_and_settings() -> None:
    data = images()
    part = data.subset(7, seed=1)
    assert torch.equal(part.x, data.x[part.y])
    assert (part.classes, part.mean, part.augment) == (data.classes, data.mean, data.augment)
    assert not torch.equal(part.y, data.subset(7, seed=2).y)
    with pytest.raises(DataError, match="24 samples was asked for: expected 1 to 23"):
        data.subset(24)


def test_data_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(DataError, match="3 samples with 2 targets"):
        TensorData(torch.zeros(3, 1), torch.zeros(2), 1)
    with pytest.raises(DataError, match="2 means and 2 deviations for 3 channels"):
        TensorData(torch.zeros(1, 3, 2, 2), torch.zeros(1), 1, (0.0, 0.0), (1.0, 1.0))
