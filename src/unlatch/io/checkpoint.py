"""Checkpoints: a folder of tensors and plain state that is either complete and unharmed, or refused by name.

    model.safetensors   tensors by their original names; any reader of safetensors opens it
    optim.safetensors   optimizer tensors
    <extra>.safetensors more tensors, if the run has any
    state.json          format, size and SHA-256 of each file, and the state of the loop

No pickle anywhere: loading a checkpoint never runs code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from ..errors import CheckpointMismatch
from . import durable

__all__ = ["FORMAT", "Checkpoint", "exists", "read", "state", "write"]

#: Raised when the layout changes in a way that older versions cannot read.
FORMAT = 1

_STATE = "state.json"
_MODEL, _OPTIMIZER = "model", "optim"


@dataclass(frozen=True)
class Checkpoint:
    """What `read` found."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    extra: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def write(
    path: str | Path,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    extra: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Write a checkpoint folder, replacing an older one at the same place in one step.

    **Arguments:**

    - `path`: the folder. One that exists must be a checkpoint; anything else is left alone and refused.
    - `model`, `optimizer`: tensors by name, of any dtype, strides or device; tensors that share memory are each stored.
    - `state`: whatever JSON can hold.
    - `extra`: further sets of tensors by file name, without suffix.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/last", model={"w": torch.ones(2)}, optimizer={}, state={"step": 3})
    ...     read(folder + "/last").state
    {'step': 3}
    """
    path = Path(path).absolute()
    groups = {_MODEL: model, _OPTIMIZER: optimizer, **(extra or {})}
    if extra and (bad := [name for name in extra if name in (_MODEL, _OPTIMIZER) or not name.isidentifier()]):
        raise ValueError(
            f"extra tensors cannot be called {bad[0]!r}: expected an identifier other than model and optim"
        )
    # Before anything touches the disk: a state that JSON cannot hold is an error of the caller.
    plain_state = json.loads(json.dumps(dict(state)))
    _refuse_foreign(path)
    with durable.replaced(path) as folder:
        files = {f"{name}.safetensors": _save(folder / f"{name}.safetensors", group) for name, group in groups.items()}
        manifest = {"format": FORMAT, "files": files, "state": plain_state}
        text = json.dumps({"sha256": _digest(manifest), **manifest}, indent=1)
        (folder / _STATE).write_text(text + "\n", encoding="utf-8")


def read(path: str | Path) -> Checkpoint:
    """Read a checkpoint folder, on the CPU, checking every byte.

    **Returns:** the tensors and the state. A missing, damaged or too new checkpoint is a `CheckpointMismatch` that
    names the file at fault.
    """
    folder, manifest = _opened(path)
    groups = {Path(name).stem: _load(folder / name, facts) for name, facts in manifest["files"].items()}
    return Checkpoint(groups.pop(_MODEL), groups.pop(_OPTIMIZER), manifest["state"], groups)


def state(path: str | Path) -> dict[str, Any]:
    """The state that was written with a checkpoint; its tensors are neither read nor checked.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/last", model={"w": torch.ones(2)}, optimizer={}, state={"step": 3})
    ...     state(folder + "/last")
    {'step': 3}
    """
    found: dict[str, Any] = _opened(path)[1]["state"]
    return found


def _opened(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Where the files are, and what they should be."""
    path = Path(path).absolute()
    folder = durable.current(path)
    if not folder.is_dir():
        raise CheckpointMismatch(f"{path}: no checkpoint there; expected a folder with {_STATE}")
    return folder, _manifest(folder / _STATE)


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint at `path`, sound or not.

    >>> exists("nowhere")
    False
    """
    return (durable.current(Path(path).absolute()) / _STATE).is_file()


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


def _load(file: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointMismatch(f"{file}: missing; the checkpoint is incomplete, use another one")
    if (size := file.stat().st_size) != facts["bytes"]:
        raise CheckpointMismatch(f"{file}: {size} bytes, expected {facts['bytes']}; it is cut off or was replaced")
    with file.open("rb") as handle:
        if hashlib.file_digest(handle, "sha256").hexdigest() != facts["sha256"]:
            raise CheckpointMismatch(f"{file}: its content does not match its checksum; it is damaged or was replaced")
    tensors = load_file(file)
    for name, true in facts["encoded"].items():
        dtype = getattr(torch, true["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointMismatch(
                f"{file}: tensor {name!r} has dtype {true['dtype']}, which this torch does not know"
            )
        tensors[name] = _decode(tensors[name], dtype, true["shape"])
    return tensors


def _decode(data: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    # A view needs bytes aligned to the new dtype, which safetensors does not promise.
    return data.clone().view(dtype).reshape(shape) if math.prod(shape) else torch.empty(shape, dtype=dtype)


def _manifest(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointMismatch(f"{file}: missing; this is not a checkpoint, or an incomplete one")
    try:
        manifest: Any = json.loads(file.read_text(encoding="utf-8"))
        digest, written = manifest.pop("sha256"), manifest["format"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointMismatch(f"{file}: cannot be read ({error!r}); it is cut off or damaged") from error
    if isinstance(written, int) and written > FORMAT:
        raise CheckpointMismatch(
            f"{file}: format {written}, this version reads up to {FORMAT}; install a newer Unlatch"
        )
    if digest != _digest(manifest):
        raise CheckpointMismatch(f"{file}: its content does not match its checksum; it is damaged or was edited")
    found: dict[str, Any] = manifest
    return found


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
