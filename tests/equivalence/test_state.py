"""A run that is saved, rebuilt and continued equals the untouched one bit for bit, mid-pipeline, for every method."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from order_jobs import CASES, accumulates, begun, data

SCHEDULER = partial(StepLR, step_size=2, gamma=0.7)


def finish(run, first: int) -> tuple[list[float], list[torch.Tensor]]:
    """Six more batches and the rest of the pipeline: losses and weights."""
    batches = data()
    results = [run.step(*batches[number % len(batches)]) for number in range(first, first + 6)] + run.flush()
    weights = [t.clone() for t in run.module().state_dict().values()]
    trained = [
        t.clone() for s in run.stations.values() for name in s.trained() for t in s.trained()[name].module.parameters()
    ]
    return [r.loss for r in results if r.loss is not None], weights + trained


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_rebuilt_run_goes_on_as_the_untouched_one(case, accumulate, tmp_path):
    if accumulate > 1 and not accumulates(case):
        pytest.skip("needs one update per batch")
    batches = data()
    untouched = begun(case, accumulate, lr_scheduler=SCHEDULER)
    for number in range(5):
        untouched.step(*batches[number % len(batches)])
    state = untouched.state()
    untouched.save(tmp_path / "checkpoint")
    losses, weights = finish(untouched, 5)

    for taken_over in ("memory", "file"):
        # Whatever the rebuilt run had before is gone: it has seen other data.
        rebuilt = begun(case, accumulate, lr_scheduler=SCHEDULER)
        for x, y in batches[:2]:
            rebuilt.step(x + 1, y)
        if taken_over == "memory":
            rebuilt.restore(state)
        else:
            rebuilt.load(tmp_path / "checkpoint")
        again, same = finish(rebuilt, 5)
        assert again == losses
        assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
