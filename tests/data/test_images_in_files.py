"""ImageNet32 and folders of images, on made-up files: read when a batch asks, refused by name."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from invoking import invoke
from unlatch import data
from unlatch.data import Augment, Loader, ResizedCrop
from unlatch.errors import ConfigError, DataError

Image = pytest.importorskip("PIL.Image")

TRAIN = [f"train_data_batch_{number}" for number in range(1, 11)]
#: The first is longer than what stays in memory.
COUNTS = {"train_data_batch_1": 400, **dict.fromkeys(TRAIN[1:], 3), "val_data": 5}


def content(name: str) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(list(COUNTS).index(name))
    return rng.integers(0, 256, (COUNTS[name], 3072), np.uint8), rng.integers(1, 1001, COUNTS[name]).tolist()


def write(folder: Path, protocol: int = 3, **changed: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in COUNTS:
        pixels, labels = content(name)
        batch = {"data": pixels, "labels": labels, "mean": np.zeros(3072)}
        (folder / name).write_bytes(pickle.dumps(changed.get(name, batch), protocol))
    return folder


@pytest.fixture(scope="module")
def thirty_two(tmp_path_factory):
    """A folder that holds a small ImageNet32."""
    root = tmp_path_factory.mktemp("batches")
    write(root / "imagenet32")
    return root


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pixels_and_labels_of_all_batches(tmp_path, protocol):
    write(tmp_path / "imagenet32", protocol)
    train, val = data.load("imagenet32", tmp_path)
    assert (len(train), len(val), train.classes, train.sample_shape) == (427, 5, 1000, (3, 32, 32))
    pixels, labels = (np.concatenate(part) for part in zip(*(content(name) for name in TRAIN), strict=True))
    asked = torch.tensor([426, 0, 399, 400, 402, 403, 7])
    x, y = train.read(asked)
    assert (x.numpy().reshape(-1, 3072) == pixels[asked.numpy()]).all()
    assert (y.numpy() == labels[asked.numpy()] - 1).all()
    x, y = Loader(val, 5).batch(0, 0)
    assert x.dtype == torch.float32
    assert (y.numpy() + 1 == content("val_data")[1]).all()


def test_subsets_and_held_out_samples_are_those_of_the_files(thirty_two):
    train, held = data.load("imagenet32", thirty_two, holdout=27, train_size=50)
    assert (len(train), len(held)) == (50, 27)
    every = {bytes(row) for name in TRAIN for row in content(name)[0]}
    both = [train.read(torch.arange(50))[0], held.read(torch.arange(27))[0]]
    rows = [image.numpy().tobytes() for images in both for image in images]
    assert set(rows) <= every
    assert len(set(rows)) == 77


def test_pixels_stay_in_their_files(tmp_path):
    folder = write(tmp_path / "imagenet32")
    train, _ = data.load("imagenet32", tmp_path)
    path = folder / TRAIN[0]
    raw, row = path.read_bytes(), content(TRAIN[0])[0][17].tobytes()
    path.write_bytes(raw.replace(row, bytes(3072)))
    assert int(train.read(torch.tensor([17]))[0].sum()) == 0
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DataError, match=r"train_data_batch_1 cannot be read any more .* it had 400 images"):
        train.read(torch.tensor([17]))


class Hostile:
    def __reduce__(self):
        return os.system, ("touch ran",)


class Unfilled:
    """An array that a pickle begins and never says the content of."""

    def __reduce__(self):
        return np.zeros(0).__reduce__()[:2]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / TRAIN[3]).unlink(), r"is incomplete: missing train_data_batch_4; expected .*val_data"),
        (lambda f: shutil.rmtree(f), r"imagenet32 was not found in .*train_data_batch_1 to train_data_batch_10"),
        (
            lambda f: os.truncate(f / TRAIN[0], 900_000),
            r"train_data_batch_1 is not a pickle .* ends at 900000",
        ),
        (lambda f: os.truncate(f / TRAIN[1], 700), r"train_data_batch_2 is not a pickle of plain arrays \(700 bytes\)"),
        (lambda f: write(f, val_data=Hostile()), r"val_data is not a pickle .* the name posix.system\. It was refused"),
        (lambda f: write(f, val_data={"data": content("val_data")[0]}), r"no list of whole numbers under 'labels'; it"),
        (
            lambda f: write(f, val_data={**good(), "data": np.zeros((5, 9), np.uint8)}),
            r"shape \(images, 3072\)",
        ),
        (lambda f: write(f, val_data={**good(), "data": Unfilled()}), r"shape \(images, 3072\)"),
        (lambda f: write(f, val_data={**good(), "labels": [1]}), "5 images, 1 labels; expected as many"),
        (lambda f: write(f, val_data={**good(), "labels": [0, 1, 2, 3, 4]}), "labels from 0 to 4, expected 1 to 1000"),
        (lambda f: write(f, val_data=[1]), "holds a list: expected a dictionary"),
    ],
)
def test_what_is_missing_torn_or_hostile_is_refused_by_name(tmp_path, monkeypatch, damage, words):
    monkeypatch.chdir(tmp_path)
    damage(write(tmp_path / "imagenet32"))
    with pytest.raises(DataError, match=words):
        data.load("imagenet32", tmp_path)
    assert not Path("ran").exists()


def good() -> dict[str, object]:
    return {"data": content("val_data")[0], "labels": content("val_data")[1]}


# ------------------------------------------------------------------------ folders


@pytest.fixture
def folders(tmp_path):
    """Two classes of small images of several sizes and kinds: left half of one brightness, right half of another."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(("ant", "bee")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                high, wide = rng.integers(20, 40, 2)
                pixels = np.full((high, wide, 3), 40 + 120 * label, np.uint8)
                pixels[:, wide // 2 :] += 60
                kind, mode = (("JPEG", "RGB"), ("png", "L"))[number % 2]
                Image.fromarray(pixels).convert(mode).save(tmp_path / part / name / f"{number}.{kind}")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    return tmp_path


def test_an_evaluation_shows_the_centre(folders):
    train, val = data.load("imagefolder", folders, size=8)
    assert (len(train), len(val), train.classes, val.sample_shape) == (12, 4, 2, (3, 8, 8))
    assert train.y.tolist() == [0] * 6 + [1] * 6
    x, _ = val.read(torch.arange(4))
    assert x.dtype == torch.uint8
    for image, dark in zip(x, (40, 40, 160, 160), strict=True):
        # Both brightnesses, left and right of the middle, whatever the size of the file; JPEG rounds a little.
        assert (image[:, :, :3].float() - dark).abs().max() <= 3
        assert (image[:, :, 5:].float() - dark - 60).abs().max() <= 3


def test_batches_depend_on_seed_epoch_and_index_only(folders):
    train, _ = data.load("imagefolder", folders, size=8)
    one, other = (Loader(train, 4, shuffle=True, seed=3, augment=True) for _ in range(2))
    passed = [x for x, _ in one]
    assert all(torch.equal(passed[index], other.batch(0, index)[0]) for index in (2, 0, 1))
    assert not torch.equal(one.batch(0, 0)[0], one.batch(1, 0)[0])
    assert not torch.equal(one.batch(0, 0)[0], Loader(train, 4, shuffle=True, seed=4, augment=True).batch(0, 0)[0])
    still = [Loader(train, 12, augment=what).batch(0, 0)[0] for what in (False, Augment(pad=0, flip=False))]
    assert torch.equal(*still)


def test_parts_that_are_drawn_lie_inside_and_have_the_shapes_that_were_asked_for():
    crop = ResizedCrop(least=0.2, stretch=1.5)
    drawn = crop.draw(300, torch.Generator().manual_seed(1))
    for row in drawn:
        left, top, right, bottom = crop.chosen(row)(64, 32)
        assert 0 <= left < right <= 64 + 1e-9
        assert 0 <= top < bottom <= 32 + 1e-9
        assert (right - left) * (bottom - top) >= 0.2 * 64 * 32 * (1 - 1e-9)
        assert 1 / 1.5 - 1e-9 <= (right - left) / (bottom - top) <= 1.5 + 1e-9
    assert 0.4 < crop.mirrored(drawn).float().mean() < 0.6
    assert not ResizedCrop(flip=False).mirrored(drawn).any()
    # Nothing of the asked shape fits: the largest that does, in the middle.
    assert crop.chosen(torch.ones(41))(100, 2) == (48.5, 0.0, 51.5, 2.0)


def test_a_mirrored_image_has_its_sides_exchanged(folders):
    square = np.zeros((24, 24, 3), np.uint8)
    square[:, :9] = 200
    Image.fromarray(square).save(folders / "train" / "ant" / "-first.png")
    train, _ = data.load("imagefolder", folders, size=8)
    # The whole image is shown, so that of all that is drawn only the side matters.
    loader = Loader(train.take(torch.zeros(64, dtype=torch.long)), 64, augment=ResizedCrop(least=1.0, stretch=1.0))
    images = loader.data.read(torch.arange(64), loader.augment, torch.Generator().manual_seed(0))[0]
    left, right = images[:, 0, 0, 0] == 200, images[:, 0, 0, -1] == 200
    assert (left != right).all()
    assert 20 < int(right.sum()) < 44
    assert torch.equal(images[left][0].flip(2), images[right][0])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: shutil.rmtree(root / "val"), r"has no folder val: expected train/CLASS/\*\.JPEG and val/CLASS"),
        (lambda root: shutil.rmtree(root / "train" / "bee"), r"val.bee is a class that is not among the 1 of train"),
        (lambda root: (root / "train" / "cow").mkdir(), r"cow holds no images: expected files that end with \.jpeg"),
        (
            lambda root: [shutil.rmtree(path) for path in (root / "val").iterdir()],
            "val has no folders",
        ),
    ],
)
def test_folders_that_are_no_data_set_are_refused_by_name(folders, damage, words):
    damage(folders)
    with pytest.raises(DataError, match=words):
        data.load("imagefolder", folders)


