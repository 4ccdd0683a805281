"""The calls on which the kernels for GPUs are tried, and what is right for them: by rolling, partition and masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import dskernels as dk
from dskernels.testing import assert_close_to_reference

HALF = (torch.bfloat16, torch.float16)


class Rope(NamedTuple):
    rotary_dim: int | None = None
    interleaved: bool = False
    by_head: bool = False


class Case(NamedTuple):
    """A call: sizes of the image, heads, and what else it has."""

    size: tuple[int, int, int]
    heads: int
    dim: int
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    bias: bool = False
    cosine: bool = False
    rope: Rope | None = None
    scale: float | None = None

    @property
    def tokens(self) -> int:
        return self.window[0] * self.window[1]

    def table(self) -> dk.RopeTable | None:
        if self.rope is None:
            return None
        options = {"rotary_dim": self.rope.rotary_dim, "interleaved": self.rope.interleaved}
        table = dk.rope_table_2d(self.dim, *self.window, **options)
        if not self.rope.by_head:
            return table
        others = dk.rope_table_2d(self.dim, *self.window, theta=7.0, **options)
        layers = [torch.stack((x, y)[: self.heads]) for x, y in zip(table[:2], others[:2], strict=True)]
        return dk.RopeTable(*layers, table.interleaved)

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What has a gradient."""
        tensors = {"qkv": torch.randn(*self.size, 3 * self.heads * self.dim).to(dtype)}
        if self.bias:
            tensors["bias"] = torch.randn(self.heads, self.tokens, self.tokens)
        if self.cosine:
            tensors["logit_scale"] = torch.rand(self.heads) * 10 + 1
        return tensors

    def grad(self, dtype: torch.dtype) -> Tensor:
        return torch.randn(*self.size, self.heads * self.dim).to(dtype)


# Every branch of the kernels, on images with as few cells as show it: whole cells and tiles of cells, ragged borders.
CASES = {
    "one": Case((1, 1, 1), 1, 8, (1, 1)),
    "rows": Case((1, 1, 9), 2, 8, (1, 7), (0, 3)),
    "swin": Case((1, 9, 9), 1, 32, (7, 7), (3, 3), bias=True),
    "other_than_square": Case((1, 14, 10), 1, 24, (7, 7), (3, 3), bias=True),
    "images": Case((2, 5, 4), 1, 16, (4, 6), (1, 2), bias=True, scale=-0.3),
    "unpadded": Case((1, 8, 8), 1, 40, (8, 8)),
    "cosine": Case((1, 6, 4), 2, 24, (5, 4), (2, 0), bias=True, cosine=True),
    "rope": Case((1, 4, 5), 2, 24, (4, 4), (0, 3), bias=True, rope=Rope(by_head=True)),
    "rope_in_pairs": Case((1, 4, 5), 1, 20, (4, 4), (3, 0), rope=Rope(16, interleaved=True)),
    "rope_and_cosine": Case((1, 4, 5), 1, 32, (4, 5), cosine=True, rope=Rope(16)),
    "tiled": Case((1, 9, 10), 1, 16, (9, 8), (0, 3), bias=True),
    "tiled_rope_and_cosine": Case((1, 6, 12), 1, 16, (6, 12), cosine=True, rope=Rope(interleaved=True)),
    "tiled_wide": Case((1, 3, 5), 1, 160, (3, 5), (1, 0), bias=True),
}


# On a GPU there are more of them, and larger ones.
GPU_CASES = {
    **CASES,
    "large": Case((3, 30, 45), 3, 32, (7, 7), (3, 3), bias=True),
    "large_v2": Case((2, 33, 40), 4, 32, (8, 8), (4, 4), bias=True, cosine=True),
    "large_rope": Case((2, 33, 40), 2, 64, (7, 7), (3, 2), bias=True, rope=Rope(by_head=True)),
    "twelve": Case((2, 30, 25), 2, 32, (12, 12), (6, 6), bias=True),
    "sixteen": Case((1, 40, 20), 1, 256, (16, 16), (8, 8), bias=True, cosine=True, rope=Rope(128, interleaved=True)),
}


