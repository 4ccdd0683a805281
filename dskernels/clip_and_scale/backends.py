"""What can serve grad_norm and clip_and_scale_, and how each of these makes its passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dskernels._library import why_no_kernel, why_no_triton, why_not_unasked
from dskernels._registry import Backend, Operator, register
from dskernels.clip_and_scale.arguments import ClipCall, Part, prepare, prepare_norm
from dskernels.clip_and_scale.passes import PowerSum, Scale, measure, result_of, scale_
from dskernels.clip_and_scale.reference import power_sum_reference, scale_reference_

Passes = tuple[PowerSum, Scale]
Run = Callable[[ClipCall, list[Part], Passes], tuple[Tensor, Tensor]]

_REFERENCE: Passes = (power_sum_reference, scale_reference_)


def _read(call: ClipCall, parts: list[Part], passes: Passes) -> tuple[Tensor, Tensor]:
    return result_of(measure(call, parts, passes[0]))


def _clip(call: ClipCall, parts: list[Part], passes: Passes) -> tuple[Tensor, Tensor]:
    measured = measure(call, parts, passes[0])
    if call.error_if_nonfinite and not measured.is_finite:
        raise RuntimeError(f"grads: expected finite gradients, got a total norm of {float(measured.norm)}")
    scale_(call, parts, measured, passes[1])
    return result_of(measured)


def _by_cpu(run: Run, call: ClipCall) -> tuple[Tensor, Tensor]:
    return run(call, call.grads.parts(in_tables=True), _REFERENCE)


def _by_triton(run: Run, call: ClipCall) -> tuple[Tensor, Tensor]:
    from dskernels.clip_and_scale.triton import TritonPasses

    passes = TritonPasses()
    return run(call, call.grads.parts(in_tables=False), (passes.power_sum, passes.scale_))


def _by_reference(run: Run, call: ClipCall) -> tuple[Tensor, Tensor]:
    return run(call, call.grads.parts(in_tables=False), _REFERENCE)


def _cpu_refuses(call: ClipCall) -> str | None:
    missing = why_no_kernel("table_power_sum", "CPU")
    if missing is not None:
        return missing
    devices = (tensor.device for part in call.grads.parts(in_tables=True) for tensor in part.read.others)
    elsewhere = next((device for device in devices if device.type != "cpu"), None)
    return None if elsewhere is None else f"a gradient is on {elsewhere}"


def _tensors(call: ClipCall) -> list[Tensor]:
    tensors = []
    for part in call.grads.parts(in_tables=False):
        tensors += part.read.others
        if part.written is not part.read:
            tensors += part.written.others
    return tensors


def _triton_refuses(call: ClipCall) -> str | None:
    tensors = _tensors(call)
    devices = {tensor.device: None for tensor in tensors}
    if len(devices) > 1:
        return f"the gradients are on {' and '.join(map(str, devices))}"
    # A process without gradients launches nothing, and must not fail where others have some.
    reason = why_no_triton(next(iter(devices), torch.device("cuda")))
    if reason is not None:
        return reason
    kinds = {type(tensor) for tensor in tensors} - {Tensor, torch.nn.Parameter}
    return f"a gradient is of class {kinds.pop().__name__}, whose memory is its own affair" if kinds else None


def _triton_unasked(call: ClipCall) -> str | None:
    tensors = _tensors(call)
    return why_not_unasked(tensors[0].device) if tensors else "there is no gradient"


def _example() -> tuple[list[Tensor], dict[str, Any]]:
    return [torch.randn(1000)], {"loss_scale": 8.0}


def _operator(name: str, prepare: Callable[..., ClipCall], run: Run) -> Operator:
    backends = (
        Backend("cpu", _cpu_refuses, functools.partial(_by_cpu, run)),
        Backend("triton", _triton_refuses, functools.partial(_by_triton, run), _triton_unasked),
        Backend("reference", lambda call: None, functools.partial(_by_reference, run)),
    )
    return register(Operator(name=name, prepare=prepare, backends=backends, example=_example, differentiable=False))


norm_operator = _operator("grad_norm", prepare_norm, _read)
clip_operator = _operator("clip_and_scale_", prepare, _clip)
