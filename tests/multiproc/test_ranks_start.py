"""Ranks that stop, never come, or take their time before there is a run: named in bounded time, or waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

import fault_jobs
import start_jobs
from fault_jobs import LIMIT
from greenhouse import Adopted, Greenhouse
from scripts import PATIENCE, environment
from unlatch.errors import PeerLost
from unlatch.transport import launch

#: Seconds to name a rank after the limit has passed, on a busy machine.
BOUND = 10.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def program(greenhouse: Greenhouse) -> Callable[..., AbstractContextManager[Adopted]]:
    """A rank that nothing but the environment tells of the others, as a cluster starts it."""

    @contextmanager
    def begin(folder: Path, rank: int, port: int, *asked: str, **more: str) -> Iterator[Adopted]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        command = [start_jobs.__file__, str(folder), *asked]
        with Path(os.devnull).open("w") as nowhere:
            started = greenhouse.program(command, {**environment(), **place, **more}, 1, nowhere.fileno())
        try:
            yield started
        finally:
            started.kill()
            started.wait()

    return begin


def report(folder: Path, rank: int) -> tuple[float, str]:
    """Seconds from the start to the end of what a rank tried, and how it ended."""
    seconds, text = (folder / f"rank{rank}").read_text().split(" ", 1)
    return float(seconds), text


@pytest.mark.parametrize(("point", "who"), [("joining", 1), ("shaking hands", 0)])
def test_programs_on_their_own(program, tmp_path, point, who):
    """Rank 0 hosts the store: if it is stopped, nothing answers."""
    port = free_port()
    with (
        program(tmp_path, 0, port, "stop", point, str(who)) as first,
        program(tmp_path, 1, port, "stop", point, str(who)) as second,
    ):
        assert (second if who == 0 else first).wait(PATIENCE) == 3
    _, text = report(tmp_path, 1 - who)
    assert text.startswith(f"PeerLost: rank {who} (starting) ")
    assert f"{LIMIT:g} s" in text


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_never_comes(program, tmp_path, who):
    with program(tmp_path, 1 - who, free_port(), "stop", "joining", "2", UNLATCH_START_LIMIT="3") as other:
        assert other.wait(PATIENCE) == 3
    seconds, text = report(tmp_path, 1 - who)
    assert text.startswith(f"PeerLost: rank {who} (starting) ")
    assert "within 3 s of the start" in text
    assert "UNLATCH_START_LIMIT" in text
    assert seconds < 3 + BOUND


def test_a_port_that_is_taken(program, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with program(tmp_path, 0, port, "stop", "joining", "2") as first:
            assert first.wait(PATIENCE) == 3
    _, text = report(tmp_path, 0)
    assert text.startswith(f"TransportError: rank 0 cannot open the store at 127.0.0.1:{port}")
    assert "Choose a port that is free" in text


@pytest.mark.parametrize(
    ("point", "who"), [("grouping", 0), ("grouping", 1), ("shaking hands", 1), ("planning", 0), ("connecting", 1)]
)
def test_stopped_before_there_is_a_run(ranks2, monkeypatch, point, who):
    monkeypatch.setattr(launch, "_GRACE", 0.5)
    pids = ranks2.run(os.getpid)
    with pytest.raises(PeerLost, match=rf"rank {who} \(\w+( \d)?\) gave no sign of life for {LIMIT:g} s"):
        ranks2.run(start_jobs.start, "stop", point, who, timeout=LIMIT + BOUND)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_one_who_is_busy_measuring_is_not_stuck(ranks2):
    ranks2.run(start_jobs.start, "doze", "planning", 0)


def test_an_error_before_there_is_a_run_is_told_to_the_others(ranks2):
    """If it were not, the others would wait for the one that has failed: its process lives on."""
    below, above = ranks2.run(fault_jobs.reported, start_jobs.start, "fail", "shaking hands", 1, fault_jobs.NEVER)
    assert below == "PeerLost: rank 1 (starting) stopped: boom at the start"
    assert above == "ConfigError: boom at the start"


def test_a_program_that_cannot_begin_is_told_and_not_waited_for(greenhouse: Greenhouse) -> None:
    with pytest.raises(ChildProcessError, match="nowhere"):
        greenhouse.program(["-c", ""], {}, 1, 2, network="nowhere")
