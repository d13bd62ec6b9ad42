"""Callbacks and metrics on ranks: the same everywhere, and one rank's trouble is known to all."""

from __future__ import annotations

import pytest
import torch

import callback_jobs


def test_metrics_early_stopping_and_averages_are_known_on_every_rank(ranks2, tmp_path):
    alone = callback_jobs.session(None, [])
    assert {"loss", "accuracy", "top2", "perplexity", "ema_loss", "ema_perplexity"} <= set(alone["history"][0][3])
    for stops in ([], [7, 2]):
        for found in ranks2.run(callback_jobs.session, str(tmp_path / f"stops{stops}"), stops):
            assert all(torch.equal(t, found["averages"][name]) for name, t in alone["averages"].items())
            assert {k: v for k, v in found.items() if k != "averages"} == {
                k: v for k, v in alone.items() if k != "averages"
            }


def test_one_rank_asks_for_the_end(ranks2):
    assert ranks2.run(callback_jobs.asked_to_stop, 0) == [(3, True, "enough")] * 2
    # The rank that reads the data does not hear of it before the pass is complete.
    assert ranks2.run(callback_jobs.asked_to_stop, 1) == [(5, False, "enough")] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_callback_that_raises_on_one_rank(ranks2, tmp_path, rank):
    found = ranks2.run(callback_jobs.fails, str(tmp_path), rank)
    text = "callback Fails raised in on_step after batch 3: ValueError: no such curve. The state is saved in"
    assert found[rank][0].startswith(f"CallbackFailed: {text} {tmp_path}")
    assert found[1 - rank][0].startswith(f"PeerLost: rank {rank} stopped: {text}")
    assert all(goes_on for *_, goes_on in found)


def test_a_callback_that_raises_while_others_exchange_values(ranks2):
    found = ranks2.run(callback_jobs.fails_to_write, 0)
    text = "callback FailsToWrite raised in on_log after batch 5: OSError: no room."
    assert found == [f"CallbackFailed: {text}", f"PeerLost: rank 0 stopped: {text}"]


def test_a_callback_that_raises_while_others_exchange_values_leaves_nobody_waiting(ranks2):
    first, second = ranks2.run(callback_jobs.fails_before_exchange, timeout=60)
    assert (
        first
        == "CallbackFailed: callback FailsBeforeExchange raised in on_epoch after batch 5: ValueError: no such curve"
    )
    assert second.startswith("OutOfStep: ")
