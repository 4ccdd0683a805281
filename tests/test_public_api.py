"""The exported names, their signatures, and what their documentation must say."""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path

import pytest

import dskernels as dk

SIGNATURES = {
    "GradNorm": "(total_norm, found_inf)",
    "QuantizedWeight": "(scheme, qweight, scale, in_features, group_size, zero_point=None, input_scale=None,"
    " input_order=None)",
    "RopeTable": "(cos, sin, interleaved=False)",
    "build_info": "()",
    "clip_and_scale_": "(grads, *, max_norm=None, loss_scale=None, norm_type=2.0, error_if_nonfinite=False,"
    " backend=None)",
    "explain": "(operator, /, *args, backend=None, **kwargs)",
    "grad_norm": "(grads, *, loss_scale=None, norm_type=2.0, backend=None)",
    "kept_ops": "()",
    "quantize_weight": "(weight, scheme, *, group_size=None, symmetric=True, input_scale=None)",
    "quantized_matmul": "(x, weight, bias=None, *, backend=None)",
    "rope_table": "(head_dim, max_positions, *, theta=10000.0, rotary_dim=None, interleaved=False, scaling=None)",
    "rope_table_2d": "(head_dim, height, width, *, theta=100.0, rotary_dim=None, interleaved=False)",
    "round_activations": "(x, scheme, *, input_scale=None)",
    "swin_attention": "(qkv, *, window_size, shift=0, num_heads, bias=None, rope=None, logit_scale=None, scale=None,"
    " padding='mask', pad_qkv=None, backend=None)",
    "use_backend": "(backend)",
    "window_attention": "(q, k, v, *, window=(None, None), rope=None, positions=None, bias=None, sink=None,"
    " softcap=None, scale=None, query_offset=None, return_lse=False, backend=None)",
    "window_attention_decode": "(q, k_cache, v_cache, cache_lengths, *, window=(None, 0), rope=None,"
    " keys_rotated=False, sink=None, softcap=None, scale=None, return_lse=False, backend=None)",
    "window_attention_varlen": "(q, k, v, cu_seqlens_q, cu_seqlens_k, *, window=(None, None), rope=None, sink=None,"
    " softcap=None, scale=None, return_lse=False, backend=None)",
}
OPERATORS = (
    "quantized_matmul",
    "swin_attention",
    "window_attention",
    "window_attention_decode",
    "window_attention_varlen",
)


def test_exported_names() -> None:
    assert sorted(dk.__all__) == sorted([*SIGNATURES, "__version__"])


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    signature = inspect.signature(getattr(dk, name))
    # Without annotations: Python versions print them in different ways.
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=signature.empty)) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_annotations(name: str) -> None:
    signature = inspect.signature(getattr(dk, name))
    assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())


@pytest.mark.parametrize("name", SIGNATURES)
def test_docstring(name: str) -> None:
    thing = getattr(dk, name)
    text = inspect.getdoc(thing) or ""
    parameters = [p for p in inspect.signature(thing).parameters if p != "self"]
    for parameter in parameters:
        assert f"{parameter}:" in text, f"{name} does not describe {parameter}"


@pytest.mark.parametrize("name", OPERATORS)
def test_docstring_of_an_operator(name: str) -> None:
    text = inspect.getdoc(getattr(dk, name)) or ""
    for part in ("Args:", "Returns:", "Raises:", "Backends:", "Source", "shape ``[", "Default:", "float32"):
        assert part in text, f"{name}: no {part}"


def test_version_and_typing() -> None:
    assert dk.__version__ == importlib.metadata.version("dskernels")
    assert (Path(dk.__file__).parent / "py.typed").exists()
