"""A pipeline over two GPUs computes what one computes."""

from __future__ import annotations

import pytest
import torch
from pipelines import assert_equal_gradients, loss_of, make_batch, make_model, make_pipeline
from ranks import Ranks
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def two_gpus(rank: int, schedule: str, per_rank: int) -> None:
    torch.cuda.set_device(rank)
    group = distributed.new_group([0, 1], backend="nccl")
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("pp",))
    model = make_model(4).cuda()
    pipeline = make_pipeline(model, mesh, schedule=schedule, microbatches=4, per_rank=per_rank)
    for call, length in enumerate([12, 9]):
        inputs, targets = (x.cuda() for x in make_batch(8, length, call))
        expected = loss_of(model(inputs), targets)
        expected.backward()
        torch.testing.assert_close(pipeline.forward_backward(inputs, targets), expected.detach(), rtol=1e-10, atol=0)
        pipeline.sync_tied_gradients()
        assert_equal_gradients(pipeline, model)
        pipeline.evaluate(inputs[:3], targets[:3])


@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_two_gpus_equal_one(ranks: Ranks, schedule: str, per_rank: int) -> None:
    ranks.run(two_gpus, 2, schedule=schedule, per_rank=per_rank)
