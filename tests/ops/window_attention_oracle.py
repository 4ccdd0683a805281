"""Window attention computed in other ways than the package computes it, to compare with.

`exact` visits the queries one by one in float64 and slices out the keys that each one sees, so nothing is masked;
it rotates by multiplying complex numbers with phases in float64. `plain` is what a careful user writes in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    softcap: float | None = None
    positions: tuple[tuple[int, ...], ...] | None = None

    def offset(self, q: Tensor, k: Tensor) -> int:
        return k.shape[2] - q.shape[2] if self.query_offset is None else self.query_offset

    def factor(self, q: Tensor) -> float:
        return q.shape[3] ** -0.5 if self.scale is None else self.scale


def op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    backend: str,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    table, positions = None, None
    if options.positions is not None:
        positions = torch.tensor(options.positions, device=q.device)
    if options.rope is not None:
        rows = max(k.shape[2], q.shape[2] + options.offset(q, k))
        rows = rows if positions is None else int(positions.max()) + 1
        theta, rotary_dim, interleaved = options.rope
        table = dk.rope_table(q.shape[3], rows, theta=theta, rotary_dim=rotary_dim, interleaved=interleaved)
        table = table.to(q.device)
    return dk.window_attention(
        q,
        k,
        v,
        window=options.window,
        rope=table,
        positions=positions,
        bias=bias,
        sink=sink,
        softcap=options.softcap,
        scale=options.scale,
        query_offset=options.query_offset,
        return_lse=True,
        backend=backend,
    )


def places(x: Tensor, first: int, options: Options) -> Tensor:
    """The positions at which the tokens of ``x`` are rotated, as ``[B or 1, 1, N, 1]`` in float64."""
    if options.positions is None:
        return torch.arange(first, first + x.shape[2], dtype=torch.float64).view(1, 1, -1, 1)
    table = torch.tensor(options.positions, dtype=torch.float64)
    return table[:, None, first : first + x.shape[2], None]


def rotated(x: Tensor, first_position: int, rope: Rope | None, options: Options | None = None) -> Tensor:
    """``x`` in float64, its pairs turned as complex numbers."""
    x = x.double()
    if rope is None or x.numel() == 0:
        return x
    width = x.shape[3] if rope.rotary_dim is None else rope.rotary_dim
    positions = places(x, first_position, options or Options())
    frequencies = torch.tensor([rope.theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    phases = torch.polar(torch.ones(()).double(), positions * frequencies)
    head, tail = x[..., :width], x[..., width:]
    pairs = head.unflatten(-1, (width // 2, 2)) if rope.interleaved else head.unflatten(-1, (2, width // 2)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * phases)
    return torch.cat((turned.flatten(-2) if rope.interleaved else turned.mT.flatten(-2), tail), -1)


def exact(
    q: Tensor, k: Tensor, v: Tensor, options: Options, bias: Tensor | None = None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` in float64."""
    left, right = options.window
    offset, group = options.offset(q, k), q.shape[1] // k.shape[1]
    queries, keys = rotated(q, offset, options.rope, options), rotated(k, 0, options.rope, options)
    full_bias = None if bias is None else bias.double().expand(*q.shape[:3], k.shape[2])
    keys, values = keys.repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    outs, lses = [], []
    for i in range(q.shape[2]):
        low = 0 if left is None else max(0, i + offset - left)
        high = k.shape[2] if right is None else min(k.shape[2], i + offset + right + 1)
        if low >= high:
            outs.append(q.new_zeros(*q.shape[:2], v.shape[3]).double())
            lse = q.new_full(q.shape[:2], -torch.inf).double()
            lses.append(lse if sink is None else sink.double().expand_as(lse))
            continue
        scores = options.factor(q) * torch.einsum("bhd,bhjd->bhj", queries[:, :, i], keys[:, :, low:high])
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if full_bias is not None:
            scores = scores + full_bias[:, :, i, low:high]
        if sink is not None:
            scores = torch.cat((scores, sink.double()[None, :, None].expand(q.shape[0], -1, 1)), -1)
        weights = scores.softmax(-1)[..., : high - low]
        outs.append(torch.einsum("bhj,bhje->bhe", weights, values[:, :, low:high]))
        lses.append(scores.logsumexp(-1))
    if not outs:
        return q.new_zeros(*q.shape[:3], v.shape[3]).double(), q.new_zeros(q.shape[:3]).double()
    return torch.stack(outs, 2), torch.stack(lses, 2)


