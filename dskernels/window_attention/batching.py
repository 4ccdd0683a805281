"""`torch.vmap` of window attention: the mapped dimension joins the batch, in one call of the operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dskernels._autograd import one_by_one

# What all of a batch share. Where the mapped dimension is in one of them, nothing can be joined.
_SHARED = ("cos", "sin", "sink")
# What the kernels read without strides.
_DENSE = ("lse", "positions", "cache_lengths")


def fold_into_batch(
    operator: torch._ops.OpOverload, info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The vmap rule of all operators but the packed ones, for tensors ``[B, ...]`` with a mapped dimension."""
    names = [argument.name for argument in operator._schema.arguments]
    if any(dim is not None for name, dim in zip(names, in_dims, strict=True) if name in _SHARED):
        return one_by_one(operator, info, in_dims, *arguments)

    def mapped(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    def folded(name: str, x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor) or name in _SHARED:
            return x
        x = mapped(x, dim).flatten(0, 1)
        return x.contiguous() if name in _DENSE else x

    results = operator(*(folded(*each) for each in zip(names, arguments, in_dims, strict=True)))
    sizes = mapped(arguments[0], in_dims[0]).shape[:2]
    # The gradient of a bias that needs none has no batch.
    dims = [0 if result.dim() > 1 else None for result in results]
    unfolded = (r if dim is None else r.unflatten(0, sizes) for r, dim in zip(results, dims, strict=True))
    return tuple(unfolded), tuple(dims)
