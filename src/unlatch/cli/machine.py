"""Flags that describe the devices and links of a simulated machine."""

from __future__ import annotations

import math
from pathlib import Path

from ..errors import ConfigError
from ..plan.layer_costs import LARGEST, SMALLEST
from ..schedule.channel import Channel
from ..schedule.machine import Machine

__all__ = ["MOST_DEVICES", "check_devices", "machine_of", "writable"]

#: Beyond it a plan is a list of idle devices that no memory holds.
MOST_DEVICES = 100_000


def machine_of(
    bandwidth: float, latency: float, *, overlapped: bool = True, jitter: float = 0.0, seed: int = 0
) -> Machine:
    """The machine that flags ask for.

    >>> machine_of(100.0, 0.5).channel.time(50)
    1.0
    """
    if not (SMALLEST <= bandwidth <= LARGEST or bandwidth == math.inf):
        raise ConfigError(
            f"--bandwidth is in bytes per unit of time, from {SMALLEST:g} to {LARGEST:g} or inf, got {bandwidth}"
        )
    if not (latency == 0 or SMALLEST <= latency <= LARGEST):
        raise ConfigError(f"--latency is a time, 0 or from {SMALLEST:g} to {LARGEST:g}, got {latency}")
    if not 0 <= jitter <= 10:
        raise ConfigError(f"--jitter is a relative standard deviation from 0 to 10, got {jitter}")
    return Machine(Channel(bandwidth, latency, overlapped), jitter=jitter, seed=seed)


def check_devices(count: int) -> int:
    """The number of devices if there can be so many.

    >>> check_devices(4)
    4
    """
    if count > MOST_DEVICES:
        raise ConfigError(f"--processors goes up to {MOST_DEVICES:,}, got {count}")
    return count


def writable(path: Path | None, flag: str, endings: tuple[str, ...] = ()) -> None:
    """Refuse, before any work is done, a path that cannot be written or a picture of unknown form.

    >>> writable(Path("absent/plan.json"), "--out")
    Traceback (most recent call last):
        ...
    unlatch.errors.ConfigError: --out absent/plan.json: there is no folder absent
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{flag} {path}: expected a name that ends in {' or '.join(endings)}")
