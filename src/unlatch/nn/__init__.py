"""What training by stages needs from a network: blocks, trees of tensors, replayable randomness, split backward."""

from __future__ import annotations

from .chain import Block, Model, StageChain, aliases, as_module, chain, cut, stage_of_blocks, stage_starts, state_names
from .chain_check import check_chain
from .randomness import mixed_seed, replayable
from .statistics import frozen_statistics
from .tree import Structure, Tree, batch_size, flatten, map_tensors, split_batch, tree_bytes, unflatten

__all__ = [
    "Block",
    "Model",
    "StageChain",
    "Structure",
    "Tree",
    "aliases",
    "as_module",
    "batch_size",
    "chain",
    "check_chain",
    "cut",
    "flatten",
    "frozen_statistics",
    "map_tensors",
    "mixed_seed",
    "replayable",
    "split_batch",
    "stage_of_blocks",
    "stage_starts",
    "state_names",
    "tree_bytes",
    "unflatten",
]
