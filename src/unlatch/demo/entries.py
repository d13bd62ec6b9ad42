"""What the demo trains: a row of the table each, with what it is measured against and what there is to see in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import Config, from_mapping
from ..errors import ConfigError
from ..methods import BASELINE

__all__ = ["ENTRIES", "PROCESSES", "Entry", "chosen_entries", "settings"]

PROCESSES = 2
NETWORK, TWIN = "resnet14", "revnet14"
TWIN_LABEL = f"{BASELINE} of {TWIN}"


@dataclass(frozen=True)
class Entry:
    """A row.

    **Arguments:**

    - `look`: what to see, a sentence with fields: numbers of the row (`ratio`, `bubble`, `late`, `copies`, `kept`,
      `error`, `accuracy`), the same of the row in `beside` (`other_kept`, ...), `notes` of how it was placed.
    - `system`: its name in the closing lines, if it has one there.
    - `baseline`: the label of the row that its speed is a multiple of.
    - `beside`: the label of a row that it is to be compared with as well.
    - `model`, `options`: the network, and options of the method. Batches are small, so they are cut into micro-batches
      only where the method lives by them; a delay of two updates is borne.
    - `split`: where the network is cut, unless that is left to measurement.
    - `planned`: whether the method's own planner places it.
    - `same_cut`: whether it is cut where `beside` is.
    """

    label: str
    method: str
    look: str
    system: str = ""
    baseline: str = BASELINE
    beside: str = ""
    model: str = NETWORK
    processes: int = PROCESSES
    options: dict[str, Any] = field(default_factory=dict)
    split: tuple[str, ...] = ()
    planned: bool = False
    same_cut: bool = False


ENTRIES = (
    Entry(
        BASELINE,
        BASELINE,
        "the measure of the others, in one process: nothing waits, nothing is late, the whole graph of a batch is kept",
        processes=1,
    ),
    Entry(
        "zb-h1",
        "zb-h1",
        "no gradient is late; in return the pipeline empties at every update, and a process waits {bubble} of the time",
        options={"microbatches": 2},
    ),
    Entry(
        "pipedream",
        "pipedream",
        "the pipeline never empties, waiting {bubble}; in return gradients are up to {late} late, with {copies} kept",
    ),
    Entry(
        "dtrp",
        "dtrp",
        "inputs are kept instead of graphs, {kept} in the fuller process where pipedream has {other_kept}; the lower "
        "half runs forward twice",
        system="DTRP",
        beside="pipedream",
    ),
    Entry(
        "layerpipe",
        "layerpipe",
        "{notes}; {ratio} times the speed of one process, where whole stages under pipedream have {other_ratio}",
        system="LayerPipe",
        beside="pipedream",
        options={"microbatches": 1},
        planned=True,
    ),
    Entry(
        "auxnet",
        "auxnet",
        "nothing is late: the upper half starts from an input that a small network predicts; the next row is its rival",
        system="AuxNet",
        beside="auxnet shallow",
    ),
    Entry(
        "auxnet shallow",
        "auxnet",
        "the small network and the upper half alone, the lower half left out: {accuracy}, where all of it has "
        "{other_accuracy}",
        beside="auxnet",
        options={"ablation": "shallow"},
        same_cut=True,
    ),
    Entry(
        TWIN_LABEL,
        BASELINE,
        "the same network with reversible blocks, in one process: the measure of the row below",
        baseline=TWIN_LABEL,
        model=TWIN,
        processes=1,
    ),
    Entry(
        "petra",
        "petra",
        "reversible blocks compute their activations back instead of keeping them, with a relative error of up to "
        "{error}; the fuller process keeps {kept} where bp keeps {other_kept}",
        system="PETRA",
        baseline=TWIN_LABEL,
        beside=TWIN_LABEL,
        model=TWIN,
        options={"microbatches": 1, "order": "1f1b"},
        # The stem cannot be reversed: as a stage of its own it leaves one below the last that can.
        split=("layer1.0", "layer2.0"),
    ),
)


def chosen_entries(names: Sequence[str] | None) -> list[Entry]:
    """All rows, or those of some methods with the rows they are measured against.

    >>> [entry.label for entry in chosen_entries(["petra"])]
    ['bp of revnet14', 'petra']
    """
    if names is None:
        return list(ENTRIES)
    wanted = [entry for entry in ENTRIES if entry.method in names]
    unknown = [name for name in names if name not in {entry.method for entry in ENTRIES}]
    if unknown or not wanted:
        known = ", ".join(dict.fromkeys(entry.method for entry in ENTRIES))
        raise ConfigError(f"--methods: the demo has no row {', '.join(unknown)!r}; it has {known}")
    needed = {entry.label for entry in wanted} | {entry.baseline for entry in wanted}
    return [entry for entry in ENTRIES if entry.label in needed]


def settings(entry: Entry, epochs: int = 1) -> Config:
    """A residual network on digits of 16x16.

    Maps of this size keep a core busy for milliseconds, and few weights are quickly updated: what is seen is the
    method, not the cost of small actions.

    >>> settings(ENTRIES[1]).run.stages
    2
    """
    cut = {"stages": len(entry.split) + 1, "split": entry.split} if entry.split else {"stages": entry.processes}
    return from_mapping(
        {
            "model": {"name": entry.model, "channels_last": True},
            "data": {
                "name": "digits",
                "batch_size": 64,
                "augment": False,
                "drop_last": True,
                "options": {"size": 16},
            },
            "method": {"name": entry.method, **entry.options},
            "optimizer": {"lr": 0.1},
            "run": {**cut, "processes": entry.processes, "epochs": epochs},
        }
    )
