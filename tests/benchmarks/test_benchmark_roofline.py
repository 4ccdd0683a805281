"""The roofline on paper: counts against brute force, and the page against the code."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import roofline
from benchmarks.ops import cases_of, op_names
from benchmarks.ops.quantized_matmul import MatmulProblem
from benchmarks.ops.swin_attention import SwinProblem
from benchmarks.ops.window_attention import WindowProblem
from benchmarks.ops.window_attention_decode import DecodeProblem
from benchmarks.ops.window_attention_varlen import VarlenProblem
from benchmarks.roofline import (
    BACKWARD_BLOCKS,
    BACKWARD_RUN,
    BACKWARD_TILES,
    BLOCK_ROWS,
    ENOUGH_BLOCKS,
    FEW_ROWS,
    GPUS,
    MMA_SYNC_SHARE,
    ROW_TILE,
    TURNED_BY_READERS,
    Gpu,
    Work,
    backward_pairs,
    cells_along,
    forward_pairs,
    work,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
SIZES = {"dtype": "bf16", "heads": 4, "key_heads": 2, "head_dim": 16}
# A byte and two operations a second, and so many exponentials that a clock of one fits.
SLOW = Gpu(name="slow", bandwidth=1.0, rates={"bf16": 2.0, "half": 1.0})


def test_page_has_the_tables_of_the_code():
    text = PAGE.read_text()
    (block,) = re.findall(r"<!-- benchmarks:roofline -->\n(.*?)\n<!-- /benchmarks -->", text, re.DOTALL)
    assert block == roofline.tables(), "python -m benchmarks.roofline --write docs/gpu.md"


def test_prose_of_the_page_says_what_the_code_has():
    text = re.sub(r"\s+", " ", PAGE.read_text())
    h100, h200 = GPUS
    assert f"`mma.sync` reaches {100 * MMA_SYNC_SHARE:.1f} % of the peak" in text
    assert f"the H200 is {h200.bandwidth / h100.bandwidth:.2f} times as fast" in text
    assert f"loses {1 / MMA_SYNC_SHARE:.1f} times to kernels of `wgmma`" in text
    assert f"comes to the same {h100.exponentials / 1e12:.1f} T/s" in text
    assert f"forward {BLOCK_ROWS} rows a block" in text
    assert f"each warp of {ROW_TILE} rows" in text
    assert f"where a block sees more than {TURNED_BY_READERS} of them" in text
    assert f"beyond {FEW_ROWS} rows" in text
    clock = h100.rates["bf16"] / h100.processors / 4096
    assert f"so the rate implies {clock / 1e9:.2f} GHz" in text
    (batch,) = (
        c.lanes[0].problem for c in cases_of("window_attention", device="cuda") if c.name == "grouped-forward-bf16"
    )
    rotated = 2 * 2 * batch.batch * batch.length * batch.head_dim * batch.heads
    times = [f"{1e3 * rotated / gpu.bandwidth:.2g}" for gpu in GPUS]
    assert f"in the batch of 4, {times[0]} ms on an H100 and {times[1]} on an H200" in text


def test_sizes_are_those_of_the_kernels():
    sources = {path.name: path.read_text() for path in (ROOT / "csrc" / "window_attention").glob("*.cu*")}
    backward = sources["cuda_backward_tile.cuh"]
    for dim in (128, 256):
        two, four = (BACKWARD_TILES[size, dim] for size in (2, 4))
        assert re.search(
            rf"BackwardTile<T, {dim}, {two[0]}, {two[1]}, .*BackwardTile<T, {dim}, {four[0]}, {four[1]}, ", backward
        )
    (own, other), (own_wide, other_wide) = (BACKWARD_TILES[size, 64] for size in (2, 4))
    assert f"BackwardTile<T, 64, {own}, sizeof(T) == 2 ? {other} : {other_wide}, " in backward
    assert own == own_wide
    forward = sources["cuda_forward.cuh"]
    assert "kWarps = 4, kThreads = kWarps * kWarp, kRows = 16 * kWarps" in forward
    assert "kKeys = kWide ? (kBucket <= 128 ? 32 : 16) : (kBucket <= 128 ? 64 : 32)" in forward
    assert f"kTurnedByReaders = {TURNED_BY_READERS};" in sources["kernel.cu"]
    quantized = ROOT / "csrc" / "quantized_matmul"
    assert f"kEnoughBlocks = {ENOUGH_BLOCKS};" in (quantized / "cuda.h").read_text()
    assert "kLeastStages = 4;" in (quantized / "kernel_float.cu").read_text()
    for line in ("kPaddedColumns = 256;", "kLeastSegment = 512;", "kNarrowTile = 64;"):
        assert line in (quantized / "cuda_plan.h").read_text()
    assert f"kFewRows = {FEW_ROWS};" in (quantized / "kernel_float.cu").read_text()
    swin = (ROOT / "csrc" / "swin_attention" / "cuda_backward.cuh").read_text()
    assert f"kBackwardBlocks = {BACKWARD_BLOCKS}, kBackwardRun = {BACKWARD_RUN};" in swin


def test_statements_about_bounds_hold():
    bounds, expected = {}, {}
    for op in op_names():
        for case in cases_of(op, device="cuda"):
            problem = case.lanes[0].problem
            bounds[op, problem] = {work(problem).bound(gpu)[1] for gpu in GPUS}
            expected[op, problem] = {work(problem).expected(gpu)[1] for gpu in GPUS}
    for (op, problem), names in bounds.items():
        few_rows = op == "quantized_matmul" and problem.rows <= 16
        if op in ("clip_and_scale", "clip_and_scale_step", "swin_attention", "window_attention_decode") or few_rows:
            assert names == {"memory"}, problem
            is_swin_fp32 = op == "swin_attention" and problem.dtype == "fp32"
            assert is_swin_fp32 or expected[op, problem] == {"memory"}, problem
        if op == "window_attention" and problem.head_dim == 128:
            assert names == {"products"}, problem


def test_statements_about_what_is_expected_hold():
    jobs = {
        (problem.scheme, problem.rows): work(problem)
        for problem in (case.lanes[0].problem for case in cases_of("quantized_matmul", device="cuda"))
    }
    for gpu in GPUS:
        assert jobs["int4_weight_only", 256].expected(gpu)[1] == "memory"
        fp8, int8 = (jobs[scheme, 4096].expected(gpu)[0] for scheme in ("fp8_block", "int8_dynamic"))
        assert fp8 == pytest.approx(2 * int8, rel=1e-3)
        packed = cases_of("window_attention_varlen", device="cuda")[0].lanes[0].problem
        assert work(packed).expected(gpu)[1] == "memory"
        small = [
            *(c.lanes[0].problem for c in cases_of("window_attention", device="cuda")),
            *(c.lanes[0].problem for c in cases_of("window_attention_decode", device="cuda")),
        ]
        for problem in small:
            is_decode = isinstance(problem, DecodeProblem)
            is_small = problem.batch == 1 if is_decode else problem.heads == 8 and not problem.backward
            if is_small and problem.dtype != "fp32":
                assert work(problem).expected(gpu)[0] < 8e-6


def test_every_case_of_a_gpu_is_counted():
    for op in op_names():
        for case in cases_of(op, device="cuda"):
            for lane in case.lanes:
                job = work(lane.problem)
                assert job.bytes == lane.problem.compulsory_bytes
                assert job.operations % lane.problem.operations == 0
                assert job.tiled_operations >= job.operations
                assert job.tiled_exponentials >= job.exponentials
                assert job.expected(GPUS[0])[0] >= job.bound(GPUS[0])[0] >= job.memory(GPUS[0]) > 0


def test_what_is_not_counted_is_refused():
    with pytest.raises(TypeError, match="got str"):
        work("a problem")


def _computed(mask, block, warp, other):
    """Pairs of warps' rows and the tiles of which they see any; tiles begin at the first column that the block sees."""
    pairs = 0
    for rows in mask.split(block):
        first, last = rows.any(0).nonzero()[[0, -1], 0].tolist()
        for part in rows.split(warp):
            seen = [bool(part[:, at : at + other].any()) for at in range(first, last + 1, other)]
            pairs += warp * other * sum(seen)
    return pairs


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("seen", [1, 5, 64, 65, 100, 1000])
@pytest.mark.parametrize("length", [1, 15, 64, 65, 200])
def test_pairs_are_those_of_tiles_that_hold_a_seen_pair(length, seen, group):
    position = torch.arange(length)
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance < seen)
    packed = mask.repeat_interleave(group, 0)
    for keys in (64, 32, 16):
        assert forward_pairs(length, seen, group, keys) == _computed(packed, BLOCK_ROWS, ROW_TILE, keys)
    for own, other in set(BACKWARD_TILES.values()):
        by_keys, by_queries = group * _computed(mask.T, own, own, other), _computed(packed, own, own, other)
        assert backward_pairs(length, seen, group, own, other) == (by_keys, by_queries)


