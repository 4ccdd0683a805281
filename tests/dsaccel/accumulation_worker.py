"""One of the processes of test_amp_accumulation: trains a window of microbatches and saves what came of it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dsaccel.amp import accumulate

VOCABULARY = 11


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, VOCABULARY))


def make_batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Microbatches of different numbers of tokens, one of them of none."""
    generator = torch.Generator().manual_seed(100 + rank)
    batches = []
    for index in range(count):
        x, y = torch.randint(VOCABULARY, (2, 3, 5), generator=generator)
        y[torch.rand(3, 5, generator=generator) < 0.2 * (index + rank)] = -100
        batches.append((x, y))
    batches[1][1].fill_(-100)
    return batches


def tokens(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


# Without annotations: DDP wants them to be classes, not the strings that they are in this file.
def counting_hook(state, bucket):
    state[0] += 1
    mean = bucket.buffer() / distributed.get_world_size()
    return distributed.all_reduce(mean, async_op=True).get_future().then(lambda future: future.value()[0])


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    # Two windows: of 3 and of 2.
    batches = make_batches(rank, 5)
    results = {}
    for kind in ("ddp", "ddp-group", "ddp-always", "fsdp"):
        exchanges = [0]
        if kind == "fsdp":
            model = make_model()
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        else:
            model = DistributedDataParallel(make_model())
            model.register_comm_hook(exchanges, counting_hook)
        group = distributed.new_group(range(world)) if kind == "ddp-group" else None
        windows = []
        for micro in accumulate(batches, 3, weight=tokens, model=model, group=group):
            with contextlib.nullcontext() if kind == "ddp-always" else micro.sync():
                (summed_loss(model, micro.batch) * micro.sum_factor).backward()
            if kind == "fsdp" and not micro.last:
                exchanges[0] += any(p.grad is not None for p in model.parameters())  # sharded, thus exchanged
            if micro.last:
                grads = [p.grad.full_tensor() if kind == "fsdp" else p.grad.clone() for p in model.parameters()]
                windows.append({"grads": grads, "exchanges": exchanges[0]})
                model.zero_grad()
        results[kind] = windows
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
