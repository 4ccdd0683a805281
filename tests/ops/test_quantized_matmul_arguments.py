"""What quantized_matmul says to wrong arguments, and which backend it chooses."""

from __future__ import annotations

import pytest
import torch
from quantized_matmul_oracle import CASES, draw_weight

import dskernels as dk
from dskernels import _library

X, BIAS = torch.randn(3, 40), torch.randn(9)
INT8, STATIC, INT4, FP8 = (
    draw_weight(CASES[n], 9, 40) for n in ("int8_dynamic", "int8_static", "int4_dynamic", "fp8_block")
)
ASYMMETRIC = draw_weight(CASES["int4_weight_only_asymmetric"], 9, 40)
FLOATS = "float32, bfloat16, float16 or float64"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, r"x: expected a tensor, got \[1.0\] \(list\)"),
        ({"x": X.long()}, ValueError, f"x: expected {FLOATS}, got torch.int64"),
        ({"x": X.to(torch.complex64)}, ValueError, f"x: expected {FLOATS}, got torch.complex64"),
        ({"x": X[:, :39]}, ValueError, r"x: expected shape \[..., 40\], got \[3, 39\]"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x: expected shape \[..., 40\], got \[\]"),
        ({"x": X.to("meta")}, ValueError, "x: expected a tensor on cpu, as weight.qweight is, got meta"),
        ({"weight": torch.randn(9, 40)}, TypeError, "weight: expected a QuantizedWeight, got a tensor of shape"),
        ({"weight": tuple(INT8)}, TypeError, "weight: expected a QuantizedWeight"),
        ({"bias": 1.0}, TypeError, r"bias: expected a tensor or None, got 1.0 \(float\)"),
        ({"bias": BIAS.long()}, ValueError, f"bias: expected {FLOATS}, got torch.int64"),
        ({"bias": BIAS[:8]}, ValueError, r"bias: expected shape \[9\], got \[8\]"),
        ({"bias": BIAS[None]}, ValueError, r"bias: expected shape \[9\], got \[1, 9\]"),
        ({"bias": BIAS.to("meta")}, ValueError, "bias: expected a tensor on cpu"),
        ({"backend": "gpu"}, ValueError, "backend: expected one of cpu, cuda, triton, reference, got 'gpu'"),
    ],
)
def test_wrong_arguments(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dk.quantized_matmul(**{"x": X, "weight": INT8, "bias": BIAS, **changes})


@pytest.mark.parametrize(
    ("weight", "changes", "error", "message"),
    [
        (INT8, {"scheme": "int3"}, ValueError, "weight.scheme: expected one of int8_dynamic, .*, got 'int3'"),
        (INT8, {"in_features": 40.0}, TypeError, r"weight.in_features: expected an int, got 40.0 \(float\)"),
        (INT8, {"in_features": True}, TypeError, "weight.in_features: expected an int"),
        (INT4, {"group_size": None}, TypeError, r"weight.group_size: expected an int, got None"),
        (INT8, {"qweight": [1]}, TypeError, "weight.qweight: expected a tensor"),
        (INT8, {"qweight": INT8.qweight.byte()}, ValueError, "weight.qweight: expected torch.int8, got torch.uint8"),
        (INT4, {"qweight": INT4.qweight.char()}, ValueError, "weight.qweight: expected torch.uint8, got torch.int8"),
        (FP8, {"qweight": FP8.qweight.view(torch.float8_e4m3fn)}, ValueError, "weight.qweight: expected torch.uint8"),
        (INT8, {"qweight": INT8.qweight[0]}, ValueError, r"weight.qweight: expected shape \[N, 40\] .*, got \[40\]"),
        (INT8, {"in_features": 41}, ValueError, r"weight.qweight: expected shape \[N, 41\] for in_features=41"),
        (INT4, {"in_features": 41}, ValueError, r"weight.qweight: expected shape \[N, 21\] for in_features=41"),
        (INT8, {"qweight": INT8.qweight.t().contiguous().t()}, ValueError, "weight.qweight: expected a contiguous"),
        (INT4, {"group_size": 8}, ValueError, "weight.group_size: expected a multiple of 16, or in_features, got 8"),
        (INT4, {"group_size": 36}, ValueError, "weight.group_size: expected a multiple of 16"),
        (INT4, {"group_size": 0}, ValueError, "weight.group_size: expected a multiple of 16"),
        (INT4, {"group_size": -1}, ValueError, "weight.group_size: expected a multiple of 16"),
        (INT8, {"scale": 1.0}, TypeError, "weight.scale: expected a tensor"),
        (INT8, {"scale": INT8.scale.half()}, ValueError, "weight.scale: expected torch.float32, got torch.float16"),
        (INT8, {"scale": INT8.scale[:8]}, ValueError, r"weight.scale: expected shape \[9\], got \[8\]"),
        (INT8, {"scale": INT8.scale[:, None]}, ValueError, r"weight.scale: expected shape \[9\], got \[9, 1\]"),
        (INT4, {"scale": INT4.scale[:, :1]}, ValueError, r"weight.scale: expected shape \[9, 2\], got \[9, 1\]"),
        (INT4, {"scale": INT4.scale.t().contiguous().t()}, ValueError, "weight.scale: expected a contiguous tensor"),
        (FP8, {"scale": torch.ones(9, 1)}, ValueError, r"weight.scale: expected shape \[1, 1\], got \[9, 1\]"),
        (INT8, {"scale": INT8.scale.to("meta")}, ValueError, "weight.scale: expected a tensor on cpu"),
        (INT8, {"zero_point": ASYMMETRIC.zero_point}, ValueError, "weight.zero_point: expected None for int8_dynamic"),
        (FP8, {"zero_point": FP8.scale.byte()}, ValueError, "weight.zero_point: expected None for fp8_block"),
        (ASYMMETRIC, {"zero_point": ASYMMETRIC.scale}, ValueError, "weight.zero_point: expected torch.uint8"),
        (
            ASYMMETRIC,
            {"zero_point": ASYMMETRIC.zero_point[:8]},
            ValueError,
            r"weight.zero_point: expected shape \[9, 2\]",
        ),
        (STATIC, {"input_scale": None}, ValueError, "weight.input_scale: expected a tensor for int8_static"),
        (STATIC, {"input_scale": 0.1}, TypeError, "weight.input_scale: expected a tensor, got 0.1"),
        (STATIC, {"input_scale": torch.ones(1)}, ValueError, r"weight.input_scale: expected shape \[\], got \[1\]"),
        (STATIC, {"input_scale": torch.ones(()).half()}, ValueError, "weight.input_scale: expected torch.float32"),
        (INT8, {"input_scale": torch.ones(())}, ValueError, "weight.input_scale: .* None for the others"),
        (INT8, {"input_order": torch.arange(39)}, ValueError, r"weight.input_order: expected shape \[40\], got \[39\]"),
        (INT8, {"input_order": torch.arange(40).int()}, ValueError, "weight.input_order: expected torch.int64"),
        (INT8, {"input_order": list(range(40))}, TypeError, "weight.input_order: expected a tensor"),
    ],
)
def test_wrong_weights(weight: dk.QuantizedWeight, changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dk.quantized_matmul(X, weight._replace(**changes))


def test_an_order_out_of_bounds(backend: str) -> None:
    if backend == "cuda":
        pytest.skip("a look at its values would wait for the GPU; test_quantized_matmul_cuda.py says what comes of it")
    for weight in (INT8, STATIC, INT4, ASYMMETRIC, FP8):
        for wrong in (40, 10**9, -41, -(10**12)):
            order = torch.arange(40).index_fill(0, torch.tensor([7]), wrong)
            with pytest.raises((IndexError, RuntimeError)):
                dk.quantized_matmul(X, weight._replace(input_order=order), backend=backend)


HAS_KERNEL = "quantized_matmul/CPU" in dk.build_info()["kernels"]


@pytest.mark.skipif(not HAS_KERNEL, reason="quantized_matmul is not compiled")
def test_choice_of_the_backend() -> None:
    for name in CASES:
        weight = draw_weight(CASES[name], 9, 40)
        explanation = dk.explain(dk.quantized_matmul, X, weight, BIAS)
        assert (explanation.chosen, explanation.origin) == ("cpu", "automatic")
        assert explanation.refusals["reference"] is None
        assert torch.equal(dk.quantized_matmul(X, weight), dk.quantized_matmul(X, weight, backend="cpu"))
        with dk.use_backend("reference"):
            assert dk.explain(dk.quantized_matmul, X, weight).chosen == "reference"


@pytest.mark.skipif(not HAS_KERNEL, reason="quantized_matmul is not compiled")
def test_what_the_kernels_refuse() -> None:
    meta = INT8._replace(qweight=INT8.qweight.to("meta"), scale=INT8.scale.to("meta"))
    for x, weight, reason in (
        (X.double(), INT8, "take float32, bfloat16 and float16, not torch.float64"),
        (X.to("meta"), meta, "the tensors are on meta"),
    ):
        explanation = dk.explain("quantized_matmul", x, weight)
        assert explanation.chosen == "reference"
        assert reason in explanation.refusals["cpu"]
        with pytest.raises(RuntimeError, match=reason):
            dk.quantized_matmul(x, weight, backend="cpu")
        assert dk.quantized_matmul(x, weight).dtype == x.dtype


def test_backends_that_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    # In float64, because an emulator that another test loaded serves what the CUDA kernels take, on the CPU, too.
    for name in ("cuda", "triton"):
        with pytest.raises(RuntimeError, match=rf"quantized_matmul: backend '{name}' \(chosen by backend=\) cannot"):
            dk.quantized_matmul(X.double(), INT8, backend=name)
    monkeypatch.setattr(_library, "_kernels", frozenset())
    monkeypatch.setattr(_library, "_not_loaded", None)
    with pytest.raises(RuntimeError, match="built without a CPU kernel for quantized_matmul"):
        dk.quantized_matmul(X, INT8, backend="cpu")
    expected = dk.quantized_matmul(X, INT8, backend="reference")
    assert torch.equal(dk.quantized_matmul(X, INT8), expected)
