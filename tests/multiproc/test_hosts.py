"""torchrun over hosts, each a network namespace with one cable to a switch: same weights, and the loss of one ends all.

The namespaces belong to the test, which makes and removes them, and nothing else on the machine is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import host_jobs
import unlatch
from fault_jobs import LIMIT
from rank_jobs import differences
from restart_jobs import session

SUPPORT = Path(host_jobs.__file__).parent
SOURCE = Path(unlatch.__file__).parents[1]
IP = shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
PORT = 29500
#: Seconds for what a quiet machine does in a few.
PATIENCE = 240.0
#: Seconds in which every host has named what was lost, after the limit, on a busy machine.
BOUND = 10.0
#: Seconds for a program that has failed, and for torchrun above it, to end.
ENDING = 60.0


def ip(*arguments: str) -> str:
    assert IP is not None
    done = subprocess.run([IP, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """A network namespace with an address, and what runs there."""

    def __init__(self, name: str, number: int, switch: str) -> None:
        self.name, self.number, self._switch = name, number, switch
        self.address = f"10.10.10.{number + 1}"
        self._port = f"port{number}"
        self._agent: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        ip("link", "add", "eth0", "netns", self.name, "type", "veth", "peer", "name", self._port, "netns", self._switch)
        ip("-n", self._switch, "link", "set", self._port, "master", "bridge", "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self._switch, "link", "set", self._port, "down")

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """End everything there at once."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def torchrun(self, hosts: int, leader: str, what: str, folder: Path, restarts: int) -> None:
        assert IP is not None
        command = [IP, "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nnodes={hosts}", f"--node-rank={self.number}", "--nproc-per-node=1"]
        command += [f"--master-addr={leader}", f"--master-port={PORT}", f"--max-restarts={restarts}"]
        command += [str(SUPPORT / "host_jobs.py"), what, str(folder)]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{SOURCE}{os.pathsep}{SUPPORT}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        with (folder / f"output{self.number}").open("wb") as output:
            self._agent = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def wait(self) -> int:
        """The exit code of torchrun."""
        assert self._agent is not None
        return self._agent.wait(PATIENCE)

    def end(self) -> None:
        self.kill()
        if self._agent is not None:
            self._agent.wait()


Network = Callable[[int], list[Host]]


@pytest.fixture
def network() -> Iterator[Network]:
    """Makes hosts; ends what still runs there and removes them afterwards."""
    if IP is None:
        pytest.skip("no `ip` command: network namespaces cannot be made")
    with ExitStack() as stack:

        def namespace(name: str) -> None:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)

        def build(count: int) -> list[Host]:
            prefix = f"unlatch-{os.getpid()}"
            switch = f"{prefix}-switch"
            try:
                namespace(switch)
                ip("-n", switch, "link", "add", "bridge", "type", "bridge")
                ip("-n", switch, "link", "set", "bridge", "up")
                hosts = []
                for number in range(count):
                    host = Host(f"{prefix}-host{number}", number, switch)
                    namespace(host.name)
                    host.connect()
                    stack.callback(host.end)
                    hosts.append(host)
            except OSError as error:
                pytest.skip(f"network namespaces are not allowed here: {error}")
            return hosts

        yield build


def start(hosts: list[Host], what: str, folder: Path, restarts: int = 0) -> None:
    for host in hosts:
        host.torchrun(len(hosts), hosts[0].address, what, folder, restarts)


def wait_until(done: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


@pytest.mark.parametrize("count", [2, 3])
def test_every_method_trains_to_the_weights_of_one_process(network, tmp_path, count):
    hosts = network(count)
    start(hosts, "every method", tmp_path)
    for host in hosts:
        assert host.wait() == 0, (tmp_path / f"output{host.number}").read_text()
    expected = host_jobs.every_method()
    for rank in range(count):
        found = torch.load(tmp_path / str(rank))
        assert found.keys() == expected.keys()
        for method, outcome in expected.items():
            assert differences(outcome, found[method]) == [], f"rank {rank}, {method}"


def test_a_rank_that_dies_is_started_anew_with_those_of_the_other_hosts(network, tmp_path):
    """And all go on from the last checkpoint, to the weights of a run that nothing has disturbed."""
    hosts = network(2)
    start(hosts, "session", tmp_path, restarts=len(host_jobs.KILLS))
    for host in hosts:
        assert host.wait() == 0, (tmp_path / f"output{host.number}").read_text()
    expected = session(host_jobs.METHOD, None, [])
    for rank in range(2):
        assert differences(expected, torch.load(tmp_path / str(rank))) == []


@pytest.mark.parametrize("lost", [0, 1], ids=["the host of the store", "another host"])
@pytest.mark.parametrize("how", ["cut", "kill"])
def test_the_loss_of_a_host_ends_the_run_on_all_others(network, tmp_path, how, lost):
    hosts = network(2)
    start(hosts, "train", tmp_path)
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
    assert all(host.wait() != 0 for host in survivors)
