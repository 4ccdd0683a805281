"""Activation checkpointing: what forward keeps for backward, what it drops, moves, and how much that is."""

from dsaccel.checkpoint.blocks import CheckpointedBlocks, checkpoint_blocks
from dsaccel.checkpoint.estimator import CostEstimate, PolicyCost, estimate
from dsaccel.checkpoint.memory import MemoryReport, memory_report
from dsaccel.checkpoint.offload import offload_activations
from dsaccel.checkpoint.policy import BlockPolicy

__all__ = [
    "BlockPolicy",
    "CheckpointedBlocks",
    "CostEstimate",
    "MemoryReport",
    "PolicyCost",
    "checkpoint_blocks",
    "estimate",
    "memory_report",
    "offload_activations",
]
