"""What swin_attention says to wrong arguments, which ones it takes, and which backend serves them."""

from __future__ import annotations

import pytest
import torch
from swin_attention_oracle import Options, check, draw, op

import dskernels as dk

QKV, BIAS, LOGIT_SCALE = torch.randn(2, 6, 5, 48), torch.randn(2, 12, 12), torch.ones(2)
TABLE = dk.rope_table_2d(8, 3, 4)


def by_head(heads: int) -> dk.RopeTable:
    return dk.RopeTable(TABLE.cos.expand(heads, -1, -1), TABLE.sin.expand(heads, -1, -1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qkv": [1.0]}, TypeError, r"qkv: expected a tensor, got \[1.0\] \(list\)"),
        ({"qkv": QKV[0]}, ValueError, r"qkv: expected 4 dimensions, \[B, H, W, 3 \* C\], got shape \[6, 5, 48\]"),
        ({"qkv": QKV.long()}, ValueError, "qkv: expected dtype float32, bfloat16, float16 or float64, got torch.int64"),
        ({"qkv": QKV.cfloat()}, ValueError, "qkv: expected dtype float32.*got torch.complex64"),
        ({"qkv": QKV[..., :0]}, ValueError, r"qkv: expected .* C a positive multiple of num_heads = 2, got shape \[2"),
        ({"qkv": QKV[..., :47]}, ValueError, r"qkv: expected \[B, H, W, 3 \* C\] with C .* got shape \[2, 6, 5, 47\]"),
        ({"qkv": QKV[..., :45]}, ValueError, "qkv: expected .* a positive multiple of num_heads = 2"),
        ({"num_heads": 5}, ValueError, r"qkv: expected .* multiple of num_heads = 5, got shape \[2, 6, 5, 48\]"),
        ({"num_heads": 0}, ValueError, "num_heads: expected a positive number, got 0"),
        ({"num_heads": -2}, ValueError, "num_heads: expected a positive number, got -2"),
        ({"num_heads": 2.0}, TypeError, r"num_heads: expected an int, got 2.0 \(float\)"),
        ({"num_heads": True}, TypeError, r"num_heads: expected an int, got True \(bool\)"),
        ({"window_size": 3.0}, TypeError, r"window_size: expected an int or a pair of ints \(height, width\), got 3.0"),
        ({"window_size": (3, 4, 5)}, TypeError, r"window_size: expected an int or a pair .* got \(3, 4, 5\) \(tuple\)"),
        ({"window_size": (3,)}, TypeError, "window_size: expected an int or a pair of ints"),
        ({"window_size": (3, None)}, TypeError, "window_size: expected an int or a pair of ints"),
        ({"window_size": True}, TypeError, "window_size: expected an int or a pair of ints"),
        ({"window_size": "34"}, TypeError, "window_size: expected an int or a pair of ints"),
        ({"window_size": (0, 4)}, ValueError, r"window_size: expected at least 1, got \(0, 4\)"),
        ({"window_size": (3, -4)}, ValueError, r"window_size: expected at least 1, got \(3, -4\)"),
        ({"shift": 3}, ValueError, r"shift: expected from 0 to below window_size = \(3, 4\), got \(3, 3\)"),
        ({"shift": (0, 4)}, ValueError, r"shift: expected from 0 to below window_size = \(3, 4\), got \(0, 4\)"),
        ({"shift": (-1, 0)}, ValueError, r"shift: expected from 0 to below window_size = \(3, 4\), got \(-1, 0\)"),
        ({"shift": 1.5}, TypeError, r"shift: expected an int or a pair of ints \(height, width\), got 1.5 \(float\)"),
        ({"shift": (1, 1, 1)}, TypeError, "shift: expected an int or a pair of ints"),
        ({"shift": None}, TypeError, r"shift: expected an int or a pair .* got None \(NoneType\)"),
        ({"bias": 0.5}, TypeError, r"bias: expected a tensor or None, got 0.5 \(float\)"),
        ({"bias": BIAS[0]}, ValueError, r"bias: expected shape \[heads, N, N\] = \[2, 12, 12\], got shape \[12, 12\]"),
        ({"bias": BIAS[:1]}, ValueError, r"bias: expected shape \[heads, N, N\] = \[2, 12, 12\], got shape \[1, 12"),
        ({"bias": BIAS[None]}, ValueError, r"bias: expected shape .* got shape \[1, 2, 12, 12\]"),
        ({"bias": BIAS[:, :, :11]}, ValueError, r"bias: expected shape .* got shape \[2, 12, 11\]"),
        ({"bias": BIAS.bool()}, ValueError, "bias: expected a floating point dtype up to float64, got torch.bool"),
        ({"bias": BIAS.to("meta")}, ValueError, "bias: expected the device of qkv, cpu, got meta"),
        ({"logit_scale": 10.0}, TypeError, r"logit_scale: expected a tensor or None, got 10.0 \(float\)"),
        ({"logit_scale": torch.ones(3)}, ValueError, r"logit_scale: expected shape \[heads\] = \[2\], got shape \[3\]"),
        ({"logit_scale": torch.ones(2, 1, 1)}, ValueError, r"logit_scale: expected shape .* got shape \[2, 1, 1\]"),
        ({"logit_scale": torch.ones(2).int()}, ValueError, "logit_scale: expected a floating point dtype"),
        ({"logit_scale": LOGIT_SCALE.to("meta")}, ValueError, "logit_scale: expected the device of qkv, cpu, got meta"),
        ({"scale": "x"}, TypeError, r"scale: expected a number or None, got 'x' \(str\)"),
        ({"scale": True}, TypeError, "scale: expected a number or None"),
        ({"scale": torch.ones(())}, TypeError, "scale: expected a number or None, got a tensor of shape"),
        ({"scale": 0.1, "logit_scale": LOGIT_SCALE}, ValueError, "scale: expected None with logit_scale, .* got 0.1"),
        ({"rope": (TABLE.cos, TABLE.sin)}, TypeError, "rope: expected a RopeTable, as made by .* rope_table_2d"),
        ({"rope": TABLE._replace(cos=TABLE.cos.half())}, ValueError, "rope.cos: expected dtype float32"),
        ({"rope": TABLE._replace(sin=TABLE.sin.to("meta"))}, ValueError, "rope.sin: expected the device of qkv, cpu"),
        ({"rope": TABLE._replace(sin=TABLE.sin[:4])}, ValueError, "rope: expected cos and sin of one shape"),
        ({"rope": TABLE._replace(cos=TABLE.cos[0], sin=TABLE.sin[0])}, ValueError, "rope: expected cos and sin of one"),
        ({"rope": by_head(2)._replace(sin=by_head(1).sin)}, ValueError, "rope: expected cos and sin of one shape"),
        (
            {"rope": TABLE._replace(sin=TABLE.sin.clone().requires_grad_())},
            ValueError,
            "rope.sin: expected a table without gradient, got requires_grad=True",
        ),
        ({"rope": dk.rope_table_2d(12, 3, 4)}, ValueError, "rope: expected rotary_dim up to the head dimension 8, got"),
        (
            {"rope": dk.rope_table_2d(8, 4, 4)},
            ValueError,
            "rope: expected a table of the 12 tokens .* got 16 positions",
        ),
        ({"rope": dk.rope_table(8, 13)}, ValueError, "rope: expected a table of the 12 tokens of a window, as made by"),
        ({"rope": by_head(3)}, ValueError, r"rope: expected a table for all heads or for each of the 2, got shape \[3"),
        ({"padding": None}, TypeError, r"padding: expected a str, got None \(NoneType\)"),
        ({"padding": "zeros"}, ValueError, "padding: expected 'mask' or 'attend', got 'zeros'"),
        (
            {"pad_qkv": torch.ones(48)},
            ValueError,
            "pad_qkv: expected None unless padding is 'attend', got padding = 'm",
        ),
        ({"padding": "attend", "pad_qkv": 0.0}, TypeError, r"pad_qkv: expected a tensor or None, got 0.0 \(float\)"),
        (
            {"padding": "attend", "pad_qkv": torch.ones(16)},
            ValueError,
            r"pad_qkv: expected shape \[3 \* C\] = \[48\], got shape \[16\]",
        ),
        ({"padding": "attend", "pad_qkv": torch.ones(48).int()}, ValueError, "pad_qkv: expected a floating point"),
        (
            {"padding": "attend", "pad_qkv": torch.ones(48).to("meta")},
            ValueError,
            "pad_qkv: expected the device of qkv",
        ),
        ({"backend": "gpu"}, ValueError, "backend: expected one of cpu, cuda, triton, reference, got 'gpu'"),
    ],
)
def test_wrong_arguments(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"qkv": QKV, "window_size": (3, 4), "num_heads": 2, **changes}
    with pytest.raises(error, match=message):
        dk.swin_attention(**arguments)


