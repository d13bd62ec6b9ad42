"""The methods of the library, by class or by name.

>>> from unlatch import methods
>>> methods.get("dtrp") == methods.DTRP()
True
"""

from .backward_unlocked import DDG, FR
from .base import Delayed, Method, get, names, register
from .compose import Compose
from .dtrp import DSP, DTR, DTRP
from .fdg import ADL, FDG
from .petra import PETRA, buffer_settings
from .pipedream import PipeDream, PipeDream2BW
from .synchronous import BP, ZBH1, ZBH2, GPipe, OneFOneB

__all__ = [
    "ADL",
    "BP",
    "DDG",
    "DSP",
    "DTR",
    "DTRP",
    "FDG",
    "FR",
    "PETRA",
    "ZBH1",
    "ZBH2",
    "Compose",
    "Delayed",
    "GPipe",
    "Method",
    "OneFOneB",
    "PipeDream",
    "PipeDream2BW",
    "buffer_settings",
    "get",
    "names",
    "register",
]
