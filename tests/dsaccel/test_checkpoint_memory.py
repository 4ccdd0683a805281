"""Saved bytes are counted exactly, and edits are found while they are."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import dskernels as dk
from dsaccel.checkpoint import MemoryReport, checkpoint_blocks, memory, memory_report
from dsaccel.checkpoint._saved import counters
from dsaccel.modules import SlidingWindowLM

pytestmark = pytest.mark.usefixtures("one_thread")


def test_counts_storages_once() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    with memory_report() as report:
        y = x * 2  # saves no tensor
        loss = (y.t() * y).sum() + y[:2].exp().sum() + y.square().sum()
    assert (report.saved_bytes, report.held_bytes) == (400 + 80, 0)
    loss.backward()
    with memory_report() as report:
        x.exp().log()
        x.square()
    # What exp saves is its result, which log saves as well; x is a leaf and counts as a parameter.
    assert (report.saved_bytes, report.held_bytes) == (400, 400)


def test_peak_is_what_is_held_at_a_time() -> None:
    x = torch.randn(25, requires_grad=True)
    with memory_report() as report:
        for _ in range(3):
            (x * 2).exp().sum().backward()
        loss = sum((x * 2).exp().sum() for _ in range(2))
        del loss
    assert report.saved_bytes == 200
    assert counters == []


def test_parameters_and_buffers_are_apart() -> None:
    model = nn.BatchNorm1d(6, affine=True).eval()
    frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
    x = torch.randn(4, 6)
    with memory_report() as report:
        model(frozen(x * model.weight))
    whole = report.saved_bytes
    # Of saved tensors: x, the product with the weight, and the running statistics.
    assert report.held_bytes == (6 + 36) * 4
    with memory_report(model) as report:
        model(frozen(x * model.weight))
    assert whole - report.saved_bytes == 2 * 6 * 4
    assert report.held_bytes == (6 + 36 + 2 * 6) * 4


def test_kept_results_of_selective_are_counted() -> None:
    model, tokens = SlidingWindowLM(40, 16, 2, 2, window=6), torch.arange(20)[None]
    sizes = {}
    for policy in ("none", "selective", "full"):
        handle = checkpoint_blocks(model, policy)
        with memory_report(model) as report:
            loss = model(tokens).sum()
            loss.backward()
            after = counters[0].saved.now
        sizes[policy] = report.saved_bytes
        handle.remove()
        del loss
        gc.collect()
        assert after == 0
    # Out and log-sum-exp of each block; the references, which serve where nothing is compiled, are never kept.
    out_and_lse = 2 * (20 * 16 + 2 * 20) * 4 if dk.build_info()["compiled"] else 0
    assert sizes["selective"] - sizes["full"] == out_and_lse
    assert sizes["full"] < sizes["none"] / 4


def test_a_report_changes_nothing() -> None:
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with memory_report():
            return x.exp().sin()

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    with memory_report():
        y = x * 2
        loss = (y * y).sum()
        with torch.no_grad():
            y.zero_()
    with pytest.raises(RuntimeError, match=r"an inplace operation: \[torch.DoubleTensor \[6\]\] is at version 1"):
        loss.backward()


def test_sparse_and_wrapped_tensors() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    with memory_report() as report:
        loss = torch.sparse.mm(torch.eye(4).to_sparse(), w * 2).sum()
    loss.backward()
    assert report.saved_bytes == 0
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged, requires_grad=True)
    with memory_report() as report:
        loss = (nested * 2).exp().values().sum()
    assert report.saved_bytes >= 6 * 3 * 4
    loss.backward()
    torch.testing.assert_close(nested.grad.values(), 2 * (2 * nested.values()).exp())


def test_an_error_ends_it() -> None:
    x = torch.randn(5, requires_grad=True)
    with pytest.raises(RuntimeError, match="must match"), memory_report() as report:
        x.exp() + torch.ones(4)
    assert counters == []
    assert report.saved_bytes == 20
    with pytest.raises(TypeError, match="model: expected a module or None, got 3"), memory_report(3):
        pass


def test_resident_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_report() as report:
        block = torch.ones(48 << 20, dtype=torch.uint8)
    assert block.sum() > 0
    assert 0 <= report.rss_growth <= report.peak_rss
    # All that torch and this process hold comes to more.
    assert report.peak_rss > 48 << 20
    monkeypatch.setattr(memory.Path, "read_text", lambda self: (_ for _ in ()).throw(OSError()))
    with memory_report() as report:
        pass
    assert (report.peak_rss, report.rss_growth) == (None, None)
    assert "RSS" not in str(report)


def test_cuda_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: calls.append("allocated") or 3 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 << 20)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda abbreviated: f"summary {abbreviated}")
    with memory_report() as report:
        calls.append("inside")
    assert calls == ["reset", "inside", "allocated"]
    assert (report.peak_allocated, report.peak_reserved, report.summary) == (3 << 20, 4 << 20, "summary True")
    assert str(report).splitlines()[-2:] == ["peak allocated on CUDA   3.0 MiB", "peak reserved on CUDA    4.0 MiB"]


def test_prints_a_line_each() -> None:
    report = MemoryReport(saved_bytes=3 << 20, held_bytes=1 << 19, offloaded_bytes=0, peak_rss=1 << 40)
    assert str(report).splitlines() == [
        "saved for backward       3.0 MiB",
        "parameters among it      0.5 MiB",
        "offloaded to the CPU     0.0 MiB",
        "peak RSS of the process  1,048,576.0 MiB",
    ]
