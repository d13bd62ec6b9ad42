"""Somebody who is no rank: reaches nothing from another machine, and with the store in reach changes nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

import fault_jobs
from unlatch.errors import PeerLost
from unlatch.transport.store import host_store

#: Seconds for what happens at once, on a busy machine.
PATIENCE = 120.0
#: Seconds in which all others name a rank that was killed, on a busy machine.
BOUND = 10.0


def listening(process: psutil.Process) -> set[str]:
    return {c.laddr.ip for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN}


def test_everything_listens_on_loopback_only(ranks2):
    found = ranks2.run(fault_jobs.listens_on)
    assert found == [{"127.0.0.1"}, {"127.0.0.1"}]


def test_the_store_of_a_launcher_is_out_of_reach_for_others():
    mine = psutil.Process()
    before = listening(mine)
    store = host_store()
    assert listening(mine) - before <= {"127.0.0.1"}
    with pytest.raises(OSError, match="in use"):
        host_store(port=store.port)


class Stranger:
    """Connects to the store of some ranks and writes what it likes to every key there is."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE))

    def keys(self, ending: str) -> list[str]:
        return [key for key in self._store.list_keys() if key.endswith(ending) or f"{ending}/" in key]

    def write(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)

    def places(self) -> set[str]:
        """Where ranks look for notes, as can be guessed from where they give signs of life."""
        return {key.rsplit("/beat/", 1)[0] for key in self.keys("/beat")}

    def pester(self) -> None:
        forged = json.dumps({"note": {"rank": 1, "text": "give up"}, "mac": "0" * 64})
        plain = json.dumps({"rank": 1, "text": "give up"})
        nested = "[" * 5000 + "]" * 5000
        for place in self.places():
            for value in (forged, plain, nested, b"\xff\xfe\x00", "x" * 1_000_000, "", "17", '{"rank": "x"}'):
                for what in ("failure", "stop", "beat/0", "beat/1"):
                    self.write(f"{place}/{what}", value)
                time.sleep(0.1)


def test_a_stranger_changes_nothing_and_a_kill_is_still_noticed_at_once(ranks2, tmp_path):
    pids = ranks2.run(os.getpid)
    stranger = Stranger(ranks2.port)
    failures: list[BaseException] = []
    ended = {}

    def train() -> None:
        try:
            ranks2.run(fault_jobs.train_forever, str(tmp_path))
        except BaseException as error:
            failures.append(error)
        ended["at"] = time.monotonic()

    training = threading.Thread(target=train)
    training.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while not all((tmp_path / f"pid{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for _ in range(4):
            stranger.pester()
        assert training.is_alive(), failures
    finally:
        killed = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        training.join(PATIENCE)
    [error] = failures
    assert isinstance(error, PeerLost)
    assert "rank 1 was killed by signal 9" in str(error)
    assert (tmp_path / "error0").read_text().startswith("PeerLost: rank 1 (stage 1) is gone without a word")
    assert ended["at"] - killed < BOUND
