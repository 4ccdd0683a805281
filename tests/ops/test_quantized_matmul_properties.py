"""Properties that hold for every input of quantized_matmul, tried on inputs that hypothesis makes up."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_matmul_oracle import CASES, Expected, draw_rows, draw_weight, stood_for
from torch import Tensor

import dskernels as dk

# The fixture only names the backend, so that examples share it is harmless. No deadline: the machine may be busy.
many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
seeds = st.integers(0, 2**31)
rows_ = st.integers(0, 40)
sizes = st.integers(1, 150)
names = st.sampled_from(list(CASES))


def make(seed: int, name: str, rows: int, out_features: int, columns: int) -> tuple[Tensor, dk.QuantizedWeight]:
    torch.manual_seed(seed)
    return draw_rows(rows, columns), draw_weight(CASES[name], out_features, columns)


def assert_same(one: Tensor, other: Tensor, name: str, backend: str) -> None:
    """Bit for bit, but for sums of floats in the reference, whose order is torch's."""
    if backend == "reference" and not CASES[name].is_integer:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()) if other.numel() else 0)
    else:
        assert torch.equal(one, other)


@many
@given(seeds, names, rows_, sizes, sizes, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_right(backend, seed, name, rows, out_features, columns, dtype) -> None:
    x, weight = make(seed, name, rows, out_features, columns)
    x, bias = x.to(dtype), torch.randn(out_features)
    result = dk.quantized_matmul(x, weight, bias, backend=backend)
    if rows:
        Expected(x, weight, bias).check(result)


@many
@given(seeds, names, rows_, sizes, sizes, st.integers(-20, 20))
def test_powers_of_two_pass_through(backend, seed, name, rows, out_features, columns, power) -> None:
    """They change no code, but where the step is fixed."""
    x, weight = make(seed, name, rows, out_features, columns)
    if weight.input_scale is not None:
        weight = weight._replace(input_scale=None, scheme="int8_dynamic")
    result = dk.quantized_matmul(x, weight, backend=backend)
    assert torch.equal(dk.quantized_matmul(x * 2.0**power, weight, backend=backend), result * 2.0**power)


@many
@given(seeds, names, rows_, sizes, sizes)
def test_odd_in_x(backend, seed, name, rows, out_features, columns) -> None:
    x, weight = make(seed, name, rows, out_features, columns)
    assert torch.equal(
        dk.quantized_matmul(-x, weight, backend=backend), -dk.quantized_matmul(x, weight, backend=backend)
    )


@many
@given(seeds, names, rows_, sizes, sizes)
def test_rows_do_not_know_each_other(backend, seed, name, rows, out_features, columns) -> None:
    x, weight = make(seed, name, rows, out_features, columns)
    order = torch.randperm(rows)
    result = dk.quantized_matmul(x, weight, backend=backend)
    assert_same(dk.quantized_matmul(x[order], weight, backend=backend), result[order], name, backend)


@many
@given(seeds, st.sampled_from([name for name in CASES if name != "fp8_block"]), rows_, sizes, sizes)
def test_channels_do_not_know_each_other(backend, seed, name, rows, out_features, columns) -> None:
    x, weight = make(seed, name, rows, out_features, columns)
    some = torch.randperm(out_features)[: out_features // 2 + 1]
    part = {field: getattr(weight, field)[some] for field in ("qweight", "scale")}
    if weight.zero_point is not None:
        part["zero_point"] = weight.zero_point[some]
    result = dk.quantized_matmul(x, weight, backend=backend)
    assert_same(dk.quantized_matmul(x, weight._replace(**part), backend=backend), result[:, some], name, backend)


@many
@given(seeds, names, rows_, sizes, sizes)
def test_columns_of_zeros_count_for_nothing(backend, seed, name, rows, out_features, columns) -> None:
    """Whatever codes they meet; so it is with the ends of vectors beyond the last column."""
    x, weight = make(seed, name, rows, out_features, columns)
    x[:, columns // 2 :] = 0.0
    start = -(-(columns // 2) // 2) if CASES[name].is_int4 else columns // 2
    other = weight.qweight.clone()
    other[:, start:] = other[:, start:].flip(0, 1)
    result = dk.quantized_matmul(x, weight, backend=backend)
    assert torch.equal(dk.quantized_matmul(x, weight._replace(qweight=other), backend=backend), result)


@many
@given(seeds, names, st.integers(1, 20), sizes, sizes)
def test_near_the_float_product(backend, seed, name, rows, out_features, columns) -> None:
    """Off by at most half a step of each activation, times its weight."""
    x, weight = make(seed, name, rows, out_features, columns)
    if weight.input_scale is not None:
        weight = weight._replace(input_scale=(x.abs().max() / 127).clamp(min=1e-30))
    matrix = torch.from_numpy(stood_for(weight))
    largest = x.double().abs().max() if weight.input_scale is not None else x.double().abs().amax(1, keepdim=True)
    # Up to its largest number, 448, e4m3 has steps of 32; int8 has 127 of 1.
    half_step = largest * (1 / 28 if name == "fp8_block" else 1 / 254 if CASES[name].is_integer else 0.0)
    allowed = half_step * matrix.abs().sum(1) + 1e-4 * (x.double().abs() @ matrix.abs().T)
    off = (dk.quantized_matmul(x, weight, backend=backend).double() - x.double() @ matrix.T).abs()
    assert (off <= allowed * 1.001).all()


@many
@given(seeds, st.sampled_from([name for name in CASES if not CASES[name].is_int4]), sizes, sizes, st.floats(-30, 30))
def test_quantized_again_the_codes_are_the_same(seed, name, out_features, columns, power) -> None:
    """Of a weight on the grid already, whose largest number is the largest code: 4-bit groups have none for it."""
    torch.manual_seed(seed)
    matrix = torch.randn(out_features, columns) * 10.0**power
    options = {"input_scale": 1.0} if name == "int8_static" else {}
    once = dk.quantize_weight(matrix, CASES[name].scheme, **options)
    again = dk.quantize_weight(once.dequantize(), CASES[name].scheme, **options)
    assert torch.equal(once.qweight, again.qweight)
    torch.testing.assert_close(once.scale, again.scale, rtol=2**-22, atol=0)
