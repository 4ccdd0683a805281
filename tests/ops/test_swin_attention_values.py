"""swin_attention where the right values are known by themselves, and at which public implementations go wrong."""

from __future__ import annotations

import functools

import pytest
import torch
from swin_attention_oracle import NAMES, Inputs, Options, Rope, check, draw, op, swin, with_gradients
from torch import Tensor

import dskernels as dk

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


def values_of(qkv: Tensor) -> Tensor:
    return qkv.chunk(3, -1)[2]


def assert_same(one: Tensor, other: Tensor, backend: str) -> None:
    """Bit for bit, but of float32 the tensor cores take two parts of 11 bits each."""
    tolerance = 2**-20 if backend == "cuda" and one.dtype == torch.float32 else 0
    torch.testing.assert_close(one, other, rtol=tolerance, atol=0)


def self_only(heads: int, tokens: int) -> Tensor:
    """The bias with which every token attends itself alone."""
    return torch.full((tokens, tokens), -torch.inf).fill_diagonal_(0).expand(heads, -1, -1)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("size", [(14, 28), (28, 14), (9, 16), (5, 3)], ids=str)
@pytest.mark.parametrize("shift", [(3, 3), (0, 0), (1, 5)], ids=str)
def test_merging_what_was_partitioned_is_the_identity(
    size: tuple[int, int], shift: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    """A public kernel swaps the two axes here."""
    options = Options((7, 7), shift, 2)
    inputs, grad_out = draw((2, *size), 16, options, dtype, cosine=True)
    inputs = inputs._replace(bias=self_only(2, 49))
    out, grad_qkv, grad_bias, grad_logit_scale, _ = with_gradients(op, inputs, grad_out, options, backend)
    assert_same(out, values_of(inputs.qkv), backend)
    assert_same(values_of(grad_qkv), grad_out, backend)
    for nothing in (grad_qkv[..., :64], grad_bias, grad_logit_scale):
        assert nothing.abs().max() < 1e-4  # what is left is the rounding of P * (dP - delta)
    assert (grad_bias[:, ~torch.eye(49, dtype=torch.bool)] == 0).all()


@functools.cache
def reach(size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], backend: str) -> Tensor:
    """Which tokens each token has a gradient of, ``[H * W, H * W]``."""
    tokens = size[0] * size[1]
    # An image for each token, in whose output it alone is asked for.
    qkv = torch.randn(1, *size, 24).repeat(tokens, 1, 1, 1).requires_grad_()
    out = dk.swin_attention(qkv, window_size=window, shift=shift, num_heads=1, backend=backend)
    (grad,) = torch.autograd.grad(out.view(tokens, tokens, 8).diagonal(0, 0, 1).sum(), qkv)
    return (grad.flatten(1, 2) != 0).any(-1)


def test_no_gradient_from_the_first_corner_to_the_last(backend: str) -> None:
    reached = reach((9, 9), (7, 7), (3, 3), backend).view(9, 9, 9, 9)
    assert not reached[0, 0, 8, 8]
    assert not reached[8, 8, 0, 0]
    assert reached[0, 0, 2, 2]
    assert not reached[0, 0, 3, 3]
    assert reached[3, 3, 8, 8]


@pytest.mark.parametrize("size", [(7, 5), (4, 9), (2, 2)], ids=str)
@pytest.mark.parametrize("shift", [(0, 0), (1, 2), (2, 0), (0, 3)], ids=str)
def test_two_tokens_share_a_cell_or_nothing(size: tuple[int, int], shift: tuple[int, int], backend: str) -> None:
    rows, columns = (torch.arange(n) for n in size)
    cells = (rows - shift[0]).div(3, rounding_mode="floor")[:, None] * 100
    cells = (cells + (columns - shift[1]).div(4, rounding_mode="floor")).flatten()
    assert torch.equal(reach(size, (3, 4), shift, backend), cells[:, None] == cells)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_no_state_is_kept_between_sizes(dtype: torch.dtype, backend: str) -> None:
    options = Options((7, 7), (3, 3), 2)
    calls = [draw((1, size, size), 16, options, dtype) for size in (7, 14, 7, 9)]
    fresh = [with_gradients(op, *call, options, backend)[:3] for call in calls]
    for call, right in zip(reversed(calls), reversed(fresh), strict=True):
        again = with_gradients(op, *call, options, backend)[:3]
        assert all(torch.equal(one, other) for one, other in zip(again, right, strict=True))


