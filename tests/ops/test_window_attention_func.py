"""The window attentions under the transforms of torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap

import dskernels as dk
from dskernels.window_attention.schema import forward_op
from dskernels.window_attention.varlen_schema import varlen_forward_op

V, B, H, HKV, N, M, D, DV = 3, 2, 4, 2, 20, 24, 16, 8
SHAPES = {
    "q": (B, H, N, D),
    "k": (B, HKV, M, D),
    "v": (B, HKV, M, DV),
    "bias": (1, H, N, M),
    "sink": (H,),
}
TABLE = dk.rope_table(D, 64, rotary_dim=8)


def draw(*names: str) -> list[Tensor]:
    return [torch.randn(SHAPES[name]) for name in names]


def draw_mapped(names: tuple[str, ...], in_dims: tuple[int | None, ...]) -> list[Tensor]:
    """Tensors with the mapped dimension of `V` where ``in_dims`` says."""
    tensors = []
    for name, dim in zip(names, in_dims, strict=True):
        each = torch.randn(V, *SHAPES[name])
        tensors.append(each[0] if dim is None else each.movedim(0, dim))
    return tensors


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sink: Tensor | None = None, **options
) -> tuple[Tensor, Tensor]:
    options = {"window": (9, 2), "rope": TABLE, "softcap": 4.0, "return_lse": True, **options}
    return dk.window_attention(q, k, v, bias=bias, sink=sink, **options)


def loss(*inputs: Tensor, **options) -> Tensor:
    out, lse = attend(*inputs, **options)
    return out.square().sum() + lse.sin().sum()


def mapped(function: Callable[..., Tensor | tuple[Tensor, ...]], in_dims: tuple[int | None, ...], *inputs: Tensor):
    """What ``vmap`` is to give: a call for each element, stacked."""
    rows = []
    for i in range(V):
        row = function(*(x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)))
        rows.append(row if isinstance(row, tuple) else (row,))
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def assert_all_close(results, others) -> None:
    results, others = ((x,) if isinstance(x, Tensor) else x for x in (results, others))
    for one, other in zip(results, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


NAMES = ("q", "k", "v", "bias", "sink")
IN_DIMS = [
    (0, 0, 0, None, None),
    (0, None, None, None, None),
    (None, 1, 3, None, None),
    (4, 0, None, 2, None),
    (None, None, None, 0, None),
    (None, None, 0, None, 0),  # a sink of its own cannot be joined in a batch
]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], backend: str) -> None:
    inputs = draw_mapped(NAMES, in_dims)

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*x, backend=backend)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it loops for want of a rule
        results = vmap(call, in_dims)(*inputs)
    assert_all_close(results, mapped(call, in_dims, *inputs))


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_gradients_for_each_element(in_dims: tuple[int | None, ...], backend: str) -> None:
    inputs = draw_mapped(NAMES, in_dims)
    each = grad(lambda *x: loss(*x, backend=backend), argnums=(0, 1, 2, 3, 4))

    def by_autograd(*x: Tensor) -> tuple[Tensor, ...]:
        leaves = [y.detach().requires_grad_() for y in x]
        return torch.autograd.grad(loss(*leaves, backend=backend), leaves)

    assert_all_close(vmap(each, in_dims)(*inputs), mapped(by_autograd, in_dims, *inputs))


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_gradients_through_vmap(in_dims: tuple[int | None, ...], backend: str) -> None:
    leaves = [x.requires_grad_() for x in draw_mapped(NAMES, in_dims)]

    def call(*x: Tensor) -> Tensor:
        return loss(*x, backend=backend)

    weights = torch.randn(V)
    results = torch.autograd.grad(vmap(call, in_dims)(*leaves) @ weights, leaves)
    assert_all_close(results, torch.autograd.grad(mapped(call, in_dims, *leaves)[0] @ weights, leaves))
    argnums = tuple(range(len(leaves)))
    assert_all_close(grad(lambda *x: vmap(call, in_dims)(*x) @ weights, argnums)(*leaves), results)


def test_vmap_over_positions_and_tables(backend: str) -> None:
    q, k, v = draw("q", "k", "v")
    positions = torch.randint(0, 64, (V, B, M))
    cos, sin = (torch.stack([t, t.flip(0), t.roll(3, 0)]) for t in TABLE[:2])

    def call(q: Tensor, places: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, rope=dk.RopeTable(cos, sin), positions=places, backend=backend)

    for in_dims, tables in (((None, 0, None, None), TABLE[:2]), ((None, 0, 0, 0), (cos, sin))):
        assert_all_close(vmap(call, in_dims)(q, positions, *tables), mapped(call, in_dims, q, positions, *tables))


def test_nested_vmap(backend: str) -> None:
    q, k, v = (torch.randn(V, 2, *SHAPES[name]) for name in ("q", "k", "v"))

    def call(*x: Tensor) -> Tensor:
        return attend(*x, backend=backend)[0]

    results = vmap(vmap(call), in_dims=(0, None, 0))(q, k[0], v)
    right = torch.stack([torch.stack([call(q[i, j], k[0, j], v[i, j]) for j in range(2)]) for i in range(V)])
    assert_all_close(results, right)


@pytest.mark.parametrize("size", [(0, 4), (2, 0)], ids=str)
def test_vmap_of_nothing(size: tuple[int, int], backend: str) -> None:
    batch, queries = size
    q, k, v = torch.randn(V, batch, H, queries, D), torch.randn(batch, HKV, M, D), torch.randn(batch, HKV, M, DV)
    call = grad(lambda *x: attend(*x, backend=backend)[0].sum(), argnums=(0, 1, 2))
    results = vmap(call, in_dims=(0, None, None))(q, k, v)
    assert [x.shape for x in results] == [q.shape, (V, *k.shape), (V, *v.shape)]
    assert all((x == 0).all() for x in results)


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_over_no_elements(in_dims: tuple[int | None, ...], backend: str) -> None:
    full = draw_mapped(NAMES, in_dims)
    empty = [x if dim is None else x.narrow(dim, 0, 0) for x, dim in zip(full, in_dims, strict=True)]
    call = grad(lambda *x: loss(*x, backend=backend), argnums=(0, 1, 2, 3, 4))
    for one, other in zip(vmap(call, in_dims)(*empty), vmap(call, in_dims)(*full), strict=True):
        assert one.shape == (0, *other.shape[1:])


def test_jacrev_and_vjp(backend: str) -> None:
    q, k, v, bias, sink = draw(*NAMES)

    def row_sums(q: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
        return attend(q, k, v, bias, sink, backend=backend)[0].sum((0, 1, 3))

    leaves = [x.clone().requires_grad_() for x in (q, bias, sink)]
    sums = row_sums(*leaves)
    rows = [torch.autograd.grad(sums[i], leaves, retain_graph=True) for i in range(N)]
    right = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    assert_all_close(jacrev(row_sums, argnums=(0, 1, 2))(q, bias, sink), right)
    _, pull = vjp(row_sums, q, bias, sink)
    assert_all_close(pull(torch.ones(N)), tuple(x.sum(0) for x in right))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.sink = torch.nn.Parameter(torch.randn(2))
        self.register_buffer("cos", TABLE.cos)
        self.register_buffer("sin", TABLE.sin)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return dk.window_attention(q, k, v, window=(5, 0), rope=dk.RopeTable(self.cos, self.sin), sink=self.sink)


def test_ensemble_of_modules() -> None:
    """torch's own way to run several models at once, which stacks sinks and tables too."""
    models, x = [Attention() for _ in range(V)], torch.randn(2, 20, 32)
    state = stack_module_state(models)
    results = vmap(lambda *s: functional_call(models[0], s, (x,)))(*state)
    assert_all_close(results, torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_transforms_compile(dynamic: bool) -> None:
    q, k, v = (torch.randn(V, *SHAPES[name]) for name in ("q", "k", "v"))
    for function in (vmap(attend), vmap(grad(loss, argnums=(0, 1, 2))), grad(lambda *x: vmap(loss)(*x).sum())):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        assert_all_close(compiled(q, k, v), function(q, k, v))


def test_forward_mode_says_no(backend: str) -> None:
    q, k, v = draw("q", "k", "v")
    tangent = torch.randn_like(q)

    def call(q: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, backend=backend)

    if backend == "reference":
        _, (moved, _) = jvp(call, (q,), (tangent,))
        _, pull = vjp(lambda q: call(q)[0], q)
        there = torch.randn_like(moved)
        torch.testing.assert_close((moved * there).sum(), (pull(there)[0] * tangent).sum(), rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(NotImplementedError, match=r'window_attention: .* forward-mode .* backend="reference"'):
        jvp(call, (q,), (tangent,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"window_attention: .* forward-mode"):
        call(forward_ad.make_dual(q, tangent))


def test_second_derivatives() -> None:
    q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))

    def call(q: Tensor, backend: str) -> Tensor:
        return dk.window_attention(q, k, v, window=(1, 0), backend=backend).square().sum()

    by_autograd = torch.autograd.functional.hessian(lambda q: call(q, "reference"), q)
    assert_all_close(hessian(lambda q: call(q, "reference"))(q), by_autograd)
    if dk.build_info()["compiled"] is not None:
        with pytest.raises(NotImplementedError, match="compiled backward cannot be differentiated again"):
            jacrev(grad(lambda q: call(q, "cpu")))(q)


@pytest.mark.parametrize("offsets_mapped", [False, True])
def test_varlen(offsets_mapped: bool, backend: str) -> None:
    q, offsets = torch.randn(V, 20, H, D), torch.tensor([[0, 7, 20], [0, 0, 19], [0, 20, 20]])
    inputs = (q, offsets) if offsets_mapped else (q,)

    def call(q: Tensor, offsets: Tensor = offsets[0]) -> Tensor:
        return packed(q, offsets, backend=backend)

    def by_autograd(q: Tensor, offsets: Tensor = offsets[0]) -> Tensor:
        leaf = q.detach().requires_grad_()
        return torch.autograd.grad(call(leaf, offsets).square().sum(), leaf)[0]

    if backend == "reference" and offsets_mapped and dk.build_info()["compiled"] is not None:
        with pytest.raises(RuntimeError, match="lengths of the sequences are values"):
            vmap(call)(*inputs)
        return
    in_dims = (0,) * len(inputs)
    assert_all_close(vmap(call)(*inputs), mapped(call, in_dims, *inputs))
    each = vmap(grad(lambda *x: call(*x).square().sum()))
    assert_all_close(each(*inputs), mapped(by_autograd, in_dims, *inputs))


def test_varlen_offsets_are_checked_by_the_kernel() -> None:
    """A transform hides the values of what it maps."""
    q, offsets = torch.randn(20, H, D), torch.tensor([[0, 7, 20], [0, 7, 21]])
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q\[2\]: expected 7 to 20, got 21"):
        vmap(lambda c: packed(q, c, backend="cpu"))(offsets)


def packed(q: Tensor, offsets: Tensor, backend: str | None = None) -> Tensor:
    options = {"window": (5, 1), "rope": TABLE, "sink": torch.linspace(-1, 1, H), "backend": backend}
    return dk.window_attention_varlen(q, q[:, ::2], q[:, ::2], offsets, offsets, **options)


def test_varlen_forward_mode_says_no() -> None:
    q, offsets = torch.randn(20, H, D), torch.tensor([0, 7, 20])
    if dk.explain(dk.window_attention_varlen, q, q, q, offsets, offsets).chosen == "reference":
        pytest.skip("the reference has a forward mode")
    with pytest.raises(NotImplementedError, match=r"window_attention_varlen: .* forward-mode"):
        jvp(lambda q: packed(q, offsets), (q,), (q,))


@pytest.mark.parametrize("mapped_caches", [False, True])
def test_decode(mapped_caches: bool, backend: str) -> None:
    q, lengths = torch.randn(V, B, H, 2, D), torch.tensor([[5, 24], [2, 3], [24, 24]])
    k, v = torch.randn(V, B, HKV, M, D), torch.randn(V, B, HKV, M, DV)
    in_dims = (0, 0, 0, 0) if mapped_caches else (0, None, None, 0)

    def call(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        options = {"window": (9, 0), "rope": TABLE, "sink": torch.linspace(-1, 1, H), "return_lse": True}
        return dk.window_attention_decode(*inputs, **options, backend=backend)

    inputs = (q, k, v, lengths) if mapped_caches else (q, k[0], v[0], lengths)
    assert_all_close(vmap(call, in_dims)(*inputs), mapped(call, in_dims, *inputs))
    if backend != "reference":
        with pytest.raises(NotImplementedError, match=r"window_attention_decode: .* forward-mode"):
            jvp(lambda q: call(q, k[0], v[0], lengths[0]), (q[0],), (q[0],))


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_operators_under_autocast(varlen: bool) -> None:
    """The operators themselves, without the public functions, which cast for them."""
    q = torch.randn(20, 2, D) if varlen else torch.randn(1, 2, 20, D)

    def call(q: Tensor) -> Tensor:
        if varlen:
            offsets = torch.tensor([0, 7, 20])
            out, _ = varlen_forward_op(q, q, q, offsets, offsets, None, None, None, 5, 0, 0.25, 0.0, False)
        else:
            out, _ = forward_op(q, q, q, *(None,) * 5, 5, 0, 0, 0.25, 0.0, False)
        assert out.dtype == torch.bfloat16
        return out.float().square().sum()

    leaf = q.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(grad(call)(q), torch.autograd.grad(call(leaf), leaf)[0])