def test_what_has_no_default() -> None:
    for missing in ({"window_size": 3}, {"num_heads": 2}):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument"):
            dk.swin_attention(QKV, **missing)


def test_arguments_that_mean_the_same(backend: str) -> None:
    def call(**changes) -> torch.Tensor:
        options = {"window_size": (4, 4), "shift": (1, 1), "num_heads": 2, "rope": dk.rope_table_2d(8, 4, 4), **changes}
        return dk.swin_attention(QKV, **options, backend=backend)

    right = call()
    table = dk.rope_table_2d(8, 4, 4)
    for changes in (
        {"window_size": 4, "shift": 1},
        {"window_size": [4, 4], "shift": [1, 1]},
        {"scale": 8**-0.5},
        {"bias": torch.zeros(2, 16, 16)},
        {"bias": torch.zeros(2, 16, 16, dtype=torch.float64)},
        {"padding": "mask", "pad_qkv": None},
        {"rope": table._replace(cos=table.cos.T.contiguous().T)},
        {"rope": dk.RopeTable(table.cos[None], table.sin[None])},
        {"rope": dk.RopeTable(table.cos.expand(2, -1, -1), table.sin.expand(2, -1, -1))},
    ):
        torch.testing.assert_close(call(**changes), right, rtol=1e-6, atol=1e-6)
    assert torch.equal(call(rope=None, shift=0), dk.swin_attention(QKV, window_size=4, num_heads=2, backend=backend))
    torch.testing.assert_close(
        call(padding="attend"), call(padding="attend", pad_qkv=torch.zeros(48)), rtol=1e-6, atol=1e-6
    )


