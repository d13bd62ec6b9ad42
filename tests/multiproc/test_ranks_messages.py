"""Rounded messages on ranks: the same bits as in one process, exact resume, and fewer bytes on the wire."""

from __future__ import annotations

import pytest

import message_jobs
from message_jobs import CASES
from rank_jobs import differences
from resume_jobs import same
from unlatch.transport.wire import HEADER_BYTES


def test_every_kind_is_the_same_on_ranks_and_goes_on_as_if_never_stopped(ranks2, tmp_path):
    expected = {}
    for case in CASES:
        found = message_jobs.trained(case, "int8", distributed=False)
        expected[case] = found[0], found[1][:8]
    for part in ranks2.run(message_jobs.both_everywhere, str(tmp_path), "int8"):
        assert [case for case in CASES if not same(part[case][0], expected[case])] == []
        assert [case for case in CASES if not same(part[case][1], expected[case])] == []


def test_images_short_batches_and_micro_batches(ranks2):
    for messages in ("bf16", "int8"):
        expected = message_jobs.on_images(messages)
        for found in ranks2.run(message_jobs.on_images, messages):
            for method, outcome in expected.items():
                assert differences(outcome, found[method]) == [], f"{method}, {messages}"


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_bytes_shrink_as_promised(ranks2, transport):
    batches = 6
    found = ranks2.run(message_jobs.bytes_sent, ("exact", "bf16", "int8"), batches, transport)[0]
    numbers, target, scales = 64 * 256, 64 * 4 * 4, 256 * 4
    for rank in (0, 1):
        rests = {messages: sent[rank] - batches * numbers * size for (messages, sent), size in _sized(found)}
        for messages, rest in rests.items():
            # A header per message, with checksums; the target goes up; forms are described once.
            per_batch = HEADER_BYTES + 64 + (target if rank == 0 else 0) + (scales if messages == "int8" else 0)
            assert 0 < rest <= (batches + 2) * per_batch + 2 * 1024, (messages, rest)


def _sized(found):
    return zip(found.items(), (4, 2, 1), strict=True)
