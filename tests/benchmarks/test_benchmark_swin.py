"""The cases of Swin attention: formulas, the reference by hand, every contestant on tiny sizes, and a missing peer."""

import copy
import dataclasses
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from benchmarks.case import DTYPES, OURS
from benchmarks.ops import swin_attention, swin_attention_layer, swin_attention_model
from benchmarks.ops.swin_attention import SwinProblem
from benchmarks.ops.swin_attention_layer import LayerProblem
from benchmarks.ops.swin_attention_model import ModelProblem
from benchmarks.peers import competitors_for
from benchmarks.peers._torchvision import why_no_torchvision
from benchmarks.peers._windows import region_mask
from benchmarks.results import CEILING, read
from benchmarks.run import main
from dskernels.swin_attention.arguments import prepare
from dskernels.swin_attention.schema import forward_op

QUICK = ["--quick", "--threads", "1", "--repeats", "2"]
SIZES = {"height": 6, "width": 9, "channels": 12, "heads": 2, "window": 3, "batch": 2, "dtype": "fp32"}
PROBLEMS = {
    "plain": SwinProblem(**SIZES),
    "shifted": SwinProblem(**SIZES, shift=1),
    "one_window": SwinProblem(**{**SIZES, "height": 3, "width": 3}),
    "shifted_backward": SwinProblem(**SIZES, shift=2, backward=True),
    "cosine_backward": SwinProblem(**SIZES, shift=1, cosine=True, backward=True),
    "bf16_backward": SwinProblem(**{**SIZES, "dtype": "bf16"}, shift=1, backward=True),
}
LAYER = LayerProblem(attention=PROBLEMS["shifted"])
MODEL = ModelProblem(image=32, batch=2, channels=8, depths=(2, 2), heads=(1, 2), window=4, classes=10)
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
each_pass = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
needs_torchvision = pytest.mark.skipif(why_no_torchvision() is not None, reason=str(why_no_torchvision()))


class _Attention(torch.nn.Module):
    """torchvision's attention by `dskernels.swin_attention`."""

    def __init__(self, theirs):
        super().__init__()
        self.theirs = theirs

    def forward(self, x):
        theirs = self.theirs
        sides = zip(theirs.window_size, theirs.shift_size, x.shape[1:3], strict=True)
        shift = tuple(0 if window >= side else shift for window, shift, side in sides)
        options = {"window_size": tuple(theirs.window_size), "shift": shift, "num_heads": theirs.num_heads}
        bias = theirs.get_relative_position_bias()[0]
        # Through the operator, whatever backend is there, since the count of operations is registered for it.
        return theirs.proj(forward_op(*prepare(theirs.qkv(x), bias=bias, **options)))


def _with_our_attention(model):
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "attn"):
            module.attn = _Attention(module.attn)
    return model


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    torch.set_num_threads(1)
    # Compiling takes longer than all else.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def _run(tmp_path, op, *arguments):
    path = tmp_path / "results.jsonl"
    status = main([op.OP, *QUICK, "--out", str(path), *arguments])
    return status, {(record.case, record.name): record for record in read(path) if record.kind != CEILING}