BEYOND = {
    "dtype": (5, 8, torch.float64, "the kernel takes float32, bfloat16 and float16, not torch.float64"),
    "head_dim": (5, 257, torch.float32, "head dimensions go up to 256, got 257"),
    "window": ((16, 17), 8, torch.float32, "windows go up to 256 tokens, got 16 x 17"),
}


@pytest.mark.parametrize("beyond", BEYOND)
def test_what_kernels_cannot_is_refused_or_falls_back(beyond: str) -> None:
    window, head_dim, dtype, reason = BEYOND[beyond]
    options = Options(window if isinstance(window, tuple) else (window, window), (2, 3))
    inputs, grad_out = draw((1, 9, 18), head_dim, options, dtype)
    check(inputs, grad_out, options, None)
    keywords = {"window_size": window, "num_heads": 1}
    assert dk.explain(dk.swin_attention, inputs.qkv, **keywords).chosen == "reference"
    if dk.build_info()["compiled"] is None:
        reason = dk.build_info()["not_loaded"]
    with pytest.raises(RuntimeError) as raised:
        op(inputs, options, "cpu")
    assert str(raised.value) == (f"swin_attention: backend 'cpu' (chosen by backend=) cannot serve this call: {reason}")
    with dk.use_backend("cpu"), pytest.raises(RuntimeError, match=r"'cpu' \(chosen by use_backend\) cannot serve"):
        op(inputs, options)
    with dk.use_backend("reference"):
        check(inputs, grad_out, options, None)


def test_kernels_serve_up_to_their_limits(backend: str) -> None:
    for window, head_dim in (((16, 16), 8), ((1, 256), 8), ((3, 3), 256)):
        options = Options(window, (window[0] // 2, window[1] // 2))
        check(*draw((1, 17, 18), head_dim, options), options, backend)


def test_automatic_choice_takes_the_compiled_kernel() -> None:
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        explanation = dk.explain(dk.swin_attention, QKV.to(dtype), window_size=7, shift=3, num_heads=2)
        assert (explanation.chosen, explanation.origin) == ("cpu", "automatic")
    assert dk.explain("swin_attention", QKV.to("meta"), window_size=7, num_heads=2).chosen == "reference"


def test_other_backends_say_why_they_cannot() -> None:
    # Those on the CPU are taken by the emulator, where it is loaded.
    refusals = dk.explain(dk.swin_attention, QKV.to("meta"), window_size=7, num_heads=2).refusals
    assert refusals["cuda"] == "the tensors are on meta"
    assert refusals["reference"] is None
    with pytest.raises(RuntimeError, match=r"'cuda' .* cannot serve this call: the tensors are on meta"):
        dk.swin_attention(QKV.to("meta"), window_size=7, num_heads=2, backend="cuda")
    with pytest.raises(
        RuntimeError, match=r"'cpu' .* cannot serve this call: the tensors are on meta|without|cannot be loaded"
    ):
        dk.swin_attention(QKV.to("meta"), window_size=7, num_heads=2, backend="cpu")


def test_explain_checks_arguments_too() -> None:
    with pytest.raises(ValueError, match="shift: expected from 0"):
        dk.explain(dk.swin_attention, QKV, window_size=7, shift=7, num_heads=2)
