"""Recurrent and encoder-decoder models of plain torch, and loaders with workers and collators, on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sequence_jobs
import unlatch
from rank_jobs import differences, plain_sgd
from unlatch.errors import PlanError

# The tuple of a recurrent layer crosses the cut before "2"; memory and targets cross every cut of the other model.
CUTS = [("recurrent", "2"), ("recurrent", "3"), ("encoder-decoder", "2"), ("encoder-decoder", "4")]


@pytest.mark.parametrize("method", ["bp", "dtr", "pipedream"])
@pytest.mark.parametrize(("kind", "cut"), CUTS)
def test_ranks_compute_what_one_process_does(ranks2, kind, cut, method):
    inline = sequence_jobs.train_sequences(kind, method, cut)
    for outcome in ranks2.run(sequence_jobs.train_sequences, kind, method, cut):
        assert differences(inline, outcome) == []


def test_workers_that_collate(ranks2):
    """They were spawned, not forked as elsewhere: each imported torch anew, and a lambda could not reach them."""
    inline = sequence_jobs.train_with_workers(0)
    for outcome in ranks2.run(sequence_jobs.train_with_workers, 2):
        assert differences(inline, outcome) == []


def refusal(model: nn.Module, x, split: list[str] | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        unlatch.parallelize(
            model,
            "dtr",
            stages=2,
            loss_fn=sequence_jobs.by_word,
            optimizer=plain_sgd,
            split=split or "auto",
            sample=(x, sequence_jobs.sentences(6)),
        )
    return str(caught.value)


@pytest.mark.parametrize("split", [None, ["2"]])
def test_a_tuple_that_the_next_block_does_not_take(split):
    """It was a bare "linear(): argument 'input' must be Tensor, not tuple"."""
    width, words = sequence_jobs.WIDTH, sequence_jobs.WORDS
    model = nn.Sequential(nn.Embedding(words, width), nn.LSTM(width, width, batch_first=True), nn.Linear(width, words))
    text = refusal(model, sequence_jobs.sentences(6), split)
    assert "block '2' fails" in text
    assert "all that the block before it returns" in text


def test_a_block_of_two_arguments():
    model = nn.Sequential(nn.Transformer(8, 2, 1, 1, 16, batch_first=True), nn.Linear(8, sequence_jobs.WORDS))
    text = refusal(model, (torch.randn(6, 5, 8), torch.randn(6, 5, 8)), ["1"])
    assert "block '0' fails" in text
    assert "as its one argument" in text