@pytest.mark.parametrize(("size", "window", "shift"), [(56, 7, 3), (14, 7, 3), (64, 8, 4), (21, 7, 0), (8, 8, 1)])
def test_cells_are_parts_of_windows_of_a_rolled_image(size, window, shift):
    problem = SwinProblem(height=size, width=size, channels=32, heads=1, dtype="bf16", window=window, shift=shift)
    parts = {((token - shift) % size // window, token < shift) for token in range(size)}
    assert cells_along(size, problem) == len(parts)


def test_window_is_counted_by_hand():
    problem = WindowProblem(length=128, seen=64, batch=3, **SIZES)
    job = work(problem)
    # Blocks of 32 queries of two heads: the first two meet a tile of keys each, the others two. In 64 columns.
    pairs = 3 * 2 * (1 + 1 + 2 + 2) * 64 * 64
    assert job.tiled_operations == 2 * 2 * 64 * pairs
    assert job.tiled_exponentials == pairs
    assert job.exponentials == 3 * 4 * problem.seen_pairs
    assert job.extra_bytes == 0
    backward = work(WindowProblem(length=128, seen=64, batch=3, backward=True, **SIZES))
    # By keys as many: two tiles of queries and one, of two heads.
    assert backward.tiled_operations == 2 * (2 + 4 + 3) * 64 * pairs
    assert backward.tiled_exponentials == 3 * pairs
    assert backward.extra_bytes == 3 * 128 * (7 * 4 + 6 * 2) * 16 * 2
    fp32 = work(WindowProblem(length=128, seen=64, batch=3, **{**SIZES, "dtype": "fp32"}))
    assert (fp32.format, fp32.operations) == ("tf32", 3 * job.operations)
    # In tiles of 32 keys the blocks meet 1, 2, 3 and 3; the first warp of none is spared one.
    assert fp32.tiled_operations == 3 * 2 * 2 * 64 * 3 * 2 * (1 + 2 + 3 + 3) * 64 * 32


def test_keys_of_long_windows_are_turned_beforehand():
    for backward, rows in ((False, 2 * 2), (True, 7 * 4 + 8 * 2)):
        job = work(WindowProblem(length=300, seen=129, batch=3, backward=backward, **SIZES))
        assert job.extra_bytes == 3 * 300 * rows * 16 * 2
    # With 32 queries of two heads a block, 97 keys are seen by 128 at most.
    assert work(WindowProblem(length=300, seen=97, **SIZES)).extra_bytes == 0
    assert work(WindowProblem(length=300, seen=98, **SIZES)).extra_bytes > 0


def test_packed_sequences_are_counted_one_by_one():
    sizes = {"dtype": "bf16", "heads": 4, "head_dim": 16}
    job = work(VarlenProblem(lengths=(70, 128, 1), seen=40, **sizes))
    alone = [work(WindowProblem(length=n, seen=40, key_heads=4, **sizes)) for n in (70, 128, 1)]
    for name in ("operations", "tiled_operations", "exponentials", "tiled_exponentials"):
        assert getattr(job, name) == sum(getattr(one, name) for one in alone)


def test_rows_are_filled_up():
    decode = work(DecodeProblem(batch=2, seen=100, **SIZES))
    # Two query heads of a key head stand in 16 rows, 100 keys in 112.
    assert decode.tiled_operations == 8 * 112 * decode.operations // 100
    swin = SwinProblem(height=14, width=21, channels=32, heads=2, dtype="bf16", shift=3, batch=2)
    assert work(swin).tiled_operations == 4 * 32 * (2 * 3 * 4 * 2) * 64 * 64
    assert work(swin).tiled_exponentials == (2 * 3 * 4 * 2) * 64 * 64


@pytest.mark.parametrize(
    ("scheme", "rows", "padded"),
    [
        ("int4_weight_only", 1, 16),
        ("int4_weight_only", 16, 16),
        ("int4_weight_only", 17, 64),
        ("int8_weight_only", 128, 128),
        ("int8_weight_only", 129, 129),
        ("int8_dynamic", 16, 16),
        ("int8_dynamic", 17, 32),
        ("int8_static", 65, 128),
        ("fp8_block", 200, 256),
    ],
)
def test_rows_of_quantized_products_are_filled_up(scheme, rows, padded):
    job = work(MatmulProblem(scheme=scheme, rows=rows, dtype="bf16", out_features=256, in_features=512))
    assert job.tiled_operations == 2 * padded * 256 * 512
    # Halves of the weight, codes of x or sums of two splits of 256 columns, each written and read.
    dense, codes = 2 * 2 * 256 * 512, 2 * rows * 512
    formats = {"int8_dynamic": "int8", "int8_static": "int8", "fp8_block": "fp8"}
    assert job.format == formats.get(scheme, "bf16")
    assert job.tiled_format == ("fp16" if scheme == "fp8_block" else None)
    assert job.share == (1.0 if rows == 129 else MMA_SYNC_SHARE)
    extra = {"int8_dynamic": codes, "int8_static": codes, "fp8_block": 2 * codes}.get(scheme, 0)
    splits = roofline.splits_of(
        MatmulProblem(scheme=scheme, rows=rows, dtype="bf16", out_features=256, in_features=512)
    )
    sums = 2 * 4 * splits * rows * 256 if splits > 1 else 0
    assert job.extra_bytes == extra + sums + (dense if rows == 129 else 0)


@pytest.mark.parametrize(
    ("scheme", "rows", "columns", "splits"),
    [
        # 128 tiles of 64 columns, 64 of 128, two times 64.
        ("int8_dynamic", 1, 8192, 2),
        ("int8_dynamic", 32, 8192, 4),
        ("int8_dynamic", 256, 8192, 2),
        ("int8_dynamic", 4096, 8192, 1),
        # 5 steps of 256 columns for at most 3 splits of 512 or more.
        ("int8_static", 32, 1200, 3),
        # 64 tiles; 8 and 16 stages of 64 bytes, of which a split has four and more.
        ("int4_weight_only", 64, 8192, 4),
        ("int4_weight_only", 64, 1024, 2),
        ("fp8_block", 16, 1024, 4),
        ("fp8_block", 256, 1024, 1),
        ("int8_weight_only", 1, 100, 1),
    ],
)
def test_products_of_few_tiles_are_split(scheme, rows, columns, splits):
    sizes = {"out_features": 8192, "in_features": columns}
    assert roofline.splits_of(MatmulProblem(scheme=scheme, rows=rows, dtype="bf16", **sizes)) == splits


def test_sums_of_a_bias_are_left_once_for_the_cells_of_a_block():
    sizes = {"height": 56, "width": 56, "channels": 128, "heads": 4, "dtype": "bf16", "shift": 3, "batch": 64}
    assert work(SwinProblem(**sizes)).extra_bytes == 0
    # 64 * 81 cells of 4 heads, for 8 blocks on each of 132 multiprocessors: 19 cells a block, 273 blocks a head.
    assert work(SwinProblem(backward=True, **sizes)).extra_bytes == 2 * 4 * 273 * 4 * 49 * 49
    few = SwinProblem(backward=True, **{**sizes, "batch": 1})
    assert work(few).extra_bytes == 2 * 4 * 81 * 4 * 49 * 49


def test_bound_is_the_longest_time():
    sizes = {"format": "bf16", "operations": 10, "tiled_operations": 20}
    assert Work(bytes=7, **sizes).bound(SLOW) == (7.0, "memory")
    assert Work(bytes=4, **sizes).bound(SLOW) == (5.0, "products")
    seconds, name = Work(bytes=4, **sizes).expected(SLOW)
    assert (seconds, name) == (pytest.approx(10 / MMA_SYNC_SHARE), "products")
    assert Work(bytes=4, share=1.0, **sizes).expected(SLOW) == (10.0, "products")
    assert Work(bytes=4, share=1.0, tiled_format="half", **sizes).expected(SLOW) == (20.0, "products")
    assert Work(bytes=4, extra_bytes=16, **sizes).expected(SLOW) == (20.0, "memory")
    many = Work(bytes=1, exponentials=1, tiled_exponentials=2, **sizes)
    assert many.bound(SLOW) == (pytest.approx(1 / SLOW.exponentials), "ex2")
    assert many.expected(SLOW) == (pytest.approx(2 / SLOW.exponentials), "ex2")


def test_command_prints_and_writes(tmp_path, capsys):
    assert roofline.main([]) == 0
    assert capsys.readouterr().out.strip() == roofline.tables()
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmarks:roofline -->\nold\n<!-- /benchmarks -->\nafter\n")
    assert roofline.main(["--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert roofline.tables() in text
    assert "\nold\n" not in text
