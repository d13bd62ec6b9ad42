"""`unlatch export`: the weights of a run as one plain safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import save_file

from ..errors import ConfigError
from ..io import checkpoint
from .console import emit_json

__all__ = ["command"]


def command(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder of a run or of a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Write the model's weights, under their original names, for plain PyTorch.

    \b
    unlatch export runs/dtr-1 model.safetensors
    python -c "from safetensors.torch import load_file; model.load_state_dict(load_file('model.safetensors'))"
    """
    folder = _checkpoint_in(source)
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; expected the name of a file")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out}: exists; choose another name, or replace it with --overwrite")
    tensors = checkpoint.read(folder).model
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, out, metadata={"format": "pt"})
    count = sum(t.numel() for t in tensors.values())
    if as_json:
        emit_json({"checkpoint": str(folder), "out": str(out), "tensors": len(tensors), "numbers": count})
    else:
        typer.echo(f"{len(tensors)} tensors, {count:,} numbers: {out}")


def _checkpoint_in(source: Path) -> Path:
    for candidate in (source, source / "last"):
        if checkpoint.exists(candidate):
            return candidate
    raise ConfigError(f"{source}: no checkpoint there; expected a run folder with last/ in it, or a checkpoint folder")
