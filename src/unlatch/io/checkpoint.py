"""Checkpoints: a folder of tensors and plain state that is either complete and unharmed, or refused by name.

    model.safetensors   tensors by their original names; any reader of safetensors opens it
    <other>.safetensors more tensors: of the optimizer, of what is under way
    state.json          format, size and SHA-256 of each file, and whatever JSON holds of the run

No pickle anywhere: loading a checkpoint never runs code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from ..errors import CheckpointMismatch
from . import durable

__all__ = ["FORMAT", "Checkpoint", "exists", "read", "state", "write"]

#: Raised when the layout changes in a way that older versions cannot read.
FORMAT = 2

STATE = "state.json"
_MODEL = "model"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Encoded(_Strict):
    """Of which type and shape the bytes are that stand for a tensor."""

    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]


class _File(_Strict):
    sha256: str
    bytes: int
    encoded: dict[str, _Encoded] = {}


class _Manifest(_Strict):
    format: int
    files: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.safetensors$")], _File]
    state: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name and by file, and plain values: what `write` is given and `read` finds.

    **Arguments:**

    - `model`: tensors by their original names.
    - `state`: whatever JSON can hold.
    - `extra`: further sets of tensors, by the name of their file without suffix.
    """

    model: Mapping[str, Tensor]
    state: Mapping[str, Any]
    extra: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def write(path: str | Path, content: Checkpoint) -> None:
    """Write a checkpoint folder, replacing an older one at the same place in one step.

    Tensors may be of any dtype, device and dense memory order; those that share memory are each stored.

    **Arguments:** `path`: the folder. One that exists must be a checkpoint; anything else is left alone and refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/last", Checkpoint({"w": torch.ones(2)}, {"step": 3}))
    ...     read(folder + "/last").state
    {'step': 3}
    """
    path = Path(path).absolute()
    if bad := [name for name in content.extra if name == _MODEL or not name.isidentifier()]:
        raise ValueError(f"extra tensors cannot be called {bad[0]!r}: expected an identifier other than {_MODEL}")
    # Before anything touches the disk: a state that JSON cannot hold is an error of the caller.
    plain_state = json.loads(json.dumps(dict(content.state)))
    _refuse_foreign(path)
    groups = {_MODEL: content.model, **content.extra}
    with durable.replaced(path) as folder:
        files = {f"{name}.safetensors": _save(folder / f"{name}.safetensors", group) for name, group in groups.items()}
        manifest = {"format": FORMAT, "files": files, "state": plain_state}
        text = json.dumps({"sha256": _digest(manifest), **manifest}, separators=(",", ":"))
        (folder / STATE).write_text(text + "\n", encoding="utf-8")


def read(path: str | Path, only: Container[str] | None = None) -> Checkpoint:
    """Read a checkpoint folder, on the CPU, checking every byte that is read.

    **Arguments:** `only`: names of files without suffix; all by default.

    **Returns:** the tensors and the state. A missing, damaged or too new checkpoint is a `CheckpointMismatch` that
    names the file at fault.
    """
    folder, manifest = _opened(path)
    if f"{_MODEL}.safetensors" not in manifest.files:
        raise CheckpointMismatch(f"{folder / STATE}: files: expected {_MODEL}.safetensors among {list(manifest.files)}")
    wanted = {Path(name).stem: facts for name, facts in manifest.files.items()}
    groups = {
        stem: _load(folder / f"{stem}.safetensors", facts)
        for stem, facts in wanted.items()
        if only is None or stem in only
    }
    return Checkpoint(groups.pop(_MODEL, {}), manifest.state, groups)


def state(path: str | Path) -> dict[str, Any]:
    """The state that was written with a checkpoint; its tensors are neither read nor checked.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/last", Checkpoint({"w": torch.ones(2)}, {"step": 3}))
    ...     state(folder + "/last")
    {'step': 3}
    """
    return _opened(path)[1].state


