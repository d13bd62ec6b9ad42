"""Loaders that raise, end, or give something else: the rank that reads says what, all others who."""

from __future__ import annotations

import pytest

import loader_jobs

#: What the rank that reads the data says.
SAID = {
    "raises": "OSError: the disk is gone [the loader raised this after 2 batches of the pass]",
    "other width": "StageFailed: stage 0 failed in the forward of batch 2: RuntimeError: mat1 and mat2",
    "other dtype": "StageFailed: stage 0 failed in the forward of batch 2: RuntimeError: mat1 and mat2",
    "fewer targets": "ShapeMismatch: every tensor of a batch must have the same number of samples",
    "no samples": "ShapeMismatch: a batch needs at least one sample, got none",
    "no tensors": "ShapeMismatch: a batch needs at least one tensor, got none",
    "triples": "DataError: fit needs a loader of pairs (x, y), got a tuple of 3 from it",
    "used up": "DataError: the loader gave no batch: is it an iterator that was used up",
    "nothing": "DataError: the loader gave no batch",
    "no iterable": "DataError: fit needs a loader of pairs (x, y), got int",
    "none": "UnlatchError: fit needs a loader on the rank that holds stage 0",
}
EVALUATED = {
    "raises": "OSError: the disk is gone",
    "other width": "StageFailed: ",
    "no tensors": "ShapeMismatch: a batch needs at least one tensor, got none",
    "triples": "DataError: evaluate needs a loader of pairs (x, y), got a tuple of 3",
    "no iterable": "DataError: evaluate needs a loader of pairs (x, y), got int",
}


@pytest.mark.parametrize("kind", SAID)
def test_training_inline(kind):
    assert loader_jobs.fits(kind).startswith(SAID[kind])


@pytest.mark.parametrize("kind", SAID)
def test_training_on_two_ranks(ranks2, kind):
    reads, follows = ranks2.run(loader_jobs.fits, kind, timeout=120)
    assert reads.startswith(SAID[kind])
    assert follows.startswith("PeerLost: rank 0 (stage 0) stopped: "), follows


@pytest.mark.parametrize("kind", EVALUATED)
def test_evaluation_inline(kind):
    assert loader_jobs.fits(kind, True).startswith(EVALUATED[kind])


@pytest.mark.parametrize("kind", EVALUATED)
def test_evaluation_on_two_ranks(ranks2, kind):
    reads, follows = ranks2.run(loader_jobs.fits, kind, True, timeout=120)
    assert reads.startswith(EVALUATED[kind])
    assert follows.startswith("PeerLost: rank 0 (stage 0) stopped: "), follows
