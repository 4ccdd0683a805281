"""What is peculiar to the CUDA kernels of swin_attention: edges of their tiles, runs of cells, the order of threads."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import emulator
import pytest
import torch
from swin_attention_triton_oracle import CASES, GPU_CASES, HALF, Case, Rope, attend, check, with_gradients
from torch import Tensor

from dskernels.swin_attention.cuda_schema import cuda_backward_op, cuda_forward_op

DTYPES = (torch.float32, *HALF)
emulated = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))

# Kernels for small heads, for windows of one tile and of several, and those for heads and windows of any size, which
# have the gradients of several tiles.
KINDS = {
    "small": Case((1, 6, 7), 2, 16, (4, 4), (1, 3), bias=True, cosine=True, rope=Rope(8)),
    "tiled": Case((1, 10, 11), 1, 8, (9, 8), (2, 3), bias=True, cosine=True, rope=Rope(interleaved=True)),
    "wide": Case((1, 4, 5), 1, 72, (4, 4), (1, 3), bias=True, cosine=True, rope=Rope(68)),
}


@pytest.fixture
def simt() -> Iterator[None]:
    emulator.load()
    emulator.configure()
    yield
    emulator.configure()


def run(case: Case, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    return with_gradients(functools.partial(attend, backend="cuda"), case, inputs, grad)


def assert_right(case: Case, dtype: torch.dtype) -> None:
    inputs, grad = case.inputs(dtype), case.grad(dtype)
    check(case, inputs, grad, run(case, inputs, grad))


def assert_same_bits(results: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, one in results.items():
        assert torch.equal(one, others[name]), name


@emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, dtype: torch.dtype, simt: None) -> None:
    assert_right(CASES[name], dtype)


@emulated
@pytest.mark.parametrize(
    "window", [(1, 1), (1, 15), (4, 4), (1, 17), (7, 7), (8, 8), (5, 13), (12, 12), (16, 16)], ids=str
)
def test_windows_around_a_tile(window: tuple[int, int], simt: None) -> None:
    """One cell of all tokens, and a few that the borders cut."""
    size = (1, window[0] + 1, window[1] + 2)
    assert_right(Case(size, 1, 8, window, (window[0] // 2, 0), bias=True), torch.float16)


@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 24, 32, 33, 40, 64, 65, 96, 128, 256])
def test_head_dims_around_a_chunk(dim: int, dtype: torch.dtype, simt: None) -> None:
    rope = Rope(dim // 4 * 4) if dim >= 4 else None
    assert_right(Case((1, 4, 6), 2, dim, (4, 4), (2, 1), bias=True, rope=rope), dtype)


@emulated
@pytest.mark.parametrize("half", [1, 3, 5])
@pytest.mark.parametrize("kind", ["small", "wide"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_any_width(kind: str, half: int, interleaved: bool, simt: None) -> None:
    """Tables that are a user's own, of odd halves; and gradients are turned by the transpose, not the inverse."""
    dim = KINDS[kind].dim
    qkv, grad = torch.randn(1, 3, 4, 3 * dim).double(), torch.randn(1, 3, 4, dim).double()
    cos, sin = (torch.randn(1, 6, half) for _ in range(2))
    options = (cos, sin, None, torch.tensor([2.0]), 1, 2, 3, 1, 0, 1.0, interleaved)
    leaf = qkv.float().requires_grad_()
    (result,) = torch.autograd.grad(cuda_forward_op(leaf, *options), leaf, grad.float())

    def turned(x: Tensor) -> Tensor:
        pairs = [slice(0, 2 * half, 2), slice(1, 2 * half, 2)]
        pairs = pairs if interleaved else [slice(0, half), slice(half, 2 * half)]
        places = ((torch.arange(3) - 1) % 2)[:, None] * 3 + torch.arange(4) % 3
        c, s = cos[0, places].double(), sin[0, places].double()
        x = torch.nn.functional.normalize(x, dim=-1)
        y = x.clone()
        y[..., pairs[0]] = x[..., pairs[0]] * c - x[..., pairs[1]] * s
        y[..., pairs[1]] = x[..., pairs[1]] * c + x[..., pairs[0]] * s
        return y

    exact = qkv.clone().requires_grad_()
    q, k, v = (x.flatten(0, 2) for x in exact.split(dim, -1))
    q, k = (turned(x.view(1, 3, 4, dim)).flatten(0, 2) for x in (q, k))
    cells = (((torch.arange(3) - 1) // 2)[:, None] * 10 + torch.arange(4) // 3).flatten()
    scores = (2 * q @ k.mT).masked_fill(cells[:, None] != cells, -torch.inf)
    (right,) = torch.autograd.grad((scores.softmax(-1) @ v).view(1, 3, 4, dim), exact, grad)
    torch.testing.assert_close(result.double(), right, rtol=1e-4, atol=1e-5)


@emulated
@pytest.mark.parametrize("name", ["small", "tiled"])
def test_runs_of_cells(name: str, simt: None) -> None:
    """However the cells are divided into runs, of which the last is shorter: the same but for sums over cells."""
    case = KINDS[name]._replace(size=(5, 13, 14) if name == "small" else (2, 19, 20))
    inputs, grad = case.inputs(torch.float16), case.grad(torch.float16)
    # One a block, as on a large GPU; and as many as a block takes.
    emulator.configure(multiprocessors=200)
    apart = run(case, inputs, grad)
    for multiprocessors in (1, 3):
        emulator.configure(multiprocessors=multiprocessors)
        together = run(case, inputs, grad)
        check(case, inputs, grad, together)
        assert_same_bits({key: together[key] for key in ("out", "grad of qkv")}, apart)
    assert not torch.equal(together["grad of bias"], apart["grad of bias"])
    check(case, inputs, grad, apart)


@emulated
@pytest.mark.parametrize("copies", emulator.COPIES)
@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("name", KINDS)
def test_same_bits_in_every_order(name: str, order: str, copies: str, simt: None) -> None:
    case = KINDS[name]
    for dtype in (torch.float32, torch.float16):
        inputs, grad = case.inputs(dtype), case.grad(dtype)
        # Blocks with several cells each.
        emulator.configure(multiprocessors=1)
        right = run(case, inputs, grad)
        emulator.configure(order, copies, seed=7, multiprocessors=1)
        assert_same_bits(run(case, inputs, grad), right)


def in_order(x: Tensor, *order: int) -> Tensor:
    """The same values, with axes in another order in memory."""
    return x.permute(*order).contiguous().permute(*(order.index(axis) for axis in range(x.dim())))


LAYOUTS = {
    "off_by_one": lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape),
    "channels_first": lambda x: in_order(x, 0, 3, 1, 2),
    "columns_first": lambda x: in_order(x, 0, 2, 1, 3),
    "batch_last": lambda x: in_order(x, 3, 2, 1, 0),
    "odd_rows": lambda x: torch.nn.functional.pad(x, (0, 3), value=torch.nan)[..., :-3],
    "part_of_wider_rows": lambda x: torch.nn.functional.pad(x, (8, 16), value=torch.nan)[..., 8:-16],
}


@emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_layouts_give_the_same_bits(name: str, layout: str, dtype: torch.dtype, simt: None) -> None:
    case = KINDS[name]
    inputs, grad = case.inputs(dtype), case.grad(dtype)
    right, moved = run(case, inputs, grad), LAYOUTS[layout]
    assert_same_bits(run(case, {**inputs, "qkv": moved(inputs["qkv"])}, grad), right)
    assert_same_bits(run(case, inputs, moved(grad)), right)
    bias = in_order(inputs["bias"], 2, 0, 1)
    assert_same_bits(run(case, {**inputs, "bias": bias}, grad.clone()), right)


@emulated
@pytest.mark.parametrize("name", KINDS)
def test_nan_stays_in_its_cell(name: str, simt: None) -> None:
    case = KINDS[name]
    inputs, grad = case.inputs(torch.float32), case.grad(torch.float32)
    clean = run(case, inputs, grad)
    inputs["qkv"][0, 0, 0], grad[0, 0, 0, 0] = torch.nan, torch.nan
    dirty = run(case, inputs, grad)
    # The first cell reaches as far as the grid is shifted.
    cell = torch.zeros(case.size, dtype=torch.bool)
    cell[0, : case.shift[0], : case.shift[1]] = True
    for key in ("out", "grad of qkv"):
        assert torch.equal(dirty[key][~cell], clean[key][~cell]), key
    assert dirty["out"][cell].isnan().all()


@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_what_the_bias_hides_counts_for_nothing(name: str, dtype: torch.dtype, simt: None) -> None:
    """Rows that see nothing, with gradients of NaN; and keys that nobody sees, with values of NaN, in the backward."""
    case = KINDS[name]
    inputs, grad = case.inputs(dtype), case.grad(dtype)
    inputs["bias"][:, 5] = -torch.inf
    (h, w), (_, height, width) = case.window, case.size
    places = ((torch.arange(height) - case.shift[0]) % h)[:, None] * w + (torch.arange(width) - case.shift[1]) % w
    grad[:, places == 5] = torch.nan
    results = run(case, inputs, grad)
    assert (places == 5).any()
    assert all(x.isfinite().all() for x in results.values())
    assert (results["out"][:, places == 5] == 0).all()
    assert (results["grad of qkv"][:, places == 5][..., : case.heads * case.dim] == 0).all()
    assert (results["grad of bias"][:, 5] == 0).all()


@emulated
def test_places_that_no_cell_has_take_nothing(simt: None) -> None:
    for case in (KINDS["small"], KINDS["wide"]):
        case = case._replace(size=(1, 2, 3), shift=(0, 0), cosine=False)
        inputs, grad = case.inputs(torch.float32), case.grad(torch.float32)
        there = torch.tensor([0, 1, 2, 4, 5, 6])
        inputs["bias"] = torch.full_like(inputs["bias"], torch.nan)
        inputs["bias"][:, there[:, None], there] = torch.randn(case.heads, 6, 6)
        results = run(case, inputs, grad)
        assert all(x.isfinite().all() for x in results.values())
        lacking = torch.ones(16, 16, dtype=torch.bool)
        lacking[there[:, None], there] = False
        assert (results["grad of bias"][:, lacking] == 0).all()


@emulated
@pytest.mark.parametrize("name", KINDS)
def test_only_what_is_needed_is_computed(name: str, simt: None) -> None:
    case = KINDS[name]
    inputs, grad = case.inputs(torch.float32), case.grad(torch.float32)
    table = case.table()
    options = (case.heads, *case.window, *case.shift, 1.0, table.interleaved)
    rest = (table.cos[None], table.sin[None], inputs["bias"], inputs["logit_scale"], *options)
    right = run(case, inputs, grad)
    for needs in ((False, False), (True, False), (False, True)):
        grads = cuda_backward_op(grad, inputs["qkv"], *rest, *needs)
        assert torch.equal(grads[0], right["grad of qkv"])
        for key, result, needed in zip(("bias", "logit_scale"), grads[1:], needs, strict=True):
            assert torch.equal(result, right[f"grad of {key}"]) if needed else result.numel() == 0


@emulated
def test_operators_refuse_what_a_kernel_would_follow(simt: None) -> None:
    qkv, grad = torch.randn(1, 4, 4, 24), torch.randn(1, 4, 4, 8)
    options = (1, 2, 2, 1, 1, 0.4, False)
    nothing = (None, None, None, None)
    for heads in (0, -2, 5, 2**62, (2**64 + 2) // 3):
        with pytest.raises(RuntimeError, match="qkv: expected"):
            cuda_forward_op(qkv, *nothing, heads, *options[1:])
    with pytest.raises(RuntimeError, match=r"bias: expected float32 \[heads"):
        cuda_forward_op(qkv, None, None, torch.randn(1, 4, 5), None, *options)
    with pytest.raises(RuntimeError, match="cos, sin: expected contiguous"):
        cuda_forward_op(qkv, torch.randn(1, 4, 4), torch.randn(1, 3, 4), None, None, *options)
    with pytest.raises(RuntimeError, match="grad_out: expected the dtype of qkv"):
        cuda_backward_op(grad.half(), qkv, *nothing, *options, False, False)
    with pytest.raises(RuntimeError, match=r"grad_out: expected \[B, H, W, C\]"):
        cuda_backward_op(grad[:, 1:], qkv, *nothing, *options, False, False)


@emulated
@pytest.mark.parametrize("name", ["small", "wide"])
def test_opcheck(name: str, simt: None) -> None:
    case = KINDS[name]._replace(size=(1, 3, 4), window=(2, 3), shift=(1, 0), rope=None)
    inputs, grad = case.inputs(torch.float32), case.grad(torch.float32)
    rest = (None, None, inputs["bias"], inputs["logit_scale"], case.heads, 2, 3, 1, 0, 1.0, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(cuda_forward_op, (inputs["qkv"].clone().requires_grad_(), *rest), test_utils=checks)
    torch.library.opcheck(cuda_backward_op, (grad, inputs["qkv"], *rest, True, True), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*GPU_CASES, *KINDS])
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = {**GPU_CASES, **KINDS}[name]
    inputs, grad = case.inputs(dtype), case.grad(dtype)
    there = {key: x.cuda() for key, x in inputs.items()}
    runs = [run(case, there, grad.cuda()) for _ in range(2)]
    check(case, inputs, grad, {key: x.cpu() for key, x in runs[0].items()})
    assert_same_bits(*runs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_layouts_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = KINDS[name]
    inputs, grad = {key: x.cuda() for key, x in case.inputs(dtype).items()}, case.grad(dtype).cuda()
    right = run(case, inputs, grad)
    for moved in LAYOUTS.values():
        assert_same_bits(run(case, {**inputs, "qkv": moved(inputs["qkv"])}, moved(grad)), right)


@pytest.mark.gpu
def test_waits_for_nothing_on_a_gpu() -> None:
    for name in ("large_v2", "sixteen"):
        case = GPU_CASES[name]
        inputs = {key: x.cuda() for key, x in case.inputs(torch.bfloat16).items()}
        grad = case.grad(torch.bfloat16).cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(case._replace(rope=None), inputs, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_image_beyond_int32_on_a_gpu() -> None:
    # The last images lie past 2**31 elements, and rows of a window farther apart than that.
    for case in (
        Case((3, 14, 7), 1, 32, (7, 7), (3, 3), bias=True),
        Case((3, 14, 7), 1, 96, (7, 7), (3, 3), bias=True),
    ):
        inputs = {key: x.cuda() for key, x in case.inputs(torch.float16).items()}
        right, channels = attend(case, **inputs, backend="cuda"), 3 * case.dim
        far = torch.empty(3, 2**30, dtype=torch.float16, device="cuda")[:, : 14 * 7 * channels].view(3, 14, 7, channels)
        storage = torch.empty(13 * 2**29 + 3 * 2**20, dtype=torch.float16, device="cuda")
        apart = storage.as_strided(inputs["qkv"].shape, (2**20, 2**29, channels, 1))
        for strided in (far, apart):
            strided.copy_(inputs["qkv"])
            assert torch.equal(attend(case, strided, inputs["bias"], backend="cuda"), right)


@pytest.mark.gpu
def test_in_a_graph_and_on_a_stream_on_a_gpu() -> None:
    case = GPU_CASES["large"]
    inputs = {key: x.cuda() for key, x in case.inputs(torch.float16).items()}
    right = attend(case, **inputs, backend="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(attend(case, **inputs, backend="cuda"), right)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = attend(case, **inputs, backend="cuda")
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, right)
