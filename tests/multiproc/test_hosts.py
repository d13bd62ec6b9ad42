"""torchrun over hosts, each a network namespace with one cable to a switch: same weights, and the loss of one ends all.

The namespaces belong to the test, which makes and removes them, and nothing else on the machine is touched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import host_jobs
import net_hosts
import unlatch
from fault_jobs import LIMIT
from greenhouse import Greenhouse
from net_hosts import Host, missing
from rank_jobs import differences
from restart_jobs import session

SUPPORT = Path(host_jobs.__file__).parent
SOURCE = Path(unlatch.__file__).parents[1]
PORT = 29500
#: Seconds for what a quiet machine does in a few.
PATIENCE = 240.0
#: Seconds in which every host has named what was lost, after the limit, on a busy machine.
BOUND = 10.0
#: Seconds for a program that has failed, and for torchrun above it, to end.
ENDING = 60.0


Network = Callable[[int], list[Host]]
Start = Callable[..., list["Torchrun"]]


@pytest.fixture
def network() -> Iterator[Network]:
    """Makes hosts, if that is allowed."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:

        def build(count: int) -> list[Host]:
            try:
                return stack.enter_context(net_hosts.hosts(count))
            except OSError as error:
                pytest.skip(f"network namespaces are not allowed here: {error}")

        yield build


class Torchrun:
    """What runs on one host."""

    def __init__(
        self, greenhouse: Greenhouse, host: Host, hosts: int, leader: str, what: str, folder: Path, restarts: int
    ) -> None:
        command = ["-m", "torch.distributed.run"]
        command += [f"--nnodes={hosts}", f"--node-rank={host.number}", "--nproc-per-node=1"]
        command += [f"--master-addr={leader}", f"--master-port={PORT}", f"--max-restarts={restarts}"]
        command += [str(SUPPORT / "host_jobs.py"), what, str(folder)]
        self.output = folder / f"output{host.number}"
        paths = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{SUPPORT}"}
        with self.output.open("wb") as output:
            self._agent = host.start_from(greenhouse, command, paths, output.fileno())

    def wait(self) -> int:
        """The exit code."""
        return self._agent.wait(PATIENCE)


@pytest.fixture
def start(greenhouse: Greenhouse) -> Start:
    """Runs a job of `host_jobs` on hosts."""

    def begin(hosts: list[Host], what: str, folder: Path, restarts: int = 0) -> list[Torchrun]:
        leader = hosts[0].address
        return [Torchrun(greenhouse, host, len(hosts), leader, what, folder, restarts) for host in hosts]

    return begin


def all_well(programs: list[Torchrun]) -> None:
    for program in programs:
        assert program.wait() == 0, program.output.read_text()


def wait_until(done: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


@pytest.mark.parametrize("count", [2, 3])
def test_every_method_trains_to_the_weights_of_one_process(network, start, tmp_path, count):
    hosts = network(count)
    all_well(start(hosts, "every method", tmp_path))
    expected = host_jobs.every_method()
    for rank in range(count):
        found = torch.load(tmp_path / str(rank))
        assert found.keys() == expected.keys()
        for method, outcome in expected.items():
            assert differences(outcome, found[method]) == [], f"rank {rank}, {method}"


def test_a_link_that_lets_little_through_changes_nothing(network, start, tmp_path):
    """Exact and rounded messages give the weights of one process, no faster than the link allows."""
    if (reason := missing(limited=True)) is not None:
        pytest.skip(reason)
    hosts = network(2)
    for host in hosts:
        try:
            host.limit(host_jobs.MEGABITS)
        except OSError as error:
            pytest.skip(f"links cannot be limited here: {error}")
    all_well(start(hosts, "slow link", tmp_path))
    expected = host_jobs.over_a_slow_link()
    for rank in range(2):
        found = torch.load(tmp_path / str(rank))
        for messages, outcome in expected.items():
            same = {key: outcome[key] for key in ("steps", "state")}
            assert differences(same, found[messages]) == [], f"rank {rank}, {messages}"
            least = found[messages]["sent"][rank] / (host_jobs.MEGABITS * 1e6 / 8)
            assert found[messages]["seconds"] > 0.8 * least
        assert found["int8"]["sent"][rank] < found["exact"]["sent"][rank] / 3


def test_a_rank_that_dies_is_started_anew_with_those_of_the_other_hosts(network, start, tmp_path):
    """And all go on from the last checkpoint, to the weights of a run that nothing has disturbed."""
    hosts = network(2)
    all_well(start(hosts, "session", tmp_path, restarts=len(host_jobs.KILLS)))
    expected = session(host_jobs.METHOD, None, [])
    for rank in range(2):
        assert differences(expected, torch.load(tmp_path / str(rank))) == []


@pytest.mark.parametrize("lost", [0, 1], ids=["the host of the store", "another host"])
@pytest.mark.parametrize("how", ["cut", "kill"])
def test_the_loss_of_a_host_ends_the_run_on_all_others(network, start, tmp_path, how, lost):
    hosts = network(2)
    programs = start(hosts, "train", tmp_path)
    wait_until(lambda: all((tmp_path / f"pid{h.number}").exists() for h in hosts), PATIENCE, "training does not begin")
    began = time.monotonic()
    getattr(hosts[lost], how)()
    # Whoever is cut off lives on and has lost the other one.
    survivors = hosts if how == "cut" else [host for host in hosts if host.number != lost]
    reports = {host.number: tmp_path / f"error{host.number}" for host in survivors}
    wait_until(lambda: all(report.exists() for report in reports.values()), LIMIT + BOUND, "a host does not notice")
    for number, report in reports.items():
        assert report.read_text().startswith(f"PeerLost: rank {1 - number} (")
    wait_until(lambda: not any(host.pids() for host in survivors), ENDING, "programs do not end")
    assert time.monotonic() - began < LIMIT + BOUND + ENDING
    assert all(programs[host.number].wait() != 0 for host in survivors)