def test_a_torn_image_is_named_when_its_batch_comes(folders):
    train, _ = data.load("imagefolder", folders, size=8)
    torn = folders / "train" / "bee" / "0.JPEG"
    os.truncate(torn, torn.stat().st_size // 2)
    with pytest.raises(DataError, match=r"bee.0\.JPEG is no whole image \(\d+ bytes\): .*fetch it again"):
        train.read(torch.tensor([6]))
    torn.unlink()
    with pytest.raises(DataError, match=r"bee.0\.JPEG is missing"):
        train.read(torch.tensor([6]))


def test_a_crop_of_files_is_not_for_images_in_memory():
    digits, _ = data.load("digits")
    with pytest.raises(ConfigError, match="ResizedCrop shows parts of images in files"):
        Loader(digits, 4, augment=ResizedCrop()).batch(0, 0)
    with pytest.raises(ConfigError, match="expected a share up to 1"):
        ResizedCrop(least=0.0)
    with pytest.raises(ConfigError, match="size is a whole number of pixels"):
        data.load("imagefolder", size=0)


SETTINGS = """
[model]
name = "mlp"
widths = [192, 8, 2]
[data]
name = "imagefolder"
dir = "."
batch_size = 4
options.size = 8
[method]
name = "dtr"
[run]
stages = 2
split = ["layers.1"]
epochs = 1
"""


def test_the_command_line_trains_on_them_and_a_torn_file_is_no_stack_trace(folders, monkeypatch):
    monkeypatch.chdir(folders)
    Path("run.toml").write_text(SETTINGS)
    done = invoke("train", "run.toml")
    assert done.exit_code == 0, done.output
    Path("val/bee/0.JPEG").write_bytes(b"")
    torn = invoke("train", "run.toml")
    assert torn.exit_code == 2
    assert "is no whole image (0 bytes)" in torn.output
    assert "Traceback" not in torn.output
