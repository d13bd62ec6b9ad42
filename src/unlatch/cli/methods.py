"""`unlatch methods`: what there is, and what each method does when."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["command"]


def command(
    name: Annotated[
        str | None, typer.Argument(help="One method in detail; all of them in a table if left out.")
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Stages that the model is cut into.")] = 4,
    ticks: Annotated[
        int | None, typer.Option(min=1, help="Length of the timetable; default: twice the stages.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Per batch; default: what the method chooses.")
    ] = None,
    momentum: Annotated[float, typer.Option(min=0.0, help="Of the optimizer, for the advice.")] = 0.9,
    nesterov: Annotated[bool, typer.Option(help="Whether the momentum is Nesterov's.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the methods, or show one in detail.

    \b
    unlatch methods
    unlatch methods dtr --stages 3
    unlatch methods fdg --stages 4 --microbatches 1 --no-nesterov

    Of one: its options, timetable, buffers, staleness and how much delay it bears. The largest stable lr x curvature of
    stages under their delays is called a*.
    """
    from .method_pages import list_all, show

    if name is None:
        list_all(stages, microbatches, as_json)
        return
    show(
        name,
        stages,
        ticks=ticks,
        microbatches=microbatches,
        momentum=momentum,
        nesterov=nesterov,
        as_json=as_json,
    )
