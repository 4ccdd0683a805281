"""What test_window_attention_triton.py runs under Triton's interpreter, in a process of its own.

The interpreter must be chosen before Triton is imported, hence the process. It computes bfloat16 products wrongly, so
that type is tested on a GPU alone.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from window_attention_oracle import Options, Rope, exact, op, plain, rotated, with_gradients

import dskernels as dk
from dskernels import _library
from dskernels.__main__ import _self_test
from dskernels._registry import registered
from dskernels.testing import LAYOUTS, assert_close_to_reference, random_tensor
from dskernels.window_attention.triton_schema import triton_backward_op, triton_forward_op

NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v", "grad of bias", "grad of sink")


class Case(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    options: Options
    sink: bool = False
    bias: tuple[int, ...] | None = None

    def inputs(self, dtype: torch.dtype, layout: str = "contiguous") -> list[Tensor]:
        shapes = (
            (self.batch, self.heads, self.queries, self.dim),
            (self.batch, self.key_heads, self.keys, self.dim),
            (self.batch, self.key_heads, self.keys, self.value_dim),
        )
        return [random_tensor(shape, dtype, layout) for shape in shapes]

    def grads(self, dtype: torch.dtype, layout: str = "contiguous") -> list[Tensor]:
        out = random_tensor((self.batch, self.heads, self.queries, self.value_dim), dtype, layout)
        return [out, torch.randn(self.batch, self.heads, self.queries)]


CASES = {
    "one": Case(1, 1, 1, 1, 1, 8, 8, Options()),
    "causal": Case(1, 2, 2, 63, 63, 40, 40, Options((16, 0), Rope())),
    "causal_unbounded": Case(1, 2, 1, 100, 100, 64, 64, Options((None, 0), Rope(rotary_dim=32))),
    "full": Case(2, 1, 1, 63, 100, 8, 24, Options((None, None), Rope(rotary_dim=2))),
    "grouped_interleaved": Case(1, 4, 2, 63, 100, 72, 40, Options((31, 7), Rope(interleaved=True))),
    "interleaved_partial": Case(1, 2, 1, 63, 63, 40, 72, Options((None, -3), Rope(rotary_dim=22, interleaved=True))),
    "ahead_only": Case(1, 1, 1, 63, 100, 64, 8, Options((-2, 9))),
    "behind_only": Case(1, 2, 1, 100, 63, 8, 8, Options((20, -3))),
    "unbounded_right": Case(1, 1, 1, 100, 63, 40, 40, Options((0, None))),
    "itself": Case(1, 1, 1, 63, 63, 16, 8, Options((0, 0), Rope())),
    "never": Case(1, 2, 1, 63, 63, 8, 8, Options((3, -4)), sink=True),
    "offset": Case(1, 2, 1, 90, 50, 16, 16, Options((10, 5), Rope(), query_offset=7)),
    "blind_rows": Case(1, 2, 1, 100, 63, 64, 64, Options((10, 5), query_offset=-40)),
    "last_query": Case(2, 4, 1, 1, 100, 64, 64, Options((30, 0), Rope())),
    "sink": Case(1, 2, 1, 63, 63, 40, 40, Options((16, 0), Rope()), sink=True),
    "sink_blind_rows": Case(1, 2, 2, 63, 40, 8, 8, Options((5, 0)), sink=True),
    "softcap": Case(1, 2, 1, 63, 100, 40, 24, Options((31, 4), Rope(), softcap=1.5), sink=True),
    "softcap_wide": Case(1, 2, 1, 63, 63, 40, 24, Options((31, 0), softcap=50.0)),
    "bias": Case(1, 2, 1, 63, 100, 16, 8, Options((31, 4), Rope(), softcap=4.0), sink=True, bias=(1, 2, 63, 100)),
    "bias_of_keys": Case(2, 1, 1, 63, 63, 8, 8, Options((None, 0)), bias=(2, 1, 1, 63)),
    "scale": Case(1, 2, 2, 63, 63, 8, 8, Options((16, 0), scale=-0.3)),
    "positions": Case(
        2,
        2,
        1,
        50,
        63,
        16,
        16,
        Options((20, 0), Rope(), positions=tuple(tuple(max(0, j - pad) for j in range(63)) for pad in (5, 0))),
    ),
    "decode_of_a_long_cache": Case(1, 2, 1, 2, 1000, 8, 8, Options((40, 0), Rope())),
}


def lse_of_rounded_operands(inputs: list[Tensor], case: Case, **scores: Tensor) -> Tensor:
    """What plain PyTorch of the same dtype makes of lse: tensor cores take rotated q and k in that dtype only."""
    q, k, v = inputs
    options = case.options
    q_turned = rotated(q, options.offset(q, k), options.rope, options).to(q.dtype)
    k_turned = rotated(k, 0, options.rope, options).to(q.dtype)
    at = dataclasses.replace(options, rope=None, positions=None, scale=options.factor(q))
    return plain(q_turned, k_turned, v, at, **scores)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_matches_float64(case: Case, dtype: torch.dtype) -> None:
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    extra = {}
    if case.bias is not None:
        extra["bias"] = torch.randn(case.bias)
    if case.sink:
        extra["sink"] = torch.randn(case.heads)

    def call(compute, *more):
        return lambda q, k, v, *rest: compute(q, k, v, case.options, *more, **dict(zip(extra, rest[:-1], strict=True)))

    leaves = [*inputs, *extra.values()]
    right = with_gradients(call(exact), [x.double() for x in leaves], grads, case.options)
    usual = with_gradients(call(plain), leaves, grads, case.options)
    usual[1] = lse_of_rounded_operands(inputs, case, **extra)
    results = with_gradients(call(op, "triton"), leaves, grads, case.options)
    names = [*NAMES[:5], *(f"grad of {name}" for name in extra)]
    for name, result, exactly, usually in zip(names, results, right, usual, strict=True):
        assert_close_to_reference(result, exactly, usually, name)


def run(inputs: list[Tensor], grads: list[Tensor], options: Options) -> list[Tensor]:
    return with_gradients(op, inputs, grads, options, "triton")


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
def test_layouts_equal_contiguous(layout: str) -> None:
    case = Case(2, 2, 1, 40, 45, 24, 8, Options((20, 3), Rope()))
    inputs, grads = case.inputs(torch.float32, layout), case.grads(torch.float32, layout)
    strided = run(inputs, grads, case.options)
    dense = run([x.contiguous() for x in inputs], [x.contiguous() for x in grads], case.options)
    for one, other in zip(strided, dense, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("token_major", [False, True])
def test_results_mirror_the_layout(token_major: bool) -> None:
    case = Case(2, 4, 2, 20, 24, 16, 8, Options((5, 2), Rope()))
    layout = "token_major" if token_major else "contiguous"
    out, lse, *grads = run(case.inputs(torch.float32, layout), case.grads(torch.float32, layout), case.options)
    for result in (out, *grads):
        assert (result.transpose(1, 2) if token_major else result).is_contiguous()
    assert lse.is_contiguous()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("rope", [None, Rope()], ids=["plain", "rope"])
def test_unseen_keys_leak_nowhere(poison: float, rope: Rope | None) -> None:
    # Queries stand at 50..79 and see keys 40..82: the rest is unseen, next to what is seen.
    case = Case(1, 2, 1, 30, 120, 40, 40, Options((10, 3), rope, query_offset=50))
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    clean = run(inputs, grads, case.options)
    for tensor in inputs[1:]:
        tensor[:, :, :40] = poison
        tensor[:, :, 83:] = poison
    dirty = run(inputs, grads, case.options)
    for one, other in zip(dirty, clean, strict=True):
        assert torch.equal(one, other)
    assert (dirty[3][:, :, :40] == 0).all()
    assert (dirty[4][:, :, 83:] == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_blind_queries_leak_nowhere(poison: float) -> None:
    # Query i stands at i - 68 and sees keys up to i - 33: none before i = 33, which is within a tile.
    case = Case(1, 2, 1, 100, 32, 24, 24, Options((32, 35)))
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    clean = run(inputs, grads, case.options)
    for tensor in (inputs[0], *grads):
        tensor[:, :, :33] = poison
    dirty = run(inputs, grads, case.options)
    for one, other in zip(dirty, clean, strict=True):
        assert torch.equal(one, other)
    assert (dirty[0][:, :, :33] == 0).all()
    assert (dirty[1][:, :, :33] == -torch.inf).all()
    assert (dirty[2][:, :, :33] == 0).all()


def test_nan_reaches_only_the_rows_that_see_it() -> None:
    q, k, v = (torch.randn(1, 1, 100, 16) for _ in range(3))
    q[:, :, 50] = torch.nan
    out, lse = op(q, k, v, Options((5, 0)), "triton")
    assert out.isnan().all(3).flatten().nonzero().flatten().tolist() == [50]
    assert lse.isnan().flatten().nonzero().flatten().tolist() == [50]


def test_rows_hidden_by_the_bias_see_nothing() -> None:
    case = Case(1, 2, 1, 40, 40, 16, 8, Options((9, 2), Rope(), softcap=3.0))
    leaves = [x.requires_grad_() for x in case.inputs(torch.float32)]
    bias = torch.zeros(40, 40)
    bias[5] = bias[30:33] = -torch.inf
    hidden = bias.isinf().all(1)
    bias[:, 39].masked_fill_(torch.arange(40) < 30, torch.nan)  # out of the window: never read
    bias.requires_grad_()
    out, lse = op(*leaves, case.options, "triton", bias=bias)
    assert (out[:, :, hidden] == 0).all()
    assert (lse[:, :, hidden] == -torch.inf).all()
    assert lse[:, :, ~hidden].isfinite().all()
    grad_out = torch.randn(out.shape)
    grad_out[:, :, hidden] = torch.nan
    grads = torch.autograd.grad(out, [*leaves, bias], grad_out)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, hidden] == 0).all()


def test_sink_of_minus_infinity_is_none() -> None:
    case = Case(1, 2, 1, 63, 40, 16, 8, Options((9, 2)))
    inputs = case.inputs(torch.float32)
    without = op(*inputs, case.options, "triton")
    with_it = op(*inputs, case.options, "triton", sink=torch.full((2,), -torch.inf))
    for one, other in zip(without, with_it, strict=True):
        assert torch.equal(one, other)


def test_large_scores() -> None:
    # Scores of about +-1e4: a softmax without its maximum overflows, and a finite mask value would win.
    q, k, v = (torch.randn(1, 1, 63, 64) for _ in range(3))
    options = Options((30, 0), scale=1.0)
    out, lse = op(q * 30, k * 30, v, options, "triton")
    right, usual = exact(q * 30, k * 30, v, options), plain(q * 30, k * 30, v, options)
    assert_close_to_reference(out, right[0], usual[0], "out")
    assert_close_to_reference(lse, right[1], usual[1], "lse")


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=str)
def test_empty(batch: int, queries: int, keys: int) -> None:
    case = Case(batch, 4, 2, queries, keys, 16, 8, Options((3, 3)))
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    out, lse, *grads_of = run(inputs, grads, case.options)
    assert out.shape == (batch, 4, queries, 8)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((grad == 0).all() and grad.shape == x.shape for grad, x in zip(grads_of, inputs, strict=True))


def test_position_outside_the_table_gives_nan() -> None:
    """The public function looks at positions on the CPU; on a GPU only the kernel does."""
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    table, positions = dk.rope_table(8, 4), torch.tensor([[0, 1, 2, 4]])
    out, _ = triton_forward_op(
        q, k, v, table.cos, table.sin, positions, None, None, None, 0, 0, 1.0, 0.0, table.interleaved
    )
    assert out[:, :, :3].isfinite().all()
    assert out[:, :, 3].isnan().all()


def test_same_bits_on_every_run() -> None:
    case = CASES["causal"]
    inputs, grads = case.inputs(torch.float16), case.grads(torch.float16)
    first, second = (run(inputs, grads, case.options) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_opcheck() -> None:
    case = Case(1, 2, 1, 9, 12, 8, 8, Options())
    inputs = case.inputs(torch.float32)
    table = dk.rope_table(8, 12, rotary_dim=4)
    rest = (table.cos, table.sin, None, torch.randn(1, 2, 9, 12), torch.randn(2), 5, 2, 3, 0.25, 2.0, False)
    out, lse = triton_forward_op(*inputs, *rest)
    # Not test_aot_dispatch_dynamic, which compares values once more and takes as long as all other tests.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_forward_op, ([*(x.requires_grad_() for x in inputs), *rest]), test_utils=checks)
    inputs = [x.detach() for x in inputs]
    for grad_lse in (torch.randn_like(lse), None):
        arguments = (torch.randn_like(out), grad_lse, *inputs, out, lse, *rest, True)
        torch.library.opcheck(triton_backward_op, arguments, test_utils=checks)


def test_exactly_the_keys_of_the_window_have_weight() -> None:
    # With the identity for values a row of the output is the row of weights.
    q, k = (torch.randn(1, 1, 40, 8) for _ in range(2))
    for left, right in ((0, 0), (1, 0), (3, 0), (2, 2), (-1, 4)):
        weights = dk.window_attention(q, k, torch.eye(40)[None, None], window=(left, right), backend="triton")[0, 0]
        for i, row in enumerate(weights):
            seen = [j for j in range(i - left, i + right + 1) if 0 <= j < 40]
            assert row.nonzero().flatten().tolist() == seen


def test_scores_below_any_finite_mask() -> None:
    # Scores of -9984 + m / 8, without rounding; half of the rows see nothing.
    q, k = torch.zeros(1, 1, 80, 8), torch.full((1, 1, 80, 8), -9984.0)
    q[..., :2], k[..., 1], v = 1, torch.randint(-20, 20, (80,)) / 8, torch.randn(1, 1, 80, 8)
    options = Options((20, 0), scale=1.0, query_offset=-40)
    out, lse = op(q, k, v, options, "triton")
    right, right_lse = exact(q, k, v, options)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=2e-3)
    assert (out[:, :, :40] == 0).all()
    assert (lse[:, :, :40] == -torch.inf).all()


def test_transforms_of_torch_func() -> None:
    q, k, v = (torch.randn(2, 1, heads, 9, 8) for heads in (2, 1, 1))
    sink = torch.randn(2)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = op(q, k, v, Options((5, 2), Rope()), "triton", sink=sink)
        return out.square().sum() + lse.sin().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, 0, None))(q, k, v[0])
    for i in range(2):
        leaves = [x.detach().requires_grad_() for x in (q[i], k[i], v[0])]
        for one, other in zip(mapped, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(one[i], other)
    with pytest.raises(NotImplementedError, match=r"window_attention: .* forward-mode"):
        torch.func.jvp(lambda q: loss(q, k[0], v[0]), (q[0],), (q[0],))


def test_compile_fullgraph_dynamic() -> None:
    table = dk.rope_table(8, 64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dk.window_attention(q, k, v, window=(5, 2), rope=table, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((20, 24), (13, 13)):
        inputs = [torch.randn(1, 2, n, 8, requires_grad=True) for n in (queries, keys, keys)]
        for one, other in zip(
            torch.autograd.grad(compiled(*inputs).square().sum(), inputs),
            torch.autograd.grad(attend(*inputs).square().sum(), inputs),
            strict=True,
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("compiled", [True, False])
def test_automatic_choice_does_not_take_the_interpreter(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(_library, "_kernels", frozenset())
    q, offsets = torch.randn(1, 1, 4, 8), torch.tensor([0, 1])
    calls = ((dk.window_attention, (q, q, q)), (dk.window_attention_varlen, (q[0], q[0], q[0], offsets, offsets)))
    for function, tensors in calls:
        automatic = dk.explain(function, *tensors)
        assert automatic.chosen in ("cpu", "reference")
        assert "emulated, which is for tests" in automatic.refusals["triton"]
        with dk.use_backend("triton"):
            assert dk.explain(function, *tensors).chosen == "triton"


def test_self_test_leaves_the_interpreter_out() -> None:
    # Its bfloat16 products are wrong, which says nothing about the kernels.
    for operator in registered():
        for backend in operator.backends:
            if backend.name == "triton":
                verdict = _self_test(operator, backend, torch.bfloat16, "cpu")
                assert verdict.startswith("skipped: on cpu GPUs are emulated")


def test_refusals() -> None:
    q = torch.randn(1, 1, 4, 8)
    assert dk.explain(dk.window_attention, q, q, q, backend="triton").refusals["triton"] is None
    wide = torch.randn(1, 1, 4, 257)
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*head dimensions go up to 256, got 257"):
        dk.window_attention(wide, wide, wide, backend="triton")
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*not torch.float64"):
        dk.window_attention(*(q.double(),) * 3, backend="triton")
