"""A checkpoint comes back bit for bit, or is refused with the name of the file at fault."""

from __future__ import annotations

import json
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from unlatch.errors import CheckpointMismatch
from unlatch.io import checkpoint, durable

FILES = ("model.safetensors", "optim.safetensors", "inflight.safetensors", "state.json")


def write(
    path: str | Path,
    *,
    model: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    state: dict[str, Any],
    extra: dict[str, dict[str, torch.Tensor]] | None = None,
) -> None:
    checkpoint.write(path, checkpoint.Checkpoint(model, state, {"optim": optimizer, **(extra or {})}))


def save(path: Path, value: float = 1.0, size: int = 16) -> None:
    write(
        path,
        model={"body.0.weight": torch.full((size,), value)},
        optimizer={"body.0.weight/momentum_buffer": torch.full((size,), -value)},
        state={"step": int(value), "rates": [0.1, 1e-300]},
        extra={"inflight": {"stage0/input": torch.full((size,), value)}},
    )


def assert_holds(path: Path, value: float) -> None:
    found = checkpoint.read(path)
    assert found.state == {"step": int(value), "rates": [0.1, 1e-300]}
    assert bool((found.model["body.0.weight"] == value).all())
    assert bool((found.extra["optim"]["body.0.weight/momentum_buffer"] == -value).all())
    assert bool((found.extra["inflight"]["stage0/input"] == value).all())


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def test_returns_what_was_written_and_leaves_nothing_else(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "last")
    assert_holds(tmp_path / "deep" / "last", 1)
    assert sorted(p.name for p in (tmp_path / "deep" / "last").iterdir()) == sorted(FILES)
    assert leftovers(tmp_path / "deep") == []


def test_replaces_an_older_one(tmp_path: Path) -> None:
    save(tmp_path / "last", 1)
    save(tmp_path / "last", 2)
    assert_holds(tmp_path / "last", 2)
    assert leftovers(tmp_path) == []


def test_relative_paths_and_text_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("last", model={"w": torch.ones(1)}, optimizer={}, state={})
    assert checkpoint.exists("last")
    assert checkpoint.read("last").extra == {"optim": {}}


DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES if hasattr(torch, name)], ids=str)
def test_every_dtype_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * size,), dtype=torch.uint8)
    tensors = {
        "odd offset": torch.zeros(1, dtype=torch.uint8),
        "matrix": raw.view(dtype).reshape(2, 3),
        "scalar": raw[:size].clone().view(dtype).reshape(()),
        "empty": torch.empty((0, 3), dtype=dtype),
    }
    write(tmp_path / "c", model=tensors, optimizer={}, state={})
    found = checkpoint.read(tmp_path / "c").model
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_any_strides_and_shared_memory(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    images = base.contiguous(memory_format=torch.channels_last)
    tied = torch.nn.Parameter(torch.randn(4, 4))
    model = {
        "channels_last": images,
        "transposed": base.transpose(0, 1),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "tied.a": tied,
        "tied.b": tied,
        "part": tied[1:3],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    write(tmp_path / "c", model=model, optimizer={}, state={})
    found = checkpoint.read(tmp_path / "c").model
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert torch.equal(found[name], tensor.detach()), name
        assert not found[name].requires_grad
    found["tied.a"].zero_()
    assert torch.equal(found["tied.b"], tied.detach())


def test_plain_pytorch_reads_the_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    write(tmp_path / "c", model=model.state_dict(), optimizer={}, state={})
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    other.load_state_dict(load_file(tmp_path / "c" / "model.safetensors"), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    save(tmp_path / "c")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").touch()
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    for name in FILES:
        assert stat.S_IMODE((tmp_path / "c" / name).stat().st_mode) == stat.S_IMODE((plain / "file").stat().st_mode)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(state=st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=4))
def test_any_json_state_survives(tmp_path_factory: pytest.TempPathFactory, state: dict[str, object]) -> None:
    path = tmp_path_factory.mktemp("state") / "c"
    write(path, model={}, optimizer={}, state=state)
    assert checkpoint.read(path).state == state


def test_infinite_numbers_in_the_state(tmp_path: Path) -> None:
    write(tmp_path / "c", model={}, optimizer={}, state={"best": float("inf"), "loss": float("nan")})
    state = checkpoint.read(tmp_path / "c").state
    assert state["best"] == float("inf")
    assert state["loss"] != state["loss"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    save(tmp_path / "c", size=2)
    file = tmp_path / "c" / name
    sound = file.read_bytes()
    for position in range(len(sound) - (name == "state.json")):  # the closing line break means nothing
        for bit in (0, 3, 7):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << bit
            if name == "state.json" and chr(sound[position]).isspace() and chr(damaged[position]).isspace():
                continue
            file.write_bytes(damaged)
            with pytest.raises(CheckpointMismatch, match=name.replace(".", r"\.")):
                checkpoint.read(tmp_path / "c")
    file.write_bytes(sound)
    assert_holds(tmp_path / "c", 1)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, 20, -2])
def test_cut_off(tmp_path: Path, name: str, keep: int) -> None:
    save(tmp_path / "c")
    file = tmp_path / "c" / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointMismatch, match=name.replace(".", r"\.")):
        checkpoint.read(tmp_path / "c")


