"""Training over several processes: one plan, made into PyTorch's own parallelism."""

from dsaccel.parallel.context import (
    context_parallel,
    exchange_halo,
    gather_sequence,
    shard_sequence,
    window_attention_context,
)
from dsaccel.parallel.costs import (
    halo_bytes,
    pipeline_bubble,
    pipeline_bytes,
    replica_bytes,
    sharded_bytes,
    state_bytes,
    tensor_bytes,
)
from dsaccel.parallel.data import data_parallel, sharded_optimizer, sharding_units
from dsaccel.parallel.gradients import clip_grad_norm_, total_grad_norm
from dsaccel.parallel.mesh import make_mesh, read_cluster
from dsaccel.parallel.parallelize import ParallelModel, parallelize
from dsaccel.parallel.pipeline import Pipeline
from dsaccel.parallel.pipeline_split import LanguageModelStage, layers_per_stage, split_stages, stage_indices
from dsaccel.parallel.plan import ParallelPlan
from dsaccel.parallel.state import load_state, save_state
from dsaccel.parallel.tensor import canonical_layout, tensor_parallel
from dsaccel.parallel.topology import Place, crossings, mesh_order

__all__ = [
    "LanguageModelStage",
    "ParallelModel",
    "ParallelPlan",
    "Pipeline",
    "Place",
    "canonical_layout",
    "clip_grad_norm_",
    "context_parallel",
    "crossings",
    "data_parallel",
    "exchange_halo",
    "gather_sequence",
    "halo_bytes",
    "layers_per_stage",
    "load_state",
    "make_mesh",
    "mesh_order",
    "parallelize",
    "pipeline_bubble",
    "pipeline_bytes",
    "read_cluster",
    "replica_bytes",
    "save_state",
    "shard_sequence",
    "sharded_bytes",
    "sharded_optimizer",
    "sharding_units",
    "split_stages",
    "stage_indices",
    "state_bytes",
    "tensor_bytes",
    "tensor_parallel",
    "total_grad_norm",
    "window_attention_context",
]
