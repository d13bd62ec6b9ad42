"""Expected, and not shown yet by a committed result file: compiled by torch's inductor, a step of bp, pipedream and dtr
takes less CPU time than uncompiled, on ResNet-20 and on a GPT of 10 M parameters.

    python benchmarks/compile_speed.py [--repeats 5] [--steps 2] [--only gpt]

Two stages in one process with one thread, so that nothing but compiling differs. What counts is CPU time per step once
the pipeline is full. What making the code takes is told apart: seconds on the wall of the first steps, those of an
uncompiled run taken off. Torch keeps code on disk, where later runs find it: these seconds are of an empty folder for
the first method, and less for those that need the same code. Rounds are interleaved, in turns which comes first; the
ratio of each round counts. Rounds are lines of compile_speed.jsonl until all are done, so that a run that was stopped
can be taken up. Meant to take less than 5 minutes on an idle machine. Ranks, and models of your own, are measured by
`unlatch bench throughput CONF --compile`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

import torch
from common import WARM, Finished, options, spread, write
from pipeline_speed import CASES

import unlatch
from unlatch.nn import chain

METHODS = ("bp", "pipedream", "dtr")
#: Samples of a batch: half of those of `pipeline_speed.py`.
ROWS = {"resnet20": 64, "gpt": 8}


class Measured:
    """A run of a method with its data, compiled or not."""

    def __init__(self, case: str, method: str, compiled: bool) -> None:
        subject, _ = CASES[case]
        x, y = subject.batch()
        self._data = x[: ROWS[case]], y[: ROWS[case]]
        model = subject.model()
        blocks = chain(model)
        self._run = unlatch.parallelize(
            model,
            unlatch.methods.get(method, microbatches=1),
            stages=2,
            # A cut that was measured would be another one for each.
            split=[blocks[len(blocks) // 2].name],
            loss_fn=subject.loss_fn,
            optimizer=subject.optimizer,
            compile=compiled,
        )
        begun = time.perf_counter()
        self._steps(WARM + self._run.schedule.depth)
        #: Seconds of the steps that fill the pipeline, and in which code is made.
        self.first = time.perf_counter() - begun

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._run.step(*self._data)

    def seconds(self, steps: int) -> float:
        """CPU seconds per step."""
        begun = time.process_time()
        self._steps(steps)
        return (time.process_time() - begun) / steps


def measure(case: str, repeats: int, steps: int, done: Finished) -> None:
    """Add what is missing of a case."""
    key = {"case": case, "steps": steps}
    missing = [turn for turn in range(repeats) if done.find(**key, round=turn) is None]
    if not missing:
        return
    runs = {(method, way): Measured(case, method, way) for method in METHODS for way in (False, True)}
    made = {method: runs[method, True].first - runs[method, False].first for method in METHODS}
    for turn in missing:
        order = list(runs)[:: 1 if turn % 2 == 0 else -1]
        found = {one: runs[one].seconds(steps) for one in order}
        speeds = {method: [found[method, False], found[method, True]] for method in METHODS}
        done.add({**key, "round": turn, "seconds": speeds, "making": made})


def summary(case: str, repeats: int, steps: int, done: Finished) -> dict[str, Any]:
    rows = [done.find(case=case, steps=steps, round=turn) for turn in range(repeats)]
    told = {}
    for method in METHODS:
        pairs = [row["seconds"][method] for row in rows if row is not None]
        making = next(row["making"][method] for row in rows if row is not None)
        ratio = spread([compiled / plain for plain, compiled in pairs])
        plain, compiled = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{case:9} {method:10} {1e3 * plain:8.1f} ms, compiled {1e3 * compiled:8.1f} ms, "
            f"ratio {ratio['median']:.3f} [{ratio['min']:.3f}, {ratio['max']:.3f}], made in {making:.0f} s",
            flush=True,
        )
        told[method] = {"ratio": ratio, "seconds": plain, "compiled_seconds": compiled, "making_seconds": making}
    return told


def main() -> None:
    parser = options(__doc__, repeats=5, steps=2)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = Finished(args.out / "compile_speed.jsonl")
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        for case in args.only:
            measure(case, args.repeats, args.steps, done)
    found = {case: summary(case, args.repeats, args.steps, done) for case in args.only}
    print(write("compile_speed", {"cases": found}, args.out))
    done.over()


if __name__ == "__main__":
    main()
