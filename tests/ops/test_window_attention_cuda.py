"""What is peculiar to the CUDA forward of window_attention: the edges of its tiles, its ways of reading, its order."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import emulator
import pytest
import torch
from torch import Tensor
from window_attention_oracle import (
    NAMES,
    Options,
    Rope,
    exact,
    on_rounded_operands,
    op,
    plain,
)
from window_attention_varlen_oracle import CASES, dense, packed

import dskernels as dk
from dskernels.testing import LAYOUTS, assert_close_to_reference, random_tensor
from dskernels.window_attention.cuda_schema import cuda_forward_op, cuda_varlen_forward_op

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)

emulated = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))


@pytest.fixture(scope="module")
def simt() -> Iterator[None]:
    emulator.load()
    yield
    emulator.configure()


def draw(heads: int, key_heads: int, queries: int, keys: int, dim: int, value_dim: int, dtype: torch.dtype):
    shapes = ((1, heads, queries, dim), (1, key_heads, keys, dim), (1, key_heads, keys, value_dim))
    return [random_tensor(shape, dtype) for shape in shapes]


def check(inputs: list[Tensor], options: Options, **scores: Tensor) -> None:
    """Compares the forward with float64."""
    right = exact(*(x.double() for x in inputs), options, **scores)
    usual = on_rounded_operands(inputs[0].dtype)(*inputs, options, **scores)
    for what, *three in zip(NAMES, op(*inputs, options, "cuda", **scores), right, usual, strict=False):
        assert_close_to_reference(*three, what)


@emulated
@pytest.mark.parametrize("keys", [31, 32, 33, 63, 64, 65, 128, 129])
@pytest.mark.parametrize("queries", [15, 16, 17, 64, 65])
def test_lengths_around_a_tile(queries: int, keys: int, simt: None) -> None:
    for dtype, window in ((torch.float16, (None, None)), (torch.float32, (17, 2))):
        check(draw(1, 1, queries, keys, 16, 8, dtype), Options(window=window))


@emulated
@pytest.mark.parametrize("extent", [0, 1, 14, 15, 16, 62, 63, 64, 65])
def test_windows_around_a_tile(extent: int, simt: None) -> None:
    check(draw(1, 1, 140, 140, 16, 16, torch.bfloat16), Options(window=(extent, 0)))
    check(draw(1, 1, 140, 140, 16, 16, torch.bfloat16), Options(window=(-3, extent)))


@emulated
@pytest.mark.parametrize("group", [2, 3, 5, 6, 7, 8, 65])
def test_groups(group: int, simt: None) -> None:
    """Heads of a group are rows of one tile, whose edges then fall between heads of a query."""
    queries = 23 if group < 64 else 3
    inputs = draw(2 * group, 2, queries, 40, 16, 24, torch.float16)
    bias, sink = torch.randn(2 * group, queries, 40), torch.randn(2 * group)
    check(inputs, Options(window=(11, 2), rope=Rope()), bias=bias, sink=sink)


@emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(8, 1), (64, 64), (65, 8), (24, 100), (128, 128), (129, 72), (16, 256), (256, 256)], ids=str
)
def test_head_dims(dim: int, value_dim: int, dtype: torch.dtype, simt: None) -> None:
    """All widths that kernels are compiled for, with more keys than two tiles hold."""
    check(draw(1, 1, 20, 140, dim, value_dim, dtype), Options(window=(130, 0)))


# Half of it whole runs of 16 bytes, some of them, and none.
ROTARY_DIMS = {"all": 48, "runs": 32, "pairs": 22, "one": 2}


@emulated
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", ROTARY_DIMS.values(), ids=ROTARY_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_turned_beforehand_are_those_turned_by_readers(
    dtype: torch.dtype, rotary_dim: int, interleaved: bool, simt: None
) -> None:
    q, k, v = draw(2, 1, 50, 300, 48, 16, dtype)
    table = dk.rope_table(48, 300, rotary_dim=rotary_dim, interleaved=interleaved)
    # One tile of queries turns its keys itself; the same among packed tokens, which may be of many tiles, does not.
    alone = dk.window_attention(q[:, :1], k, v, rope=table, return_lse=True, backend="cuda")
    offsets = [torch.tensor([0, n]) for n in (50, 300)]
    tokens = [x[0].transpose(0, 1) for x in (q[:, :1], k, v)]
    out, lse = dk.window_attention_varlen(*tokens, *offsets, rope=table, return_lse=True, backend="cuda")
    assert torch.equal(out.transpose(0, 1)[None], alone[0])
    assert torch.equal(lse[None], alone[1])
    options = Options(rope=Rope(rotary_dim=rotary_dim, interleaved=interleaved))
    check([q, k, v], options)
    check([q[:, :1], k, v], options)


@emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", [None, Rope(rotary_dim=32), Rope(interleaved=True)], ids=["plain", "half", "pairs"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
def test_layouts_give_the_same_bits(layout: str, rope: Rope | None, dtype: torch.dtype, simt: None) -> None:
    shapes = ((2, 6, 30, 64), (2, 2, 80, 64), (2, 2, 80, 32))
    inputs = [random_tensor(shape, dtype, layout) for shape in shapes]
    options = Options(window=(40, 4), rope=rope)
    for one, other in zip(
        op(*inputs, options, "cuda"), op(*(x.contiguous() for x in inputs), options, "cuda"), strict=True
    ):
        assert torch.equal(one, other)


@emulated
def test_a_table_off_by_one_element(simt: None) -> None:
    inputs = draw(2, 2, 40, 40, 32, 32, torch.float16)
    table = dk.rope_table(32, 40)
    moved = [torch.cat((torch.zeros(1), x.flatten()))[1:].view_as(x) for x in (table.cos, table.sin)]
    options = (None, None, None, 9, 0, 0, 0.2, 0.0, False)
    right = cuda_forward_op(*inputs, table.cos, table.sin, *options)
    for one, other in zip(cuda_forward_op(*inputs, *moved, *options), right, strict=True):
        assert torch.equal(one, other)


@emulated
@pytest.mark.parametrize("copies", emulator.COPIES)
@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 96), (torch.float32, 136)], ids=str)
def test_same_bits_in_every_order(dtype: torch.dtype, dim: int, order: str, copies: str, simt: None) -> None:
    inputs = draw(2, 1, 50, 200, dim, dim, dtype)
    options, sink = Options(window=(90, 3), rope=Rope(), softcap=3.0), torch.randn(2)
    right = op(*inputs, options, "cuda", sink=sink)
    try:
        for seed in (1, 2):
            emulator.configure(order, copies, seed)
            for one, other in zip(op(*inputs, options, "cuda", sink=sink), right, strict=True):
                assert torch.equal(one, other)
    finally:
        emulator.configure()


@emulated
def test_large_scores_keep_their_digits(simt: None) -> None:
    """Scores near 2000, whose differences decide: scaled to base 2 before the maximum is gone they would be rounded."""
    q, k, v = draw(1, 1, 40, 80, 8, 8, torch.float32)
    q[..., 0], k[..., 0] = 1.0, 2000.0
    check([q, k, v], Options(scale=1.0))


@emulated
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_nobody_sees_never_leaks(poison: float, simt: None) -> None:
    """Hidden keys before what is read, and behind it in the last tile."""
    options = Options(window=(5, -3), rope=Rope(), query_offset=40)
    q, k, v = draw(3, 1, 30, 100, 24, 20, torch.float16)
    right = op(q, k, v, options, "cuda")
    for x in (k, v):
        x[:, :, :35] = x[:, :, 67:] = poison
    for one, other in zip(op(q, k, v, options, "cuda"), right, strict=True):
        assert torch.equal(one, other)
        assert other.isfinite().all()


@emulated
@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)], ids=["batch", "queries", "keys", "all"]
)
def test_empty(batch: int, queries: int, keys: int, simt: None) -> None:
    q, k, v = torch.randn(batch, 4, queries, 8), torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 6)
    options = Options(rope=Rope() if queries + keys > 0 else None, query_offset=0)
    out, lse = op(q, k, v, options, "cuda")
    assert torch.equal(out, torch.zeros(batch, 4, queries, 6))
    assert torch.equal(lse, torch.full((batch, 4, queries), -torch.inf))
    sink = torch.randn(4)
    _, lse = op(q, k, v, options, "cuda", sink=sink)
    assert torch.equal(lse, sink[:, None].expand_as(lse))


@emulated
@pytest.mark.parametrize("name", [name for name in CASES if name != "several_chunks"])
def test_packed_equals_dense(name: str, simt: None) -> None:
    """Heads of a group are packed alike in both, so the tiles are the same, and so are the bits."""
    case = CASES[name]._replace(heads=6)
    inputs = case.inputs(torch.float16)
    right = dense(lambda *x, sink: op(*x, "cuda", sink=sink), case, *inputs)
    for one, other in zip(packed(case, "cuda", *inputs), right, strict=True):
        assert torch.equal(one, other)


@emulated
def test_a_thousand_sequences(simt: None) -> None:
    """More than a warp looks through at once, and most of them empty."""
    lengths = [0] * 1000
    lengths[3], lengths[31], lengths[32], lengths[33], lengths[500], lengths[999] = 2, 1, 64, 65, 3, 4
    case = CASES["even"]._replace(queries=tuple(lengths), keys=tuple(lengths), rest=(5, 0), key_heads=1, heads=1)
    inputs = case.inputs(torch.float32)
    right = dense(exact, case, *(x.double() for x in inputs))
    usual = dense(plain, case, *inputs)
    for what, *three in zip(NAMES, packed(case, "cuda", *inputs), right, usual, strict=False):
        assert_close_to_reference(*three, what)


@emulated
@pytest.mark.parametrize("types", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=str)
def test_offsets_of_two_types(types: tuple[torch.dtype, torch.dtype], simt: None) -> None:
    case = CASES["uneven"]
    *tensors, _ = case.inputs(torch.float32)
    options = (None, None, None, 9, 3, 0.25, 0.0, False)
    right = cuda_varlen_forward_op(*tensors, *case.offsets(), *options)
    mixed = [x.to(dtype) for x, dtype in zip(case.offsets(), types, strict=True)]
    for one, other in zip(cuda_varlen_forward_op(*tensors, *mixed, *options), right, strict=True):
        assert torch.equal(one, other)


WRONG_OFFSETS = {
    "beyond": ([0, 40, 1000], [0, 10**6, 2 * 10**6]),
    "negative": ([-5, -70, 50], [0, -(2**31), 9]),
    "falling": ([50, 20, 0], [9, 60, 3]),
    "huge": ([0, 2**62, 2**62], [-(2**62), 2**62, 0]),
}


@emulated
@pytest.mark.parametrize("name", WRONG_OFFSETS)
def test_wrong_offsets_stay_within_the_tensors(name: str, simt: None) -> None:
    """Nobody looks at offsets on a GPU. Under AddressSanitizer this test says whether it holds."""
    offsets = [torch.tensor(x) for x in WRONG_OFFSETS[name]]
    q, k, v = torch.randn(50, 2, 8), torch.randn(60, 1, 8), torch.randn(60, 1, 8)
    table = dk.rope_table(8, 4)
    for tables in ((None, None), (table.cos, table.sin)):
        out, lse = cuda_varlen_forward_op(q, k, v, *offsets, *tables, None, 9, 3, 0.25, 0.0, False)
        assert (out.shape, lse.shape) == ((50, 2, 8), (2, 50))


@emulated
@pytest.mark.parametrize("queries", [40, 200], ids=["turned_by_readers", "turned_beforehand"])
def test_position_outside_the_table_gives_nan(queries: int, simt: None) -> None:
    inputs = draw(1, 1, queries, queries, 16, 16, torch.float32)
    table = dk.rope_table(16, 30)
    positions = torch.zeros(1, queries, dtype=torch.int64)
    positions[0, 7], positions[0, 9] = 30, -1
    extent = 0 if queries == 40 else 150
    out, _ = cuda_forward_op(*inputs, table.cos, table.sin, positions, None, None, extent, 0, 0, 0.25, 0.0, False)
    bad = out.isnan().all(3).flatten().nonzero().flatten().tolist()
    assert bad == ([7, 9] if extent == 0 else [*range(7, 160)])


@emulated
def test_positions_of_no_sequence_need_no_rows_of_the_table(simt: None) -> None:
    empty = [x[:0] for x in draw(1, 1, 40, 40, 16, 16, torch.float32)]
    table = dk.rope_table(16, 30)
    positions = torch.zeros(0, 40, dtype=torch.int64)
    out, _ = cuda_forward_op(*empty, table.cos, table.sin, positions, None, None, None, 0, 0, 0.25, 0.0, False)
    assert out.shape == (0, 1, 40, 16)


@emulated
def test_a_direct_call_is_checked_for_what_memory_safety_needs(simt: None) -> None:
    q, k, v = draw(4, 2, 5, 6, 8, 6, torch.float32)
    table = dk.rope_table(8, 6)
    cos, sin = table.cos, table.sin
    places = torch.zeros(1, 6, dtype=torch.int64)

    def call(q=q, k=k, v=v, cos=None, sin=None, positions=None, bias=None, sink=None, offset=0) -> None:
        cuda_forward_op(q, k, v, cos, sin, positions, bias, sink, None, None, offset, 0.25, 0.0, False)

    call()
    wrong = {
        "expected 4 dimensions": {"q": q[0]},
        "expected .B, Hq, Nq, D.": {"v": v[:, :, :5]},
        "expected a multiple of 2 heads, got 3": {"q": q[:, :3]},
        "expected one dtype": {"k": k.half()},
        "float32, bfloat16 or float16": {"q": q.double(), "k": k.double(), "v": v.double()},
        "cos, sin: expected contiguous": {"cos": cos.T, "sin": sin.T},
        "cos, sin: expected positions 0 to 5, got 5 rows": {"cos": cos[:5], "sin": sin[:5]},
        "cos, sin: expected positions -1 to 5": {"cos": cos, "sin": sin, "offset": -1},
        "positions: expected contiguous int64": {"cos": cos, "sin": sin, "positions": places[:, :5]},
        "with every query at a key": {"cos": cos, "sin": sin, "positions": places, "offset": 2},
        "bias: expected float32": {"bias": torch.zeros(1, 4, 5, 6).half()},
        "bias: expected float32 .B": {"bias": torch.zeros(1, 4, 5, 5)},
        "sink: expected contiguous float32": {"sink": torch.zeros(3)},
        "expected head dims up to 256, got 8 and 257": {"v": torch.zeros(1, 2, 6, 257)},
    }
    for message, arguments in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            call(**arguments)


@emulated
def test_a_direct_call_with_packed_sequences_is_checked(simt: None) -> None:
    tensors = [torch.randn(9, 2, 8) for _ in range(3)]
    offsets = torch.tensor([0, 9])

    def call(q=tensors[0], k=tensors[1], v=tensors[2], of_q=offsets, of_k=offsets) -> None:
        cuda_varlen_forward_op(q, k, v, of_q, of_k, None, None, None, None, None, 0.25, 0.0, False)

    call()
    wrong = {
        "expected 3 dimensions": {"q": tensors[0][None]},
        "expected .T, Hq, D.": {"v": tensors[2][:5]},
        "cu_seqlens_q: expected int32 or int64": {"of_q": offsets.float()},
        "cu_seqlens_k: expected int32 or int64 .n . 1.": {"of_k": offsets[:0]},
        "cu_seqlens_k: expected as many offsets as cu_seqlens_q, 2, got 1": {"of_k": offsets[:1]},
    }
    for message, arguments in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            call(**arguments)


def on_a_gpu(compute, *tensors: Tensor) -> list[Tensor]:
    return [x.cpu() for x in compute(*(x.cuda() for x in tensors))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", [None, Rope(rotary_dim=32), Rope(interleaved=True)], ids=["plain", "half", "pairs"])
@pytest.mark.parametrize(("dim", "value_dim"), [(40, 24), (64, 64), (128, 128), (200, 256)], ids=str)
@pytest.mark.parametrize("window", [(31, 7), (None, 0), (-2, 9)], ids=str)
def test_on_a_gpu(window: tuple, dim: int, value_dim: int, rope: Rope | None, dtype: torch.dtype) -> None:
    options = Options(window=window, rope=rope)
    inputs = draw(6, 2, 200, 257, dim, value_dim, dtype)
    right = exact(*(x.double() for x in inputs), options)
    usual = on_rounded_operands(dtype)(*inputs, options)
    table = None
    if rope is not None:
        table = dk.rope_table(dim, 257, rotary_dim=rope.rotary_dim, interleaved=rope.interleaved).to("cuda")
    attend = functools.partial(dk.window_attention, window=window, rope=table, return_lse=True, backend="cuda")
    for what, *three in zip(NAMES, on_a_gpu(attend, *inputs), right, usual, strict=False):
        assert_close_to_reference(*three, what)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_packed_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    *inputs, sink = case.inputs(dtype)
    right = dense(exact, case, *(x.double() for x in inputs), sink.double())
    usual = [dense(plain, case, *inputs, sink)[0], dense(on_rounded_operands(dtype), case, *inputs, sink)[1]]
    table = case.table() if case.rope is None else case.table().to("cuda")
    offsets = [x.cuda() for x in case.offsets(torch.int32)]
    options = {"window": case.window, "rope": table, "softcap": case.softcap, "sink": sink.cuda(), "backend": "cuda"}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dk.window_attention_varlen(q, k, v, *offsets, **options, return_lse=True)

    for what, *three in zip(NAMES, on_a_gpu(attend, *inputs), right, usual, strict=False):
        assert_close_to_reference(*three, what)


@pytest.mark.gpu
@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("tokens_apart", [2**25, 2**26 + 8], ids=str)
def test_offsets_beyond_2_to_31_elements(tokens_apart: int, rope: bool) -> None:
    """Rows, heads and batches so far apart that no 32-bit offset reaches the last."""
    storage = torch.empty(2**33, dtype=torch.float16, device="cuda")
    small = [torch.randn(1, 2, 100, 64).half().cuda() for _ in range(3)]
    table = dk.rope_table(64, 100).to("cuda") if rope else None
    attend = functools.partial(dk.window_attention, window=(40, 0), rope=table, return_lse=True, backend="cuda")
    right = attend(*small)
    far = []
    for i, x in enumerate(small):
        view = storage[128 * i :].as_strided((1, 2, 100, 64), (0, 64, tokens_apart, 1))
        far.append(view.copy_(x))
    for one, other in zip(attend(*far), right, strict=True):
        assert torch.equal(one, other)
