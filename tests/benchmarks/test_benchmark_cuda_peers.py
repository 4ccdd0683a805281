"""Who takes part on a GPU: the same problems and competitors on the CPU, with stand-ins for what only a GPU has."""

import dataclasses
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F

import dskernels as dk
from benchmarks import cuda, timing
from benchmarks.case import OURS, TRITON
from benchmarks.memory import peak_memory
from benchmarks.ops import cases_of, op_names
from benchmarks.ops.quantized_matmul import MatmulProblem
from benchmarks.peers import competitors_for
from benchmarks.results import CEILING, read
from benchmarks.run import main
from benchmarks.verify import Expected, why_wrong

OPS = [op for op in op_names() if cases_of(op, device="cuda")]
CASES = [(op, case.name) for op in OPS for case in cases_of(op, device="cuda", quick=True)]


def _window(q, k, v, window):
    """``[H, N, D]`` by the reference."""
    return dk.window_attention(q[None], k[None], v[None], window=window, backend="reference")[0]


def _packed(q, k, v, offsets, window):
    assert offsets.dtype == torch.int32
    parts = [
        _window(*(x[start:stop].transpose(0, 1) for x in (q, k, v)), window).transpose(0, 1)
        for start, stop in pairwise(offsets.tolist())
    ]
    return torch.cat(parts)


def _flash_attn_func(q, k, v, *, causal, window_size):
    assert causal
    assert all(x.is_contiguous() for x in (q, k, v))
    parts = [_window(*(x[i].transpose(0, 1) for x in (q, k, v)), window_size).transpose(0, 1) for i in range(len(q))]
    return torch.stack(parts)


def _flash_attn_varlen_func(q, k, v, offsets, offsets_k, longest, longest_k, *, causal, window_size):
    assert causal
    assert longest == longest_k == int(offsets.diff().max())
    return _packed(q, k, v, offsets, window_size)


def _varlen_attn(q, k, v, offsets, offsets_k, longest, longest_k, *, window_size, enable_gqa):
    assert longest == longest_k == int(offsets.diff().max())
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return _packed(q, k, v, offsets, window_size)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    torch.set_num_threads(1)
    # Compiling takes longer than all else, and what is compiled is the eager form.
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function or (lambda inner: inner))
    package = ModuleType("flash_attn")
    package.flash_attn_func, package.flash_attn_varlen_func = _flash_attn_func, _flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", _varlen_attn)


def _on_cpu(op, name):
    (case,) = (case for case in cases_of(op, device="cuda", quick=True) if case.name == name)
    return [dataclasses.replace(lane, problem=dataclasses.replace(lane.problem, device="cpu")) for lane in case.lanes]


def _needs_a_gpu(lane):
    # Flex has no backward on the CPU, and torchao no int4 weights.
    name, problem = lane.name, lane.problem
    backward = name == "flex" and getattr(problem, "backward", False)
    return backward or (name == "torchao" and problem.scheme.startswith("int4")) or name == TRITON


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{op}-{name}" for op, name in CASES])
def test_every_contestant_does_the_same_work(op, name):
    compared = []
    for lane in _on_cpu(op, name):
        if _needs_a_gpu(lane) or lane.competitor.refuses(lane.problem) is not None:
            continue
        inputs = lane.problem.draw()
        prepared = lane.competitor.prepare(lane.problem, inputs)
        results = prepared.comparable(prepared.run())
        assert why_wrong(lane, results, Expected(lane.problem, inputs)) is None, lane.name
        compared.append(lane.name)
    assert len(compared) > 1


@pytest.mark.parametrize("name", ["flash_attn", "varlen_attn", "sdpa_causal"])
def test_peer_with_a_window_too_wide_is_caught(name):
    case = "causal-forward-bf16" if name == "sdpa_causal" else "forward-backward-bf16"
    (lane,) = (lane for lane in _on_cpu("window_attention", case) if lane.name == name)
    inputs = lane.problem.draw()
    wider = dataclasses.replace(lane.problem, seen=lane.problem.seen + 1)
    if name == "sdpa_causal":
        # It has no window that could be wrong: the problem has.
        wider, lane = lane.problem, dataclasses.replace(lane, problem=dataclasses.replace(lane.problem, seen=100))
    prepared = lane.competitor.prepare(wider, inputs)
    results = prepared.comparable(prepared.run())
    assert "relative root mean square error" in why_wrong(lane, results, Expected(lane.problem, inputs))


PEERS = {op: {peer.name: peer for peer in competitors_for(op, "cuda")} for op in OPS}


