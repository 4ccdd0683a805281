"""The cases of quantized products: formulas, what is right, weights that take turns, and every peer on tiny sizes."""

import dataclasses
import importlib.util
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from benchmarks import run, timing
from benchmarks.case import OURS, Lane
from benchmarks.ops import quantized_matmul, quantized_matmul_shapes
from benchmarks.ops.quantized_matmul import MatmulProblem
from benchmarks.peers import competitors_for, ort
from benchmarks.results import CEILING, read
from benchmarks.run import main
from benchmarks.verify import Expected, why_wrong
from dskernels.quantized_matmul.arguments import prepare
from dskernels.quantized_matmul.schema import forward_op
from dskernels.quantized_matmul.weight import SCHEMES

# One thread, as in the other tests: the pool of ONNX Runtime is made once in a process.
QUICK = ["--quick", "--threads", "1", "--repeats", "2"]
SIZES = {"dtype": "fp32", "out_features": 130, "in_features": 200, "group_size": 32}
PROBLEMS = {scheme: MatmulProblem(scheme=scheme, rows=5, **SIZES) for scheme in SCHEMES}
PROBLEMS["bf16"] = dataclasses.replace(PROBLEMS["int8_dynamic"], dtype="bf16")
PEERS = {peer.name: peer for peer in competitors_for(quantized_matmul.OP)}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
each_contest = pytest.mark.parametrize(
    ("scheme", "name"),
    [(scheme, name) for scheme, names in quantized_matmul._PEERS.items() for name in (OURS, *names)],
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(timing, "_REST_SECONDS", 0.0)
    # Compiling takes longer than all else, and what torchao compiles is its eager form.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def _run(tmp_path, op, *arguments):
    path = tmp_path / "results.jsonl"
    status = main([op.OP, *QUICK, "--out", str(path), *arguments])
    return status, {(r.case, r.name): r for r in read(path) if r.kind != CEILING}


def _tiny(scheme, **sizes):
    # Rows of fewer values have larger codes, with which peers saturate on AVX2.
    sizes = {"rows": 1, "out_features": 64, "in_features": 1024, **sizes}
    return MatmulProblem(scheme=scheme, dtype="fp32", **sizes)


def _contestant(problem, name):
    competitor = quantized_matmul._OURS if name == OURS else PEERS[name]
    reason = competitor.refuses(problem)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return competitor


def _fault(problem, competitor, inputs, results):
    lane = Lane(name=competitor.name, title=competitor.title, problem=problem, competitor=competitor)
    return why_wrong(lane, results, Expected(problem, inputs))


@each_problem
def test_operations_are_those_of_torchs_counter(problem):
    inputs = problem.draw()
    with FlopCounterMode(display=False) as counter:
        forward_op(*prepare(inputs.x, inputs.quantized))
    assert problem.operations == counter.get_total_flops()


@each_problem
def test_bytes_are_those_of_the_tensors(problem):
    x, _, weight, _ = problem.draw()
    out = dk.quantized_matmul(x, weight)
    tensors = [x, out, *(field for field in weight if isinstance(field, torch.Tensor))]
    assert problem.compulsory_bytes == sum(tensor.nbytes for tensor in tensors)
    assert problem.weight_bytes == weight.qweight.nbytes + weight.scale.nbytes


@each_problem
def test_expected_is_the_product_with_the_float_weight(problem):
    inputs = problem.draw()
    (got,) = problem.expected(inputs, torch.float64)
    x, weight = inputs.x.double().numpy(), inputs.weight.double().numpy()
    torch.testing.assert_close(got, torch.from_numpy((x[:, None, :] * weight).sum(-1)))


def test_inputs_are_the_same_on_every_draw():
    for problem in PROBLEMS.values():
        torch.testing.assert_close(tuple(problem.draw()[:2]), tuple(problem.draw()[:2]), rtol=0, atol=0)


@each_scheme
def test_allowed_errors_are_about_what_rounding_leaves(scheme):
    problem = _tiny(scheme, rows=16, in_features=4096)
    inputs = problem.draw()
    exact, got = problem.expected(inputs, torch.float64)[0], dk.quantized_matmul(inputs.x, inputs.quantized).double()
    error = ((got - exact).square().mean() / exact.square().mean()).sqrt()
    assert problem.rounding_error / 3 < error < problem.rounding_error / 1.1


@pytest.mark.parametrize(("footprint", "count"), [(0, 1), (1, 1), (1000, 3)], ids=["warm", "small", "cold"])
def test_weights_take_turns(footprint, count):
    inputs = _tiny("int8_dynamic", footprint=footprint).draw()
    weights = inputs.copies(inputs.x.clone, 400)
    places = sorted((weight.data_ptr(), weight.nbytes) for weight in weights)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(places))
    used = []
    step = inputs.step(lambda weight: used.append(weight.data_ptr()) or weight, weights)
    # Every weight once beforehand.
    assert used == [weight.data_ptr() for weight in weights]
    for _ in range(2 * count):
        step()
    assert used == 3 * [weight.data_ptr() for weight in weights]
    assert len(set(used)) == count


