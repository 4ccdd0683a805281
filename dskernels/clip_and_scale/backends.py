"""What can serve grad_norm and clip_and_scale_, and how each of these makes its passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dskernels._library import why_no_cuda, why_no_kernel, why_no_triton, why_not_unasked
from dskernels._registry import Backend, Operator, register
from dskernels.clip_and_scale.arguments import ClipCall, Part, prepare, prepare_norm
from dskernels.clip_and_scale.cuda import CudaPasses, settle_cuda
from dskernels.clip_and_scale.passes import Passes, measure, scale_

Run = Callable[[ClipCall, list[Part], Passes], tuple[Tensor, Tensor]]


def _read(call: ClipCall, parts: list[Part], passes: Passes) -> tuple[Tensor, Tensor]:
    settled = measure(call, parts, passes)
    return settled.norm, settled.found_inf


def _clip(call: ClipCall, parts: list[Part], passes: Passes) -> tuple[Tensor, Tensor]:
    settled = measure(call, parts, passes)
    if call.error_if_nonfinite and settled.found_inf:
        raise RuntimeError(f"grads: expected finite gradients, got a total norm of {float(settled.norm)}")
    scale_(parts, settled.factor, passes)
    return settled.norm, settled.found_inf


def _by_cpu(run: Run, call: ClipCall) -> tuple[Tensor, Tensor]:
    return run(call, call.grads.parts(in_tables=True), Passes())


def _by_cuda(run: Run, call: ClipCall) -> tuple[Tensor, Tensor]:
    if not _tensors(call):
        # There is no device to launch on.
        return _by_reference(run, call)
    passes = CudaPasses()
    return run(call, call.grads.parts(in_tables=False), Passes(passes.power_sum, settle_cuda, passes.scale_))


def _by_triton(run: Run, call: ClipCall) -> tuple[Tensor, Tensor]:
    from dskernels.clip_and_scale.triton import TritonPasses

    passes = TritonPasses()
    return run(call, call.grads.parts(in_tables=False), Passes(passes.power_sum, scale_=passes.scale_))


def _by_reference(run: Run, call: ClipCall) -> tuple[Tensor, Tensor]:
    return run(call, call.grads.parts(in_tables=False), Passes())


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


def _gpu_refuses(why_not: Callable[[torch.device], str | None], call: ClipCall) -> str | None:
    """Why kernels that serve all devices but those for which ``why_not`` has a reason do not serve the call."""
    tensors = _tensors(call)
    devices = {tensor.device: None for tensor in tensors}
    if len(devices) > 1:
        return f"the gradients are on {' and '.join(map(str, devices))}"
    # A process without gradients launches nothing, and must not fail where others have some.
    reasons = [why_not(device) for device in devices or (torch.device("cuda"), torch.device("cpu"))]
    if None not in reasons:
        return reasons[0]
    kinds = {type(tensor) for tensor in tensors} - {Tensor, torch.nn.Parameter}
    return f"a gradient is of class {kinds.pop().__name__}, whose memory is its own affair" if kinds else None


def _gpu_unasked(call: ClipCall) -> str | None:
    tensors = _tensors(call)
    return why_not_unasked(tensors[0].device) if tensors else "there is no gradient"


_why_no_cuda = functools.partial(why_no_cuda, "chunk_power_sums")


def _example() -> tuple[list[Tensor], dict[str, Any]]:
    return [torch.randn(1000)], {"loss_scale": 8.0}


def _operator(name: str, prepare: Callable[..., ClipCall], run: Run) -> Operator:
    backends = (
        Backend("cpu", _cpu_refuses, functools.partial(_by_cpu, run)),
        Backend("cuda", functools.partial(_gpu_refuses, _why_no_cuda), functools.partial(_by_cuda, run), _gpu_unasked),
        Backend(
            "triton", functools.partial(_gpu_refuses, why_no_triton), functools.partial(_by_triton, run), _gpu_unasked
        ),
        Backend("reference", lambda call: None, functools.partial(_by_reference, run)),
    )
    return register(Operator(name=name, prepare=prepare, backends=backends, example=_example, differentiable=False))


norm_operator = _operator("grad_norm", prepare_norm, _read)
clip_operator = _operator("clip_and_scale_", prepare, _clip)
