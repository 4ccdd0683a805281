"""What the CUDA kernel of window_attention_decode does that others do not: splits, tiles, copies; and it on a GPU.

Emulated on the CPU (tests/shared/emulator.py), and with ``-m gpu`` on a GPU, where Triton's kernel runs the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import emulator
import pytest
import torch
from test_window_attention_decode import CASES, Case, Inputs, decode, draw, rows_of_full_calls
from torch import Tensor
from window_attention_oracle import Rope, exact, on_rounded_operands

import dskernels as dk
from dskernels.testing import LAYOUTS, assert_close_to_reference, random_tensor
from dskernels.window_attention.cuda_schema import cuda_decode_op

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu, id=f"gpu_{name}") for name in ("cuda", "triton")]


@pytest.fixture
def emulated() -> None:
    missing = emulator.why_not()
    if missing is not None:
        pytest.skip(missing)
    emulator.load()


@pytest.fixture
def configure(emulated: None) -> Iterator[Callable[..., None]]:
    """Sets how the emulator's next launches go, until the test ends."""
    yield emulator.configure
    emulator.configure()


def check(case: Case, x: Inputs, backend: str = "cuda", device: str = "cpu") -> None:
    """Asserts that the results are as near to float64 as those of plain PyTorch on what the tensor cores take."""
    operand = x.q.dtype if x.q.dtype == x.k_cache.dtype else torch.float32
    results = [y.cpu() for y in decode_on(device, case, x, backend)]
    right, usual = rows_of_full_calls(exact, case, x), rows_of_full_calls(on_rounded_operands(operand), case, x)
    usual = [usual[0].to(x.q.dtype), usual[1].float()]
    for what, *three in zip(("out", "lse"), results, right, usual, strict=True):
        assert_close_to_reference(*three, what)


def decode_on(device: str, case: Case, x: Inputs, backend: str) -> list[Tensor]:
    if device == "cpu":
        return decode(case, x, backend)
    table = case.table()
    q, k_cache, v_cache, lengths, sink = (y.to(device) for y in (x.q, x.k_cache, x.v_cache, x.lengths, x.sink))
    options = {"window": case.window, "rope": None if table is None else table.to(device), "backend": backend}
    scores = {"keys_rotated": case.keys_rotated, "sink": sink, "softcap": case.softcap, "return_lse": True}
    return list(dk.window_attention_decode(q, k_cache, v_cache, lengths, **options, **scores))


@pytest.mark.parametrize("kernel", ON_GPU)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lengths])
def test_matches_float64_on_a_gpu(name: str, dtype: torch.dtype, kernel: str) -> None:
    check(CASES[name], draw(CASES[name], dtype), kernel, "cuda")


@pytest.mark.parametrize("kernel", ON_GPU)
@pytest.mark.parametrize("name", ["rolling", "odd_dims", "rotated_keys"])
@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_on_a_gpu(dtype: torch.dtype, cache: torch.dtype, name: str, kernel: str) -> None:
    check(CASES[name], draw(CASES[name], dtype, cache), kernel, "cuda")