def plain(
    q: Tensor, k: Tensor, v: Tensor, options: Options, bias: Tensor | None = None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Products in the dtype of the inputs, rotation, softmax and ``lse`` in float32 or wider, and a dense mask."""
    wide = torch.promote_types(q.dtype, torch.float32)
    left, right = options.window
    offset, group = options.offset(q, k), q.shape[1] // k.shape[1]
    q_wide, k_wide = (_turned(x.to(wide), first, options) for x, first in ((q, offset), (k, 0)))
    k_wide, v = k_wide.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    distance = torch.arange(k.shape[2]) - torch.arange(offset, offset + q.shape[2])[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    blind = hidden.all(1)[:, None]

    def softmax_inputs(queries: Tensor, keys: Tensor) -> Tensor:
        scores = (queries @ keys.mT * options.factor(q)).to(wide)
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = (scores if bias is None else scores + bias).masked_fill(hidden & ~blind, -torch.inf)
        if sink is None:
            return scores
        return torch.cat((scores, sink.to(wide)[:, None, None].expand(*scores.shape[:3], 1)), -1)

    probabilities = softmax_inputs(q_wide.to(q.dtype), k_wide.to(q.dtype)).softmax(-1).to(q.dtype)
    out = (probabilities[..., : k.shape[2]] @ v).masked_fill(blind, 0)
    no_keys = torch.tensor(-torch.inf) if sink is None else sink.to(wide)[:, None]
    return out, torch.where(blind[:, 0], no_keys, softmax_inputs(q_wide, k_wide).logsumexp(-1))


def on_rounded_operands(dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """`plain` in ``dtype``, to which rotated queries and keys are rounded, as tensor cores take them."""

    def compute(q: Tensor, k: Tensor, v: Tensor, options: Options, **scores: Tensor) -> tuple[Tensor, Tensor]:
        scale, offset = options.factor(q), options.offset(q, k)
        q, k = rotated(q, offset, options.rope, options), rotated(k, 0, options.rope, options)
        unturned = replace(options, rope=None, positions=None, scale=scale)
        return plain(q.to(dtype), k.to(dtype), v.to(dtype), unturned, **scores)

    return compute


def plain_for(backend: str, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """What ``backend`` is held to: `plain`, of rounded operands where it rounds them."""
    return on_rounded_operands(dtype) if backend == "cuda" else plain


def _turned(x: Tensor, first_position: int, options: Options) -> Tensor:
    rope = options.rope
    if rope is None:
        return x
    width = x.shape[3] if rope.rotary_dim is None else rope.rotary_dim
    angles = places(x, first_position, options) * (rope.theta ** (-torch.arange(0, width, 2).double() / width))
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
    if backend == "cuda" and options.rope is not None:
        plain_results = with_gradients(plain_for(backend, inputs[0].dtype), inputs, grads, options)
    results = with_gradients(op, inputs, grads, options, backend)
    for name, result, right, usual in zip(NAMES, results, exact_results, plain_results, strict=True):
        assert_close_to_reference(result, right, usual, name)


def check_rounded_sink(result: Tensor, exactly: Tensor, out: Tensor, grads: list[Tensor], dtype: torch.dtype) -> None:
    """Asserts that the gradient of a sink is as near as an ``out`` in half precision lets it be."""
    # Its terms are -weight * sum(grad_out * out) with an out of rounded weights that was rounded itself: half a unit in
    # the last place of each, twice.
    terms = (grads[0].double() * out).abs().sum((0, 2, 3)) + grads[1].abs().sum((0, 2))
    assert ((result - exactly).abs() <= torch.finfo(dtype).eps * terms).all()
