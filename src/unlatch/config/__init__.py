"""Settings from a TOML file, mirroring the arguments of `parallelize` one to one.

`sections` says what can be set, `load` reads it (`unlatch.problems` has the words), `lr` and `optimizer`
turn text into factories that travel to other processes.
"""

from .load import Judge, from_mapping, load, values_of
from .lr import LRCurve, LRFactory
from .optimizer import OptimizerFactory
from .sections import Config, Data, LRSettings, Method, Model, OptimizerSettings, RunSettings

__all__ = [
    "Config",
    "Data",
    "Judge",
    "LRCurve",
    "LRFactory",
    "LRSettings",
    "Method",
    "Model",
    "OptimizerFactory",
    "OptimizerSettings",
    "RunSettings",
    "from_mapping",
    "load",
    "values_of",
]
