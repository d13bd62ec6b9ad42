"""Hosts made of network namespaces, each with one cable to a switch; what they send can be limited.

Whoever makes them removes them, and nothing else on the machine is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenhouse import Adopted, Greenhouse

_PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_IP = [shutil.which("ip", path=_PLACES) or "ip"]
_TC = [shutil.which("tc", path=_PLACES) or "tc"]


def ip(*arguments: str) -> str:
    return _run(*_IP, *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """A network namespace with an address, and what runs there."""

    def __init__(self, name: str, number: int, switch: str) -> None:
        self.name, self.number, self._switch = name, number, switch
        self.address = f"10.10.10.{number + 1}"
        self._port = f"port{number}"
        self._programs: list[subprocess.Popen[bytes] | Adopted] = []

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

    def limit(self, megabits: float | None) -> None:
        """Let no more than so many megabits per second leave the host: a token bucket. `None` takes the limit away."""
        if megabits is None:
            # There is none to begin with.
            subprocess.run([*_TC, "-n", self.name, "qdisc", "delete", "dev", "eth0", "root"], capture_output=True)
            return
        # As much as goes through in 1 ms may come at once; what waits longer than 100 ms is dropped, as routers do.
        burst = max(32_000, int(megabits * 1e6 / 8 * 0.001))
        bucket = ["rate", f"{megabits}mbit", "burst", f"{burst}", "latency", "100ms"]
        _run(*_TC, "-n", self.name, "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket)

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        """Run a program there; `options` are those of `Popen`."""
        found = subprocess.Popen([*_IP, "netns", "exec", self.name, *command], env=_own(environment), **options)
        self._programs.append(found)
        return found

    def start_from(
        self, greenhouse: Greenhouse, arguments: Sequence[str], environment: Mapping[str, str], output: int
    ) -> Adopted:
        """Run a program of Python there that has imported already."""
        found = greenhouse.program(arguments, _own(environment), output, output, network=self.name)
        self._programs.append(found)
        return found

    def end(self) -> None:
        """End everything there, and wait for what was started."""
        self.kill()
        for program in self._programs:
            program.wait()


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", **environment}


def missing(*, limited: bool = False) -> str | None:
    """Why hosts cannot be made here as far as commands go; for `limited` ones too."""
    for command in ("ip", "tc") if limited else ("ip",):
        if shutil.which(command, path=_PLACES) is None:
            return f"no `{command}` command (Debian has it in iproute2): network namespaces cannot be made"
    return None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Makes hosts; ends what still runs there and removes them afterwards. `OSError` where that is not allowed."""
    prefix = f"unlatch-{os.getpid()}"
    switch = f"{prefix}-switch"
    with ExitStack() as stack:

        def namespace(name: str) -> None:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)

        namespace(switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        found = []
        for number in range(count):
            host = Host(f"{prefix}-host{number}", number, switch)
            namespace(host.name)
            host.connect()
            stack.callback(host.end)
            found.append(host)
        yield found