def test_without_shift_there_is_no_mask(backend: str) -> None:
    """Every window is plain attention over all of its tokens."""
    options = Options((5, 7), (0, 0), 3)
    inputs, _ = draw((2, 10, 21), 16, options)
    windows = inputs.qkv.view(2, 2, 5, 3, 7, 3, 3, 16).permute(5, 0, 1, 3, 6, 2, 4, 7).flatten(5, 6)
    right = torch.nn.functional.scaled_dot_product_attention(*windows, attn_mask=inputs.bias)
    right = right.unflatten(4, (5, 7)).permute(0, 1, 4, 2, 5, 3, 6).reshape(2, 10, 21, 48)
    torch.testing.assert_close(op(inputs, options, backend), right, rtol=1e-5, atol=1e-5)


def by_region(inputs: Inputs, options: Options, backend: str) -> Tensor:
    """The op called without shift on each rectangle that the grid cuts out of the image, with its part of the bias."""
    out = inputs.qkv.new_zeros(*inputs.qkv.shape[:3], inputs.qkv.shape[3] // 3)
    bias = inputs.bias.view(options.heads, *options.window, *options.window)
    edges = []
    for size, window, shift in zip(inputs.qkv.shape[1:3], options.window, options.shift, strict=True):
        cuts = range(shift - window if shift else 0, size, window)
        edges.append([(max(cut, 0), min(cut + window, size), max(-cut, 0)) for cut in cuts])
    for top, bottom, row in edges[0]:
        for left, right, column in edges[1]:
            height, width = bottom - top, right - left
            rows, columns = slice(row, row + height), slice(column, column + width)
            out[:, top:bottom, left:right] = dk.swin_attention(
                inputs.qkv[:, top:bottom, left:right],
                window_size=(height, width),
                num_heads=options.heads,
                bias=bias[:, rows, columns, rows, columns].reshape(options.heads, height * width, -1),
                logit_scale=inputs.logit_scale,
                backend=backend,
            )
    return out


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize(
    ("size", "window", "shift"),
    [((14, 28), (7, 7), (3, 3)), ((9, 9), (7, 7), (3, 3)), ((17, 11), (5, 4), (2, 0)), ((4, 5), (7, 6), (2, 5))],
    ids=str,
)
def test_shifted_is_a_loop_over_regions(size, window, shift, dtype: torch.dtype, backend: str) -> None:
    options = Options(window, shift, 2)
    for cosine in (False, True):
        inputs, grad_out = draw((2, *size), 24, options, dtype, cosine=cosine)
        results = with_gradients(op, inputs, grad_out, options, backend)
        right = with_gradients(by_region, inputs, grad_out, options, backend)
        unit = torch.finfo(dtype).eps
        for name, one, other in zip(NAMES, results, right, strict=True):
            if one is not None:
                tolerance = max(4 * unit, 1e-5) * float(other.abs().max())
                torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("logit_scale", [1.0, 100.0])
def test_cosine_attention_cuts_regions_truly_apart(logit_scale: float, dtype: torch.dtype, backend: str) -> None:
    """SwinV2 adds -100 to logits that go from -100 to 100: what is hidden may then outweigh what is seen."""
    inputs, grad_out = draw((1, 9, 9), 16, Options((7, 7), (3, 3)), dtype, bias=False)
    # Keys of the first region point away from its queries, those of the others along with them.
    direction = torch.randn(16)
    for rows in (slice(0, 3), slice(3, 9)):
        for columns in (slice(0, 3), slice(3, 9)):
            sign = -1.0 if rows.start == columns.start == 0 else 1.0
            inputs.qkv[:, rows, columns, :16] = direction.to(dtype)
            inputs.qkv[:, rows, columns, 16:32] = (sign * direction).to(dtype)
    grad_out[:, 3:] = 0
    grad_out[:, :, 3:] = 0
    inputs = inputs._replace(logit_scale=torch.tensor([logit_scale]))
    options = Options((7, 7), (3, 3))
    out, grad_qkv, *_ = with_gradients(op, inputs, grad_out, options, backend)
    # All logits within the region are the same.
    mean = values_of(inputs.qkv)[:, :3, :3].double().mean((1, 2), keepdim=True).expand(-1, 3, 3, -1)
    tolerance = 4 * max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(out[:, :3, :3].double(), mean, rtol=tolerance, atol=tolerance)
    elsewhere = torch.ones(9, 9, dtype=torch.bool)
    elsewhere[:3, :3] = False
    assert (grad_qkv[:, elsewhere] == 0).all()
    changed = inputs._replace(
        qkv=torch.where(elsewhere[..., None], 50 * torch.randn(1, 9, 9, 48).to(dtype), inputs.qkv)
    )
    assert torch.equal(op(changed, options, backend)[:, :3, :3], out[:, :3, :3])


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("window", [(1, 1), (1, 7), (7, 1)], ids=str)
def test_thin_windows_are_finite(window: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    options = Options(window, (window[0] // 2, window[1] // 2), 2, Rope())
    inputs, grad_out = draw((2, 8, 9), 16, options, dtype, cosine=True)
    results = with_gradients(op, inputs, grad_out, options, backend)
    assert all(x.isfinite().all() for x in results[:4])
    if window == (1, 1):
        assert_same(results[0], values_of(inputs.qkv), backend)
        assert_same(values_of(results[1]), grad_out, backend)
    check(inputs, grad_out, options, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_with_shift_rounds_once(dtype: torch.dtype, backend: str) -> None:
    """Computed in float32 inside: the result is that of float32 inputs but for one rounding."""
    if backend == "cuda":
        pytest.skip("tensor cores take weights and gradients of scores rounded to the dtype of the inputs")
    options = Options((7, 7), (3, 3), 3)
    inputs, grad_out = draw((2, 14, 20), 32, options, dtype)
    results = with_gradients(op, inputs, grad_out, options, backend)[:3]
    wide = with_gradients(op, inputs._replace(qkv=inputs.qkv.float()), grad_out.float(), options, backend)[:3]
    assert [x.dtype for x in results] == [dtype, dtype, torch.float32]
    for one, other in zip(results, wide, strict=True):
        limits = torch.finfo(one.dtype)
        tolerance = limits.eps * other.abs() + limits.smallest_normal + 4e-6 * other.abs().max()
        assert ((one.double() - other.double()).abs() <= tolerance).all()


@pytest.mark.parametrize("window", [(7, 7), (1, 43), (43, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_odd_numbers_of_tokens_with_a_bias_at_any_address(window: tuple[int, int], offset: int, backend: str) -> None:
    options = Options(window, (window[0] // 3, window[1] // 3), 2)
    inputs, grad_out = draw((1, 45, 44), 8, options)
    size = inputs.bias.numel()
    memory = torch.full((size + 8,), torch.nan)
    memory[offset : offset + size] = inputs.bias.flatten()
    moved = inputs._replace(bias=memory[offset : offset + size].view(inputs.bias.shape))
    results = with_gradients(op, moved, grad_out, options, backend)[:3]
    right = with_gradients(op, inputs, grad_out, options, backend)[:3]
    for one, other in zip(results, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


def axes_swapped(head_dim: int, interleaved: bool) -> Tensor:
    """Where each component of a head goes when its pairs of the two axes change places."""
    pairs = torch.arange(head_dim // 2).roll(head_dim // 4)
    return (
        torch.stack((2 * pairs, 2 * pairs + 1), 1).flatten()
        if interleaved
        else torch.cat((pairs, pairs + head_dim // 2))
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cosine", [False, True])
def test_transposing_image_and_axes_commutes_with_rope(interleaved: bool, cosine: bool, backend: str) -> None:
    heads, head_dim, (h, w) = 2, 16, (3, 5)
    options = Options((h, w), (1, 3), heads, Rope(interleaved=interleaved))
    inputs, grad_out = draw((2, 8, 13), head_dim, options, cosine=cosine)
    turned_options = Options((w, h), (3, 1), heads, Rope(interleaved=interleaved))

    def turned(x: Inputs, _: Options) -> Tensor:
        order = axes_swapped(head_dim, interleaved)
        q, k, v = x.qkv.transpose(1, 2).unflatten(-1, (3, heads, head_dim)).unbind(3)
        qkv = torch.stack((q[..., order], k[..., order], v), 3).flatten(3)
        bias = x.bias.view(heads, h, w, h, w).permute(0, 2, 1, 4, 3).reshape(heads, h * w, h * w)
        return op(x._replace(qkv=qkv, bias=bias), turned_options, backend).transpose(1, 2)

    results = with_gradients(op, inputs, grad_out, options, backend)
    for one, other in zip(results, with_gradients(turned, inputs, grad_out, options), strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("place", [(0, 0), (4, 5), (8, 10)], ids=str)
def test_what_is_not_finite_stays_in_its_window(
    place: tuple[int, int], cosine: bool, poison: float, backend: str
) -> None:
    options = Options((4, 4), (2, 1), 2, Rope())
    inputs, grad_out = draw((2, 9, 11), 16, options, cosine=cosine)
    clean = with_gradients(op, inputs, grad_out, options, backend)
    dirty_qkv, dirty_grad = inputs.qkv.clone(), grad_out.clone()
    dirty_qkv[0, place[0], place[1]] = poison
    dirty_grad[0, place[0], place[1]] = poison
    cells = [(torch.arange(n) - shift).div(4, rounding_mode="floor") for n, shift in ((9, 2), (11, 1))]
    inside = (cells[0] == cells[0][place[0]])[:, None] & (cells[1] == cells[1][place[1]])
    outside = torch.stack((~inside, torch.ones_like(inside)))
    for qkv, grad in ((dirty_qkv, grad_out), (inputs.qkv, dirty_grad), (dirty_qkv, dirty_grad)):
        results = with_gradients(op, inputs._replace(qkv=qkv), grad, options, backend)
        for one, other in zip(results[:2], clean[:2], strict=True):
            assert torch.equal(one[outside], other[outside])
        # Pairs of places that the window lacks take nothing from it.
        down, right = (torch.arange(n)[m] for n, m in ((9, inside.any(1)), (11, inside.any(0))))
        places = ((down - 2) % 4)[:, None] * 4 + (right - 1) % 4
        lacking = torch.ones(16, 16, dtype=torch.bool)
        lacking[places.flatten()[:, None], places.flatten()] = False
        assert torch.equal(results[2][:, lacking], clean[2][:, lacking])
    assert op(inputs._replace(qkv=dirty_qkv), options, backend)[0, place[0], place[1]].isnan().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(("size", "shift"), [((3, 5), (0, 0)), ((5, 3), (2, 4)), ((6, 6), (6, 6))], ids=str)
def test_bias_of_pairs_that_no_window_has_is_never_looked_at(
    size: tuple[int, int], shift: tuple[int, int], poison: float, backend: str
) -> None:
    options = Options((7, 7), shift, 2)
    inputs, grad_out = draw((2, *size), 16, options, cosine=True)
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in size), indexing="ij")
    places = ((rows - shift[0]) % 7 * 7 + (columns - shift[1]) % 7).flatten()
    cells = ((rows < shift[0]) * 2 + (columns < shift[1])).flatten()
    had = torch.zeros(49, 49, dtype=torch.bool)
    had[places[:, None], places] = cells[:, None] == cells
    clean = with_gradients(op, inputs, grad_out, options, backend)[:4]
    dirty = inputs._replace(bias=torch.where(had, inputs.bias, poison))
    results = with_gradients(op, dirty, grad_out, options, backend)[:4]
    assert all(torch.equal(one, other) for one, other in zip(results, clean, strict=True))
    assert (results[2][:, ~had] == 0).all()


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("cosine", [False, True])
def test_bias_of_minus_infinity_hides(cosine: bool, dtype: torch.dtype, backend: str) -> None:
    options = Options((4, 5), (1, 2), 2, Rope())
    inputs, grad_out = draw((2, 9, 11), 16, options, dtype, cosine=cosine)
    hidden = torch.rand(2, 20, 20) < 0.4
    hidden[0, 3] = hidden[1, 19] = True  # rows that see nothing
    hidden[0, :, 7] = True  # a key that nobody sees
    inputs = inputs._replace(bias=inputs.bias.masked_fill(hidden, -torch.inf))
    check(inputs, grad_out, options, backend)
    out, grad_qkv, grad_bias, *_ = with_gradients(op, inputs, grad_out, options, backend)
    places = (torch.arange(9) - 1)[:, None] % 4 * 5 + (torch.arange(11) - 2) % 5
    grads = grad_qkv.unflatten(-1, (3, 2, 16))
    for head, token in ((0, 3), (1, 19)):
        assert (out.unflatten(-1, (2, 16))[:, places == token, head] == 0).all()
        assert (grads[:, places == token][:, :, 0, head] == 0).all()
    assert (grads[:, places == 7][:, :, 1:, 0] == 0).all()
    assert (grad_bias[hidden] == 0).all()


def test_everything_hidden(backend: str) -> None:
    options = Options((3, 3), (1, 1), 2)
    inputs, grad_out = draw((1, 7, 7), 8, options, cosine=True)
    inputs = inputs._replace(bias=torch.full_like(inputs.bias, -torch.inf))
    assert all((x == 0).all() for x in with_gradients(op, inputs, grad_out, options, backend)[:4])


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_scores_below_any_finite_mask(dtype: torch.dtype, backend: str) -> None:
    """A mask of -1e4 or so would outweigh what is seen; a maximum that starts at a number would find nothing."""
    options = Options((4, 4), (2, 1), 2)
    inputs, grad_out = draw((1, 9, 10), 16, options, dtype)
    bias = -9984 + torch.randint(-20, 20, (2, 16, 16)) / 8
    qkv = inputs.qkv.clone()
    qkv[..., :32] = 0
    check(Inputs(qkv, bias), grad_out, options, backend)
    out = op(Inputs(qkv, bias), options, backend)
    right = swin(Inputs(qkv.double(), bias.double()), options)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=4 * max(torch.finfo(dtype).eps, 1e-4))
    huge = Inputs(qkv, torch.where(torch.eye(16, dtype=torch.bool), -1e30, -3e38).expand(2, 16, 16))
    assert_same(op(huge, options, backend), values_of(qkv), backend)
