"""Context parallelism: what ranks compute of their slices is what one process computes of the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_cases import fails, mesh_of_all
from ranks import Ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsaccel.parallel.context import shard_sequence, window_attention_context
from dskernels import rope_table, window_attention

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = [(3, 0), (0, 0), (5, 2), (100, 0), (-2, 5), (4, -1), (2, -3), (None, 0), (None, None), (10**30, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_attention_is_that_of_one_process(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    for lengths in (None, [9, 4, 9, 0][:world]):
        ranks.run(attention_case, world, dtype=dtype, lengths=lengths)


def attention_case(rank: int, dtype: torch.dtype, lengths: list[int] | None) -> None:
    mesh, world = mesh_of_all(), dist.get_world_size()
    total = 7 * world if lengths is None else sum(lengths)
    start, length = (7 * rank, 7) if lengths is None else (sum(lengths[:rank]), lengths[rank])
    rows = slice(start, start + length)
    # The kernel's tiles begin at the first query of a slice, so float32 is summed in another order: a few ulp of sums
    # of up to `total` terms of size 1.
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    rope, generator = rope_table(16, total, rotary_dim=12), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    for number, window in enumerate(WINDOWS):
        whole = [draw(2, 4, total, 16), draw(2, 2, total, 16), draw(2, 2, total, 8)]
        sink, bias = draw(4), draw(1, 4, total, total) if number % 2 else draw(2, 1, 1, total)
        grads = draw(2, 4, total, 8), draw(2, 4, total)
        options: dict[str, Any] = {"window": window, "softcap": 5.0 if number % 3 else None, "scale": 0.3}
        whole = [x.requires_grad_() for x in (*whole, sink, bias)]
        local = [x.detach()[:, :, rows].clone().requires_grad_() for x in whole[:3]]
        sink_here = sink.detach().clone().requires_grad_()
        bias_here = (bias.detach()[:, :, rows] if number % 2 else bias.detach()).clone().requires_grad_()
        *qkv, sink, bias = whole
        out = window_attention(*qkv, rope=rope, sink=sink, bias=bias, return_lse=True, **options)
        here = window_attention_context(
            *local, mesh=mesh, rope=rope, sink=sink_here, bias=bias_here, return_lse=True, lengths=lengths, **options
        )
        for got, expected in zip(here, out, strict=True):
            torch.testing.assert_close(got, expected[:, :, rows], **tolerance)
        # A row that sees nothing but its sink has that for lse, so all of it is finite.
        torch.autograd.backward(out, grads)
        torch.autograd.backward(here, [grad[:, :, rows] for grad in grads])
        for got, expected in zip(local, qkv, strict=True):
            torch.testing.assert_close(got.grad, expected.grad[:, :, rows], **tolerance)
        for got, expected in ((sink_here, sink), (bias_here, bias)):
            dist.all_reduce(got.grad) if got.shape == expected.shape else None
            grad = expected.grad if got.shape == expected.shape else expected.grad[:, :, rows]
            torch.testing.assert_close(got.grad, grad, **tolerance)


def test_positions_are_taken_slice_by_slice(ranks: Ranks) -> None:
    ranks.run(positions_case, 3)


def positions_case(rank: int) -> None:
    mesh, rope = mesh_of_all(), rope_table(8, 40)
    q, k, v = (torch.randn(2, 2, 15, 8, dtype=torch.float64) for _ in range(3))
    for positions in (torch.randint(40, (15,)), torch.randint(40, (2, 15))):
        for window in ((4, 0), (7, 2)):
            expected = window_attention(q, k, v, window=window, rope=rope, positions=positions)
            local = [shard_sequence(x, mesh, 2) for x in (q, k, v)]
            places = shard_sequence(positions, mesh, -1)
            out = window_attention_context(*local, mesh=mesh, window=window, rope=rope, positions=places)
            torch.testing.assert_close(out, shard_sequence(expected, mesh, 2), rtol=1e-12, atol=1e-12)


def test_nan_that_nobody_sees_stays_out_and_bits_repeat(ranks: Ranks) -> None:
    ranks.run(nan_case, 3)


def nan_case(rank: int) -> None:
    mesh = mesh_of_all()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        # Key j is seen from p = j - 2 at the latest, so keys 0 and 1 by nobody; the empty window's keys travel in vain.
        for window, hidden in (((-2, 9), 2), ((9, -20), 18)):
            q, k, v = (torch.randn(1, 2, 18, 8).to(dtype) for _ in range(3))
            k[:, :, :hidden] = v[:, :, :hidden] = torch.nan
            runs = []
            for _ in range(2):
                local = [shard_sequence(x, mesh, 2).clone().requires_grad_() for x in (q, k, v)]
                out = window_attention_context(*local, mesh=mesh, window=window)
                out.float().square().sum().backward()
                runs.append([out.detach(), *(x.grad for x in local)])
            expected = shard_sequence(window_attention(q, k, v, window=window), mesh, 2)
            torch.testing.assert_close(runs[0][0], expected, rtol=1e-2, atol=1e-2)
            for first, second in zip(*runs, strict=True):
                assert first.isfinite().all()
                assert torch.equal(first, second)


class CountedBytes(TorchDispatchMode):
    """What this rank receives and sends, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.received = self.sent = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert func is torch.ops.c10d.alltoall_base_.default
            self.calls += 1
            self.received += args[0].nbytes
            self.sent += args[1].nbytes
        return func(*args, **(kwargs or {}))


