"""swin_attention against float64: shapes, shifts, head dimensions, layouts, and what holds for every input."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from swin_attention_oracle import Inputs, Options, Rope, check, draw, expected, op, with_gradients
from torch import Tensor

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


class Case(NamedTuple):
    batch: int
    height: int
    width: int
    heads: int
    head_dim: int
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    rope: Rope | None = None
    bias: bool = True
    cosine: bool = False
    scale: float | None = None

    @property
    def options(self) -> Options:
        return Options(self.window, self.shift, self.heads, self.rope, self.scale)

    def draw(self, dtype: torch.dtype) -> tuple[Inputs, Tensor]:
        shape = (self.batch, self.height, self.width)
        return draw(shape, self.head_dim, self.options, dtype, bias=self.bias, cosine=self.cosine)


def case_id(case: Case) -> str:
    batch, height, width, heads, head_dim, (h, w), (down, right), rope, bias, cosine, scale = case
    parts = [f"B{batch}", f"{height}x{width}", f"H{heads}", f"D{head_dim}", f"W{h}x{w}", f"S{down}_{right}"]
    if rope is not None:
        parts.append(f"rope{rope.rotary_dim or head_dim}{'i' * rope.interleaved}{'h' * rope.by_head}")
    parts += ["bias"] * bias + ["cosine"] * cosine + [f"scale{scale}"] * (scale is not None)
    return "-".join(parts)


CASES = [
    Case(1, 1, 1, 1, 8, (1, 1)),
    Case(2, 14, 14, 3, 32, (7, 7)),
    Case(1, 14, 28, 2, 32, (7, 7), (3, 3)),
    Case(1, 28, 14, 2, 32, (7, 7), (3, 3), bias=False),
    Case(2, 17, 10, 3, 24, (7, 7), (3, 3), cosine=True),
    Case(1, 23, 19, 2, 40, (5, 7), (2, 3), Rope()),
    Case(2, 5, 4, 2, 16, (7, 7), (3, 2)),
    Case(1, 5, 11, 2, 16, (7, 7), (6, 0), Rope(by_head=True), cosine=True),
    Case(1, 9, 30, 1, 63, (4, 16), (2, 8), Rope(rotary_dim=32)),
    Case(1, 17, 17, 1, 72, (8, 8), (4, 4), Rope(interleaved=True)),
    Case(1, 13, 25, 1, 128, (12, 12), (6, 6), bias=False),
    Case(1, 17, 20, 1, 160, (16, 16), (8, 8), cosine=True),
    Case(2, 9, 30, 2, 24, (1, 7), (0, 3)),
    Case(2, 30, 9, 2, 24, (7, 1), (3, 0), Rope(rotary_dim=8, interleaved=True), cosine=True),
    Case(3, 6, 7, 5, 8, (1, 1), cosine=True),
    Case(5, 7, 5, 7, 16, (2, 2), (1, 1), Rope()),
    Case(2, 11, 8, 4, 20, (3, 3), (1, 2), Rope(rotary_dim=12, by_head=True, interleaved=True), scale=0.3),
    Case(1, 3, 43, 2, 32, (1, 43), (0, 20)),
    Case(2, 10, 10, 2, 1, (5, 5), (2, 2)),
    Case(1, 8, 10, 1, 256, (5, 5), (0, 2), scale=-0.05),
]


@functools.cache
def known(case: Case, dtype: torch.dtype):
    torch.manual_seed(CASES.index(case))
    inputs, grad_out = case.draw(dtype)
    return inputs, grad_out, expected(inputs, grad_out, case.options)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_float64(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs, grad_out, results = known(case, dtype)
    check(inputs, grad_out, case.options, backend, results)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_in_float64(case: Case) -> None:
    inputs, grad_out = case.draw(torch.float64)
    check(inputs, grad_out, case.options, "reference")


@pytest.mark.parametrize("head_dim", [1, 3, 8, 16, 24, 31, 32, 33, 40, 63, 64, 72, 96, 128, 160, 255])
def test_head_dims(head_dim: int, backend: str) -> None:
    rope = Rope(rotary_dim=head_dim - head_dim % 4) if head_dim >= 4 else None
    case = Case(1, 9, 8, 2, head_dim, (5, 3), (2, 1), rope, cosine=head_dim % 16 == 0)
    check(*case.draw(torch.float32), case.options, backend)


@pytest.mark.parametrize("window", [(1, 1), (1, 7), (7, 1), (2, 2), (3, 3), (5, 7), (7, 7), (12, 12), (4, 16)], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (16, 15), (8, 33)], ids=str)
def test_windows_and_sizes(size: tuple[int, int], window: tuple[int, int], backend: str) -> None:
    shift = (window[0] // 2, (window[1] + 1) // 2 % window[1])
    case = Case(2, *size, 2, 8, window, shift)
    check(*case.draw(torch.float32), case.options, backend)


@pytest.mark.parametrize("shift", list(itertools.product(range(3), range(4))), ids=str)
@pytest.mark.parametrize("size", [(7, 9), (9, 8), (2, 3)], ids=str)
def test_all_shifts_of_a_small_window(size: tuple[int, int], shift: tuple[int, int], backend: str) -> None:
    case = Case(1, *size, 2, 8, (3, 4), shift, Rope())
    check(*case.draw(torch.float32), case.options, backend)


@pytest.mark.parametrize("heads", [1, 2, 5, 16, 33])
def test_heads(heads: int, backend: str) -> None:
    case = Case(2, 8, 9, heads, 8, (4, 4), (2, 2), Rope(by_head=True), cosine=heads % 2 == 0)
    check(*case.draw(torch.float32), case.options, backend)


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_bias_gradient_sums_over_many_windows(batch: int, backend: str) -> None:
    # The emulator takes some 10 ms for a head of a window.
    batch = min(batch, 5) if backend == "cuda" else batch
    case = Case(batch, 14, 21, 3, 8, (7, 7), (3, 3), cosine=True)
    check(*case.draw(torch.float32), case.options, backend)


def sliced(x: Tensor) -> Tensor:
    """``[B, H, W, C]`` as part of a larger image that is NaN elsewhere."""
    return torch.nn.functional.pad(x, (0, 0, 2, 1, 1, 3), value=torch.nan)[:, 1:-3, 2:-1]


LAYOUTS = {
    "channels_first": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "columns_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": sliced,
    "batch_last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "offset": lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape),
    "every_second_channel": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2],
    "every_second_column": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), 3).flatten(2, 3)[:, :, ::2],
    "part_of_more_channels": lambda x: torch.nn.functional.pad(x, (3, 2), value=torch.nan)[..., 3:-2],
    "one_image_repeated": lambda x: x[:1].expand_as(x),
    "one_row_repeated": lambda x: x[:, :1].expand_as(x),
    "one_column_repeated": lambda x: x[:, :, :1].expand_as(x),
    "one_number": lambda x: x[:1, :1, :1, :1].expand_as(x),
}


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone(memory_format=torch.contiguous_format)


def assert_same_as_dense(inputs: Inputs, grad_out: Tensor, options: Options, backend: str) -> None:
    results = with_gradients(op, inputs, grad_out, options, backend)
    right = with_gradients(op, Inputs(*map(dense, inputs)), dense(grad_out), options, backend)
    for one, other in zip(results, right, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)
    assert results[0].is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_layouts_equal_contiguous(layout: str, dtype: torch.dtype, backend: str) -> None:
    case = Case(3, 9, 12, 2, 24, (5, 4), (2, 1), Rope())
    inputs, grad_out = case.draw(dtype)
    viewed = inputs._replace(qkv=LAYOUTS[layout](inputs.qkv))
    assert_same_as_dense(viewed, LAYOUTS[layout](grad_out), case.options, backend)
    assert_same_as_dense(inputs, LAYOUTS[layout](grad_out), case.options, backend)


BIAS_LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "heads_last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "offset": lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape),
    "odd_rows": lambda x: torch.nn.functional.pad(x, (2, 1, 1, 0), value=torch.nan)[:, 1:, 2:-1],
    "every_second": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2],
    "one_head_repeated": lambda x: x[:1].expand_as(x),
    "one_row_repeated": lambda x: x[:, :1].expand_as(x),
    "one_column_repeated": lambda x: x[..., :1].expand_as(x),
    "bfloat16": lambda x: x.bfloat16(),
}


@pytest.mark.parametrize("layout", BIAS_LAYOUTS)
@pytest.mark.parametrize("window", [(7, 7), (1, 43), (4, 4)], ids=str)
def test_layouts_of_the_bias(window: tuple[int, int], layout: str, backend: str) -> None:
    case = Case(2, 8, 50, 2, 16, window, (0, 3))
    inputs, grad_out = case.draw(torch.float32)
    inputs = inputs._replace(bias=BIAS_LAYOUTS[layout](inputs.bias), logit_scale=torch.rand(1).expand(2))
    assert_same_as_dense(inputs, grad_out, case.options, backend)
    check(inputs, grad_out, case.options, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_the_parameters(dtype: torch.dtype, backend: str) -> None:
    case = Case(1, 9, 8, 2, 16, (4, 4), (1, 2), cosine=True)
    inputs, grad_out = case.draw(torch.bfloat16)
    mixed = inputs._replace(bias=inputs.bias.to(dtype), logit_scale=inputs.logit_scale.to(dtype))
    results = with_gradients(op, mixed, grad_out, case.options, backend)
    assert [x.dtype for x in results[:4]] == [torch.bfloat16, torch.bfloat16, dtype, dtype]
    rounded = inputs._replace(bias=mixed.bias.float(), logit_scale=mixed.logit_scale.float())
    right = with_gradients(op, rounded, grad_out, case.options, backend)
    for one, other in zip(results[:4], right[:4], strict=True):
        assert torch.equal(one, other.to(one.dtype))


@pytest.mark.parametrize("size", [(0, 9, 9), (0, 14, 14), (2, 0, 9), (2, 9, 0), (2, 0, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("padding", ["mask", "attend"])
def test_empty(size: tuple[int, int, int], shift: int, padding: str, backend: str) -> None:
    options = Options((7, 7), (shift, shift), 2, padding=padding)
    inputs, grad_out = draw(size, 16, options, cosine=True, pad=padding == "attend")
    out, *grads = with_gradients(op, inputs, grad_out, options, backend)
    assert out.shape == (*size, 32)
    for x, grad in zip(inputs, grads, strict=True):
        assert (x is None and grad is None) or (grad.shape == x.shape and (grad == 0).all())


def test_inputs_stay_as_they_are(backend: str) -> None:
    case = Case(2, 9, 12, 2, 24, (5, 4), (2, 1), Rope(), cosine=True)
    inputs, grad_out = case.draw(torch.float32)
    kept = [x.clone() for x in (*inputs[:3], grad_out)]
    with_gradients(op, inputs, grad_out, case.options, backend)
    assert all(torch.equal(now, then) for now, then in zip((*inputs[:3], grad_out), kept, strict=True))


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("batch", [1, 9])
def test_same_bits_on_every_run_and_for_every_thread_count(batch: int, dtype: torch.dtype, backend: str) -> None:
    if backend == "reference":
        pytest.skip("torch's own matrix products answer for the reference")
    if backend == "cuda":
        pytest.skip("no thread of torch computes; orders of CUDA's threads are tried in test_swin_attention_cuda.py")
    case = Case(batch, 30, 37, 3, 32, (7, 7), (3, 3), Rope(), cosine=True)
    inputs, grad_out = case.draw(dtype)
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (threads, threads, 1, 2, 3, 1):
            torch.set_num_threads(count)
            runs.append(with_gradients(op, inputs, grad_out, case.options, backend)[:4])
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(one, first) for one, first in zip(run, runs[0], strict=True))
