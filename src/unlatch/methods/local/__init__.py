"""Methods in which no gradient crosses a border: every stage starts its backward from something it has itself.

`greedy` has DGL, DNI and their schedules, with a drawing (read it first); `auglocal` is DGL with heads of
later layers. `stations` says what a stage does under them, `networks` builds what stages are given beside their layers,
`loss` checks the loss, `statistics` has what is measured. AuxNet builds on the last three.
"""

from .auglocal import AugLocal
from .greedy import DGL, DNI, Local, OptimizerFactory

__all__ = ["DGL", "DNI", "AugLocal", "Local", "OptimizerFactory"]
