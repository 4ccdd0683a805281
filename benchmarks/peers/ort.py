"""ONNX Runtime's contributed operators, a model of one node for each scheme.

Inputs and results stay where they are, bound beforehand. A session packs its weight when it is made; several of them
share one pool of threads, as the layers of a model would.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import dskernels as dk
from benchmarks.case import Competitor, Prepared

if TYPE_CHECKING:
    from benchmarks.ops.quantized_matmul import Inputs, MatmulProblem

_DOMAIN = "com.microsoft"
# Activations of MatMulNBits: 0 leaves them in float32, 4 quantizes them to int8 in blocks.
_FLOAT, _INT8 = 0, 4
_LEVELS = {"int8_weight_only": _FLOAT, "int4_weight_only": _FLOAT, "int4_dynamic": _INT8}
_INT8_BLOCK = 128

_pool_threads: int | None = None


def _refuses(problem: MatmulProblem) -> str | None:
    missing = [name for name in ("onnxruntime", "onnx") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    return None if problem.dtype == "fp32" else "takes float32 activations only"


def _prepare(problem: MatmulProblem, inputs: Inputs) -> Prepared:
    model, notes = _model(problem, inputs)
    weights = inputs.copies(lambda: _bound(model, inputs.x, problem.out_features), problem.weight_bytes)

    def multiply(bound: _Bound) -> Tensor:
        bound.session.run_with_iobinding(bound.binding)
        return bound.out

    if "ATEN_CPU_CAPABILITY" in os.environ:
        notes["instructions"] = "the machine's best: there is no way to put it on a tier"
    return Prepared(inputs.step(multiply, weights), {**notes, "weights": len(weights)}, own_threads=True)


class _Bound(NamedTuple):
    """A session, with its input and result bound: the binding knows but their addresses."""

    session: Any
    binding: Any
    x: Tensor
    out: Tensor


def _bound(model: bytes, x: Tensor, out_features: int) -> _Bound:
    import numpy
    import onnxruntime

    _make_pool(torch.get_num_threads())
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding, out = session.io_binding(), torch.empty(x.shape[0], out_features)
    binding.bind_input("x", "cpu", 0, numpy.float32, list(x.shape), x.data_ptr())
    binding.bind_output("out", "cpu", 0, numpy.float32, list(out.shape), out.data_ptr())
    return _Bound(session, binding, x, out)


def _make_pool(threads: int) -> None:
    # The pool is made with the first session of a process, and stays.
    import onnxruntime

    global _pool_threads
    if _pool_threads is None:
        onnxruntime.set_global_thread_pool_sizes(threads, 1)
        _pool_threads = threads
    if _pool_threads != threads:
        raise RuntimeError(f"its pool has {_pool_threads} threads already, not {threads}")


def _model(problem: MatmulProblem, inputs: Inputs) -> tuple[bytes, dict[str, Any]]:
    """The model for a scheme, and what to say of it."""
    from onnx import TensorProto, helper, numpy_helper

    if problem.scheme in _LEVELS:
        nodes, constants, notes = _n_bits(problem, inputs)
    else:
        nodes, constants, notes = _int8(problem, inputs.quantized)
    graph = helper.make_graph(
        nodes,
        problem.scheme,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(inputs.x.shape))],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [problem.rows, problem.out_features])],
        [numpy_helper.from_array(value.contiguous().numpy(), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(), notes


_Parts = tuple[list[Any], dict[str, Tensor], dict[str, Any]]


def _int8(problem: MatmulProblem, weight: dk.QuantizedWeight) -> _Parts:
    from onnx import helper

    constants = {"weight": weight.qweight.T, "scale": weight.scale}
    if problem.scheme == "int8_dynamic":
        node = helper.make_node("DynamicQuantizeMatMul", ["x", "weight", "scale"], ["out"], domain=_DOMAIN)
        return [node], constants, {"operator": node.op_type}
    assert weight.input_scale is not None
    constants |= {"step": weight.input_scale, "zero": torch.tensor(128, dtype=torch.uint8)}
    quantize = helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["codes"])
    names = ["codes", "weight", "step", "scale", "zero"]
    product = helper.make_node("MatMulIntegerToFloat", names, ["out"], domain=_DOMAIN)
    return [quantize, product], constants, {"operator": f"{quantize.op_type}, {product.op_type}"}


def _n_bits(problem: MatmulProblem, inputs: Inputs) -> _Parts:
    from onnx import helper

    if problem.scheme == "int8_weight_only":
        bits, block, constants = 8, _INT8_BLOCK, _int8_blocks(inputs.weight)
    else:
        # The same order of codes and the same zero as ours.
        qweight, scale, block = inputs.quantized.qweight, inputs.quantized.scale, problem.group_size
        bits, constants = 4, {"weight": qweight.view(*scale.shape, block // 2), "scale": scale}
    level = _LEVELS[problem.scheme]
    sizes: dict[str, Any] = {"K": problem.in_features, "N": problem.out_features, "bits": bits, "block_size": block}
    node = helper.make_node(
        "MatMulNBits", ["x", "weight", "scale"], ["out"], domain=_DOMAIN, accuracy_level=level, **sizes
    )
    return [node], constants, {"operator": f"MatMulNBits, {bits} bits, accuracy_level {level}"}


def _int8_blocks(weight: Tensor) -> dict[str, Tensor]:
    """Codes with a zero of 128 and a scale for each block of columns, the last of which is padded."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % _INT8_BLOCK))
    blocks = padded.view(weight.shape[0], -1, _INT8_BLOCK)
    scale = blocks.abs().amax(2) / 127
    codes = (blocks / scale[..., None]).round() + 128
    return {"weight": codes.to(torch.uint8), "scale": scale}


COMPETITORS = {
    "quantized_matmul": Competitor(
        name="ort",
        title="ONNX Runtime",
        refuses=_refuses,
        prepare=_prepare,
        allowed_error=lambda problem: problem.rounding_error,
        devices=("cpu",),
    )
}
