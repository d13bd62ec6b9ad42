"""One run, stage by stage: how late it was, what it held in memory, how well it reconstructed inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..io.space import bytes_text
from ..table import Table, number_text

__all__ = ["stage_table"]


def stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    """A line per stage.

    **Arguments:** `stages`: as in the summary of a run. Bytes are the most there ever were: `stored` in queues of
    inputs and in graphs, `waiting` in messages that had come and were not taken up yet. `input error` is the largest
    relative error of a reconstructed input; the column is there if any stage reconstructs.

    >>> measured = {"staleness": 3.0, "delay": 6, "in_flight": 7, "stored_bytes": 2048, "message_bytes": 0}
    >>> rest = {"weight_copies": 0, "reconstruction_error": None}
    >>> print(stage_table([{"stage": 0, **measured, **rest}]).text())
    stage  updates late  ticks late  under way  stored  waiting  old weights
    ------------------------------------------------------------------------
        0             3           6          7  2.0 kB      0 B            0
    """
    reconstructs = any(stage["reconstruction_error"] is not None for stage in stages)
    replicated = any(stage.get("replica") for stage in stages)
    heads = ("stage", "updates late", "ticks late", "under way", "stored", "waiting", "old weights")
    rows = [
        (
            f"{stage['stage']} of replica {stage.get('replica', 0)}" if replicated else str(stage["stage"]),
            f"{stage['staleness']:.3g}",
            str(stage["delay"]),
            str(stage["in_flight"]),
            bytes_text(stage["stored_bytes"]),
            bytes_text(stage["message_bytes"]),
            str(stage["weight_copies"]),
            *((number_text(stage["reconstruction_error"], ".2g"),) if reconstructs else ()),
        )
        for stage in stages
    ]
    return Table((*heads, *(("input error",) if reconstructs else ())), tuple(rows), left=())
