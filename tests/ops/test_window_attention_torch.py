"""window_attention as a citizen of PyTorch: tracing, export, autocast, checkpointing, counting, memory layout."""

from __future__ import annotations

import collections
import copy
import functools
import io

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from dskernels.window_attention.schema import backward_op, count_seen_pairs, forward_op

TABLE = dk.rope_table(16, 128, rotary_dim=8)


def tensors(dtype: torch.dtype = torch.float32, queries: int = 20, keys: int = 24, grad: bool = False) -> list[Tensor]:
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 8))
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def options(inputs: list[Tensor], rope: bool, scores: bool = False) -> tuple:
    """The operator's options; ``scores`` adds positions, bias, sink and softcap."""
    queries, keys = inputs[0].shape[2], inputs[1].shape[2]
    table = (TABLE.cos, TABLE.sin) if rope else (None, None)
    positions = torch.arange(keys).flip(0).repeat(2, 1) if scores and rope else None
    bias = torch.randn(1, 4, queries, keys, requires_grad=True).expand(2, 4, queries, keys) if scores else None
    sink = torch.randn(4, requires_grad=True) if scores else None
    return (*table, positions, bias, sink, 5, 2, keys - queries, 0.25, 2.0 if scores else 0.0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("rope", [False, True])
def test_opcheck(dtype: torch.dtype, token_major: bool, rope: bool) -> None:
    inputs = tensors(dtype)
    if token_major:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    out, lse = forward_op(*inputs, *options(inputs, rope))
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    torch.library.opcheck(forward_op, (*leaves, *options(inputs, rope)))
    arguments = (torch.randn_like(out), torch.randn_like(lse), *inputs, out, lse, *options(inputs, rope), False)
    torch.library.opcheck(backward_op, arguments)
    torch.library.opcheck(backward_op, (arguments[0], None, *arguments[2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", [False, True])
def test_opcheck_of_what_acts_on_the_scores(dtype: torch.dtype, rope: bool) -> None:
    inputs = tensors(dtype)
    leaves, extra = [x.detach().clone().requires_grad_() for x in inputs], options(inputs, rope, scores=True)
    torch.library.opcheck(forward_op, (*leaves, *extra))
    extra = tuple(x.detach() if isinstance(x, Tensor) else x for x in extra)
    out, lse = forward_op(*inputs, *extra)
    for bias_needs_grad in (False, True):
        arguments = (torch.randn_like(out), torch.randn_like(lse), *inputs, out, lse, *extra, bias_needs_grad)
        torch.library.opcheck(backward_op, arguments)


def test_opcheck_unbounded_and_empty() -> None:
    for queries, keys in ((7, 7), (0, 5), (5, 0)):
        inputs = tensors(queries=queries, keys=keys)
        torch.library.opcheck(forward_op, (*inputs, *(None,) * 7, keys - queries, 0.25, 0.0, False))


@pytest.mark.parametrize("layout", ["contiguous", "token_major"])
def test_results_mirror_the_layout(layout: str, backend: str) -> None:
    inputs = tensors()
    if layout == "token_major":
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = dk.window_attention(*leaves, window=(5, 0), return_lse=True, backend=backend)
    grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    # Through the plain reference autograd lays out its gradients as it likes.
    for result in (out, *(grads if backend != "reference" else ())):
        dense = result.transpose(1, 2) if layout == "token_major" else result
        assert dense.is_contiguous()
    assert lse.is_contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    return dk.window_attention(q, k, v, window=(5, 2), rope=TABLE, return_lse=True, backend=backend)


def values_and_grads(function, inputs: list[Tensor], *extra) -> list[Tensor]:
    outputs = function(*inputs, *extra)
    return [*outputs, *torch.autograd.grad(sum(x.float().square().sum() for x in outputs), inputs)]


def assert_all_close(results: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(results, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_fullgraph_dynamic(compiler: str, backend: str) -> None:
    if compiler == "inductor" and backend == "reference":
        pytest.skip("inductor's code for plain PyTorch is not ours to test, and takes long to compile")
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=compiler)
    for queries, keys in ((20, 24), (33, 33), (7, 50)):
        inputs = tensors(queries=queries, keys=keys, grad=True)
        assert_all_close(values_and_grads(compiled, inputs, backend), values_and_grads(attend, inputs, backend))


def test_compile_with_window_and_offset_as_inputs() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor, left: int, offset: int, scale: float) -> Tensor:
        return dk.window_attention(q, k, v, window=(left, 0), query_offset=offset, scale=scale)

    inputs = tensors()
    for left, offset, scale in ((3, 4, 0.2), (5, 2, 0.3), (1, 9, 0.5)):
        expected = dk.window_attention(*inputs, window=(left, 0), query_offset=offset, scale=scale)
        torch.testing.assert_close(compiled(*inputs, left, offset, scale), expected)


def test_compiled_calls_follow_use_backend() -> None:
    torch._dynamo.reset()
    ran = []

    def spy(graph: torch.fx.GraphModule, _: object):
        ran.append(any("dskernels" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(lambda *x: attend(*x)[0], fullgraph=True, backend=spy)
    inputs = tensors()
    compiled(*inputs)
    with dk.use_backend("reference"):
        compiled(*inputs)
    served = dk.explain(dk.window_attention, *inputs).chosen
    assert ran == [served == "cpu", False]


class Block(torch.nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.backend = backend
        self.rope = dk.rope_table(16, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return (
            dk.window_attention(q, k, v, window=(5, 0), rope=self.rope, backend=self.backend).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_batch_and_length(strict: bool, backend: str) -> None:
    block = Block(backend)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=128)
    program = torch.export.export(
        block, (torch.randn(2, 20, 32),), dynamic_shapes={"x": {0: batch, 1: length}}, strict=strict
    )
    for again in (program, saved_and_loaded(program)):
        for shape in ((1, 11, 32), (3, 128, 32)):
            x = torch.randn(shape)
            torch.testing.assert_close(again.module()(x), block(x), rtol=1e-5, atol=1e-5)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


class Scores(torch.nn.Module):
    """Everything that acts on the scores, over lengths of queries and keys that vary on their own."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend, self.sink = backend, torch.nn.Parameter(torch.randn(4))
        self.register_buffer("cos", TABLE.cos)
        self.register_buffer("sin", TABLE.sin)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        options = {"window": (5, 0), "rope": dk.RopeTable(self.cos, self.sin), "sink": self.sink, "softcap": 3.0}
        extra = {"positions": positions, "bias": bias, "return_lse": True, "backend": self.backend}
        return dk.window_attention(q, k, v, **options, **extra)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_two_dynamic_lengths(strict: bool, backend: str) -> None:
    """The default ``query_offset`` is the difference of two symbols, not the number that it was in the trace."""

    def draw(batch: int, queries: int, keys: int) -> list[Tensor]:
        shapes = ((batch, 4, queries, 16), (batch, 2, keys, 16), (batch, 2, keys, 8), (1, 4, queries, keys))
        return [*(torch.randn(shape) for shape in shapes), torch.randint(0, 128, (batch, keys))]

    module, free = Scores(backend), torch.export.Dim.DYNAMIC
    batch, keys = torch.export.Dim("batch", max=64), torch.export.Dim("keys", max=128)
    sizes = ({0: batch, 2: free}, {0: batch, 2: keys}, {0: batch, 2: keys}, {2: free, 3: keys}, {0: batch, 1: keys})
    program = torch.export.export(module, tuple(draw(2, 20, 24)), dynamic_shapes=sizes, strict=strict)
    # Traced through the reference, torch's own operators rule out what they did not see: lengths that are equal.
    sizes = [(1, 11, 40), (3, 2, 128), *([] if backend == "reference" else [(2, 33, 33)])]
    for again in (program, saved_and_loaded(program)):
        for shape in sizes:
            inputs = draw(*shape)
            assert_all_close(again.module()(*inputs), module(*inputs))


def test_module_copies_and_pickles(backend: str, tmp_path) -> None:
    block, x = Block(backend), torch.randn(2, 20, 32)
    torch.save(block, tmp_path / "block.pt")
    loaded = torch.load(tmp_path / "block.pt", weights_only=False)
    for other in (copy.deepcopy(block), loaded):
        assert torch.equal(other(x), block(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    inputs = tensors(grad=True)
    cast = [x.detach().to(dtype) for x in inputs]
    with torch.autocast("cpu", dtype):
        out, lse = attend(*inputs, backend)
        mixed, _ = attend(cast[0], *inputs[1:], backend)
        direct, _ = forward_op(*inputs, *options(inputs, True))
    assert (out.dtype, direct.dtype, lse.dtype) == (dtype, dtype, torch.float32)
    # The arithmetic inside is not lowered: the results are those of inputs that were rounded beforehand.
    without = attend(*cast, backend)
    assert torch.equal(out, without[0])
    assert torch.equal(lse, without[1])
    assert torch.equal(mixed, out)
    for grad in torch.autograd.grad(out.float().sum(), inputs):
        assert grad.dtype == torch.float32


def test_autocast_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = tensors(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        one, other = compiled(*inputs)[0], attend(*inputs)[0]
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one, other)


def test_activation_checkpointing(backend: str) -> None:
    inputs = tensors(grad=True)

    def checkpointed(*x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(attend, *x, backend, use_reentrant=False)

    results, right = values_and_grads(checkpointed, inputs), values_and_grads(attend, inputs, backend)
    assert all(torch.equal(one, other) for one, other in zip(results, right, strict=True))


class Count(TorchDispatchMode):
    """Counts the calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_keeps_the_attention() -> None:
    inputs = tensors(grad=True)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, _ = forward_op(q.sin(), k, v, *options(inputs, True))
        return [out.sin()]

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        kept = operator is torch.ops.dskernels.window_attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def selectively(*x: Tensor) -> list[Tensor]:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(layer, *x, use_reentrant=False, context_fn=contexts)

    def wholly(*x: Tensor) -> list[Tensor]:
        return checkpoint(layer, *x, use_reentrant=False)

    right = values_and_grads(layer, inputs)
    for function, runs in ((selectively, 1), (wholly, 2)):
        with Count() as count:
            results = values_and_grads(function, inputs)
        assert all(torch.equal(one, other) for one, other in zip(results, right, strict=True))
        assert count.calls["dskernels.window_attention.default"] == runs
        assert count.calls["dskernels.window_attention_backward.default"] == 1


def test_inference_mode_and_no_grad(backend: str) -> None:
    inputs = tensors(grad=True)
    expected = attend(*inputs, backend)[0].detach()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out, _ = attend(*inputs, backend)
        assert not out.requires_grad
        assert torch.equal(out.clone(), expected)


def test_meta_tensors() -> None:
    inputs = [x.to("meta") for x in tensors(torch.bfloat16)]
    out, lse = forward_op(*inputs, *(None,) * 5, 5, 0, 4, 0.25, 0.0, False)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 4, 20, 8), torch.bfloat16, (2, 4, 20), torch.float32)
    assert dk.window_attention(*inputs, window=(5, 0)).shape == (2, 4, 20, 8)


@pytest.mark.parametrize("window", [(None, None), (5, 0), (0, 0), (None, -3), (-4, 9), (-4, 2), (100, 100)], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(20, 24, 4), (24, 20, -4), (9, 30, 100), (5, 5, -90), (0, 4, 0)]
)
def test_operations_are_those_of_the_seen_pairs(window, queries: int, keys: int, offset: int) -> None:
    left, right = window
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - offset
    seen = (distance >= (-left if left is not None else -(10**6))) & (distance <= (10**6 if right is None else right))
    pairs = int(seen.sum())
    assert count_seen_pairs(queries, keys, left, right, offset) == pairs
    inputs = tensors(queries=queries, keys=keys, grad=True)
    with FlopCounterMode(display=False) as counter:
        out, _ = forward_op(*inputs, *(None,) * 5, left, right, offset, 0.25, 0.0, False)
    # Two sums of 16 for scores and two of 8 for values over 2 batches of 4 heads; a multiply-add counts 2.
    assert counter.get_total_flops() == 2 * 8 * pairs * (16 + 8)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 8 * pairs * (3 * 16 + 2 * 8)
