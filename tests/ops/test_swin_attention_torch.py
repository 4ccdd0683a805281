"""swin_attention as a citizen of PyTorch: tracing, export, autocast, checkpointing, counting."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from dskernels.swin_attention.schema import backward_op, forward_op

TABLE = dk.rope_table_2d(16, 4, 5)
BY_HEAD = dk.RopeTable(torch.stack((TABLE.cos, TABLE.sin)), torch.stack((TABLE.sin, TABLE.cos)))


def tensors(*size: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    """qkv of images ``[B, H, W]``, a bias and a logit_scale."""
    qkv = torch.randn(*(size or (2, 9, 11)), 96).to(dtype)
    return [x.requires_grad_(grad) for x in (qkv, torch.randn(2, 20, 20), torch.rand(2) * 5)]


def attend(qkv: Tensor, bias: Tensor, logit_scale: Tensor, backend: str | None = None, **options) -> Tensor:
    options = {"window_size": (4, 5), "shift": (1, 3), "num_heads": 2, "rope": TABLE, **options}
    return dk.swin_attention(qkv, bias=bias, logit_scale=logit_scale, backend=backend, **options)


def values_and_grads(function, inputs: list[Tensor], *extra) -> list[Tensor]:
    out = function(*inputs, *extra)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def assert_all_close(results: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(results, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


OPTIONS = (2, 4, 5, 1, 3, 0.25, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("rope", [None, TABLE, BY_HEAD], ids=["plain", "rope", "rope_by_head"])
def test_opcheck(dtype: torch.dtype, channels_first: bool, rope: dk.RopeTable | None) -> None:
    qkv, bias, logit_scale = tensors(dtype=dtype, grad=False)
    if channels_first:
        qkv = qkv.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    cos, sin = (None, None) if rope is None else (t.view(-1, 20, 8) for t in rope[:2])
    out = forward_op(qkv, cos, sin, bias, logit_scale, *OPTIONS)
    leaf = qkv.detach().clone().requires_grad_()
    torch.library.opcheck(forward_op, (leaf, cos, sin, None, None, *OPTIONS))
    extra = (bias.clone().requires_grad_(), logit_scale.clone().requires_grad_())
    torch.library.opcheck(forward_op, (leaf, cos, sin, *extra, *OPTIONS))
    for needs in ((True, True), (False, True), (True, False), (False, False)):
        arguments = (torch.randn_like(out), qkv, cos, sin, bias.mT, logit_scale, *OPTIONS, *needs)
        torch.library.opcheck(backward_op, arguments)
    torch.library.opcheck(backward_op, (torch.randn_like(out), qkv, cos, sin, None, None, *OPTIONS, False, False))
    # What is not there has no gradient, even where one asks for it.
    asked = (torch.randn_like(out), qkv, cos, sin, None, None, *OPTIONS, True, True)
    torch.library.opcheck(backward_op, asked)
    assert [x.numel() for x in backward_op(*asked)[1:]] == [0, 0]


@pytest.mark.parametrize("size", [(0, 9, 11), (2, 0, 11), (2, 9, 0), (1, 1, 1)], ids=str)
def test_opcheck_of_nothing(size: tuple[int, int, int]) -> None:
    leaves = tensors(*size)
    torch.library.opcheck(forward_op, (leaves[0], None, None, *leaves[1:], *OPTIONS))
    qkv, bias, logit_scale = (x.detach() for x in leaves)
    arguments = (torch.randn(*size, 32), qkv, None, None, bias, logit_scale, *OPTIONS, True, True)
    torch.library.opcheck(backward_op, arguments)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("padding", ["mask", "attend"])
def test_compile_fullgraph_dynamic(padding: str, compiler: str, backend: str) -> None:
    if backend == "reference" and (compiler == "inductor" or padding == "attend"):
        pytest.skip("the code for plain PyTorch is not ours to test, and takes long to compile")
    torch._dynamo.reset()

    def call(qkv: Tensor, bias: Tensor, logit_scale: Tensor) -> Tensor:
        pad = qkv.mean((0, 1, 2)) if padding == "attend" else None
        return attend(qkv, bias, logit_scale, backend, padding=padding, pad_qkv=pad)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=compiler)
    # Not two images first: torch would take their number for that of the heads.
    for size in ((3, 9, 11), (2, 8, 10), (5, 3, 21)):
        inputs = tensors(*size)
        assert_all_close(values_and_grads(compiled, inputs), values_and_grads(call, inputs))


def test_compile_once_for_all_sizes() -> None:
    torch._dynamo.reset()
    graphs = []

    def spy(graph: torch.fx.GraphModule, _: object):
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=spy)
    for size in ((3, 9, 11), (2, 8, 10), (4, 30, 21), (2, 12, 5)):
        compiled(*tensors(*size, grad=False))
    served = dk.explain(dk.swin_attention, tensors()[0], window_size=4, num_heads=2).chosen
    # The reference's own arithmetic of sizes may ask whether a size is a multiple of the window.
    assert len(graphs) == 1 or served == "reference"


def test_compile_with_window_and_shift_as_inputs() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(qkv: Tensor, window: int, shift: int, scale: float) -> Tensor:
        return dk.swin_attention(qkv, window_size=window, shift=(shift, 0), num_heads=2, scale=scale)

    qkv = torch.randn(2, 9, 11, 96)
    for window, shift, scale in ((4, 2, 0.2), (7, 3, 0.3), (3, 1, 0.5)):
        right = dk.swin_attention(qkv, window_size=window, shift=(shift, 0), num_heads=2, scale=scale)
        torch.testing.assert_close(compiled(qkv, window, shift, scale), right)


def test_compiled_calls_follow_use_backend() -> None:
    torch._dynamo.reset()
    ran = []

    def spy(graph: torch.fx.GraphModule, _: object):
        ran.append(any("dskernels" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(lambda *x: attend(*x), fullgraph=True, backend=spy)
    inputs = tensors()
    compiled(*inputs)
    with dk.use_backend("reference"):
        compiled(*inputs)
    served = dk.explain(dk.swin_attention, inputs[0], window_size=4, num_heads=2).chosen
    assert ran == [served == "cpu", False]


class Block(torch.nn.Module):
    def __init__(self, backend: str, padding: str) -> None:
        super().__init__()
        self.qkv, self.proj = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.bias = torch.nn.Parameter(torch.randn(2, 20, 20))
        self.logit_scale = torch.nn.Parameter(torch.rand(2))
        self.register_buffer("cos", TABLE.cos)
        self.register_buffer("sin", TABLE.sin)
        self.backend, self.padding = backend, padding

    def forward(self, x: Tensor) -> Tensor:
        rope = dk.RopeTable(self.cos, self.sin)
        pad = self.qkv.bias if self.padding == "attend" else None
        options = {"rope": rope, "padding": self.padding, "pad_qkv": pad}
        return self.proj(attend(self.qkv(x), self.bias, self.logit_scale.exp(), self.backend, **options))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("padding", ["mask", "attend"])
def test_export_with_free_sizes(padding: str, strict: bool, backend: str) -> None:
    if backend == "reference" and (strict or padding == "attend"):
        pytest.skip("the code for plain PyTorch is not ours to test, and takes long to export")
    block = Block(backend, padding)
    free = dict(enumerate(torch.export.Dim.DYNAMIC for _ in range(3)))
    program = torch.export.export(block, (torch.randn(3, 9, 11, 32),), dynamic_shapes={"x": free}, strict=strict)
    for again in (program, saved_and_loaded(program)):
        for size in ((3, 13, 8), (2, 7, 33), (4, 9, 11), (2, 8, 10)):
            x = torch.randn(*size, 32)
            torch.testing.assert_close(again.module()(x), block(x), rtol=1e-5, atol=1e-5)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def test_module_copies_and_pickles(backend: str, tmp_path) -> None:
    block, x = Block(backend, "attend"), torch.randn(2, 9, 11, 32)
    torch.save(block, tmp_path / "block.pt")
    loaded = torch.load(tmp_path / "block.pt", weights_only=False)
    for other in (copy.deepcopy(block), loaded):
        assert torch.equal(other(x), block(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    inputs = tensors()
    cast = [inputs[0].detach().to(dtype), *inputs[1:]]
    cos, sin = (t[None] for t in TABLE[:2])
    with torch.autocast("cpu", dtype):
        out = attend(*inputs, backend)
        padded = attend(*inputs, backend, padding="attend", pad_qkv=torch.ones(96))
        direct = forward_op(inputs[0], cos, sin, *inputs[1:], *OPTIONS)
    assert out.dtype == padded.dtype == direct.dtype == dtype
    # The arithmetic inside is not lowered, nor is bias: the results are those of qkv that was rounded beforehand.
    assert torch.equal(out, attend(*cast, backend))
    assert torch.equal(padded, attend(*cast, backend, padding="attend", pad_qkv=torch.ones(96)))
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.float().sum(), inputs))


def test_autocast_leaves_float64_alone() -> None:
    inputs = tensors(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(*inputs), attend(*inputs, "reference"))


def test_autocast_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        one, other = compiled(*inputs), attend(*inputs)
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one, other)


def test_activation_checkpointing(backend: str) -> None:
    inputs = tensors()

    def checkpointed(*x: Tensor) -> Tensor:
        return checkpoint(attend, *x, backend, use_reentrant=False)

    results, right = values_and_grads(checkpointed, inputs), values_and_grads(attend, inputs, backend)
    assert all(torch.equal(one, other) for one, other in zip(results, right, strict=True))


def test_inference_mode_and_no_grad(backend: str) -> None:
    inputs = tensors()
    expected = attend(*inputs, backend).detach()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = attend(*inputs, backend)
        assert not out.requires_grad
        assert torch.equal(out.clone(), expected)


def test_saved_tensors_may_not_change_in_place(backend: str) -> None:
    """The backward computes from the inputs again, so autograd must know that it needs them."""
    if backend == "reference":
        pytest.skip("what the reference needs again is torch's own matter")
    for i in range(3):
        leaves = tensors()
        inputs = [x.clone() for x in leaves]
        out = attend(*inputs, backend)
        inputs[i].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), leaves)


def test_meta_tensors() -> None:
    qkv = torch.randn(2, 9, 11, 96, device="meta", dtype=torch.bfloat16)
    out = forward_op(qkv, None, None, None, None, *OPTIONS)
    assert (out.shape, out.dtype) == ((2, 9, 11, 32), torch.bfloat16)
    for padding in ("mask", "attend"):
        out = dk.swin_attention(qkv, window_size=7, shift=3, num_heads=2, padding=padding)
        assert (out.shape, out.dtype, out.device.type) == ((2, 9, 11, 32), torch.bfloat16, "meta")


@pytest.mark.parametrize("size", [(9, 11), (4, 5), (2, 3), (1, 30), (0, 7), (8, 10)], ids=str)
@pytest.mark.parametrize("shift", [(0, 0), (1, 3), (3, 0)], ids=str)
def test_operations_are_those_of_the_seen_pairs(size: tuple[int, int], shift: tuple[int, int]) -> None:
    pairs = 1
    for length, window, offset in zip(size, (4, 5), shift, strict=True):
        cells = (torch.arange(length) - offset).div(window, rounding_mode="floor")
        pairs *= int((cells[:, None] == cells).sum())
    leaves = tensors(2, *size)
    options = (2, 4, 5, *shift, 0.25, False)
    with FlopCounterMode(display=False) as counter:
        out = forward_op(leaves[0], None, None, leaves[1], None, *options)
    # Two products of 16 components over 2 images of 2 heads; a multiply-add counts 2.
    assert counter.get_total_flops() == 2 * 4 * pairs * 2 * 16
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 4 * pairs * 5 * 16
