"""Methods in which no gradient crosses a border: every stage starts its backward from something it has itself.

`greedy` has the methods DGL and DNI and their schedules (read it first), `stations` what a stage does under them,
`networks` builds what stages are given beside their layers, `loss` checks the loss, `statistics` has what is measured.
AuxNet builds on all but `greedy`'s schedules.
"""

from .greedy import DGL, DNI, Local, OptimizerFactory

__all__ = ["DGL", "DNI", "Local", "OptimizerFactory"]
