"""Auxiliary variables: every stage starts at once, from a predicted input (AuxNet, AuxVar, SPH).

`schedule` says what happens in which order, with a drawing; read it first. `border` has what the methods share,
`auxnet` and `auxvar` the methods, `station` what a stage does, `sources` and `tables` where predicted inputs come from,
`mismatch` the penalty and its gradients, `records` and `probe` what is measured.
"""

from .auxnet import AuxNet
from .auxvar import SPH, AuxVar
from .border import BorderMethod

__all__ = ["SPH", "AuxNet", "AuxVar", "BorderMethod"]
