"""``python -m dskernels``: what was built, which backend serves each operator here and why, and a short self-test."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import dskernels as dk
from dskernels._registry import Backend, Operator, registered
from dskernels.testing import assert_close_to_reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main() -> int:
    """Prints the report and returns the exit status: 1 if a backend is wrong."""
    _print_build()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    failures = sum(_report(operator, device) for operator in registered() for device in devices)
    print()
    print(f"self-test: {f'{failures} FAILED' if failures else 'passed'}")
    return 1 if failures else 0


def _report(operator: Operator, device: str) -> int:
    """Prints what serves an operator on a device, and how many of these are wrong."""
    tensors, options = _example(operator, device)
    print()
    print(dk.explain(operator.name, *tensors, **options))
    failures = 0
    for backend in operator.backends:
        # On a GPU rotated queries and keys of half precision are rounded, as the reference does not.
        for dtype in _DTYPES if device == "cpu" else _DTYPES[:1]:
            verdict = _self_test(operator, backend, dtype, device)
            failures += verdict.startswith("FAILED")
            print(f"  self-test {device:<4} {backend.name:<9} {str(dtype).removeprefix('torch.'):<8} {verdict}")
    return failures


def _example(operator: Operator, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    tensors, options = operator.example()
    there = {name: value.to(device) if hasattr(value, "to") else value for name, value in options.items()}
    return [tensor.to(device) for tensor in tensors], there


def _print_build() -> None:
    info = dk.build_info()
    print(f"dskernels {info['version']}, torch {info['torch']}, {torch.get_num_threads()} threads")
    compiled = info["compiled"]
    if compiled is None:
        print(f"compiled: nothing; {info['not_loaded']}")
        return
    print(f"compiled: by {compiled['compiler']} for torch {compiled['torch']}")
    print(
        f"  CPU tiers: {_listed(compiled['cpu_tiers'])}; can run here: {_listed(compiled['cpu_tiers_here'])}; "
        f"in use: {info['cpu_tier']}"
    )
    print(f"  CUDA architectures: {_listed(compiled['cuda_archs'])}")
    print(f"  kernels: {_listed(info['kernels'])}")


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _self_test(operator: Operator, backend: Backend, dtype: torch.dtype, device: str) -> str:
    """``"ok"``, ``"skipped: <reason>"`` or ``"FAILED: <reason>"`` for outputs, and gradients, against float64."""
    torch.manual_seed(0)
    tensors, options = _example(operator, device)
    rounded = [tensor.to(dtype) for tensor in tensors]
    call = operator.prepare(*rounded, **options)
    reason = backend.refuses(call) or backend.unasked(call)
    if reason is not None:
        return f"skipped: {reason}"
    reference = operator.find("reference")
    try:
        exact = _outputs_and_gradients(operator, reference, [tensor.double() for tensor in rounded], options)
        plain = _outputs_and_gradients(operator, reference, rounded, options)
        got = _outputs_and_gradients(operator, backend, rounded, options)
        for index, results in enumerate(zip(got, exact, plain, strict=True)):
            assert_close_to_reference(*results, f"result {index} of outputs and gradients")
    except (AssertionError, RuntimeError) as error:
        return f"FAILED: {error}"
    return "ok"


def _outputs_and_gradients(
    operator: Operator, backend: Backend, tensors: list[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_(operator.differentiable) for tensor in tensors]
    outputs = backend.run(operator.prepare(*leaves, **options))
    if not operator.differentiable:
        # The inputs, too: an operator may write them.
        return [*outputs, *leaves]
    # The same weights for every dtype: small integers are exact in all of them.
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randint(-4, 5, out.shape, generator=generator).to(out) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


if __name__ == "__main__":
    sys.exit(main())
