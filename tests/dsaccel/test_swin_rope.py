"""2-D rotary positions of windows: what the op rotates by tables is what the modules rotate by themselves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import dskernels as dk
from dsaccel.modules import AxialRope2d, MixedRope2d, SwinAttention

pytestmark = pytest.mark.usefixtures("one_thread")


def turned(qkv: Tensor, rope: MixedRope2d, shift: tuple[int, int]) -> Tensor:
    """Queries and keys rotated token by token, by complex numbers."""
    height, width = rope.window_size
    out = qkv.detach().clone()
    heads = out.unflatten(3, (3, rope.num_heads, rope.head_dim))
    by_column, by_row = rope.frequencies.detach().to(qkv.dtype)
    for row in range(qkv.shape[1]):
        for column in range(qkv.shape[2]):
            y, x = (row - shift[0]) % height, (column - shift[1]) % width
            angle = x * by_column + y * by_row
            turn = torch.complex(angle.cos(), angle.sin())
            pairs = heads[:, row, column, :2]
            if rope.interleaved:
                z = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * turn
                heads[:, row, column, :2] = torch.view_as_real(z).flatten(-2)
            else:
                z = torch.complex(*pairs.chunk(2, -1)) * turn
                heads[:, row, column, :2] = torch.cat((z.real, z.imag), -1)
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("shift", [(0, 0), (1, 2)], ids=["shift0", "shift1,2"])
def test_mixed_rotates_each_token_by_its_place(interleaved: bool, shift: tuple[int, int]) -> None:
    rope = MixedRope2d(8, (3, 4), 2, interleaved=interleaved).double()
    qkv = torch.randn(2, 7, 9, 48, dtype=torch.float64)
    torch.testing.assert_close(rope(qkv, shift=shift), turned(qkv, rope, shift))


@pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
@pytest.mark.parametrize("shift", [0, (1, 2)], ids=str)
def test_table_and_own_rotation_agree(cosine: bool, shift: int | tuple[int, int], backend: str) -> None:
    rope = MixedRope2d(8, (3, 4), 2)
    qkv = torch.randn(2, 7, 9, 48)
    scale = torch.tensor([3.0, 5.0]) if cosine else None
    options = {"window_size": (3, 4), "shift": shift, "num_heads": 2, "logit_scale": scale}
    inside = dk.swin_attention(qkv, rope=rope.table(), backend=backend, **options)
    outside = dk.swin_attention(rope(qkv, shift=shift), backend=backend, **options)
    torch.testing.assert_close(inside, outside, rtol=1e-5, atol=1e-5)


def test_table_is_float32_by_head_and_detached() -> None:
    rope = MixedRope2d(8, (3, 4), 2).double()
    table = rope.table()
    assert table.cos.shape == (2, 12, 4)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    assert not table.cos.requires_grad
    by_column, by_row = rope.frequencies.detach()
    for n in range(12):
        angle = n % 4 * by_column + n // 4 * by_row
        assert torch.equal(table.cos[:, n], angle.cos().float())
        assert torch.equal(table.sin[:, n], angle.sin().float())


@pytest.mark.parametrize("padding", ["mask", "attend"])
def test_gradients_of_learned_frequencies(padding: str) -> None:
    rope = MixedRope2d(4, (2, 3), 2)
    attention = SwinAttention(8, 2, (2, 3), shift=1, rope=rope, cosine=True, padding=padding).double()
    for p in attention.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(1, 3, 5, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda _: attention(x), (rope.frequencies,))
    assert torch.autograd.gradgradcheck(lambda _: attention(x), (rope.frequencies,))


@pytest.mark.parametrize("padding", ["mask", "attend"])
@pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
def test_attention_is_the_same_with_and_without_gradient_of_frequencies(padding: str, cosine: bool) -> None:
    rope = MixedRope2d(8, (3, 4), 2)
    attention = SwinAttention(16, 2, (3, 4), shift=(1, 2), rope=rope, cosine=cosine, padding=padding)
    for p in (*attention.qkv.parameters(), *attention.proj.parameters()):
        nn.init.normal_(p, std=0.5)
    # Sizes that leave padding in a window with tokens.
    x = torch.randn(2, 8, 11, 16)
    calls = []
    rope.register_forward_hook(lambda *_: calls.append(1))
    learned = attention(x)
    assert len(calls) == 1
    with torch.no_grad():
        torch.testing.assert_close(attention(x), learned, rtol=1e-5, atol=1e-5)
    rope.requires_grad_(False)
    torch.testing.assert_close(attention(x), learned, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


def test_gradient_of_frequencies_by_torch_func() -> None:
    attention = SwinAttention(16, 2, 4, rope=MixedRope2d(8, 4, 2)).double()
    x = torch.randn(1, 5, 6, 16, dtype=torch.float64)
    parameters = dict(attention.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(attention, parameters, (x,)).square().sum()

    grads = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    for name, p in parameters.items():
        assert p.grad.any()
        torch.testing.assert_close(grads[name], p.grad)


def test_mixed_starts_from_axial_frequencies_turned_by_an_angle_a_head() -> None:
    rope = MixedRope2d(16, 7, 64, theta=10.0)
    x, y = rope.frequencies.detach()
    magnitude = 10.0 ** (-4 * torch.arange(4) / 16)
    torch.testing.assert_close(torch.hypot(x, y), magnitude.repeat(2).expand(64, 8))
    angle = torch.atan2(y, x)
    # One angle for the first half of the pairs, one at right angles to it for the second; another for each head.
    assert torch.allclose(angle[:, :1].cos(), angle[:, :4].cos(), atol=1e-5)
    torch.testing.assert_close(x[:, :4] * x[:, 4:] + y[:, :4] * y[:, 4:], torch.zeros(64, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(x[:, :4] * y[:, 4:] - y[:, :4] * x[:, 4:], (magnitude**2).expand(64, 4))
    quadrants = torch.stack((x[:, 0] > 0, y[:, 0] > 0), 1).unique(dim=0)
    assert len(quadrants) == 4
    assert angle[:, 0].unique().numel() == 64


def test_axial_is_the_table_and_stays_float32() -> None:
    rope = AxialRope2d(8, (3, 4), theta=50.0)
    expected = dk.rope_table_2d(8, 3, 4, theta=50.0)
    for changed in (rope, copy.deepcopy(rope), pickle.loads(pickle.dumps(rope)), rope.half(), rope.double()):
        table = changed.table()
        assert torch.equal(table.cos, expected.cos)
        assert torch.equal(table.sin, expected.sin)
    assert list(rope.state_dict()) == []
    assert rope.to("meta").table().cos.is_meta
    with torch.device("meta"):
        other = AxialRope2d(8, (3, 4), theta=50.0)
    assert torch.equal(other.to_empty(device="cpu").table().cos, expected.cos)


def test_transposing_image_and_axes_commutes() -> None:
    rope, other = MixedRope2d(8, (3, 5), 2).double(), MixedRope2d(8, (5, 3), 2).double()
    other.load_state_dict({"frequencies": rope.frequencies.flip(0)})
    qkv = torch.randn(1, 8, 11, 48, dtype=torch.float64)
    out = dk.swin_attention(rope(qkv, shift=(1, 2)), window_size=(3, 5), shift=(1, 2), num_heads=2)
    transposed = other(qkv.transpose(1, 2), shift=(2, 1))
    out_transposed = dk.swin_attention(transposed, window_size=(5, 3), shift=(2, 1), num_heads=2)
    torch.testing.assert_close(out.transpose(1, 2), out_transposed)


def test_half_precision_is_rotated_in_float32() -> None:
    rope = MixedRope2d(8, 7, 2)
    qkv = torch.randn(1, 7, 7, 48).bfloat16()
    exact = rope(qkv.float())
    with torch.autocast("cpu", torch.bfloat16):
        rotated = rope(qkv)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, exact.bfloat16())


ERRORS = {
    "axial-dim": (lambda: AxialRope2d(6, 7), ValueError, "rotary_dim: expected a multiple of 4"),
    "axial-window": (lambda: AxialRope2d(8, 0), ValueError, "window_size: expected at least 1, got 0"),
    "axial-theta": (lambda: AxialRope2d(8, 7, theta=0), ValueError, "theta: expected a positive number, got 0"),
    "dim": (lambda: MixedRope2d(6, 7, 2), ValueError, "head_dim: expected a multiple of 4, got 6"),
    "dim-type": (lambda: MixedRope2d("8", 7, 2), TypeError, "head_dim: expected an int, got '8'"),
    "heads": (lambda: MixedRope2d(8, 7, 0), ValueError, "num_heads: expected a positive number, got 0"),
    "theta": (lambda: MixedRope2d(8, 7, 2, theta=-1), ValueError, "theta: expected a positive number, got -1"),
    "theta-type": (lambda: MixedRope2d(8, 7, 2, theta="10"), TypeError, "theta: expected a number, got '10'"),
    "window": (lambda: MixedRope2d(8, (7,), 2), TypeError, r"window_size: expected an int or a pair of ints"),
    "qkv": (
        lambda: MixedRope2d(8, 7, 2)(torch.zeros(1, 7, 7, 24)),
        ValueError,
        r"qkv: expected shape \[B, H, W, 48\], got shape \[1, 7, 7, 24\]",
    ),
    "qkv-dim": (lambda: MixedRope2d(8, 7, 2)(torch.zeros(7, 48)), ValueError, r"qkv: expected shape \[B, H, W, 48\]"),
    "shift": (
        lambda: MixedRope2d(8, 7, 2)(torch.zeros(1, 7, 7, 48), shift=-1),
        ValueError,
        "shift: expected at least 0, got -1",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
