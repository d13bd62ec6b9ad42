"""Claim: `unlatch --help`, the help of every command and `unlatch init` each take less than 0.3 s of CPU time.
`unlatch methods` takes that of `import torch` and about half as much again.

    python benchmarks/help_time.py [--repeats 9] [--steps 1]

CPU time, user and system, of a whole process from start to end, `steps` processes per round, rounds interleaved.
`unlatch methods` shows is computed from the methods themselves, which are made of torch's parts; `import torch` in a
process of its own is what cannot be saved there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common import interleave, options, spread, write

from unlatch.cli.commands import COMMANDS

TARGET = 0.3
TORCH, LISTING = "import torch", "unlatch methods"


def seconds(arguments: Sequence[str], steps: int) -> float:
    """CPU seconds of Python with these arguments, in an empty folder."""
    spent = 0.0
    for _ in range(steps):
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen([sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise RuntimeError(f"{' '.join(arguments)} ended with code {process.returncode}")
            spent += used.ru_utime + used.ru_stime
    return spent / steps


def main() -> None:
    asked = options(__doc__, repeats=9, steps=1).parse_args()
    source = Path(__file__).parents[1] / "src"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    quick = [["--help"], *([command, "--help"] for command in COMMANDS), ["init"]]
    lines = {f"unlatch {' '.join(words)}": ["-m", "unlatch", *words] for words in [*quick, ["methods"]]}
    lines[TORCH] = ["-c", "import torch"]
    times = interleave({name: partial(seconds, words, asked.steps) for name, words in lines.items()}, asked.repeats)
    found = {name: spread(values) for name, values in times.items()}
    print(f"{'':<26}{'CPU s':>8}{'best':>8}{'worst':>8}")
    for name, one in found.items():
        print(f"{name:<26}{one['median']:>8.3f}{one['min']:>8.3f}{one['max']:>8.3f}")
    slow = [name for name, one in found.items() if name not in (TORCH, LISTING) and one["median"] >= TARGET]
    print(f"below {TARGET} s: {'all but ' + ', '.join(slow) if slow else 'all that need no torch'}")
    print(f"{LISTING}: {found[LISTING]['median'] / found[TORCH]['median']:.2f} of {TORCH}")
    print(write("help_time", {"target": TARGET, "cpu_seconds": found}, asked.out))


if __name__ == "__main__":
    main()
