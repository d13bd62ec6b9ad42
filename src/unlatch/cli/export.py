"""`unlatch export`: the weights of a run as one plain safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .console import emit_json

__all__ = ["command"]


def command(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder of a run or of a checkpoint.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT.safetensors", help="The file to write; default: RUN.safetensors.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint instead of its latest.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Write the model's weights as one file for plain PyTorch.

    \b
    unlatch export runs/dtr-1 model.safetensors
    python -c "from safetensors.torch import load_file; model.load_state_dict(load_file('model.safetensors'))"

    They have their original names and are the newest of every stage. What batches that were under way would still have
    changed is not in them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from ..io import checkpoint
    from ..train.snapshot import facts
    from .continuing import checkpoint_at

    folder = checkpoint_at(source, best=best)
    out = out or Path(f"{source.absolute().name}.safetensors")
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; expected the name of a file")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out}: exists; choose another name, or replace it with --overwrite")
    tensors, loop = checkpoint.read(folder, only={"model"}).model, facts(folder).loop
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, out, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from None
    found = {
        "checkpoint": str(folder),
        "out": str(out),
        "step": loop.batches,
        "under_way": loop.under_way,
        "tensors": len(tensors),
        "numbers": sum(t.numel() for t in tensors.values()),
    }
    if as_json:
        emit_json(found)
        return
    under_way = f", {loop.under_way} batches under way" if loop.under_way else ""
    typer.echo(f"{found['tensors']} tensors, {found['numbers']:,} numbers: {out} (step {loop.batches}{under_way})")
