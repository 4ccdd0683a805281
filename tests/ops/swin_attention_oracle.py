"""Swin attention by Swin's own steps, to compare with: nothing here knows of windows that are cut at a border.

The image is padded at the bottom and the right, rolled, cut into windows; pairs of tokens of different regions are
excluded; softmax, merge, roll back, crop. In float64 that is `exact`, in the dtype of the inputs what a careful user
writes. Rotations multiply complex numbers with phases in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import dskernels as dk
from dskernels.testing import PLAIN_ERRORS, TOLERANCES, assert_close_to_reference

NAMES = ("out", "grad of qkv", "grad of bias", "grad of logit_scale", "grad of pad_qkv")


class Rope(NamedTuple):
    theta: float = 100.0
    rotary_dim: int | None = None
    interleaved: bool = False
    by_head: bool = False  # each head has a theta of its own


@dataclass(frozen=True)
class Options:
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    heads: int = 1
    rope: Rope | None = None
    scale: float | None = None
    padding: str = "mask"

    @property
    def tokens(self) -> int:
        return self.window[0] * self.window[1]


class Inputs(NamedTuple):
    """The tensors of a call, each with a gradient."""

    qkv: Tensor
    bias: Tensor | None = None
    logit_scale: Tensor | None = None
    pad_qkv: Tensor | None = None

    def double(self) -> Inputs:
        return Inputs(*(None if x is None else x.detach().double() for x in self))


def table(options: Options, head_dim: int) -> dk.RopeTable | None:
    if options.rope is None:
        return None
    theta, rotary_dim, interleaved, by_head = options.rope
    thetas = [theta * (1 + head) for head in range(options.heads)] if by_head else [theta]
    tables = [
        dk.rope_table_2d(head_dim, *options.window, theta=each, rotary_dim=rotary_dim, interleaved=interleaved)
        for each in thetas
    ]
    if not by_head:
        return tables[0]
    return dk.RopeTable(torch.stack([t.cos for t in tables]), torch.stack([t.sin for t in tables]), interleaved)


def op(inputs: Inputs, options: Options, backend: str | None = None) -> Tensor:
    head_dim = inputs.qkv.shape[3] // (3 * options.heads)
    return dk.swin_attention(
        inputs.qkv,
        window_size=options.window,
        shift=options.shift,
        num_heads=options.heads,
        bias=inputs.bias,
        rope=table(options, head_dim),
        logit_scale=inputs.logit_scale,
        scale=options.scale,
        padding=options.padding,
        pad_qkv=inputs.pad_qkv,
        backend=backend,
    )


def regions(height: int, width: int, options: Options) -> Tensor:
    """Which of Swin's nine regions each token of the padded and rolled image is in, ``[H, W]``; padding is a tenth."""
    ids = torch.zeros(-height % options.window[0] + height, -width % options.window[1] + width, dtype=torch.long)
    parts = [
        (slice(0, -window), slice(-window, -shift), slice(-shift, None)) if shift else (slice(None),)
        for window, shift in zip(options.window, options.shift, strict=True)
    ]
    count = 0
    for rows in parts[0]:
        for columns in parts[1]:
            ids[rows, columns] = count
            count += 1
    if options.padding == "mask":
        padded = torch.ones_like(ids, dtype=torch.bool)
        padded[:height, :width] = False
        ids[rolled(padded[None, :, :, None], options)[0, :, :, 0]] = 9
    return ids


def rolled(x: Tensor, options: Options, back: bool = False) -> Tensor:
    return torch.roll(x, [shift if back else -shift for shift in options.shift], (1, 2))