@pytest.mark.parametrize("name", FILES)
def test_missing_file(tmp_path: Path, name: str) -> None:
    save(tmp_path / "c")
    (tmp_path / "c" / name).unlink()
    with pytest.raises(CheckpointMismatch, match=f"{name}: missing"):
        checkpoint.read(tmp_path / "c")


def test_swapped_files(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    save(tmp_path / "d", 2)
    (tmp_path / "d" / "model.safetensors").rename(tmp_path / "c" / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors.*checksum"):
        checkpoint.read(tmp_path / "c")


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="no checkpoint there"):
        checkpoint.read(tmp_path / "c")
    assert not checkpoint.exists(tmp_path / "c")


def test_format_of_the_future(tmp_path: Path) -> None:
    save(tmp_path / "c")
    file = tmp_path / "c" / "state.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "format": checkpoint.FORMAT + 1}))
    with pytest.raises(CheckpointMismatch, match=rf"state\.json: format {checkpoint.FORMAT + 1}.*newer"):
        checkpoint.read(tmp_path / "c")


@pytest.mark.parametrize("text", ["null", "[]", "3", "{}", '{"sha256": "x"}', '{"sha256": "x", "format": "1"}'])
def test_foreign_json(tmp_path: Path, text: str) -> None:
    save(tmp_path / "c")
    (tmp_path / "c" / "state.json").write_text(text)
    with pytest.raises(CheckpointMismatch, match=r"state\.json"):
        checkpoint.read(tmp_path / "c")


def test_never_replaces_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("all my work")
    with pytest.raises(CheckpointMismatch, match="other content"):
        save(tmp_path / "thesis")
    with pytest.raises(CheckpointMismatch, match="is a file"):
        save(tmp_path / "thesis" / "chapter1.tex")
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "all my work"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")
    assert_holds(tmp_path / "empty", 1)


@pytest.mark.parametrize("name", ["model", "a/b", "../x", ""])
def test_extra_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="extra tensors cannot be called"):
        write(tmp_path / "c", model={}, optimizer={}, state={}, extra={name: {}})
    assert list(tmp_path.iterdir()) == []