@pytest.mark.parametrize(
    ("op", "peer", "case", "reason"),
    [
        ("window_attention", "flash_attn", "forward-fp32", "takes float16 and bfloat16 only"),
        ("window_attention", "varlen_attn", "forward-fp32", "takes float16 and bfloat16 only"),
        ("window_attention", "sdpa_causal", "forward-bf16", "takes no window: the whole triangle is other work"),
        ("window_attention", "flex", "forward-backward-bf16", None),
        ("window_attention", "sdpa_causal", "causal-forward-bf16", None),
        ("window_attention_varlen", "flash_attn", "packed-forward-bf16", None),
    ],
    ids=["flash_fp32", "varlen_fp32", "no_window", "flex_backward", "causal", "packed"],
)
def test_peers_of_attention_say_what_they_take(op, peer, case, reason):
    (problem,) = (case_.lanes[0].problem for case_ in cases_of(op, device="cuda") if case_.name == case)
    assert PEERS[op][peer].refuses(problem) == reason


def test_int_mm_needs_rows_on_a_gpu():
    refuses = PEERS["quantized_matmul"]["torch_packed"].refuses
    problem = MatmulProblem(scheme="int8_dynamic", rows=16, dtype="bf16", device="cuda")
    assert refuses(problem) == "on a GPU _int_mm takes more than 16 rows only"
    assert refuses(dataclasses.replace(problem, rows=17)) is None
    assert refuses(dataclasses.replace(problem, device="cpu")) is None


def test_absent_flash_attention_is_told_from_a_broken_one(monkeypatch):
    refuses = PEERS["window_attention"]["flash_attn"].refuses
    problem = cases_of("window_attention", device="cuda")[0].lanes[0].problem
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert refuses(problem) == "flash_attn is not installed"

    def broken(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr("importlib.import_module", broken)
    assert refuses(problem) == "flash_attn cannot be imported: undefined symbol"


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_block_scales_are_laid_out_as_cublas_takes_them(monkeypatch, rows):
    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
        assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
        padded, columns, blocks = len(a), b.shape[1], a.shape[1] // 128
        assert padded % 4 == 0
        assert (scale_a.shape, scale_a.stride()) == ((padded, blocks), (1, padded))
        assert (scale_b.shape, scale_b.stride()) == ((blocks, columns // 128), (1, blocks))
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        x = a.float() * scale_a.repeat_interleave(128, 1)
        weight = b.float() * scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (x @ weight).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    problem = MatmulProblem(scheme="fp8_block", rows=rows, dtype="bf16", out_features=256, in_features=384)
    inputs = problem.draw()
    prepared = PEERS["quantized_matmul"]["scaled_mm"].prepare(problem, inputs)
    assert prepared.notes["scales"] == "1 x 128 and 128 x 128"
    (out,) = prepared.run()
    ours = dk.quantized_matmul(inputs.x, inputs.quantized, backend="reference")
    # The same codes and scales, up to a rounding of the scales of x.
    torch.testing.assert_close(out, ours, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_every_case_runs_on_a_gpu_without_peers(tmp_path, op):
    path = tmp_path / "results.jsonl"
    assert main([op, "--device", "cuda", "--quick", "--repeats", "2", "--peers", "none", "--out", str(path)]) == 0
    records = read(path)
    ours = [record for record in records if record.kind != CEILING and record.notes]
    assert {record.case for record in ours} == {case.name for case in cases_of(op, device="cuda")}
    assert all(record.status == "timed" and record.scratch_bytes is not None for record in ours)
    assert all(record.machine["gpu"]["name"] == torch.cuda.get_device_name() for record in records)
    assert {record.name for record in ours} >= ({OURS} if op != "window_attention" else {OURS, "N=256"})


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["flushed", "queued", "eager"])
def test_clock_measures_what_is_there(launch):
    clock = cuda.CudaClock(launch)
    cycles = int(0.5e-3 * clock._cycles_per_second)

    def half_a_millisecond():
        torch.cuda._sleep(cycles)
        return []

    (turn,) = timing.take_turns({"a": half_a_millisecond}, clock=clock, repeats=1)["a"]
    # Within what a clock's frequency may move by; the test is of the unit and of what is counted.
    assert all(0.25e-3 < seconds < 1e-3 for seconds in turn)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_inputs_on_a_gpu_are_the_same_on_every_draw(op):
    problem = cases_of(op, device="cuda", quick=True)[0].lanes[0].problem
    first, second = (
        [x for x in problem.draw() if isinstance(x, torch.Tensor)] or problem.draw().grads for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert a.is_cuda
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_memory_on_a_gpu_holds_inputs_results_and_what_is_between():
    def run():
        between = torch.empty(2**24, dtype=torch.uint8, device="cuda")
        return [between[:5].clone()]

    assert 2**24 <= cuda.scratch_bytes(run) <= 2**24 + 2**10
    (case,) = (c for c in cases_of("window_attention", device="cuda", quick=True) if c.sweep)
    memory = peak_memory(case, case.lanes[-1], quick=True)
    inputs = case.lanes[-1].problem.draw()
    assert memory.peak >= sum(x.nbytes for x in (*inputs[:3], inputs.q)) + memory.scratch