@pytest.mark.gpu
def test_graph_replays_with_other_lengths() -> None:
    case = CASES["parts_and_wrap"]
    x = draw(case, torch.bfloat16)
    q, k_cache, v_cache, lengths = (y.cuda() for y in x[:1] + x[3:6])
    options = {"window": case.window, "rope": dk.rope_table(case.dim, 3000).to("cuda"), "backend": "cuda"}
    dk.window_attention_decode(q, k_cache, v_cache, lengths, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dk.window_attention_decode(q, k_cache, v_cache, lengths, **options)
    for change in (0, -513, 100):
        lengths.copy_(x.lengths.cuda() + change)
        graph.replay()
        assert torch.equal(out, dk.window_attention_decode(q, k_cache, v_cache, lengths, **options))


# 6 tiles of rows: of one multiprocessor's 4 blocks each gets one, of 64 as many as there are 256 keys.
@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_splits_are_joined(dtype: torch.dtype, multiprocessors: int, configure: Callable[..., None]) -> None:
    """More splits than there are tiles of keys too: the last ones see nothing."""
    configure(multiprocessors=multiprocessors)
    case = Case((1, 17, 300, 1023), 1024, 2, heads=6, key_heads=1, window=(None, 0), rope=Rope(), softcap=5.0)
    check(case, draw(case, dtype))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.usefixtures("emulated")
def test_edges_of_tiles_and_wraps(queries: int) -> None:
    """Windows of 33 keys, two tiles of 16 and one, whose begin or end meets that of the 48 slots or comes near."""
    lengths = (1, 15, 16, 17, 32, 33, 34, 47, 48, 49, 63, 64, 65, 79, 80, 81, 95, 96, 97, 100)
    case = Case(lengths, 48, queries, heads=2, key_heads=1, window=(32, 0), rope=Rope())
    check(case, draw(case, torch.float16))


# On both sides of the widths that kernels are made for, and of 16 bytes.
WIDTHS = [(1, 1), (2, 9), (16, 33), (63, 64), (64, 65), (65, 15), (80, 128), (128, 129), (136, 256), (255, 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), WIDTHS)
@pytest.mark.usefixtures("emulated")
def test_widths(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    rope = Rope(rotary_dim=dim // 4 * 2, interleaved=dim % 2 == 1) if dim > 3 else None
    case = Case((7, 45), 32, dim=dim, value_dim=value_dim, window=(24, 0), rope=rope)
    check(case, draw(case, dtype))


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys_rotated", [False, True], ids=["unrotated", "rotated"])
@pytest.mark.usefixtures("emulated")
def test_dtypes(dtype: torch.dtype, cache: torch.dtype, keys_rotated: bool) -> None:
    case = Case((0, 9, 70), 40, 2, dim=48, value_dim=24, window=(30, 0), rope=Rope(), keys_rotated=keys_rotated)
    check(case, draw(case, dtype, cache))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.usefixtures("emulated")
def test_rows_of_several_tiles(dtype: torch.dtype) -> None:
    # 3 heads of 40 queries are 120 rows, in tiles of 16; a tile begins amid the heads of a query.
    case = Case((25, 40, 130), 90, 40, heads=6, key_heads=2, window=(30, 2), rope=Rope())
    check(case, draw(case, dtype))


@pytest.mark.parametrize("name", ["several_queries", "parts"])
@pytest.mark.parametrize("copies", emulator.COPIES)
@pytest.mark.parametrize("order", emulator.ORDERS)
def test_same_bits_in_every_order(order: str, copies: str, name: str, configure: Callable[..., None]) -> None:
    x = draw(CASES[name], torch.float16)
    right = decode(CASES[name], x, "cuda")
    configure(order, copies, seed=3)
    for one, other in zip(decode(CASES[name], x, "cuda"), right, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.usefixtures("emulated")
def test_unaligned_copies_equal_vectors(cache: torch.dtype, layout: str) -> None:
    """Bit for bit, for caches of q's dtype, which are copied as they are, and others, which are converted."""
    q = random_tensor((3, 6, 2, 32), torch.float32, layout)
    k, v = (random_tensor((3, 2, 24, 32), cache, layout) for _ in range(2))
    options = {"window": (15, 0), "rope": dk.rope_table(32, 61), "backend": "cuda", "return_lse": True}
    out, lse = dk.window_attention_decode(q, k, v, torch.tensor([2, 24, 61]), **options)
    lengths = torch.tensor([[2, 0], [24, 0], [61, 0]], dtype=torch.int32)[:, 0]
    right = dk.window_attention_decode(*(x.contiguous() for x in (q, k, v)), lengths, **options)
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("slots", [64, 700])
@pytest.mark.usefixtures("emulated")
def test_slots_that_nobody_sees_leak_nowhere(slots: int, poison: float) -> None:
    """In one part and in several."""
    case = Case((20, 64, 150), slots, 2, window=(29 if slots == 64 else 600, -1), rope=Rope())
    x = draw(case, torch.float32)
    # Seen are the tokens L - 2 - left to L - 2.
    clean = x._replace(k_cache=x.k_cache.clone(), v_cache=x.v_cache.clone())
    for b, length in enumerate(case.lengths):
        seen = {j % slots for j in range(max(0, length - 2 - case.window[0]), length - 1)}
        hidden = sorted(set(range(slots)) - seen)
        x.k_cache[b, :, hidden] = x.v_cache[b, :, hidden] = poison
        clean.k_cache[b, :, hidden] = clean.v_cache[b, :, hidden] = 0
    for one, other in zip(decode(case, x, "cuda"), decode(case, clean, "cuda"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("emulated")
def test_blind_queries_leak_nowhere() -> None:
    # The first query stands at 0 and sees only tokens before itself; the second sees token 0, a NaN.
    case = Case((2,), 8, 2, window=(3, -1))
    x = draw(case, torch.float32)
    x.v_cache[:, :, 0] = torch.nan
    out, lse = decode(case, x, "cuda")
    assert (out[:, :, 0] == 0).all()
    torch.testing.assert_close(lse[0, :, 0], x.sink)
    assert out[:, :, 1].isnan().all()


@pytest.mark.usefixtures("emulated")
def test_position_outside_the_table_gives_nan() -> None:
    """The public function looks at lengths on the CPU; on a GPU only the kernel does."""
    q, cache = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 8, 8)
    table, lengths = dk.rope_table(8, 4), torch.tensor([4, 5])
    options = (table.cos, table.sin, None, 1, 0, 1.0, 0.0, table.interleaved, False)
    out, _ = cuda_decode_op(q, cache, cache, lengths, *options)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.usefixtures("emulated")
def test_lengths_that_do_not_fit_see_what_is_left_in_the_cache(dtype: torch.dtype) -> None:
    # Without scores the result is the mean of what is seen: the last 6 tokens, the first query all but one of them.
    most = torch.iinfo(dtype).max
    q, cache = torch.zeros(4, 2, 2, 8), torch.randn(6, 2, 6, 8)[1:5]
    lengths = torch.tensor([-3, 7, 1000, -most - 1], dtype=dtype)
    out, lse = cuda_decode_op(q, cache, cache, lengths, *(None,) * 4, 0, 1.0, 0.0, False, False)
    for b in (0, 3):
        assert (out[b] == 0).all()
        assert (lse[b] == -torch.inf).all()
    for b, length in ((1, 7), (2, 1000)):
        torch.testing.assert_close(out[b, :, 1], cache[b].mean(1))
        earlier = [slot for slot in range(6) if slot != (length - 1) % 6]
        torch.testing.assert_close(out[b, :, 0], cache[b][:, earlier].mean(1))
    farthest = torch.tensor([most] * 4, dtype=dtype)
    out, _ = cuda_decode_op(q, cache, cache, farthest, *(None,) * 4, 0, 1.0, 0.0, False, False)
    torch.testing.assert_close(out[:, :, 1], cache.mean(2))


@pytest.mark.usefixtures("emulated")
def test_empty() -> None:
    for name in ("no_sequence", "no_query", "no_slot"):
        case = CASES[name]
        out, lse = decode(case, draw(case, torch.float32), "cuda")
        assert out.shape == (len(case.lengths), 4, case.queries, 16)
        assert lse.shape == out.shape[:3]


@pytest.mark.parametrize("name", ["several_queries", "rotated_keys", "no_sequence"])
@pytest.mark.usefixtures("emulated")
def test_opcheck(name: str) -> None:
    case = CASES[name]
    x = draw(case, torch.float32)
    table = dk.rope_table(case.dim, 1000)
    options = (table.cos, table.sin, x.sink, case.window[0], None, 0.25, 3.0, False, case.keys_rotated)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(cuda_decode_op, (x.q, x.k_cache, x.v_cache, x.lengths, *options), test_utils=checks)


@pytest.mark.usefixtures("emulated")
def test_vmap_joins_the_batch() -> None:
    case = CASES["several_queries"]
    x = draw(case, torch.float32)

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return dk.window_attention_decode(*tensors, window=case.window, return_lse=True, backend="cuda")

    tensors = (x.q, x.k_cache, x.v_cache, x.lengths)
    mapped = torch.func.vmap(attend)(*(y.unflatten(0, (3, 3)) for y in tensors))
    for one, other in zip(mapped, attend(*tensors), strict=True):
        assert torch.equal(one.flatten(0, 1), other)


Q, K, V = torch.randn(2, 6, 2, 8), torch.randn(2, 3, 10, 8), torch.randn(2, 3, 10, 4)
TABLE = dk.rope_table(8, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: Q[:, :, :, :6]}, "k_cache, v_cache: expected"),
        ({0: Q[0]}, "expected 4 dimensions"),
        ({0: Q[:, :5]}, "expected a multiple of 3 heads, got 5"),
        ({0: Q.double()}, "q: expected float32, bfloat16 or float16"),
        ({1: K[:1]}, "k_cache, v_cache: expected"),
        ({1: K[0]}, "k_cache: expected 4 dimensions"),
        ({2: V[:, :, :9]}, "k_cache, v_cache: expected"),
        ({2: V.half()}, "caches of one dtype"),
        ({0: Q.repeat(1, 1, 1, 33), 1: K.repeat(1, 1, 1, 33)}, "expected head dims up to 256, got 264 and 4"),
        ({3: torch.tensor([10.0, 15.0])}, "cache_lengths: expected int32 or int64"),
        ({3: torch.tensor([10])}, "cache_lengths: expected int32 or int64"),
        ({5: TABLE.sin[:, :2]}, "cos, sin: expected"),
        ({6: torch.ones(5)}, "sink: expected"),
    ],
    # Not of the tensors, which are others in every process.
    ids=lambda part: part if isinstance(part, str) else "",
)
@pytest.mark.usefixtures("emulated")
def test_kernel_checks_what_memory_safety_needs(changes: dict[int, Tensor], message: str) -> None:
    arguments = [Q, K, V, torch.tensor([10, 15]), TABLE.cos, TABLE.sin, None, 8, 0, 0.3, 0.0, False, False]
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(RuntimeError, match=message):
        cuda_decode_op(*arguments)