def test_unfit_content_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    with pytest.raises(TypeError):
        write(tmp_path / "c", model={}, optimizer={}, state={"tensor": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'w'.*sparse"):
        write(tmp_path / "c", model={"w": torch.eye(2).to_sparse()}, optimizer={}, state={})
    assert_holds(tmp_path / "c", 1)
    assert leftovers(tmp_path) == []


def test_a_write_that_the_system_stops_half_way(tmp_path: Path) -> None:
    # A limit on file size fails inside write(2), after some bytes were written, just as a full disk does.
    save(tmp_path / "c", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path / "c", 2, size=1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_holds(tmp_path / "c", 1)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("calls_before_failure", range(8))
def test_disk_errors_at_any_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls_before_failure: int) -> None:
    save(tmp_path / "c", 1)
    left = calls_before_failure
    real = durable.os.fsync

    def failing(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(durable.os, "fsync", failing)
    try:
        save(tmp_path / "c", 2)
        value = 2
    except OSError:
        # After the renames the new one is in place, and only its name may not be on disk yet.
        value = 2 if calls_before_failure == 5 else 1
    monkeypatch.undo()
    assert value == (1 if calls_before_failure < 5 else 2)
    assert_holds(tmp_path / "c", value)
    save(tmp_path / "c", 3)
    assert_holds(tmp_path / "c", 3)
    assert leftovers(tmp_path) == []


def test_a_failed_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", 1)
    real = durable.os.rename

    def failing(source: Path, target: Path) -> None:
        if ".tmp-" in source.name:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(durable.os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path / "c", 2)
    assert_holds(tmp_path / "c", 1)
    assert leftovers(tmp_path) == []


KILLER = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from unlatch.io import checkpoint, durable

def save(path, value):
    checkpoint.write(path, checkpoint.Checkpoint({"w": torch.full((1000,), value)}, {"value": value}))

def die_at(count):
    # SIGKILL before the count-th call that changes the disk: nothing of Python runs afterwards.
    left = count
    def wrap(owner, name):
        real = getattr(owner, name)
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(owner, name, call)
    for owner, name in [(os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (durable.tempfile, "mkdtemp"),
                        (checkpoint.Path, "write_bytes"), (checkpoint.Path, "write_text"), (checkpoint.Path, "chmod")]:
        wrap(owner, name)

root = Path(sys.argv[1])
seen = []
for count in range(1, 100):
    path = root / f"c{count}"
    save(path, 1.0)
    pid = os.fork()
    if pid == 0:
        die_at(count)
        save(path, 2.0)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    found = checkpoint.read(path)
    assert bool((found.model["w"] == found.state["value"]).all())
    seen.append(found.state["value"])
    save(path, 3.0)
    assert checkpoint.read(path).state["value"] == 3.0
    if not killed:
        break
assert not [p for p in root.iterdir() if p.name.startswith(".")], list(root.iterdir())
print(*seen)
"""


def test_killed_at_any_moment_the_old_or_the_new_one_is_whole(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    seen = [float(value) for value in result.stdout.split()]
    assert seen == sorted(seen), "once the new one was visible it stayed"
    assert seen.count(1.0) >= 9, "every step before the swap was hit: folder, 3 files, 4 flushes, rename"
    assert seen.count(2.0) >= 2


def test_killed_in_the_middle_of_writing_bytes(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    stuck = """
import os, signal, sys
from unlatch.io import checkpoint
def half(self, data):
    with open(self, "wb") as handle:
        handle.write(data[: len(data) // 2])
        handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.Path.write_bytes = half
import torch
checkpoint.write(sys.argv[1], checkpoint.Checkpoint({"w": torch.ones(1000)}, {}))
"""
    result = subprocess.run([sys.executable, "-c", stuck, str(tmp_path / "c")], timeout=240)
    assert result.returncode == -9
    assert len(leftovers(tmp_path)) == 1
    assert_holds(tmp_path / "c", 1)
    save(tmp_path / "c", 2)
    assert_holds(tmp_path / "c", 2)
    assert leftovers(tmp_path) == []


def test_cleaning_spares_others(tmp_path: Path) -> None:
    # Another checkpoint's temporary folder, and one of ours that a live writer holds.
    (tmp_path / ".other.tmp-1").mkdir()
    with durable.replaced(tmp_path / "c") as held:
        save(tmp_path / "c", 1)
        assert held.exists()
        assert (tmp_path / ".other.tmp-1").exists()


def test_names_with_pattern_characters(tmp_path: Path) -> None:
    (tmp_path / ".run[1]*.tmp-stale").mkdir()
    (tmp_path / ".run1x.tmp-other").mkdir()
    save(tmp_path / "run[1]*")
    assert_holds(tmp_path / "run[1]*", 1)
    assert leftovers(tmp_path) == [".run1x.tmp-other"]
