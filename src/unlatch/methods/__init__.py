"""The methods of the library, by class or by name.

`base` has what every method answers, with defaults, and the registry: read it first. One file per method; `local`,
`auxnet` and `layerpipe` are families with stations of their own. `options` checks options by their annotations,
`planner` and `costs` serve `unlatch plan` and `simulate`. Generic code imports only from here and from those four.

>>> from unlatch import methods
>>> methods.get("dtrp") == methods.DTRP()
True
"""

from .asyncpp import AsyncPP
from .auxnet import SPH, AuxNet, AuxVar
from .backward_unlocked import DDG, FR
from .base import BASELINE, ClosedForm, Delayed, GradientKind, Method, get, names, problems, register
from .cgad import CGAD
from .compose import Compose
from .dtrp import DSP, DTR, DTRP
from .fdg import ADL, FDG
from .layerpipe import LayerPipe
from .local import DGL, DNI, AugLocal, Local
from .paci import PACI
from .petra import PETRA, buffer_settings
from .petra_sgd import PetraSGD
from .pipedream import PipeDream, PipeDream2BW
from .synchronous import BP, ZBH1, ZBH2, GPipe, OneFOneB
from .xpipe import XPipe

__all__ = [
    "ADL",
    "BASELINE",
    "BP",
    "CGAD",
    "DDG",
    "DGL",
    "DNI",
    "DSP",
    "DTR",
    "DTRP",
    "FDG",
    "FR",
    "PACI",
    "PETRA",
    "SPH",
    "ZBH1",
    "ZBH2",
    "AsyncPP",
    "AugLocal",
    "AuxNet",
    "AuxVar",
    "ClosedForm",
    "Compose",
    "Delayed",
    "GPipe",
    "GradientKind",
    "LayerPipe",
    "Local",
    "Method",
    "OneFOneB",
    "PetraSGD",
    "PipeDream",
    "PipeDream2BW",
    "XPipe",
    "buffer_settings",
    "get",
    "names",
    "problems",
    "register",
]