def windows_of(x: Tensor, options: Options) -> Tensor:
    """``[B, H, W, C]`` as ``[B, windows, tokens, C]``."""
    (h, w), (batch, height, width, channels) = options.window, x.shape
    x = x.view(batch, height // h, h, width // w, w, channels)
    return x.transpose(2, 3).reshape(batch, (height // h) * (width // w), h * w, channels)


def image_of(x: Tensor, height: int, width: int, options: Options) -> Tensor:
    """``[B, windows, tokens, C]`` as ``[B, height, width, C]``."""
    h, w = options.window
    x = x.view(x.shape[0], height // h, width // w, h, w, x.shape[3])
    return x.transpose(2, 3).reshape(x.shape[0], height, width, x.shape[5])


def rotated(x: Tensor, options: Options, table_dtype: torch.dtype) -> Tensor:
    """Tokens ``[..., heads, tokens, D]`` in float64, their pairs turned as complex numbers."""
    if options.rope is None:
        return x
    theta, rotary_dim, interleaved, by_head = options.rope
    width = x.shape[-1] if rotary_dim is None else rotary_dim
    bases = [theta * (1 + head) if by_head else theta for head in range(options.heads)]
    exponents = torch.arange(0, width, 4, dtype=torch.float64) / -width
    frequencies = torch.tensor(bases, dtype=torch.float64)[:, None] ** exponents
    tokens = torch.arange(options.tokens)[:, None]
    places = (tokens // options.window[1], tokens % options.window[1])
    phases = torch.cat([place * frequencies[:, None] for place in places], -1)
    turns = torch.complex(*(part.to(table_dtype).double() for part in (phases.cos(), phases.sin())))
    head_part, tail = x[..., :width].double(), x[..., width:].double()
    pairs = head_part.unflatten(-1, (width // 2, 2)) if interleaved else head_part.unflatten(-1, (2, width // 2)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    return torch.cat((turned.flatten(-2) if interleaved else turned.mT.flatten(-2), tail), -1)


def swin(inputs: Inputs, options: Options, table_dtype: torch.dtype = torch.float32) -> Tensor:
    """``out``, with products in the dtype of qkv, and rotation, norms and softmax in float32 or wider."""
    qkv, bias, logit_scale, pad_qkv = inputs
    dtype, wide = qkv.dtype, torch.promote_types(qkv.dtype, torch.float32)
    _, height, width, channels = qkv.shape
    bottom, right = -height % options.window[0], -width % options.window[1]
    padded = torch.nn.functional.pad(qkv, (0, 0, 0, right, 0, bottom))
    if pad_qkv is not None:
        filled = torch.ones(padded.shape[1:3], dtype=torch.bool)
        filled[:height, :width] = False
        padded = torch.where(filled[..., None], pad_qkv.to(dtype), padded)
    windows = windows_of(rolled(padded, options), options)
    q, k, v = windows.unflatten(-1, (3, options.heads, channels // (3 * options.heads))).permute(3, 0, 1, 4, 2, 5)
    q, k = q.to(wide), k.to(wide)
    factor: Tensor | float = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    if logit_scale is not None:
        q, k = (torch.nn.functional.normalize(x, dim=-1, eps=1e-12) for x in (q, k))
        # One factor a head, or, for `sizes_of_sums`, one a score.
        factor = logit_scale.to(wide)[:, None, None] if logit_scale.dim() == 1 else logit_scale
    q, k = (rotated(x, options, table_dtype).to(dtype) for x in (q, k))
    scores = (q @ k.mT).to(wide) * factor
    if bias is not None:
        scores = scores + bias.to(wide)
    ids = windows_of(regions(height, width, options)[None, :, :, None], options)[0, :, None, :, 0]
    scores = scores.masked_fill(ids[..., :, None] != ids[..., None, :], -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0).to(dtype)
    merged = image_of((weights @ v).transpose(2, 3).flatten(-2), height + bottom, width + right, options)
    return rolled(merged, options, back=True)[:, :height, :width]


def with_gradients(compute, inputs: Inputs, grad_out: Tensor, options: Options, *extra) -> list[Tensor | None]:
    """``out`` and the gradients of the inputs; None for those that there are not."""
    leaves = Inputs(*(None if x is None else x.detach().requires_grad_() for x in inputs))
    given = [x for x in leaves if x is not None]
    out = compute(leaves, options, *extra)
    grads = iter(torch.autograd.grad(out, given, grad_out.to(out.dtype), allow_unused=True, materialize_grads=True))
    return [out.detach(), *(None if x is None else next(grads) for x in leaves)]


def sizes_of_sums(inputs: Inputs, grad_out: Tensor, options: Options) -> Tensor | None:
    """The root of the sum of squares of the terms, one a score, of the gradient of logit_scale.

    In that gradient they cancel, whereas their roundings, each its own way, add up like this.
    """
    if inputs.logit_scale is None:
        return None
    batch, height, width, _ = inputs.qkv.shape
    windows = -(-height // options.window[0]) * -(-width // options.window[1])
    each = inputs.logit_scale[:, None, None].expand(batch, windows, -1, options.tokens, options.tokens)
    terms = with_gradients(swin, inputs._replace(logit_scale=each).double(), grad_out, options)[3]
    return terms.square().sum((0, 1, 3, 4)).sqrt()


def expected(inputs: Inputs, grad_out: Tensor, options: Options):
    """The exact and the plain results, and `sizes_of_sums`."""
    exactly = with_gradients(swin, inputs.double(), grad_out, options, torch.float64)
    plainly = with_gradients(swin, inputs, grad_out, options)
    return exactly, plainly, sizes_of_sums(inputs, grad_out, options)


def check(inputs: Inputs, grad_out: Tensor, options: Options, backend: str | None, known=None) -> None:
    """Asserts that output and gradients of the op are as near to float64 as the tolerance table allows."""
    exact_results, plain_results, sizes = known or expected(inputs, grad_out, options)
    results = with_gradients(op, inputs, grad_out, options, backend)
    for name, result, right, usual in zip(NAMES, results, exact_results, plain_results, strict=True):
        if right is None:
            continue
        if name != "grad of logit_scale":
            assert_close_to_reference(result, right, usual, name)
            continue
        assert result.dtype == usual.dtype
        # Tensor cores take operands that are rounded to the dtype of qkv, and so are the terms.
        floor = TOLERANCES[inputs.qkv.dtype if backend == "cuda" else result.dtype].floor
        allowed = PLAIN_ERRORS * (usual.double() - right).abs().max() + floor * sizes
        error = (result.double() - right).abs()
        assert (error <= allowed).all(), f"{name}: errors {error.tolist()}, allowed {allowed.tolist()}"


def draw(
    shape: tuple[int, int, int],
    head_dim: int,
    options: Options,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = True,
    cosine: bool = False,
    pad: bool = False,
) -> tuple[Inputs, Tensor]:
    """Inputs for images ``[B, H, W]``, and a gradient of the output."""
    channels, tokens = options.heads * head_dim, options.tokens
    inputs = Inputs(
        torch.randn(*shape, 3 * channels).to(dtype),
        torch.randn(options.heads, tokens, tokens) if bias else None,
        torch.rand(options.heads) * 10 + 1 if cosine else None,
        torch.randn(3 * channels) if pad else None,
    )
    return inputs, torch.randn(*shape, channels).to(dtype)
