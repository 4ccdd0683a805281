"""Attention inside the windows of an image: Swin's partition, shift, softmax and merge in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dskernels._autograd import invoke
from dskernels._library import why_not_unasked
from dskernels._registry import Backend, Operator, register
from dskernels.rope import RopeTable, rope_table_2d
from dskernels.swin_attention.arguments import SwinAttentionCall, prepare, why_not_cpu, why_not_cuda, why_not_triton
from dskernels.swin_attention.cuda_schema import cuda_forward_op
from dskernels.swin_attention.reference import swin_attention_reference
from dskernels.swin_attention.schema import forward_op
from dskernels.swin_attention.triton_schema import triton_forward_op

__all__ = ["swin_attention"]


def swin_attention(
    qkv: Tensor,
    *,
    window_size: int | tuple[int, int],
    shift: int | tuple[int, int] = 0,
    num_heads: int,
    bias: Tensor | None = None,
    rope: RopeTable | None = None,
    logit_scale: Tensor | None = None,
    scale: float | None = None,
    padding: str = "mask",
    pad_qkv: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of every token of an image over the tokens of its window, from projection to projection.

    A grid of ``h x w`` windows starts ``shift`` rows and columns into the image; two tokens attend each other iff they
    share a window of it and the window does not wrap around the image. With token ``i`` at place ``(y, x)`` of its
    window, ``n = y * w + x``, and ``q, k, v = qkv.chunk(3, -1)`` by head::

        score[i, j] = scale * <rotate(q[i]), rotate(k[j])> + bias[n_i, n_j]
        score[i, j] = logit_scale * <rotate(q[i] / |q[i]|), rotate(k[j] / |k[j]|)> + bias[n_i, n_j]     (SwinV2)
        out[i]      = sum over j of softmax(score[i])[j] * v[j]

    This is Swin's pad, roll, partition, mask, softmax, merge and roll back, as address arithmetic: nothing is copied
    into windows, and no mask is stored or added. A row without a finite score gives 0.

    Args:
        qkv: shape ``[B, H, W, 3 * C]``, as one ``Linear`` produces it: ``C`` queries, ``C`` keys, ``C`` values, each
            ``num_heads`` heads of ``C / num_heads``; float32, bfloat16 or float16 (float64 with the reference); any
            strides. H and W need not be equal, nor multiples of the window.
        window_size: ``w``, or ``(h, w)``.
        shift: of the grid, ``0 <= shift < window_size``, one for both axes or ``(rows, columns)``; taken literally, so
            a model sets it to 0 on an axis of a single window. Default: 0.
        num_heads: heads.
        bias: shape ``[num_heads, h * w, h * w]``, floating point, added to the scores of the tokens at these places of
            their window; -inf hides a key. Its gradient is summed over windows in float32, in a fixed order. Default:
            none.
        rope: table of `rope_table_2d` for ``(h, w)``, or one such table for each head (``[num_heads, h * w, D / 2]``),
            by which queries and keys are rotated, in float32 whatever the inputs. Not differentiated. Default: none.
        logit_scale: shape ``[num_heads]``, floating point: cosine attention with this factor (SwinV2's, already
            clamped and exponentiated). Differentiable. Default: none, dot products.
        scale: factor of the scores without ``logit_scale``. Default: ``(C / num_heads) ** -0.5``.
        padding: of windows that reach beyond the bottom and the right border. ``"mask"``: there is nothing to attend.
            ``"attend"``: the image is filled up to whole windows with tokens ``pad_qkv`` that take part, as in
            torchvision's models, and in timm's without a shift (with one, timm rolls before it fills up); where there
            is something to fill up, ``qkv`` is copied. Default: ``"mask"``.
        pad_qkv: shape ``[3 * C]``, the queries, keys and values of a padded token with ``padding="attend"``: the bias
            of the ``Linear``, where that padding comes before it. Differentiable. Default: zeros.
        backend: ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``; an explicit choice never falls back.
            Default: `use_backend`, then ``DSKERNELS_BACKEND``, then the first that serves the call.

    Returns:
        shape ``[B, H, W, C]``, dtype of ``qkv``, contiguous.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not fit each other.
        RuntimeError: the backend that was asked for cannot serve the call.

    Backends: ``cpu``, ``cuda`` and ``triton`` (float32, bfloat16, float16; heads up to 256 components, windows up to
    256 tokens), ``reference`` (everything, any device; differentiable any number of times). ``cuda`` and ``triton``
    serve CUDA tensors; they round rotated queries and keys of half precision to their dtype, as tensor cores take them,
    and ``cuda`` those of length 1, too. ``cuda`` takes fewer than 2**30 images, rows and columns; its kernels are for
    GPUs from compute capability 8.0 on, and so far have run in the emulator of the tests alone. ``triton`` also serves,
    where it is asked for, tensors on the CPU in its interpreter (``TRITON_INTERPRET=1``). Under autocast qkv is cast to
    the autocast dtype.

    Sources: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021, section 3.2
    and equation 4; cosine attention of Liu et al., "Swin Transformer V2", 2022, equation 2, but with windows that the
    shift cuts truly apart, where the paper's code adds -100 to the scores.
    """
    call = prepare(
        qkv,
        window_size=window_size,
        shift=shift,
        num_heads=num_heads,
        bias=bias,
        rope=rope,
        logit_scale=logit_scale,
        scale=scale,
        padding=padding,
        pad_qkv=pad_qkv,
    )
    out: Tensor
    (out,) = _operator.choose(call, backend).run(call)
    # An export of free sizes must not ask whether there was something to fill up, and slices ask.
    if padding == "mask" or (not torch.compiler.is_exporting() and out.shape[1:3] == qkv.shape[1:3]):
        return out
    bottom, right = out.shape[1] - qkv.shape[1], out.shape[2] - qkv.shape[2]
    return torch.nn.functional.pad(out, (0, 0, 0, -right, 0, -bottom))


def _gpu_unasked(call: SwinAttentionCall) -> str | None:
    return why_not_unasked(call.qkv.device)


def _example() -> tuple[list[Tensor], dict[str, Any]]:
    options = {"window_size": (5, 7), "shift": (2, 3), "num_heads": 3, "bias": torch.randn(3, 35, 35)}
    return [torch.randn(2, 13, 17, 3 * 3 * 24)], {**options, "rope": rope_table_2d(24, 5, 7)}


_operator = register(
    Operator(
        name="swin_attention",
        prepare=prepare,
        backends=(
            Backend("cpu", why_not_cpu, lambda call: (invoke(forward_op, *call),)),
            Backend("cuda", why_not_cuda, lambda call: (cuda_forward_op(*call),), _gpu_unasked),
            Backend("triton", why_not_triton, lambda call: (triton_forward_op(*call),), _gpu_unasked),
            Backend("reference", lambda call: None, lambda call: (swin_attention_reference(*call),)),
        ),
        example=_example,
    )
)
