"""The methods of the library, by class or by name.

>>> from unlatch import methods
>>> methods.get("dtrp") == methods.DTRP()
True
"""

from .auxnet import AuxNet
from .auxvar import SPH, AuxVar
from .backward_unlocked import DDG, FR
from .base import BASELINE, ClosedForm, Delayed, GradientKind, Method, get, names, register
from .compose import Compose
from .dtrp import DSP, DTR, DTRP
from .fdg import ADL, FDG
from .layerpipe import LayerPipe
from .local import DGL, DNI, Local
from .petra import PETRA, buffer_settings
from .petra_sgd import PetraSGD
from .pipedream import PipeDream, PipeDream2BW
from .synchronous import BP, ZBH1, ZBH2, GPipe, OneFOneB

__all__ = [
    "ADL",
    "BASELINE",
    "BP",
    "DDG",
    "DGL",
    "DNI",
    "DSP",
    "DTR",
    "DTRP",
    "FDG",
    "FR",
    "PETRA",
    "SPH",
    "ZBH1",
    "ZBH2",
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
    "buffer_settings",
    "get",
    "names",
    "register",
]
