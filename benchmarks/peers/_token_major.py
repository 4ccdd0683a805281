"""For kernels of FlashAttention's family: tensors ``[B, N, H, D]`` or packed ``[T, H, D]``, rotated before the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.case import Prepared
from benchmarks.peers._rope import rotation
from benchmarks.peers._trials import fastest
from dskernels import RopeTable

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def takes_half_only(dtype: str) -> str | None:
    """The reason why kernels without a float32 form cannot take a problem, or None."""
    return "takes float16 and bfloat16 only" if dtype == "fp32" else None


def prepare(inputs: Inputs, attend: Attend) -> Prepared:
    """A batch ``[B, H, N, D]``, laid out as ``attend`` likes it outside the timing; its results are laid out back."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs[:3])
    grad_out = None if inputs.grad_out is None else inputs.grad_out.transpose(1, 2).contiguous()
    mine = inputs._replace(q=q, k=k, v=v, grad_out=grad_out)
    prepared = prepare_packed(mine, torch.arange(inputs.q.shape[2], device=inputs.q.device), attend)
    return Prepared(prepared.run, prepared.notes, lambda results: [result.transpose(1, 2) for result in results])


def prepare_packed(inputs: Inputs, positions: Tensor, attend: Attend) -> Prepared:
    """Token-major inputs whose tokens stand at ``positions``; the rotation is eager or compiled, what is faster."""
    rows = RopeTable(inputs.rope.cos[positions][:, None], inputs.rope.sin[positions][:, None])
    rotate = rotation(rows, inputs.q.dtype)
    torch._dynamo.reset()
    forms = {"eager": rotate, "compiled": torch.compile(rotate, fullgraph=True, dynamic=False)}
    runs = {name: inputs.step(_rotated(form, attend)) for name, form in forms.items()}
    best = fastest(runs)
    return Prepared(runs[best], {"rope": best, "ropes_tried": list(forms)})


def offsets_of(lengths: Sequence[int], device: str) -> Tensor:
    """Where each sequence begins, and where the last one ends, int32."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def positions_of(lengths: Sequence[int], device: str) -> Tensor:
    """Of every token in its sequence."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def _rotated(rotate: Callable[[Tensor], Tensor], attend: Attend) -> Attend:
    return lambda q, k, v: attend(rotate(q), rotate(k), v)
