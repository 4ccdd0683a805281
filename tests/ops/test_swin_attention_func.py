"""swin_attention under the transforms of torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap

import dskernels as dk
from dskernels.swin_attention.schema import forward_op

V, B, H, W, HEADS, D = 3, 2, 5, 7, 2, 8
SHAPES = ((B, H, W, 3 * HEADS * D), (HEADS, 12, 12), (HEADS,))
TABLE = dk.rope_table_2d(D, 3, 4)
IN_DIMS = [(0, None, None), (3, None, None), (4, 0, None), (None, 2, None), (None, None, 1), (1, 1, 0)]


def draw() -> list[Tensor]:
    return [torch.randn(shape) for shape in SHAPES]


def draw_mapped(in_dims: tuple[int | None, ...]) -> list[Tensor]:
    """Tensors with the mapped dimension of `V` where ``in_dims`` says."""
    each = [torch.randn(V, *shape) for shape in SHAPES]
    return [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(each, in_dims, strict=True)]


def attend(qkv: Tensor, bias: Tensor, logit_scale: Tensor, **options) -> Tensor:
    options = {"window_size": (3, 4), "shift": (1, 2), "num_heads": HEADS, "rope": TABLE, **options}
    return dk.swin_attention(qkv, bias=bias, logit_scale=logit_scale, **options)


def loss(*inputs: Tensor, **options) -> Tensor:
    return attend(*inputs, **options).sin().sum()


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


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize("padding", ["mask", "attend"])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], padding: str, backend: str) -> None:
    inputs = draw_mapped(in_dims)

    def call(*x: Tensor) -> Tensor:
        return attend(*x, backend=backend, padding=padding)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it loops for want of a rule
        results = vmap(call, in_dims)(*inputs)
    assert_all_close(results, mapped(call, in_dims, *inputs))


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize("argnums", [(0, 1, 2), (0,), (1, 2)], ids=str)
def test_gradients_for_each_element(in_dims: tuple[int | None, ...], argnums: tuple[int, ...], backend: str) -> None:
    inputs = draw_mapped(in_dims)
    each = grad(lambda *x: loss(*x, backend=backend), argnums=argnums)

    def by_autograd(*x: Tensor) -> tuple[Tensor, ...]:
        leaves = [y.detach().requires_grad_() for y in x]
        return torch.autograd.grad(loss(*leaves, backend=backend), [leaves[i] for i in argnums])

    assert_all_close(vmap(each, in_dims)(*inputs), mapped(by_autograd, in_dims, *inputs))


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_gradients_through_vmap(in_dims: tuple[int | None, ...], backend: str) -> None:
    leaves, weights = [x.requires_grad_() for x in draw_mapped(in_dims)], torch.randn(V)

    def call(*x: Tensor) -> Tensor:
        return loss(*x, backend=backend)

    results = torch.autograd.grad(vmap(call, in_dims)(*leaves) @ weights, leaves)
    assert_all_close(results, torch.autograd.grad(mapped(call, in_dims, *leaves)[0] @ weights, leaves))
    assert_all_close(grad(lambda *x: vmap(call, in_dims)(*x) @ weights, (0, 1, 2))(*leaves), results)


def test_vmap_over_tables_and_padded_tokens(backend: str) -> None:
    inputs = draw()
    cos, sin = (torch.stack([t, t.flip(0), t.roll(3, 0)]) for t in TABLE[:2])
    tokens = torch.randn(V, SHAPES[0][-1])

    def call(cos: Tensor, sin: Tensor, token: Tensor) -> Tensor:
        rope = dk.RopeTable(cos, sin)
        return attend(*inputs, rope=rope, padding="attend", pad_qkv=token, backend=backend)

    assert_all_close(vmap(call)(cos, sin, tokens), mapped(call, (0, 0, 0), cos, sin, tokens))


def test_nested_vmap(backend: str) -> None:
    qkv, bias, logit_scale = torch.randn(V, 2, *SHAPES[0]), torch.randn(2, *SHAPES[1]), torch.randn(V, *SHAPES[2])

    def call(*x: Tensor) -> Tensor:
        return attend(*x, backend=backend)

    results = vmap(vmap(call, in_dims=(0, 0, None)), in_dims=(0, None, 0))(qkv, bias, logit_scale)
    rows = [torch.stack([call(qkv[i, j], bias[j], logit_scale[i]) for j in range(2)]) for i in range(V)]
    assert_all_close(results, torch.stack(rows))


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_over_no_elements(in_dims: tuple[int | None, ...], backend: str) -> None:
    full = draw_mapped(in_dims)
    empty = [x if dim is None else x.narrow(dim, 0, 0) for x, dim in zip(full, in_dims, strict=True)]
    call = grad(lambda *x: loss(*x, backend=backend), argnums=(0, 1, 2))
    for one, other in zip(vmap(call, in_dims)(*empty), vmap(call, in_dims)(*full), strict=True):
        assert one.shape == (0, *other.shape[1:])


def test_jacrev_and_vjp(backend: str) -> None:
    inputs = draw()

    def rows(*x: Tensor) -> Tensor:
        return attend(*x, backend=backend).sum((0, 2, 3))

    leaves = [x.clone().requires_grad_() for x in inputs]
    sums = rows(*leaves)
    each = [torch.autograd.grad(sums[i], leaves, retain_graph=True) for i in range(H)]
    right = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    assert_all_close(jacrev(rows, argnums=(0, 1, 2))(*inputs), right)
    _, pull = vjp(rows, *inputs)
    assert_all_close(pull(torch.ones(H)), tuple(x.sum(0) for x in right))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HEADS * D, 3 * HEADS * D)
        self.bias = torch.nn.Parameter(torch.randn(SHAPES[1]))
        self.logit_scale = torch.nn.Parameter(torch.randn(SHAPES[2]))

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.qkv(x), self.bias, self.logit_scale, padding="attend", pad_qkv=self.qkv.bias)


def test_ensemble_of_modules() -> None:
    """torch's own way to run several models at once, which stacks biases too."""
    models, x = [Attention() for _ in range(V)], torch.randn(2, H, W, HEADS * D)
    state = stack_module_state(models)
    results = vmap(lambda *s: functional_call(models[0], s, (x,)))(*state)
    assert_all_close(results, torch.stack([model(x) for model in models]))


