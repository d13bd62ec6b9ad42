"""Before anything is done together: do all ranks mean the same run?"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..methods import Method
from ..nn.chain import Model, as_module
from ..transport.world import World

__all__ = ["shake_hands"]


def shake_hands(world: World, method: Method, asked: dict[str, Any], model: Model) -> None:
    """All ranks must mean the same run; the difference is named before anything is done together."""
    if world.group is None:
        return
    # Functions in a method are shown with their address, which is another one in each process.
    named = re.sub(r" at 0x[0-9a-f]+", "", repr(method))
    facts = {**asked, "method": named, "torch": torch.__version__, "initial weights": _fingerprint(model)}
    for rank, others in enumerate(world.gather(facts)):
        for what, mine in facts.items():
            if others[what] != mine:
                raise ConfigError(
                    f"ranks {world.rank} and {rank} disagree on {what}: {mine} here, {others[what]} there. Run the "
                    "same program everywhere and build the model from one seed (torch.manual_seed) on every rank."
                )


def _fingerprint(model: Model) -> str:
    digest = hashlib.sha256()
    for name, t in as_module(model).state_dict().items():
        digest.update(name.encode())
        if isinstance(t, Tensor):
            digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
