"""No memory left, for a stage, for a message, or in the kernel's eyes: who, at which batch, and what takes less."""

from __future__ import annotations

import json
import re

import pytest
import torch

import fault_jobs
from recording import feed
from small_nets import vectors
from unlatch import Faults
from unlatch.errors import PeerLost, StageFailed, TransportError
from unlatch.io.space import bytes_text
from unlatch.transport.mail import Message
from unlatch.transport.wire import Reader, Writer


def test_a_stage_without_memory(ranks2, tmp_path):
    with pytest.raises(StageFailed) as caught:
        ranks2.run(fault_jobs.breaks, "dtr", 2, "memory", 1, str(tmp_path))
    text = str(caught.value)
    assert "stage 1 failed in the forward of batch 2: RuntimeError: " in text
    assert "can't allocate memory" in text
    assert re.search(r"Out of memory: it keeps [\d.]+ k?B for batches under way, its process held [\d.]+ [MG]B", text)
    assert "more micro-batches" in text
    other = json.loads((tmp_path / "rank0").read_text())["text"]
    assert other.startswith("PeerLost: rank 1 (stage 1) stopped: stage 1 failed in the forward of batch 2")


def test_a_stage_without_memory_inline():
    with (
        fault_jobs.start("dtr", 2, "memory", 1) as run,
        pytest.raises(StageFailed, match=r"stage 1 failed in the forward of batch 2.*Out of memory"),
    ):
        feed(run, vectors(8))


def test_a_message_without_memory():
    sealed, reader = Writer().seal(Message("forward", 1, payload=torch.empty(2**30, dtype=torch.uint8))), Reader(0)
    head = reader.head(sealed.header)
    with (
        fault_jobs.little_memory(),
        pytest.raises(TransportError, match=rf"no room for a message of {bytes_text(2**30)}"),
    ):
        reader.envelope(head, sealed.body)


def test_a_rank_that_the_system_kills(ranks2, tmp_path):
    """The launcher says how much memory there was, the other rank who it was and at which batch."""
    with pytest.raises(PeerLost) as caught:
        ranks2.run(fault_jobs.breaks, "dtr", 2, Faults().kill(stage=1, at=4), 1, str(tmp_path))
    first, held, seen = str(caught.value).splitlines()[:3]
    assert first.endswith("the system may have, for lack of memory")
    assert re.search(r"the largest rank that has ended held [\d.]+ [MG]B: fewer samples in a batch, more micro-", held)
    assert "what rank 0 saw of it: rank 1 (stage 1) is gone" in seen
    assert re.search(r"stage 0 waited for the \w+ message of batch \d+", str(caught.value))
