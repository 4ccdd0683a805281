"""Cases of Swin attention with the projections around it, against torchvision's function of the same work.

All contestants take one bias of the positions; a model's lookup of it in its table is not part of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import dskernels as dk
from benchmarks.case import DTYPES, OURS, Case, Competitor, Lane, Prepared
from benchmarks.ops.swin_attention import SwinProblem, case_name, main_sizes, notes, quick_sizes, step, with_backward
from benchmarks.peers import competitors_for

OP = "swin_attention_layer"

# Of torchvision's function, in its order: x, then these.
_PARAMETERS = ("qkv_weight", "proj_weight", "bias", "qkv_bias", "proj_bias")


class Inputs(NamedTuple):
    """``x [B, H, W, C]``, the parameters in torchvision's order, and ``grad_out`` where it is needed."""

    x: Tensor
    qkv_weight: Tensor
    proj_weight: Tensor
    bias: Tensor
    qkv_bias: Tensor
    proj_bias: Tensor
    grad_out: Tensor | None

    def step(self, layer: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
        """The work that is timed, given a function of x and the parameters."""
        return step(layer, self[:-1], self.grad_out)


@dataclass(frozen=True, kw_only=True)
class LayerProblem:
    """Sizes of the attention inside, and with them of the layer."""

    attention: SwinProblem

    def __str__(self) -> str:
        return f"projections and {self.attention}"

    @property
    def dtype(self) -> str:
        """A key of `DTYPES`."""
        return self.attention.dtype

    @property
    def device(self) -> str:
        """Where it runs."""
        return self.attention.device

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return."""
        names = ("x", *_PARAMETERS) if self.attention.backward else ()
        return ("out", *(f"grad_{name}" for name in names))

    @property
    def operations(self) -> int:
        """Those of attention, and 4 C x C products for each token forward, twice that backward."""
        sizes = self.attention
        products = 12 if sizes.backward else 4
        tokens = sizes.batch * sizes.height * sizes.width
        return 2 * products * tokens * sizes.channels**2 + sizes.operations

    @property
    def compulsory_bytes(self) -> int:
        """Forward x is read and out written; backward x and grad_out are read and grad_x is written; parameters alike.

        What lies between the projections need not move.
        """
        sizes = self.attention
        channels = sizes.channels
        values = sizes.batch * sizes.height * sizes.width * channels
        parameters = 4 * channels**2 + 4 * channels + sizes.heads * sizes.tokens**2
        total = 5 * values + 3 * parameters if sizes.backward else 2 * values + parameters
        return total * DTYPES[self.dtype].itemsize

    def draw(self) -> Inputs:
        """Normally distributed from a fixed seed; weights so that values between have a variance of about 1."""
        generator = torch.Generator().manual_seed(0)
        sizes, dtype = self.attention, DTYPES[self.dtype]
        channels = sizes.channels
        image = (sizes.batch, sizes.height, sizes.width, channels)

        def tensor(*shape: int, deviation: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator).mul_(deviation).to(dtype)

        return Inputs(
            x=tensor(*image),
            qkv_weight=tensor(3 * channels, channels, deviation=channels**-0.5),
            proj_weight=tensor(channels, channels, deviation=channels**-0.5),
            bias=tensor(sizes.heads, sizes.tokens, sizes.tokens),
            qkv_bias=tensor(3 * channels),
            proj_bias=tensor(channels),
            grad_out=tensor(*image) if sizes.backward else None,
        )

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of the reference between two ``F.linear``."""
        cast_inputs = Inputs(*(cast(Tensor, None if x is None else x.to(dtype)) for x in inputs))
        return cast_inputs.step(self.by_dskernels(backend="reference"))()

    def by_dskernels(self, **options: Any) -> Callable[..., Tensor]:
        """Our way, as a function of the tensors of `Inputs`."""

        def layer(
            x: Tensor, qkv_weight: Tensor, proj_weight: Tensor, bias: Tensor, qkv_bias: Tensor, proj_bias: Tensor
        ) -> Tensor:
            qkv = F.linear(x, qkv_weight, qkv_bias)
            out = dk.swin_attention(qkv, bias=bias, **self.attention.options, **options)
            return F.linear(out, proj_weight, proj_bias)

        return layer

    def by_torchvision(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same by torchvision's ``shifted_window_attention``."""
        sizes = self.attention
        options: dict[str, Any] = {"window_size": [sizes.window] * 2, "shift_size": [sizes.shift] * 2}

        def layer(
            x: Tensor, qkv_weight: Tensor, proj_weight: Tensor, bias: Tensor, qkv_bias: Tensor, proj_bias: Tensor
        ) -> Tensor:
            biases: dict[str, Any] = {"relative_position_bias": bias[None], "qkv_bias": qkv_bias}
            biases["proj_bias"] = proj_bias
            return function(x, qkv_weight, proj_weight, num_heads=sizes.heads, **biases, **options)

        return layer


def _prepare_ours(problem: LayerProblem, inputs: Inputs) -> Prepared:
    return Prepared(inputs.step(problem.by_dskernels()), notes(problem.attention))


_OURS = Competitor(name=OURS, title="F.linear and dskernels", refuses=lambda problem: None, prepare=_prepare_ours)


def _against_peers(attention: SwinProblem, quick: bool) -> Case:
    problem = LayerProblem(attention=quick_sizes(attention) if quick else attention)
    competitors = [_OURS, *competitors_for(OP)]
    lanes = [Lane(name=c.name, title=c.title, problem=problem, competitor=c) for c in competitors]
    name, title = case_name(attention), str(problem)
    return Case(op=OP, name=name, title=title, dtype=problem.dtype, lanes=lanes, seconds=10.0)


def cases(quick: bool = False) -> list[Case]:
    """All cases: two stages of Swin-T, shifted, in two dtypes. No target is set."""
    sizes = [replace(size, dtype=dtype) for size in main_sizes() for dtype in ("fp32", "bf16")]
    return [_against_peers(problem, quick) for size in sizes for problem in with_backward(size)]
