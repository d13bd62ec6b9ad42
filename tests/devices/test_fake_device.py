"""Training on an accelerator, as far as it can be tried without one: on a device that Python makes up.

Its operations are those of the CPU, so results must equal the CPU's bit for bit; its copies and streams run late, and
using anything too early is an error. See `tests/support/fake_device.py`.
"""

from __future__ import annotations

from functools import cache, partial

import pytest

import device_jobs
import guard_jobs
import rank_jobs
import replica_jobs
import unlatch

METHODS = unlatch.methods.names()
#: One of every kind of station and of rule.
FAMILIES = ("1f1b", "zb-h1", "pipedream", "dtrp", "petra", "dni", "auxnet", "auxvar", "layerpipe")


@cache
def on_cpu(method: str) -> rank_jobs.Outcome:
    return rank_jobs.train_conv(method, 3, device="cpu", distributed=False)


@pytest.mark.parametrize("method", METHODS)
def test_inline_equals_the_cpu_bit_for_bit(ranks_with_devices, method):
    found, counts = ranks_with_devices.run(device_jobs.counted_inline, rank_jobs.train_conv, method, 3)[0]
    assert rank_jobs.differences(on_cpu(method), found) == []
    assert counts["copies to the device"] > 10
    assert "streams" not in counts, "a single process has nothing to stage"


@pytest.mark.parametrize("method", FAMILIES)
def test_ranks_equal_the_cpu_bit_for_bit(ranks_with_devices, method):
    by_rank = ranks_with_devices.run(device_jobs.counted, rank_jobs.train_conv, method, 3)
    for rank, (found, counts) in enumerate(by_rank):
        assert rank_jobs.differences(on_cpu(method), found) == [], f"rank {rank}"
        assert counts["streams"] == 2
        assert counts["copies to the device"] > 10
        assert counts["copies to the host"] > 10


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "dtrp"])
def test_parts_of_gradients_of_replicas_leave_the_device(ranks_with_devices, method):
    expected = replica_jobs.train_each_in_parts((method,), 2, 2)[method]
    by_rank = ranks_with_devices.run(device_jobs.on_fake, replica_jobs.train_each_in_parts, (method,), 2, 2)
    for rank, found in enumerate(by_rank):
        assert rank_jobs.differences(expected, found[method]) == [], f"rank {rank}"


@pytest.mark.parametrize("distributed", [None, False])
def test_exact_resume(ranks_with_devices, tmp_path, distributed):
    job = device_jobs.resumed_wrongly
    if distributed is None:
        cases = ("pipedream", "dtrp", "auxnet replay", "layerpipe")
        assert ranks_with_devices.run(device_jobs.on_fake, job, cases, str(tmp_path)) == [[], []]
    else:
        cases = ("fdg", "petra", "dgl", "auxvar lagrangian")
        assert ranks_with_devices.run(device_jobs.on_first, job, cases, str(tmp_path), False)[0] == []


def test_a_drained_checkpoint_with_adam(ranks_with_devices, tmp_path):
    cases = ("bp", "pipedream", "dtr", "dgl", "auxnet", "auxvar")
    assert ranks_with_devices.run(device_jobs.on_first, device_jobs.drained_wrongly, cases, str(tmp_path))[0] == []


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_bad_batches_are_left_out(ranks_with_devices, kind):
    """A loss is not read when it is found: what is bad shows in the gradients, before they are applied."""
    cases = ("pipedream", "petra", "dgl")
    assert ranks_with_devices.run(device_jobs.on_fake, guard_jobs.wrong_ones, cases, kind) == [[], []]


def test_places(ranks_with_devices):
    for found in ranks_with_devices.run(device_jobs.on_fake, device_jobs.places, "dtr"):
        assert found == {
            "stages": {"fake:0"},
            "moments": {"fake:0"},
            "untouched": True,
            "given back": {"cpu"},
            "trained": True,
            "loss": "float",
            "busy": True,
        }


def test_pinned_batches_are_moved_without_waiting(ranks_with_devices):
    assert ranks_with_devices.run(device_jobs.on_fake, device_jobs.pinned_batches) == [(True, {})] * 2


@pytest.mark.parametrize("method", ["bp", "gpipe", "pipedream", "dtr", "fdg", "zb-h1"])
def test_nobody_waits_for_a_value(ranks_with_devices, method):
    """Four batches: with checks the host waits twice for each of 8 updates, without it never does."""
    checked = ranks_with_devices.run(device_jobs.waits_in_steps, method, 4)[0]
    assert checked["waits for a value"] == 16
    assert "waits for a copy" not in checked
    blind = ranks_with_devices.run(device_jobs.waits_in_steps_unchecked, method, 4)[0]
    assert "waits for a value" not in blind
    assert "waits for a copy" not in blind
    # The losses of the batches that are reported.
    assert blind.get("waits for an event", 0) <= 4


@pytest.mark.parametrize(
    "forgotten",
    [
        "leaving waits for the compute stream",
        "the sender waits for the copy",
        "tensors stay until they are copied",
        "the compute stream waits for the arrival",
        "memory is lent to the compute stream",
        "buffers stay until they are read",
    ],
)
def test_staging_that_forgets_something_is_found_out(ranks_with_devices, forgotten):
    assert ranks_with_devices.run(device_jobs.sent_and_received) == ["", ""]
    for found in ranks_with_devices.run(device_jobs.sent_and_received, forgotten):
        assert found == "garbage" or found.startswith("race: ")


@pytest.mark.parametrize(
    "forgotten",
    [
        "the lane waits for the compute stream",
        "the compute stream waits for the arrival",
        "memory is lent to the compute stream",
        "copies of what is under way wait for it",
    ],
)
def test_lanes_that_forget_something_are_found_out(ranks_with_devices, forgotten):
    assert ranks_with_devices.run(device_jobs.sent_over_a_lane) == ["", ""]
    for found in ranks_with_devices.run(device_jobs.sent_over_a_lane, forgotten):
        assert found == "garbage" or found.startswith("race: ")


def test_settings_are_judged_by_the_device_of_the_user(ranks_with_devices):
    """What is found out on the CPU before training refused them as if they were for the CPU."""

    def refused(device, setting, method="dtr"):
        job = partial(device_jobs.prepared_without_a_compiler, method=method)
        return ranks_with_devices.run(device_jobs.on_first, job, f"run.device={device}", setting)[0]

    assert refused("fake", "run.transport=nccl") == ""
    assert refused("fake", "run.compile=true") == ""
    assert "one fake device to another, and this run computes on cpu" in refused("cpu", "run.transport=nccl")
    assert "needs a C++ compiler, and finds none" in refused("cpu", "run.compile=true")
    assert "zb-h1 does the two halves of a backward apart" in refused("fake", "run.compile=true", "zb-h1")


def test_which_device(ranks_with_devices):
    asked = (("auto", 1, 0), ("fake", 2, 1), ("fake:1", 1, 0), ("cpu", 4, 3), ("fake", 4, 2), ("fake:1", 2, 0))
    asked += (("fake:2", 1, 0), ("cuda", 1, 0))
    found = ranks_with_devices.run(device_jobs.devices_asked, *asked)[0]
    assert found[:4] == ["fake:0", "fake:1", "fake:1", "cpu"]
    assert found[4].startswith("more ranks than devices: this is rank 2 of 4 on this machine (counted from 0)")
    assert "is one device, and 2 ranks run on this machine" in found[5]
    assert "this machine has 2 fake device(s), numbered from 0 to 1" in found[6]
    assert "finds no cuda device on this machine (it has fake)" in found[7]
