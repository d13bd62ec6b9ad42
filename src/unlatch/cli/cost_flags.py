"""The flags of `plan` and `simulate` that say which layers to place and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["ArraySide", "BatchSize", "CostModel", "CostSource", "CostsFile", "NetworkName"]

CostsFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Layers as JSON: name, F, D, G, ... each.")]
NetworkName = Literal["alexnet", "vgg16", "vgg19", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
CostModel = Annotated[
    Literal["measured", "mac", "systolic"] | None,
    typer.Option(help="For settings measured or mac, for a published network mac or systolic."),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, max=10**6, help="Samples per batch of a published network.  [default: 64]")
]
ArraySide = Annotated[
    int | None, typer.Option(min=1, max=10**6, help="Rows and columns of a systolic array.  [default: 128]")
]


@dataclass(frozen=True)
class CostSource:
    """The flags that name a source; exactly one of the first three is given."""

    costs: Path | None
    network: str | None
    conf: Path | None
    model: str | None
    batch: int | None = None
    array: int | None = None
    data_dir: str | None = None
