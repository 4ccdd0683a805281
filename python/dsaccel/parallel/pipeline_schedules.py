"""Stages and schedules of `torch.distributed.pipelining`, set up for `Pipeline`.

PyTorch calls that package alpha: nothing else imports it, and this file only when a pipeline is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from dskernels.checks import wrong_type, wrong_value

# What a stage makes of a microbatch: size, strides and dtype.
Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Context = Callable[[], AbstractContextManager[Any]]

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class _Stage(PipelineStage):
    """A stage whose forward runs in a context, and whose backward, which a schedule runs in between, does not."""

    def __init__(self, *args: Any, context: Context, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = context

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        # As of 2.13, PyTorch sets the gradients of an FSDP module to None here, as it would have run it to find shapes:
        # also when it has not, and also those that earlier calls have accumulated.
        return


def make_schedule(
    kind: str,
    modules: Sequence[nn.Module],
    shapes: Sequence[Shape],
    microbatches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    group: distributed.ProcessGroup,
    device: torch.device,
    context: Context,
) -> tuple[Any, list[PipelineStage]]:
    """A schedule over the stages of this rank, and these.

    Args:
        kind: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, or ``"forward"`` for any number of stages and microbatches
            without backward.
        modules: this rank's stages.
        shapes: of a microbatch of inputs, then of what each stage of the whole pipeline makes of it.
        microbatches: their number.
        loss_fn: gives what backward starts from.
        group: the ranks of the pipeline.
        device: of the buffers.
        context: in which forward runs.
    """
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    stages: list[PipelineStage] = [
        _Stage(
            module,
            index,
            len(shapes) - 1,
            device,
            # With the shapes at hand PyTorch does not run the stages to find them, which in some versions moves the
            # random state on, and under FSDP discards gradients that are being accumulated.
            input_args=_example(shapes[index]),
            output_args=_example(shapes[index + 1]),
            group=group,
            context=context,
        )
        for index, module in zip(range(rank, len(shapes) - 1, ranks), modules, strict=True)
    ]
    # PyTorch would divide all gradients by the number of microbatches: those of earlier calls too.
    options: dict[str, Any] = {"loss_fn": loss_fn, "scale_grads": False}
    if len(shapes) - 1 == ranks and kind != "interleaved":
        return SINGLE.get(kind, ScheduleGPipe)(stages[0], microbatches, **options), stages
    schedule = ScheduleInterleaved1F1B if kind == "interleaved" else ScheduleLoopedBFS
    return schedule(list(stages), microbatches, **options), stages


def shape_from(out: object, *, is_last: bool) -> Shape:
    """The shape of what a stage returned.

    Raises:
        TypeError, ValueError: it cannot be sent to the next stage.
    """
    if not isinstance(out, Tensor):
        raise wrong_type("stages", "a tensor from each", out)
    if not is_last and not out.is_contiguous():
        raise wrong_value("stages", "a contiguous tensor from each", f"strides {out.stride()}")
    return tuple(out.shape), out.stride(), out.dtype


def _example(shape: Shape) -> Tensor:
    size, strides, dtype = shape
    is_floating = dtype.is_floating_point
    return torch.empty_strided(size, strides, dtype=dtype, device="meta", requires_grad=is_floating)
