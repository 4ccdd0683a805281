"""Cases of all schemes against ``F.linear`` in float32, in many shapes: is a quantized layer ever the slower one?

The baseline is ``F.linear``; a ratio is the time of our product over its own, and above 1 it is a shape where
quantizing costs time. Weights are met again and again, as a small model's are: where they lie in the processor's
cache, the four times as many bytes of the float weight matter least.
"""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Lane
from benchmarks.ops.quantized_matmul import MatmulProblem, our_lane
from benchmarks.peers import competitors_for
from dskernels.quantized_matmul.weight import SCHEMES

OP = "quantized_matmul_shapes"

# Out and in features: square, of grouped keys and of a gated layer in a model of 7B parameters, and both of MiniLM.
_SHAPES = ((4096, 4096), (1024, 4096), (11008, 4096), (384, 1536), (1536, 384))
_ROWS = (1, 2, 4, 8, 16, 64, 256)
_QUICK_SHAPES = ((48, 64), (17, 100))


def _case(out_features: int, in_features: int, rows: int, group_size: int) -> Case:
    (linear,) = competitors_for(OP)
    sizes: dict[str, Any] = {"out_features": out_features, "in_features": in_features, "group_size": group_size}
    problems = [MatmulProblem(scheme=scheme, rows=rows, dtype="fp32", **sizes) for scheme in SCHEMES]
    # Whose problem it is makes no difference to F.linear: all are drawn from the same seed.
    baseline = Lane(name=linear.name, title=linear.title, problem=problems[0], competitor=linear)
    return Case(
        op=OP,
        name=f"{out_features}x{in_features}-m{rows}-fp32",
        title=f"fp32, M{rows} N{out_features} K{in_features}",
        dtype="fp32",
        lanes=[baseline, *(our_lane(problem, problem.scheme, problem.scheme) for problem in problems)],
        baseline=linear.name,
        limits=dict.fromkeys(SCHEMES, 1.0),
        seconds=4.0,
    )


def cases(quick: bool = False) -> list[Case]:
    """All cases: every shape with every number of rows."""
    shapes, rows = (_QUICK_SHAPES, (1, 7)) if quick else (_SHAPES, _ROWS)
    return [_case(n, k, m, 32 if quick else 128) for n, k in shapes for m in rows]
