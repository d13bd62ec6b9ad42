"""What training by stages needs from a network.

`chain` makes blocks of a model (read it first) and `chain_check` checks them, `tree` handles what passes between them,
`carry` what passes by some of them, `parts` takes blocks apart. `foreign` and the files `huggingface` know models that
were written elsewhere. `randomness` and `statistics` make passes replay, `split_backward` divides a backward.
`coupling`, `reversible` and `inversion` are reversible blocks; `auxiliary`, `heads`, `rescaled` networks beside the
stages. Exports are public.
"""

from __future__ import annotations

from .apply import Apply
from .carry import Add, Recall, Remember
from .chain import Block, Model, StageChain, aliases, as_module, chain, cut, stage_of_blocks, stage_starts, state_names
from .chain_check import Tie, check_chain, ties
from .parts import Divisible, in_parts
from .randomness import mixed_seed, replayable
from .reversible import (
    Coupling,
    Merge,
    Permutation,
    RevBlock,
    ReversibleChain,
    Segment,
    SpaceToDepth,
    Split,
    Streams,
    check_inverse,
    check_reversible,
    invert,
    invert_and_differentiate,
    is_reversible,
    reversible,
    segments,
)
from .split_backward import Pending, input_gradients
from .statistics import frozen_statistics
from .tree import Structure, Tree, batch_size, flatten, map_tensors, split_batch, tree_bytes, unflatten

__all__ = [
    "Add",
    "Apply",
    "Block",
    "Coupling",
    "Divisible",
    "Merge",
    "Model",
    "Pending",
    "Permutation",
    "Recall",
    "Remember",
    "RevBlock",
    "ReversibleChain",
    "Segment",
    "SpaceToDepth",
    "Split",
    "StageChain",
    "Streams",
    "Structure",
    "Tie",
    "Tree",
    "aliases",
    "as_module",
    "batch_size",
    "chain",
    "check_chain",
    "check_inverse",
    "check_reversible",
    "cut",
    "flatten",
    "frozen_statistics",
    "in_parts",
    "input_gradients",
    "invert",
    "invert_and_differentiate",
    "is_reversible",
    "map_tensors",
    "mixed_seed",
    "replayable",
    "reversible",
    "segments",
    "split_batch",
    "stage_of_blocks",
    "stage_starts",
    "state_names",
    "ties",
    "tree_bytes",
    "unflatten",
]