def _by_hand(problem, inputs):
    """Every image and head in float64 with one mask of all its tokens: no windows are made."""
    rows, columns = (torch.arange(n).sub(problem.shift) for n in (problem.height, problem.width))
    cell = torch.cartesian_prod(rows.div(problem.window, rounding_mode="floor"), columns // problem.window)
    place = torch.cartesian_prod(rows % problem.window, columns % problem.window) @ torch.tensor([problem.window, 1])
    seen = (cell[:, None] == cell).all(-1)
    leaves = [tensor.double().requires_grad_() for tensor in inputs.tensors]
    qkv, bias, *logit_scale = leaves
    q, k, v = qkv.flatten(1, 2).unflatten(-1, (3, problem.heads, -1)).permute(2, 0, 3, 1, 4)
    if logit_scale:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        q = q * logit_scale[0][:, None, None]
    else:
        q = q / problem.head_dim**0.5
    scores = (q @ k.mT + bias[:, place[:, None], place]).masked_fill(~seen, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(*qkv.shape[:3], -1)
    if not problem.backward:
        return seen, [out.detach()]
    return seen, [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out.double())]


@each_problem
def test_expected_is_attention_with_one_mask(problem):
    inputs = problem.draw()
    seen, results = _by_hand(problem, inputs)
    assert problem.seen_pairs == seen.sum()
    expected = problem.expected(inputs, torch.float64)
    assert len(expected) == len(problem.result_names)
    for got, wanted in zip(expected, results, strict=True):
        torch.testing.assert_close(got, wanted)


@each_problem
def test_region_mask_leaves_the_seen_pairs(problem):
    if problem.shift:
        mask = region_mask(problem, torch.empty(0))
        assert (mask == 0).sum() == problem.seen_pairs
        assert mask.unique().tolist() == [-100, 0]


@each_problem
def test_operations_are_those_of_torchs_counter(problem):
    inputs = problem.draw()
    with FlopCounterMode(display=False) as counter:
        leaves = [tensor.detach().requires_grad_(problem.backward) for tensor in inputs.tensors]
        named = dict(zip(("qkv", "bias", "logit_scale"), leaves, strict=False))
        out = forward_op(*prepare(**named, **problem.options))
        if problem.backward:
            out.backward(inputs.grad_out)
    assert problem.operations == counter.get_total_flops()


@each_problem
def test_bytes_are_those_of_the_tensors_of_each_pass(problem):
    inputs = problem.draw()
    out, *gradients = (x.to(DTYPES[problem.dtype]) for x in problem.expected(inputs, torch.float32))
    moved = [*inputs.tensors, out]
    if problem.backward:
        moved += [*inputs.tensors, inputs.grad_out, *gradients]
    assert problem.compulsory_bytes == sum(tensor.nbytes for tensor in moved)


def test_counts_of_the_first_stage_are_those_on_paper():
    problem = SwinProblem(height=56, width=56, channels=96, heads=3, dtype="fp32", shift=3)
    # Along an axis 7 whole windows, one of 3 and one of 4 tokens: 7 * 49 + 9 + 16 = 368.
    assert problem.seen_pairs == 368**2 == 135_424
    # 2 products of 8 images, 96 channels, 2 operations each: 3072 a pair.
    assert problem.operations == 416_022_528
    assert dataclasses.replace(problem, backward=True).operations == 7 * 416_022_528 // 2
    assert dataclasses.replace(problem, shift=0).operations == 3072 * (8 * 49) ** 2
    # 25,088 tokens by 4 * 96 values of 4 bytes; and 3 tables of 49 x 49.
    assert problem.compulsory_bytes == 38_535_168 + 28_812
    assert dataclasses.replace(problem, backward=True).compulsory_bytes == 38_535_168 * 11 // 4 + 3 * 28_812
    assert dataclasses.replace(problem, dtype="bf16").compulsory_bytes == (38_535_168 + 28_812) // 2


@each_pass
def test_counts_of_a_layer_are_those_of_its_tensors(backward):
    problem = LayerProblem(attention=dataclasses.replace(LAYER.attention, backward=backward))
    inputs = problem.draw()
    out, *gradients = problem.expected(inputs, torch.float32)
    moved = [*inputs[:-1], out]
    if backward:
        moved += [*inputs[:-1], inputs.grad_out, *gradients]
    assert problem.compulsory_bytes == sum(tensor.nbytes for tensor in moved)
    names = [f"grad_{name}" for name in inputs._fields[:-1]] if backward else []
    assert problem.result_names == ("out", *names)
    # 2 * 6 * 9 tokens through 12 x 36 and 12 x 12.
    assert problem.operations - problem.attention.operations == (3 if backward else 1) * 2 * 108 * 4 * 144


@needs_torchvision
@each_pass
def test_operations_of_a_model_are_those_of_torchs_counter(backward):
    problem = dataclasses.replace(MODEL, backward=backward)
    inputs = problem.draw()
    model = _with_our_attention(inputs.model)
    prepared = inputs.prepared(model, model)
    with FlopCounterMode(display=False) as counter:
        prepared.run()
    assert problem.operations == counter.get_total_flops()
    assert problem.elements == sum(parameter.numel() for parameter in inputs.model.parameters())


def test_model_is_torchvisions_swin_t():
    problem = ModelProblem()
    # As torchvision's documentation gives them for Swin_T_Weights.
    assert problem.elements == 28_288_354
    assert problem.operations / 2 / problem.batch == pytest.approx(4.49e9, rel=0.03)
    assert problem.compulsory_bytes == 4 * (4 * 3 * 224 * 224 + 4 * 1000 + 28_288_354)
    sizes = [(block.height, block.channels, block.heads, block.shift) for block in problem.attentions]
    third = [(14, 384, 12, 0), (14, 384, 12, 3)] * 3
    assert sizes == [(56, 96, 3, 0), (56, 96, 3, 3), (28, 192, 6, 0), (28, 192, 6, 3), *third, *[(7, 768, 24, 0)] * 2]


@needs_torchvision
def test_model_keeps_its_weights_and_images_for_the_next():
    problem = dataclasses.replace(MODEL, backward=True)
    inputs = problem.draw()
    before = copy.deepcopy(inputs.model.state_dict())
    first = problem.expected(inputs, torch.float64)
    for competitor in (swin_attention_model._OURS, *competitors_for(swin_attention_model.OP)):
        prepared = competitor.prepare(problem, inputs)
        for _ in range(2):
            # Gradients are of one step, not of all so far.
            results = prepared.comparable(prepared.run())
        for got, wanted in zip(results, first, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in inputs.model.parameters())
    torch.testing.assert_close(inputs.model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(problem.draw().model.state_dict(), before, rtol=0, atol=0)


def test_inputs_are_the_same_on_every_draw():
    for problem in (*PROBLEMS.values(), LAYER):
        for first, second in zip(problem.draw(), problem.draw(), strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("op", [swin_attention, swin_attention_layer, swin_attention_model], ids=lambda op: op.OP)
def test_every_case_runs_with_all_peers_that_are_there(tmp_path, op):
    status, lanes = _run(tmp_path, op)
    assert status == 0
    competitors = [op._OURS, *competitors_for(op.OP)]
    assert lanes.keys() == {(case.name, competitor.name) for case in op.cases() for competitor in competitors}
    problem = op.cases(quick=True)[0].lanes[0].problem
    there = {competitor.name for competitor in competitors if competitor.refuses(problem) is None}
    assert {name for (_, name), record in lanes.items() if record.status == "timed"} == there


def _other_shift(original, problem, inputs):
    if isinstance(problem, SwinProblem):
        return original(dataclasses.replace(problem, shift=problem.shift + 1), inputs)
    return original(LayerProblem(attention=dataclasses.replace(problem.attention, shift=0)), inputs)


def _wrong_last_gradient(original, problem, inputs):
    prepared = original(problem, inputs)

    def run():
        *others, last = prepared.run()
        return [*others, last * 1.01]

    return dataclasses.replace(prepared, run=run)


def _other_weights(original, problem, inputs):
    model = inputs.copy()
    table = next(parameter for name, parameter in model.named_parameters() if "bias_table" in name)
    table.data.mul_(1.1)
    return original(problem, inputs._replace(model=model))


@pytest.mark.parametrize(
    ("op", "name", "case", "fault", "reason"),
    [
        (swin_attention, OURS, "forward-56-shift3-bf16", _other_shift, "out: largest error"),
        (swin_attention, "eager", "forward-14-shift3-fp32", _other_shift, "out: relative root"),
        (swin_attention, "compiled", "forward-14-shift3-fp16", _other_shift, "out: relative root"),
        (swin_attention, "sdpa", "forward-14-shift3-bf16", _other_shift, "out: relative root"),
        (swin_attention, OURS, "cosine-forward-backward-64-shift4-fp32", _wrong_last_gradient, "grad_logit_scale"),
        (swin_attention, "eager", "forward-backward-7-shift0-fp32", _wrong_last_gradient, "grad_bias"),
        (swin_attention_layer, OURS, "forward-backward-56-shift3-fp32", _wrong_last_gradient, "grad_proj_bias"),
        pytest.param(
            *(swin_attention_layer, "torchvision", "forward-14-shift3-bf16", _other_shift, "out: relative root"),
            marks=needs_torchvision,
        ),
        pytest.param(
            *(swin_attention_model, OURS, "inference-fp32", _other_weights, "logits: largest error"),
            marks=needs_torchvision,
        ),
        pytest.param(
            *(swin_attention_model, "torchvision", "training-fp32", _other_weights, "logits: relative root"),
            marks=needs_torchvision,
        ),
    ],
    ids=[
        *("ours", "eager", "compiled", "sdpa", "cosine_gradient", "bias_gradient"),
        *("layer", "torchvision_layer", "model", "torchvision_model"),
    ],
)
def test_other_work_is_caught(tmp_path, monkeypatch, op, name, case, fault, reason):
    def changed(competitor):
        original = competitor.prepare
        if competitor.name != name:
            return competitor
        return dataclasses.replace(competitor, prepare=lambda *arguments: fault(original, *arguments))

    peers = [changed(competitor) for competitor in competitors_for(op.OP)]
    monkeypatch.setattr(op, "_OURS", changed(op._OURS))
    monkeypatch.setattr(op, "competitors_for", lambda name, device="cpu": peers)
    status, lanes = _run(tmp_path, op, "--case", case)
    assert status == 1
    wrong = {name: record.reason for (_, name), record in lanes.items() if record.status == "wrong"}
    assert wrong.keys() == {name}
    assert reason in wrong[name]


@pytest.mark.parametrize("op", [swin_attention_layer, swin_attention_model], ids=lambda op: op.OP)
def test_missing_torchvision_is_reported(tmp_path, monkeypatch, capsys, op):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    case = op.cases()[0].name
    status, lanes = _run(tmp_path, op, "--case", case)
    assert status == 0
    missing = {name for (_, name), record in lanes.items() if record.reason == "torchvision is not installed"}
    # The model itself, too, is torchvision's.
    alone = set() if op is swin_attention_model else {OURS}
    assert missing == {OURS, "compiled", "torchvision"} - alone
    assert {name for (_, name), record in lanes.items() if record.status == "timed"} == alone
    assert "skipped  torchvision: torchvision is not installed" in capsys.readouterr().out


def test_compiled_peer_takes_the_faster_form_of_a_mask(monkeypatch):
    compiled = {peer.name: peer for peer in competitors_for(swin_attention.OP)}["compiled"]
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    for name, forms in (("plain", 1), ("shifted", 3)):
        given.clear()
        prepared = compiled.prepare(PROBLEMS[name], PROBLEMS[name].draw())
        assert given == forms * [{"fullgraph": True, "dynamic": False}]
        assert prepared.notes["mode"] == "default"
        assert len(prepared.notes.get("forms_tried", [1])) == forms


def test_our_lane_says_what_serves():
    notes = swin_attention.notes(PROBLEMS["shifted"])
    with dk.use_backend("reference"):
        assert swin_attention.notes(PROBLEMS["shifted"]) == {**notes, "backend": "reference"}


def test_cases_and_targets_are_those_of_the_design():
    cases = {case.name: case for case in swin_attention.cases()}
    assert {name: case.targets for name, case in cases.items() if case.targets} == {
        "forward-56-shift3-fp32": {"eager": 5.0, "compiled": 3.0},
        "forward-backward-56-shift3-fp32": {"eager": 3.5, "compiled": 3.0},
        "forward-14-shift3-fp32": {"eager": 4.0, "compiled": 2.5},
        "forward-backward-14-shift3-fp32": {"eager": 3.0, "compiled": 3.0},
    }
    sizes = {case.lanes[0].problem.sizes for case in cases.values()}
    assert sizes == {
        *(f"B8 56x56 C96 H3 window 7 shift {shift}" for shift in (0, 3)),
        *(f"B8 14x14 C384 H12 window 7 shift {shift}" for shift in (0, 3)),
        "B8 28x28 C192 H6 window 7 shift 3",
        "B8 7x7 C768 H24 window 7 shift 0",
        "B8 64x64 C96 H3 window 8 shift 4",
    }
    assert len(cases) == len(swin_attention.cases()) == 24
    assert all(case.lanes[0].problem.head_dim == 32 for case in cases.values())