def test_bytes_are_those_of_the_window(ranks: Ranks) -> None:
    for window in ((3, 0), (5, 2), (20, 0), (0, 0), (-2, 4), (0, -1)):
        left, right = (max(bound, 0) for bound in window)
        short, long = ([6, 6, 6], [24, 24, 24])
        for lengths in (short, long):
            counts = ranks.run(bytes_case, 3, length=lengths[0], window=window)
            for rank, (forward, backward) in enumerate(counts):
                start, end = rank * lengths[0], (rank + 1) * lengths[0]
                tokens = min(left, start) + min(right, sum(lengths) - end)
                # B * Hkv * (D + Dv) numbers of two bytes, in one message each way.
                received = tokens * 2 * 3 * (8 + 4) * 2
                assert forward[0] == backward[1] == received
                assert forward[2] == backward[2] == int(left + right > 0)
            assert sum(forward[1] for forward, _ in counts) == sum(forward[0] for forward, _ in counts)


def bytes_case(rank: int, length: int, window: tuple[int, int]) -> list[tuple[int, int, int]]:
    mesh, counts = mesh_of_all(), []
    q, k, v = (torch.randn(2, h, length, d, dtype=torch.bfloat16).requires_grad_() for h, d in ((6, 8), (3, 8), (3, 4)))
    with CountedBytes() as forward:
        out = window_attention_context(q, k, v, mesh=mesh, window=window)
    with CountedBytes() as backward:
        out.sum().backward()
    for counted in (forward, backward):
        counts.append((counted.received, counted.sent, counted.calls))
    return counts


def test_errors_of_attention_come_on_every_rank(ranks: Ranks) -> None:
    ranks.run(errors_case, 2)


def errors_case(rank: int) -> None:
    mesh, x, rope = mesh_of_all(), torch.randn(1, 2, 4, 8), rope_table(8, 7)

    def attend(q: Any = x, k: Any = x, v: Any = x, **options: Any) -> None:
        window_attention_context(q, k, v, **{"mesh": mesh, "window": (1, 0), **options})

    fails(TypeError, "window: expected a pair", attend, window=3)
    fails(TypeError, "window left: expected an int or None", attend, window=(1.0, 0))
    fails(TypeError, "k: expected a tensor", attend, k=None)
    fails(ValueError, "v: expected [B, H, N, D], as many tokens as in q", attend, v=x[:, :, 1:])
    fails(ValueError, "q: expected [B, H, N, D]", attend, q=x[0])
    fails(TypeError, "rope: expected a RopeTable", attend, rope=(rope.cos, rope.sin))
    fails(IndexError, "rope: the last key stands at position 7, the table holds 7", attend, rope=rope)
    fails(ValueError, "bias: expected 1 or all 8 keys", attend, bias=torch.zeros(4, 4))
    fails(TypeError, "positions: expected a tensor or None", attend, rope=rope, positions=[0, 1, 2, 3])
    fails(ValueError, "positions: expected shape [N] or [B, N] = [1, 4]", attend, rope=rope, positions=torch.arange(8))
    # These are the operator's own, which come on every rank alike.
    fails(ValueError, "positions: expected None without rope", attend, positions=torch.arange(4))
    fails(RuntimeError, "float64", attend, *[x.double()] * 3, backend="cpu")
