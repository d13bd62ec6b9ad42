"""What all benchmarks share: options, result files, and the timing of `unlatch.throughput`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unlatch.io.results import Results
from unlatch.io.versions import versions
from unlatch.throughput.timing import WARM, completions, interleave, spread, steady_seconds

__all__ = [
    "RESULTS",
    "WARM",
    "Finished",
    "completions",
    "interleave",
    "options",
    "spread",
    "steady_seconds",
    "write",
]

RESULTS = Path(__file__).parent / "results"
#: Options with a folder of this machine: what is to stand for it in a result file.
_FOLDERS = {"--out": "", "--data-dir": "--data-dir DIR", "--data": "--data DIR"}


def options(doc: str | None, *, repeats: int, steps: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark that takes times."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=steps, help="steps per round that count")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    return parser


def _command() -> str:
    """How this program was called, for its result file: with its options, without folders of this machine."""
    told, given = [], iter(sys.argv[1:])
    for word in given:
        option, equals, _ = word.partition("=")
        if option in _FOLDERS:
            if not equals:
                next(given, None)
            told.append(_FOLDERS[option])
        else:
            told.append(shlex.quote(word))
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *filter(None, told)])


class Finished(Results):
    """Measurements, each a line of a file that outlives a kill; what is there is not measured again.

    Lines of speeds are of one session, which `over` ends; lines of accuracies and bytes stay.
    """

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The line with these values, if there is one."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def once(self, measure: Callable[[], Mapping[str, Any]], **key: Any) -> dict[str, Any]:
        """The line with this key; measured now unless it is there."""
        if self.find(**key) is None:
            self.add({**key, **measure()})
        found = self.find(**key)
        assert found is not None, "a key has no values that JSON changes"
        return found

    def over(self) -> None:
        """All is in the result file now; the next call measures anew, as another day or other code may be faster."""
        self.close()
        self.path.unlink()


def write(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Store a result with the command that made it and what it depended on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"versions": versions(), "command": _command(), **result}, indent=1) + "\n")
    return path