def _windows(x: Tensor, case: Case) -> Tensor:
    """``[B, H, W, C]`` as Swin cuts it: filled up, rolled and partitioned, ``[B, windows, N, C]``."""
    (h, w), (down, right) = case.window, case.shift
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % w, 0, -x.shape[1] % h))
    x = x.roll((-down, -right), (1, 2)).unflatten(2, (-1, w)).unflatten(1, (-1, h))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _image(x: Tensor, case: Case) -> Tensor:
    (_, height, width), (h, w) = case.size, case.window
    x = x.unflatten(2, case.window).unflatten(1, (-(-height // h), -(-width // w)))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2).roll(case.shift, (1, 2))[:, :height, :width]


def _hidden(case: Case) -> Tensor:
    """Which pairs of a window, ``[windows, N, N]``, are of two regions, or have a key that fills up."""
    (_, height, width), (h, w) = case.size, case.window
    regions = torch.zeros(-(-height // h) * h, -(-width // w) * w)
    for axis, shift in enumerate(case.shift):
        parts = ((0, -case.window[axis]), (-case.window[axis], -shift), (-shift, None)) if shift else ()
        for number, (start, stop) in enumerate(parts):
            regions.transpose(0, axis)[start:stop] += number * 3**axis
    # Undone in advance, since `_windows` rolls; what fills up is of no region.
    regions = regions.roll(case.shift, (0, 1))
    regions[height:] = regions[:, width:] = -1
    ids = _windows(regions[None, :, :, None], case._replace(size=(1, *regions.shape)))[0, :, :, 0]
    return (ids[:, :, None] != ids[:, None]) | (ids == -1)[:, None]


def _turned(x: Tensor, table: dk.RopeTable | None) -> Tensor:
    """``[..., heads, N, D]`` in float64, its pairs turned as complex numbers."""
    if table is None:
        return x
    phases = torch.complex(table.cos.double(), table.sin.double())
    head, tail = x[..., : table.rotary_dim].double(), x[..., table.rotary_dim :].double()
    pairs = head.unflatten(-1, (-1, 2)) if table.interleaved else head.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * phases)
    return torch.cat((turned.flatten(-2) if table.interleaved else turned.mT.flatten(-2), tail), -1)


def by_masks(case: Case, qkv: Tensor, bias: Tensor | None = None, logit_scale: Tensor | None = None) -> Tensor:
    """Swin attention as its authors write it, by rolling, partition and masks; in float64 if qkv is.

    In other dtypes products are in that of qkv, all else in float32 or wider.
    """
    dtype, wide = qkv.dtype, torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = _windows(qkv, case).unflatten(-1, (3, case.heads, case.dim)).permute(3, 0, 1, 4, 2, 5)
    factor: Any = case.dim**-0.5 if case.scale is None else case.scale
    if logit_scale is not None:
        q, k = (torch.nn.functional.normalize(x.to(wide), dim=-1) for x in (q, k))
        factor = logit_scale[:, None, None]
    q, k = (_turned(x, case.table()).to(dtype) for x in (q, k))
    scores = (q @ k.mT).to(wide) * factor
    scores = scores if bias is None else scores + bias
    hidden = _hidden(case)[:, None]
    # A token that fills up may see nothing. What it gets is cut off.
    scores = scores.masked_fill(hidden & ~hidden.all(-1, keepdim=True), -torch.inf)
    out = scores.softmax(-1).to(dtype) @ v
    return _image(out.transpose(2, 3).flatten(-2), case)


def attend(
    case: Case,
    qkv: Tensor,
    bias: Tensor | None = None,
    logit_scale: Tensor | None = None,
    *,
    backend: str = "triton",
) -> Tensor:
    table = case.table()
    return dk.swin_attention(
        qkv,
        window_size=case.window,
        shift=case.shift,
        num_heads=case.heads,
        bias=bias,
        rope=None if table is None else table.to(qkv.device),
        logit_scale=logit_scale,
        scale=case.scale,
        backend=backend,
    )


def with_gradients(compute: Any, case: Case, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = compute(case, **leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"out": out.detach(), **{f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}}


def check(case: Case, inputs: dict[str, Tensor], grad: Tensor, results: dict[str, Tensor]) -> None:
    """Whether ``results`` are as near to float64 as plain PyTorch."""
    exact = with_gradients(by_masks, case, {name: x.double() for name, x in inputs.items()}, grad)
    plain = with_gradients(by_masks, case, inputs, grad)
    for name, result in results.items():
        if name == "grad of logit_scale" and inputs["qkv"].dtype in HALF:
            # Sums of products of rounded operands, one a head, of which the plain one may be right by luck.
            atol = 4 * torch.finfo(inputs["qkv"].dtype).eps * max(1.0, float(exact[name].abs().max()))
            torch.testing.assert_close(result.double(), exact[name].double(), rtol=0, atol=atol)
        else:
            assert_close_to_reference(result, exact[name], plain[name], name)
