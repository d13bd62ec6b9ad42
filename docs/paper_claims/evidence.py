"""What there is to judge: result files of benchmarks and studies, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from result_tables.common import by_seed, result

from unlatch.config.study import load_study
from unlatch.io.results import read_results
from unlatch.report.paired import Paired, paired
from unlatch.report.study import study_report
from unlatch.report.study_case import CaseFound

DIGITS, FULL = "digits", "CIFAR-10, 3 epochs"


class Missing(Exception):
    """There is no result; the message tells how to make it."""


class Evidence:
    """Result files, read when they are asked for."""

    def __init__(self, results: Path, studies: Path) -> None:
        self.results, self.studies = results, studies
        self._read: dict[str, Any] = {}

    def file(self, name: str, command: str | None = None) -> dict[str, Any]:
        """A result file of `benchmarks/`."""
        if name not in self._read:
            self._read[name] = result(name, self.results)
        found: dict[str, Any] | None = self._read[name]
        if found is None:
            raise Missing(command or f"python benchmarks/{name}.py")
        return found

    def runs(self, name: str, label: Callable[[Mapping[str, Any]], str]) -> dict[str, dict[int, float]]:
        """Accuracies in percent by label and seed, of a benchmark with a line per run."""
        path = self.results / f"{name}.jsonl"
        if not path.is_file():
            raise Missing(f"python benchmarks/{name}.py --data-dir DIR")
        return by_seed(read_results(path), label)

    def study(self, name: str) -> Studied:
        """What a study found."""
        file = self.studies / f"{name}.toml"
        where = "" if name.startswith(DIGITS) else " --data-dir DIR"
        command = f"unlatch compare studies/{name}.toml{where}"
        lines = read_results(self.studies / "results" / f"{name}.jsonl") if file.is_file() else []
        if not lines:
            raise Missing(command)
        if name not in self._read:
            self._read[name] = Studied(file, lines, command)
        found: Studied = self._read[name]
        return found


class Studied:
    """Cases of a study by label, as far as all their seeds came to an end."""

    def __init__(self, file: Path, lines: Sequence[Any], command: str) -> None:
        self.command = command
        self._report = study_report(load_study(file), lines, command=command)

    @cached_property
    def _cases(self) -> dict[str, CaseFound]:
        whole = {row["case"] for row in self._report.numbers() if row["is_result"]}
        return {label: case for case in self._report.cases if case.label in whole for label in case.labels}

    def pair(self, label: str, other: str | None = None) -> Paired:
        """A case against another one, or its baseline: points by seed, and the least that accuracies can show."""
        if label not in self._cases or other not in (None, *self._cases):
            raise Missing(self.command)
        one = self._cases[label]
        two = self._report.base_of(one) if other is None else self._cases[other]
        values = [{seed: 100 * value for seed, value in case.values.items()} for case in (one, two)]
        both = paired(*values, 100 * max(one.resolution, two.resolution))
        assert both is not None, "whole cases have all seeds"
        return both

    def diverged(self, label: str, other: str | None = None) -> bool:
        """Whether a case did where what it stands against did not."""
        cases = {name: case for case in self._report.cases for name in case.labels}
        if label not in cases or not cases[label].missed("diverged"):
            return False
        beside = self._report.base_of(cases[label]) if other is None else cases.get(other)
        return beside is not None and beside.is_result

    def cosine(self, label: str) -> float:
        """The least cosine of a stage's gradient with that of backpropagation."""
        if label not in self._cases or not self._cases[label].cosines():
            raise Missing(self.command)
        return float(min(self._cases[label].cosines()))
