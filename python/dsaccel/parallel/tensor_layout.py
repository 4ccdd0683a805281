"""In which order the rows of a fused qkv projection lie: as a model is saved, or as tensor parallelism splits them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dsaccel.modules import WindowAttention

Order = Callable[[Tensor], Tensor]


def rows_by_rank(x: Tensor, rows: tuple[int, int, int], ranks: int) -> Tensor:
    """``[q | k | v]`` along the first dimension as ``[q_0 | k_0 | v_0 | q_1 | k_1 | v_1 | ...]``.

    Equal slices of the result are then what each rank computes: its heads' queries, keys and values.

    Args:
        x: shape ``[sum(rows), ...]``: a weight or bias, its gradient or a moment of it.
        rows: of q, of k and of v, multiples of ``ranks``.
        ranks: number of slices.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
    section 2.3 (attention split by heads).
    """
    parts = [part.chunk(ranks) for part in x.split(rows)]
    return torch.cat([piece for rank in zip(*parts, strict=True) for piece in rank])


def rows_by_kind(x: Tensor, rows: tuple[int, int, int], ranks: int) -> Tensor:
    """The inverse of `rows_by_rank`: ``[q_0 | k_0 | v_0 | q_1 | ...]`` as ``[q | k | v]``; arguments as there."""
    slices = [part.split([count // ranks for count in rows]) for part in x.chunk(ranks)]
    return torch.cat([piece for kind in zip(*slices, strict=True) for piece in kind])


def canonical_layout(model: nn.Module) -> dict[str, tuple[Order, Order]]:
    """The parameters whose rows `tensor_parallel` has put into another order, and how to change it back and forth.

    ``{name: (to_canonical, from_canonical)}``, names as in ``model.named_parameters()``, one that is shared under each
    of its names. Both functions take a tensor of the parameter's whole shape (the parameter itself, its gradient, a
    moment of its optimizer) and return a new one with the rows ``[q | k | v]``, or as they lie in the parallel model:

    - a plain tensor, which holds all rows, gives a plain one;
    - a DTensor, also one that ``fully_shard`` has split further, gives one with the same mesh and placements. Its rows
      travel for that: every rank holds the whole tensor for a moment.

    A model that is not tensor parallel has none.
    """
    layout = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        ranks = getattr(module, "_tensor_parallel_ranks", 1)
        if isinstance(module, WindowAttention) and ranks > 1:
            rows = qkv_rows(module, ranks)
            for name, _ in module.qkv.named_parameters(prefix=f"{prefix}.qkv".lstrip(".")):
                layout[name] = (_order(rows_by_kind, rows, ranks), _order(rows_by_rank, rows, ranks))
    return layout


def qkv_rows(attention: WindowAttention, ranks: int) -> tuple[int, int, int]:
    """The rows of q, k and v over all of ``ranks``, of a module that has the heads of one."""
    queries, keys = (count * ranks * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads))
    return queries, keys, keys


def _order(function: Callable[..., Tensor], rows: tuple[int, int, int], ranks: int) -> Order:
    @torch.no_grad()
    def ordered(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return function(x, rows, ranks)
        mesh, whole = x.device_mesh, [Replicate()] * x.device_mesh.ndim
        local = function(x.redistribute(placements=whole).to_local(), rows, ranks)
        return DTensor.from_local(local, mesh, whole, run_check=False).redistribute(placements=x.placements)

    return ordered
