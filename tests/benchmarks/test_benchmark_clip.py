"""The cases of clip_and_scale and of steps with it: formulas, reference, and work that stays the same."""

import pytest
import torch

import dskernels as dk
from benchmarks.case import DTYPES
from benchmarks.ops import clip_and_scale, clip_and_scale_step
from benchmarks.ops.clip_and_scale import LOSS_SCALE, ClipProblem
from benchmarks.ops.clip_and_scale_step import ListStepProblem, TrainingProblem, loss_of
from benchmarks.peers import competitors_for
from dskernels.clip_and_scale import passes

PROBLEMS = {dtype: ClipProblem(count=5, length=300, dtype=dtype) for dtype in DTYPES}
STEP = ListStepProblem(count=5, length=300)
TRAINING = TrainingProblem(length=7, dim=16, layers=2, vocabulary=30)
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


def _competitors(op):
    return [op._OURS, *competitors_for(op.OP)]


def _clipped(grads, max_norm):
    """By torch, of float64 parameters of their own."""
    parameters = [torch.zeros_like(grad, dtype=torch.float64, requires_grad=True) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.double() / LOSS_SCALE
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm, torch.cat([parameter.grad for parameter in parameters])


@each_problem
def test_expected_is_torchs_clipping(problem):
    inputs = problem.draw()
    for got, expected in zip(
        problem.expected(inputs, torch.float64), _clipped(inputs.grads, inputs.thresholds[0]), strict=True
    ):
        torch.testing.assert_close(got, expected)


@each_problem
def test_bytes_are_two_reads_and_a_write(problem):
    assert problem.compulsory_bytes == 3 * sum(grad.nbytes for grad in problem.draw().grads)
    assert problem.operations == 3 * sum(grad.numel() for grad in problem.draw().grads)


def test_bytes_of_a_step_are_those_of_its_tensors():
    loop = STEP.draw().loop()
    loop.optimizer.step()
    moments = [loop.optimizer.state[p][name] for p in loop.parameters for name in ("exp_avg", "exp_avg_sq")]
    grads = [parameter.grad for parameter in loop.parameters]
    changed = sum(tensor.nbytes for tensor in [*loop.parameters, *moments])
    assert STEP.compulsory_bytes == 2 * changed + 2 * sum(grad.nbytes for grad in grads)


@each_problem
def test_gradients_go_up_and_down_and_never_vanish(problem):
    for competitor in _competitors(clip_and_scale):
        inputs = problem.draw()
        prepared = competitor.prepare(problem, inputs)
        drawn = torch.cat(inputs.grads)
        for number in range(60):
            before = prepared.comparable(prepared.run())[1].double()
            assert float(before.norm()) == pytest.approx(inputs.thresholds[number % 2], rel=2e-2)
        assert (before.ne(0) == drawn.ne(0)).all()
        # The last call has brought them back, but for rounding in every call.
        assert float((before - drawn.double()).norm() / before.norm()) < 60 * torch.finfo(drawn.dtype).eps


@each_problem
def test_no_call_has_a_factor_of_one(problem):
    inputs = problem.draw()
    mine = inputs.turning()
    for factor in (0.75, 4 / 3, 0.75, 4 / 3):
        before = mine.grads[0].double()
        norm = dk.clip_and_scale_(mine.grads, max_norm=mine.max_norm(), loss_scale=LOSS_SCALE).total_norm
        assert float(norm) > inputs.thresholds[1]
        torch.testing.assert_close(mine.grads[0].double(), factor * before, rtol=2e-2, atol=1e-6)


class _Kept:
    """Inputs that keep the loop they have made."""

    def __init__(self, inputs):
        self.made = inputs.loop()

    def loop(self):
        return self.made


@pytest.mark.parametrize("competitor", _competitors(clip_and_scale_step), ids=lambda competitor: competitor.name)
def test_gradients_of_steps_go_up_and_down_too(competitor):
    inputs = STEP.draw()
    kept = _Kept(inputs)
    prepared = competitor.prepare(STEP, kept)
    for number in range(20):
        prepared.run()
        norm = torch.cat([parameter.grad for parameter in kept.made.parameters]).norm()
        lowered = competitor.name != "unclipped" and number % 2 == 0
        assert float(norm) == pytest.approx(inputs.thresholds[0 if lowered else 1], rel=1e-5)


@pytest.mark.skipif(dk.build_info()["compiled"] is None, reason="counts the calls of the compiled kernel")
def test_folded_step_reads_gradients_once_and_scales_none(monkeypatch):
    reads = []
    power_sum = passes.table_power_sum_op
    monkeypatch.setattr(passes, "table_power_sum_op", lambda *args: reads.append(len(args[0])) or power_sum(*args))
    monkeypatch.setattr(passes, "table_scale_op", None)
    prepared = clip_and_scale_step._OURS.prepare(STEP, STEP.draw())
    for _ in range(3):
        prepared.run()
    assert reads == [STEP.count] * 3


def test_training_problem_counts_its_parameters():
    inputs = TRAINING.draw()
    assert TRAINING.elements == sum(parameter.numel() for parameter in inputs.parameters)
    assert TRAINING.compulsory_bytes == 6 * sum(parameter.nbytes for parameter in inputs.parameters)
    (training,) = (case for case in clip_and_scale_step.cases() if case.name == "training-fp32")
    assert training.lanes[0].problem.elements == pytest.approx(1e8, rel=0.05)
    assert training.baseline == "unclipped"


def test_training_is_clipped_and_begins_anew_for_everybody():
    inputs = TRAINING.draw()
    expected = TRAINING.expected(inputs, torch.float64)
    loss_of(inputs.model, inputs.tokens).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in inputs.parameters])
    assert float(norm) == pytest.approx(2 * inputs.max_norm(), rel=1e-5)
    assert float(expected[0]) == pytest.approx(float(norm), rel=1e-5)
    before = [parameter.detach().clone() for parameter in inputs.parameters]
    for competitor in _competitors(clip_and_scale_step):
        prepared = competitor.prepare(TRAINING, inputs)
        assert all(torch.equal(a, b) for a, b in zip(inputs.parameters, before, strict=True))
        results = prepared.comparable(prepared.run())
        for got, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-7)
        prepared.run()
        assert not any(torch.equal(a, b) for a, b in zip(inputs.parameters, before, strict=True))


def test_inputs_are_the_same_on_every_draw():
    for problem in (*PROBLEMS.values(), STEP):
        first, second = problem.draw(), problem.draw()
        assert first.thresholds == second.thresholds
        torch.testing.assert_close(first.grads, second.grads, rtol=0, atol=0)
    first, second = TRAINING.draw(), TRAINING.draw()
    torch.testing.assert_close(first.model.state_dict(), second.model.state_dict(), rtol=0, atol=0)
    assert torch.equal(first.tokens, second.tokens)


def test_cases_and_targets_are_those_of_the_design():
    targets = {case.name: case.targets for case in clip_and_scale.cases() if case.targets}
    assert targets == {
        "large-fp32": {"unscale_clip": 1.65},
        "small-fp32": {"unscale_clip": 5.0},
        "tiny-fp32": {"unscale_clip": 50.0},
    }
    titles = [case.title for case in clip_and_scale.cases() if case.dtype == "bf16"]
    assert titles == [f"unscale and clip, bf16, {size}" for size in ("32 x 1M", "2000 x 4K", "20000 x 256")]
