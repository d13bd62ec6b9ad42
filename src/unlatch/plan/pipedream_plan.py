"""What PipeDream's planner returns: stages of whole layers, each on one or more workers, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .layer_costs import LayerCost, Number, exact, plain

__all__ = ["PipeDreamPlan", "PipeDreamStage"]


@dataclass(frozen=True)
class PipeDreamStage:
    """Layers `first .. end - 1` on `replicas` workers."""

    first: int
    end: int
    replicas: int = 1


@dataclass(frozen=True)
class PipeDreamPlan:
    """Stages from the data to the loss, and what follows from them."""

    layers: tuple[LayerCost, ...]
    workers: int
    stages: tuple[PipeDreamStage, ...]
    #: Time per mini-batch in steady state; infinite if no plan that uses all workers can run.
    initiation_interval: Number
    note: str = ""

    @property
    def warmups(self) -> tuple[int, ...]:
        """Forwards that each replica of a stage does before its first backward."""
        return tuple(count - 1 for count in self.versions)

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions of each stage: the mini-batches that one replica has under way.

        >>> layer = LayerCost("", 1, 1, 1)
        >>> PipeDreamPlan((layer, layer), 4, (PipeDreamStage(0, 1, 3), PipeDreamStage(1, 2)), 1).versions
        (2, 1)
        """
        after = [sum(s.replicas for s in self.stages[number:]) for number in range(len(self.stages))]
        return tuple(-(-count // stage.replicas) for count, stage in zip(after, self.stages, strict=True))

    @property
    def in_flight(self) -> int:
        """Mini-batches that enter before the first leaves, per replica of the input stage (NOAM)."""
        return self.versions[0]

    @property
    def loads(self) -> tuple[Number, ...]:
        """Time that each worker computes per mini-batch; workers of a stage stand side by side."""
        found: list[Number] = []
        for stage in self.stages:
            work = sum((exact(layer.work) for layer in self.layers[stage.first : stage.end]), Fraction(0))
            share = work / stage.replicas
            found += [share if _is_exact(self.layers) else float(share)] * stage.replicas
        return (*found, *[0] * (self.workers - len(found)))

    @property
    def delays(self) -> tuple[int, ...]:
        """Updates by which each layer's gradient is late, with stashed weights."""
        sizes = [stage.end - stage.first for stage in self.stages]
        return tuple(warm for warm, size in zip(self.warmups, sizes, strict=True) for _ in range(size))

    @property
    def utilisation(self) -> Number:
        """Share of the time that the workers compute, on average."""
        return sum(self.loads, start=0) / (self.workers * self.initiation_interval)

    @property
    def communication_bytes(self) -> Number:
        """Bytes per mini-batch: activations and their gradients between stages, and weights between replicas."""
        borders: list[Number] = [2 * self.layers[stage.first - 1].activation_bytes for stage in self.stages[1:]]
        for stage in self.stages:
            weights = sum((layer.weight_bytes for layer in self.layers[stage.first : stage.end]), start=0)
            # Each of m replicas sends 2 (m - 1) / m of the weights once per m mini-batches.
            borders.append(2 * (stage.replicas - 1) * weights / stage.replicas if stage.replicas > 1 else 0)
        return sum(borders, start=0)

    def to_json(self) -> dict[str, Any]:
        """The answer of `unlatch plan --method pipedream --json`; layers and processors count from 0."""
        tasks = []
        processor = 0
        for stage in self.stages:
            for layer in range(stage.first, stage.end):
                for kind in ("F", "D", "G") if layer else ("F", "G"):
                    for replica in range(stage.replicas):
                        tasks.append(
                            {
                                "task": kind,
                                "layer": layer,
                                "name": self.layers[layer].name,
                                "processor": processor + replica,
                                "fraction": plain(Fraction(1, stage.replicas)),
                                "slot": None,
                            }
                        )
            processor += stage.replicas
        return {
            "method": "pipedream",
            "processors": self.workers,
            "busy_processors": sum(stage.replicas for stage in self.stages),
            "initiation_interval": plain(self.initiation_interval) if self.initiation_interval < math.inf else None,
            "loads": [plain(load) for load in self.loads],
            "tasks": tasks,
            "delays": list(self.delays),
            "utilisation": plain(self.utilisation),
            "communication_bytes": plain(self.communication_bytes),
            "stages": [{"first": s.first, "end": s.end, "replicas": s.replicas} for s in self.stages],
            "split": [self.layers[stage.first].name for stage in self.stages[1:]],
            "versions": list(self.versions),
            "in_flight": self.in_flight,
            "note": self.note,
        }


def _is_exact(layers: Sequence[LayerCost]) -> bool:
    return all(isinstance(value, int | Fraction) for layer in layers for value in (layer.F, layer.D, layer.G))