@each_contest
def test_every_contestant_has_as_many_weights_as_fill_the_footprint(scheme, name):
    problem = _tiny(scheme, footprint=10 * 64 * 1024)
    competitor = _contestant(problem, name)
    prepared = competitor.prepare(problem, problem.draw())
    # Float32, and torch's 4 bits for x86, are larger than codes.
    larger = {("int4_dynamic", "torch_packed"): 2, (scheme, "linear"): 4}
    bytes_of_one = larger[scheme, name] * 64 * 1024 if (scheme, name) in larger else problem.weight_bytes
    assert prepared.notes["weights"] >= 3
    assert (prepared.notes["weights"] + 1) * bytes_of_one >= problem.footprint
    assert prepared.own_threads == (name == "ort")
    # The last weight gives what the first one does.
    results = [prepared.run()[0].clone() for _ in range(prepared.notes["weights"])]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@each_contest
def test_every_contestant_is_right_and_caught_when_it_is_not(scheme, name):
    problem = _tiny(scheme, rows=1 if scheme == "int4_dynamic" else 3)
    competitor, inputs = _contestant(problem, name), problem.draw()
    results = [competitor.prepare(problem, inputs).run()[0].clone()]
    assert _fault(problem, competitor, inputs, results) is None
    factor, reason = 1 + 2 * problem.rounding_error, "out: relative root"
    if name == "linear":
        factor = 1.001
    elif name == OURS:
        factor, reason = 1.0001, "out: largest error"
    assert reason in _fault(problem, competitor, inputs, [factor * results[0]])


@each_scheme
def test_our_codes_are_held_to_the_float_weight_too(scheme):
    problem = _tiny(scheme)
    competitor, inputs = quantized_matmul._OURS, problem.draw()
    scale = inputs.quantized.scale * (1 + 2 * problem.rounding_error)
    wrong = inputs._replace(quantized=inputs.quantized._replace(scale=scale))
    # Kernel and reference agree on these codes.
    results = competitor.prepare(problem, wrong).run()
    assert "out: relative root" in _fault(problem, competitor, wrong, results)


@pytest.mark.parametrize("missing", ["onnxruntime", "onnx", "torchao"])
def test_peers_that_are_not_installed_say_so(monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    peer = PEERS["torchao" if missing == "torchao" else "ort"]
    assert f"{missing}" in peer.refuses(PROBLEMS["int8_dynamic"])
    assert "not installed" in peer.refuses(PROBLEMS["int8_dynamic"])


def test_pool_of_onnxruntime_keeps_its_threads():
    pytest.importorskip("onnxruntime")
    ort._make_pool(1)
    with pytest.raises(RuntimeError, match="its pool has 1 threads already, not 2"):
        ort._make_pool(2)


def test_every_case_runs_with_all_peers(tmp_path):
    status, lanes = _run(tmp_path, quantized_matmul)
    assert status == 0
    assert lanes.keys() == {(case.name, lane.name) for case in quantized_matmul.cases() for lane in case.lanes}
    problems = {case.name: case.lanes[0].problem for case in quantized_matmul.cases(quick=True)}
    for (case, name), record in lanes.items():
        reason = None if name == OURS else PEERS[name].refuses(problems[case])
        assert (record.status, record.reason) == ("timed" if reason is None else "skipped", reason)


def test_every_shape_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "peak_memory", None)
    status, lanes = _run(tmp_path, quantized_matmul_shapes)
    assert status == 0
    cases = quantized_matmul_shapes.cases(quick=True)
    assert {key: record.status for key, record in lanes.items()} == {
        (case.name, name): "timed" for case in cases for name in ("linear", *SCHEMES)
    }
    assert "target time of int4_dynamic ≤ 1× that of linear: " in capsys.readouterr().out


def test_cases_and_targets_are_those_of_the_design():
    cases = quantized_matmul.cases()
    assert len({case.name for case in cases}) == len(cases)
    targets = {}
    for case in cases:
        problem = case.lanes[0].problem
        assert (problem.out_features, problem.in_features, problem.group_size) == (4096, 4096, 128)
        assert problem.footprint in (0, 2**29)
        if case.targets:
            # The same ones with warm and cold weights.
            assert targets.setdefault((problem.scheme, problem.rows), case.targets) == case.targets
    assert targets == {
        ("int8_dynamic", 1): {"fbgemm": 1.0, "ort": 1.0},
        ("int8_dynamic", 16): {"fbgemm": 1.2, "ort": 1.2},
        ("int8_dynamic", 256): {"fbgemm": 1.1, "ort": 1.1},
        ("int4_dynamic", 1): {"ort": 2.5},
        ("int4_dynamic", 16): {"ort": 1.5},
        ("int4_dynamic", 256): {"ort": 1.5},
        ("int4_weight_only", 1): {"ort": 4.0},
        ("int4_weight_only", 16): {"ort": 1.5},
    }
    assert {case.lanes[0].problem.scheme for case in cases} == set(SCHEMES)
    assert sum(case.seconds for case in cases) < 300
    shapes = quantized_matmul_shapes.cases()
    assert len({case.name for case in shapes}) == len(shapes) == 5 * 7
