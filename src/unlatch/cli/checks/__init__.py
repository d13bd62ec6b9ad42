"""What `unlatch check` looks at: each check answers in plain words whether a promise holds for the user's own model.

`findings_about` makes all of them, in the order in which one makes sense after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...config import Config
from ...errors import PlanError
from ...transport.launch import Ranks
from ..prepare import prepare
from .device import device_found, past_the_host, speed, transfer
from .environment import loopback, machine
from .equality import one_stage, two_processes
from .finding import Finding, Verdict, find_out
from .gradients import exact_method, standing_still
from .soundness import inverses, sound_chain
from .trajectory import definition
from .trial import Trial

__all__ = ["Finding", "Verdict", "findings_about"]


def findings_about(config: Config, *, on_device: bool = False) -> Iterator[Finding]:
    """What holds on this machine, for the model and the method that the settings name.

    **Arguments:** `on_device`: look at the device as well, and at how fast it trains.
    """
    yield find_out("machine", machine)
    if on_device:
        yield find_out("device", partial(device_found, config))
        yield find_out("transfer", partial(transfer, config))
    try:
        trial = Trial.of(prepare(config))
    except PlanError as error:
        yield Finding("chain", "differs", str(error))
        return
    yield find_out("chain", partial(sound_chain, trial))
    yield find_out("one stage", partial(one_stage, trial))
    yield find_out("zero learning rate", partial(standing_still, trial))
    yield find_out("exact gradient", partial(exact_method, trial))
    yield find_out("definition", partial(definition, trial))
    yield find_out("inverses", partial(inverses, trial))
    with Ranks(2, threads=config.run.threads) as ranks:
        reached = find_out("loopback", partial(loopback, ranks))
        yield reached
        if reached.verdict == "ok":
            yield find_out("two processes", partial(two_processes, trial, ranks))
            if on_device:
                yield find_out("nccl", partial(past_the_host, trial, ranks))
                yield find_out("speed", partial(speed, trial, ranks))
