"""Loaders that fail in every way a loader can, to be trained from inline and on ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import unlatch
from fault_jobs import start
from small_nets import vectors

Batch = tuple[torch.Tensor, torch.Tensor]


class Raises:
    """Gives two batches and fails."""

    def __iter__(self) -> Iterator[Batch]:
        yield from vectors(2)
        raise OSError("the disk is gone")


class OtherWidth:
    def __iter__(self) -> Iterator[Batch]:
        yield from vectors(2)
        yield torch.zeros(4, 7).double(), torch.zeros(4, 5).double()


class OtherDtype:
    def __iter__(self) -> Iterator[Batch]:
        yield from vectors(2)
        yield torch.zeros(4, 5), torch.zeros(4, 5)


class FewerTargets:
    def __iter__(self) -> Iterator[Batch]:
        yield from vectors(2)
        yield torch.zeros(4, 5).double(), torch.zeros(3, 5).double()


class NoSamples:
    def __iter__(self) -> Iterator[Batch]:
        yield from vectors(2)
        yield torch.zeros(0, 5).double(), torch.zeros(0, 5).double()


class NoTensors:
    def __iter__(self) -> Iterator[Any]:
        yield from vectors(2)
        yield [1.0, 2.0], [3.0]


class Triples:
    def __iter__(self) -> Iterator[Any]:
        yield from ((x, y, 0) for x, y in vectors(2))


def used_up() -> Iterator[Batch]:
    """An iterator has nothing left for the second pass."""
    return iter(vectors(3))


LOADERS: dict[str, Any] = {
    **{"raises": Raises, "other width": OtherWidth, "other dtype": OtherDtype, "fewer targets": FewerTargets},
    **{"no samples": NoSamples, "no tensors": NoTensors, "triples": Triples, "used up": used_up},
    **{"nothing": list, "no iterable": lambda: 3, "none": lambda: None},
}


def fits(kind: str, evaluating: bool = False) -> str:
    """What training, or evaluation, with such a loader ends in on this rank."""
    sound = vectors(4)
    run = start("dtr", 2)
    try:
        loader = LOADERS[kind]() if 0 in run.stations else None
        with run:
            if evaluating:
                run.evaluate(loader)
            else:
                unlatch.Trainer(run).fit(loader, 2, sound)
    except Exception as error:
        notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}{notes}"
    return "no error"
