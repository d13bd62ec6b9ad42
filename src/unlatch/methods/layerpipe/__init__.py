"""LayerPipe: the tasks of every layer placed on devices so that all are equally busy.

`layerpipe` has the method, `entries` its order of work with a drawing (read it first; which task needs what is said by
`plan.dataflow`), `workload` what it costs, `station` does the work with the `layers`, `planning`
decides where tasks go for a model.
"""

from .layerpipe import LayerPipe

__all__ = ["LayerPipe"]
