"""Window attention computed in other ways than the package computes it, to compare with.

`exact` visits the queries one by one in float64 and slices out the keys that each one sees, so nothing is masked;
it rotates by multiplying complex numbers with phases in float64. `plain` is what a careful user writes in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import dskernels as dk
from dskernels.testing import assert_close_to_reference


class Rope(NamedTuple):
    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class Options:
    window: tuple[int | None, int | None] = (None, None)
    rope: Rope | None = None
    scale: float | None = None
    query_offset: int | None = None

    def offset(self, q: Tensor, k: Tensor) -> int:
        return k.shape[2] - q.shape[2] if self.query_offset is None else self.query_offset

    def factor(self, q: Tensor) -> float:
        return q.shape[3] ** -0.5 if self.scale is None else self.scale


def op(q: Tensor, k: Tensor, v: Tensor, options: Options, backend: str) -> tuple[Tensor, Tensor]:
    table = None
    if options.rope is not None:
        rows = max(k.shape[2], q.shape[2] + options.offset(q, k))
        theta, rotary_dim, interleaved = options.rope
        table = dk.rope_table(q.shape[3], rows, theta=theta, rotary_dim=rotary_dim, interleaved=interleaved)
    return dk.window_attention(
        q,
        k,
        v,
        window=options.window,
        rope=table,
        scale=options.scale,
        query_offset=options.query_offset,
        return_lse=True,
        backend=backend,
    )


def rotated(x: Tensor, first_position: int, rope: Rope | None) -> Tensor:
    """``x`` in float64, its pairs turned as complex numbers."""
    x = x.double()
    if rope is None:
        return x
    width = x.shape[3] if rope.rotary_dim is None else rope.rotary_dim
    positions = torch.arange(first_position, first_position + x.shape[2], dtype=torch.float64)
    frequencies = torch.tensor([rope.theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    phases = torch.polar(torch.ones(()).double(), positions[:, None] * frequencies)
    head, tail = x[..., :width], x[..., width:]
    pairs = head.unflatten(-1, (width // 2, 2)) if rope.interleaved else head.unflatten(-1, (2, width // 2)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * phases)
    return torch.cat((turned.flatten(-2) if rope.interleaved else turned.mT.flatten(-2), tail), -1)


def exact(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` in float64."""
    left, right = options.window
    offset, group = options.offset(q, k), q.shape[1] // k.shape[1]
    queries, keys = rotated(q, offset, options.rope), rotated(k, 0, options.rope)
    keys, values = keys.repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    outs, lses = [], []
    for i in range(q.shape[2]):
        low = 0 if left is None else max(0, i + offset - left)
        high = k.shape[2] if right is None else min(k.shape[2], i + offset + right + 1)
        if low >= high:
            outs.append(q.new_zeros(*q.shape[:2], v.shape[3]).double())
            lses.append(q.new_full(q.shape[:2], -torch.inf).double())
            continue
        scores = options.factor(q) * torch.einsum("bhd,bhjd->bhj", queries[:, :, i], keys[:, :, low:high])
        outs.append(torch.einsum("bhj,bhje->bhe", scores.softmax(-1), values[:, :, low:high]))
        lses.append(scores.logsumexp(-1))
    if not outs:
        return q.new_zeros(*q.shape[:3], v.shape[3]).double(), q.new_zeros(q.shape[:3]).double()
    return torch.stack(outs, 2), torch.stack(lses, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Products in the dtype of the inputs, rotation, softmax and ``lse`` in float32 or wider, and a dense mask."""
    wide = torch.promote_types(q.dtype, torch.float32)
    left, right = options.window
    offset, group = options.offset(q, k), q.shape[1] // k.shape[1]
    q_wide, k_wide = (_turned(x.to(wide), first, options.rope) for x, first in ((q, offset), (k, 0)))
    k_wide, v = k_wide.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    distance = torch.arange(k.shape[2]) - torch.arange(offset, offset + q.shape[2])[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    blind = hidden.all(1)[:, None]

    def softmax_inputs(queries: Tensor, keys: Tensor) -> Tensor:
        return (queries @ keys.mT * options.factor(q)).to(wide).masked_fill(hidden & ~blind, -torch.inf)

    probabilities = softmax_inputs(q_wide.to(q.dtype), k_wide.to(q.dtype)).softmax(-1).to(q.dtype)
    out = (probabilities @ v).masked_fill(blind, 0)
    return out, softmax_inputs(q_wide, k_wide).logsumexp(-1).masked_fill(blind[:, 0], -torch.inf)


def _turned(x: Tensor, first_position: int, rope: Rope | None) -> Tensor:
    if rope is None:
        return x
    width = x.shape[3] if rope.rotary_dim is None else rope.rotary_dim
    angles = torch.arange(first_position, first_position + x.shape[2]).double()[:, None] * (
        rope.theta ** (-torch.arange(0, width, 2).double() / width)
    )
    cos, sin = angles.cos().float(), angles.sin().float()
    first = slice(0, width, 2) if rope.interleaved else slice(0, width // 2)
    second = slice(1, width, 2) if rope.interleaved else slice(width // 2, width)
    turned = x.clone()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v")


def with_gradients(compute, inputs: list[Tensor], grads: list[Tensor], options: Options, *extra) -> list[Tensor]:
    """Outputs of ``compute`` and the gradients of its inputs for the output gradients ``grads``."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = compute(*leaves, options, *extra)
    pairs = [(out, g.to(out.dtype)) for out, g in zip(outputs, grads, strict=True) if out.requires_grad]
    if not pairs:
        return [*outputs, *(torch.zeros_like(x) for x in leaves)]
    used, given = zip(*pairs, strict=True)
    return [*outputs, *torch.autograd.grad(used, leaves, given, allow_unused=True, materialize_grads=True)]


def expected(inputs: list[Tensor], grads: list[Tensor], options: Options) -> tuple[list[Tensor], list[Tensor]]:
    """The exact and the plain results."""
    wide = [x.detach().double() for x in inputs]
    threads = torch.get_num_threads()
    # Thousands of small operations: waking a second thread for each costs more than it brings.
    torch.set_num_threads(1)
    try:
        return with_gradients(exact, wide, grads, options), with_gradients(plain, inputs, grads, options)
    finally:
        torch.set_num_threads(threads)


def check(inputs: list[Tensor], grads: list[Tensor], options: Options, backend: str, known=None) -> None:
    """Asserts that outputs and gradients of the op are as near to float64 as the tolerance table allows."""
    exact_results, plain_results = known or expected(inputs, grads, options)
    results = with_gradients(op, inputs, grads, options, backend)
    for name, result, right, usual in zip(NAMES, results, exact_results, plain_results, strict=True):
        assert_close_to_reference(result, right, usual, name)