def test_transforms_compile() -> None:
    if dk.explain(dk.swin_attention, draw()[0], window_size=3, num_heads=HEADS).chosen == "reference":
        pytest.skip("the code for plain PyTorch is not ours to test, and takes long to compile")
    inputs = [torch.randn(V, *shape) for shape in SHAPES]
    for function in (vmap(attend), vmap(grad(loss, argnums=(0, 1, 2))), grad(lambda *x: vmap(loss)(*x).sum())):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_all_close(compiled(*inputs), function(*inputs))


def test_forward_mode_says_no(backend: str) -> None:
    qkv, bias, logit_scale = draw()
    tangent = torch.randn_like(qkv)

    def call(qkv: Tensor) -> Tensor:
        return attend(qkv, bias, logit_scale, backend=backend)

    if backend == "reference":
        _, moved = jvp(call, (qkv,), (tangent,))
        _, pull = vjp(call, qkv)
        there = torch.randn_like(moved)
        torch.testing.assert_close((moved * there).sum(), (pull(there)[0] * tangent).sum(), rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(NotImplementedError, match=r'swin_attention: .* forward-mode .* backend="reference"'):
        jvp(call, (qkv,), (tangent,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"swin_attention: .* forward-mode"):
        call(forward_ad.make_dual(qkv, tangent))


def test_second_derivatives() -> None:
    qkv = torch.randn(1, 2, 3, 12)

    def call(qkv: Tensor, backend: str) -> Tensor:
        return dk.swin_attention(qkv, window_size=2, shift=1, num_heads=1, backend=backend).square().sum()

    by_autograd = torch.autograd.functional.hessian(lambda x: call(x, "reference"), qkv)
    assert_all_close(hessian(lambda x: call(x, "reference"))(qkv), by_autograd)
    if dk.build_info()["compiled"] is not None:
        with pytest.raises(NotImplementedError, match="compiled backward cannot be differentiated again"):
            jacrev(grad(lambda x: call(x, "cpu")))(qkv)


def test_operator_under_autocast() -> None:
    """The operator itself, without the public function, which casts for it."""
    qkv, bias, logit_scale = draw()

    def call(qkv: Tensor) -> Tensor:
        out = forward_op(qkv, None, None, bias, logit_scale, HEADS, 3, 4, 1, 2, 0.25, False)
        assert out.dtype == torch.bfloat16
        return out.float().square().sum()

    leaf = qkv.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(grad(call)(qkv), torch.autograd.grad(call(leaf), leaf)[0])