def _opened(path: str | Path) -> tuple[Path, _Manifest]:
    """Where the files are, and what they should be."""
    path = Path(path).absolute()
    folder = durable.current(path)
    if not folder.is_dir():
        raise CheckpointMismatch(f"{path}: no checkpoint there; expected a folder with {STATE}")
    return folder, _manifest(folder / STATE)


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint at `path`, sound or not.

    >>> exists("nowhere")
    False
    """
    return (durable.current(Path(path).absolute()) / STATE).is_file()


def _refuse_foreign(path: Path) -> None:
    if path.is_dir() and any(path.iterdir()) and not exists(path):
        raise CheckpointMismatch(f"{path}: is a folder with other content, not a checkpoint; choose another place")
    if path.exists() and not path.is_dir():
        raise CheckpointMismatch(f"{path}: is a file; a checkpoint is a folder, choose another place")


#: What safetensors stores under its own name; everything else is stored as bytes and named in the manifest.
_NATIVE = frozenset(
    {
        torch.bool,
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    }
)


def _save(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    stored: dict[str, Tensor] = {}
    encoded: dict[str, Any] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise ValueError(f"cannot store {name!r}, a tensor of layout {tensor.layout}: expected a dense one")
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dense.untyped_storage().data_ptr() in memory:
            dense = dense.clone()
        memory.add(dense.untyped_storage().data_ptr())
        if dense.dtype not in _NATIVE:
            encoded[name] = {"dtype": str(dense.dtype).removeprefix("torch."), "shape": list(dense.shape)}
            dense = dense.reshape(-1).view(torch.uint8)
        stored[name] = dense
    data = serialize(stored)
    file.write_bytes(data)
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "encoded": encoded}


def _load(file: Path, facts: _File) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointMismatch(f"{file}: missing; the checkpoint is incomplete, use another one")
    if (size := file.stat().st_size) != facts.bytes:
        raise CheckpointMismatch(f"{file}: {size} bytes, expected {facts.bytes}; it is cut off or was replaced")
    with file.open("rb") as handle:
        if hashlib.file_digest(handle, "sha256").hexdigest() != facts.sha256:
            raise CheckpointMismatch(f"{file}: its content does not match its checksum; it is damaged or was replaced")
    try:
        # Sums over numbers that lie elsewhere relative to a cache line may differ in the last bit.
        tensors = {name: t.clone() for name, t in load_file(file).items()}
    except SafetensorError as error:
        raise CheckpointMismatch(f"{file}: is no safetensors file ({error})") from error
    for name, true in facts.encoded.items():
        try:
            tensors[name] = _decode(tensors[name], true)
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointMismatch(
                f"{file}: {STATE} says that tensor {name!r} is encoded as {true}, which does not fit: {error}"
            ) from None
    return tensors


def _decode(data: Tensor, true: _Encoded) -> Tensor:
    dtype = getattr(torch, true.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch knows no dtype {true.dtype}")
    return data.view(dtype).reshape(true.shape) if math.prod(true.shape) else torch.empty(true.shape, dtype=dtype)


def _manifest(file: Path) -> _Manifest:
    if not file.is_file():
        raise CheckpointMismatch(f"{file}: missing; this is not a checkpoint, or an incomplete one")
    try:
        manifest: Any = json.loads(file.read_text(encoding="utf-8"))
        digest, written = manifest.pop("sha256"), manifest["format"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointMismatch(f"{file}: cannot be read ({error!r:.100}); it is cut off or damaged") from error
    if isinstance(written, int) and written > FORMAT:
        raise CheckpointMismatch(
            f"{file}: format {written}, this version reads up to {FORMAT}; install a newer Unlatch"
        )
    if digest != _digest(manifest):
        raise CheckpointMismatch(f"{file}: its content does not match its checksum; it is damaged or was edited")
    try:
        return _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointMismatch(f"{file}: {place}: {first['msg']}, got {first['input']!r:.60}") from None


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
