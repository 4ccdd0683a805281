"""The roofline on paper: bytes, operations and the least time of every case on a GPU, from data sheets alone.

``python -m benchmarks.roofline`` prints the tables, ``--write docs/gpu.md`` puts them between the page's markers, which
has the formulas in words. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

from benchmarks.case import DTYPES
from benchmarks.ops import cases_of, op_names
from benchmarks.ops.clip_and_scale import ClipProblem
from benchmarks.ops.clip_and_scale_step import ListStepProblem
from benchmarks.ops.quantized_matmul import MatmulProblem
from benchmarks.ops.swin_attention import SwinProblem
from benchmarks.ops.window_attention import WindowProblem
from benchmarks.ops.window_attention_decode import DecodeProblem
from benchmarks.ops.window_attention_varlen import VarlenProblem
from benchmarks.report import insert

# Rows of one mma.sync, which a warp takes at a time, and of a block of the attention's forward.
ROW_TILE, BLOCK_ROWS = 16, 64

# Keys up to which the forward's tiles of queries each turn their own; those of longer windows are turned beforehand.
TURNED_BY_READERS = 128

# Of the attention's backward by bytes of an element and the head dim's bucket: a block's own rows, rows that pass by.
BACKWARD_TILES = {
    (2, 64): (64, 64),
    (4, 64): (64, 32),
    (2, 128): (64, 32),
    (4, 128): (32, 16),
    (2, 256): (32, 16),
    (4, 256): (16, 16),
}

# Rows beyond which codes of weights alone are made floats, for cuBLAS to multiply, and blocks that a quantized product
# of less is cut into.
FEW_ROWS, ENOUGH_BLOCKS = 128, 264

# Of Swin's backward: blocks that each multiprocessor is left, and cells that a block walks over at most.
BACKWARD_BLOCKS, BACKWARD_RUN = 8, 32

# What mma.sync reaches of the rate that only wgmma reaches in full on Hopper: Luo et al., "Dissecting the NVIDIA Hopper
# Architecture through Microbenchmarking and Multiple Level Analysis", arXiv:2501.12084, section 6.2.
MMA_SYNC_SHARE = 0.629

# Products of TF32 that stand for one of float32.
SPLIT = 3


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A data sheet: dense rates, operations a second by format, ``"alu"`` for float32 without tensor cores."""

    name: str
    bandwidth: float
    rates: dict[str, float]
    processors: int = 132

    @property
    def exponentials(self) -> float:
        """``ex2`` a second: 16 a clock and processor, at the clock that the rate of bf16, 4096 of them, implies."""
        return self.rates["bf16"] * 16 / 4096


_HOPPER = {"alu": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "int8": 1978.9e12, "fp8": 1978.9e12}
GPUS = (
    Gpu(name="H100", bandwidth=3.35e12, rates=_HOPPER),
    Gpu(name="H200", bandwidth=4.8e12, rates=_HOPPER),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a problem asks for, and what our kernels make of it.

    Attributes:
        bytes: that are compulsory.
        format: whose rate counts, a key of `Gpu.rates`.
        operations, exponentials: that are useful.
        tiled_operations, tiled_exponentials: that are computed.
        extra_bytes: that are read and written besides, between kernels.
        tiled_format: in which our kernels multiply, if it is another.
        share: of the rate that they reach.
    """

    bytes: int
    format: str
    operations: int
    tiled_operations: int
    exponentials: int = 0
    tiled_exponentials: int = 0
    extra_bytes: int = 0
    tiled_format: str | None = None
    share: float = MMA_SYNC_SHARE

    def bound(self, gpu: Gpu) -> tuple[float, str]:
        """The longest of the times for the bytes, the useful operations and the useful exponentials, and its name."""
        return _longest(self.memory(gpu), self.products(gpu), self.exponentials / gpu.exponentials)

    def expected(self, gpu: Gpu) -> tuple[float, str]:
        """The same with what our kernels move and compute, at the rate of how they multiply."""
        memory = (self.bytes + self.extra_bytes) / gpu.bandwidth
        products = self.tiled_operations / (self.share * gpu.rates[self.tiled_format or self.format])
        return _longest(memory, products, self.tiled_exponentials / gpu.exponentials)

    def memory(self, gpu: Gpu) -> float:
        """Seconds for the bytes."""
        return self.bytes / gpu.bandwidth

    def products(self, gpu: Gpu) -> float:
        """Seconds for the useful operations."""
        return self.operations / gpu.rates[self.format]


def _longest(memory: float, products: float, exponentials: float) -> tuple[float, str]:
    return max((memory, "memory"), (products, "products"), (exponentials, "ex2"))


@singledispatch
def work(problem: Any) -> Work:
    """What a problem of a case for a GPU asks for.

    Raises:
        TypeError: nobody has counted such a problem.
    """
    raise TypeError(f"problem: expected one of a case for a GPU, got {type(problem).__name__}")


@work.register
def _(problem: WindowProblem) -> Work:
    return _attention(problem, [problem])


@work.register
def _(problem: VarlenProblem) -> Work:
    sizes: dict[str, Any] = {"seen": problem.seen, "dtype": problem.dtype, "head_dim": problem.head_dim}
    sizes |= {"heads": problem.heads, "key_heads": problem.heads, "backward": problem.backward}
    return _attention(problem, [WindowProblem(length=length, **sizes) for length in problem.lengths])


def _attention(problem: WindowProblem | VarlenProblem, sequences: Sequence[WindowProblem]) -> Work:
    """Forward two products. Backward five are useful; scores and their gradient are computed twice, once for the
    gradient of the queries and once for that of keys and values, as nobody adds to another's sum: seven.
    """
    size, bucket = DTYPES[problem.dtype].itemsize, _bucket(problem.head_dim, 64)
    products = exponentials = seen = 0
    for one in sequences:
        group = one.heads // one.key_heads
        seen += one.batch * one.heads * one.seen_pairs
        keys = (64 if size == 2 else 32) // (2 if bucket > 128 else 1)
        forward = forward_pairs(one.length, one.seen, group, keys)
        by_keys, by_queries = 0, 0
        if one.backward:
            by_keys, by_queries = backward_pairs(one.length, one.seen, group, *BACKWARD_TILES[size, bucket])
        products += one.batch * one.key_heads * (2 * forward + 4 * by_keys + 3 * by_queries)
        exponentials += one.batch * one.key_heads * (forward + by_keys + by_queries)
    format_, split = ("tf32", SPLIT) if problem.dtype == "fp32" else (problem.dtype, 1)
    return Work(
        bytes=problem.compulsory_bytes,
        format=format_,
        operations=split * problem.operations,
        tiled_operations=split * 2 * products * bucket,
        exponentials=(2 if problem.backward else 1) * seen,
        tiled_exponentials=exponentials,
        extra_bytes=_passes(sequences) * problem.head_dim * size,
    )


def _passes(sequences: Sequence[WindowProblem]) -> int:
    """Rows of a head that are read and written besides: of keys that are turned beforehand, and all that backward reads
    again, of queries q four times (read to be turned, written, read by two kernels), out once (for delta) and grad_out
    two times more than is compulsory; of keys k four times, and v twice.
    """
    first = sequences[0]
    tokens = sum(one.batch * one.length for one in sequences)
    reach = first.seen + (BLOCK_ROWS - 1) // (first.heads // first.key_heads)
    turned = 2 if min(reach, tokens // first.batch) > TURNED_BY_READERS else 0
    of_queries, of_keys = (7, 6 + turned) if first.backward else (0, turned)
    return tokens * (of_queries * first.heads + of_keys * first.key_heads)


def forward_pairs(length: int, seen: int, group: int, keys: int) -> int:
    """Pairs that the attention's forward computes for the heads of a group, whose rows are packed: row r is of query
    r / group.

    A block of `BLOCK_ROWS` passes tiles of ``keys`` from the first key on that it sees; each of its warps leaves out
    those of which its rows see nothing.
    """
    rows, tiles = length * group, 0
    for first in range(0, rows, ROW_TILE):
        last = min(first + ROW_TILE, rows) - 1
        start, begin = (max(0, row // group - seen + 1) for row in (first // BLOCK_ROWS * BLOCK_ROWS, first))
        tiles += (last // group - start) // keys - (begin - start) // keys + 1
    return ROW_TILE * keys * tiles


def backward_pairs(length: int, seen: int, group: int, own: int, other: int) -> tuple[int, int]:
    """Pairs that the two kernels of the attention's backward compute for the heads of a group: of tiles of ``own`` keys
    and the queries of each head that see one of them, and of ``own`` packed queries and the keys that they see; these
    pass by in tiles of ``other``, from the first one on.
    """
    by_keys = sum(own * _padded(min(first + own + seen - 1, length) - first, other) for first in range(0, length, own))
    by_queries, rows = 0, length * group
    for first in range(0, rows, own):
        last = min(first + own, rows) - 1
        by_queries += own * _padded(last // group + 1 - max(0, first // group - seen + 1), other)
    return group * by_keys, by_queries


@work.register
def _(problem: DecodeProblem) -> Work:
    """The query heads of a key head are the rows of a product, and keys come 16 at a time."""
    heads = problem.batch * problem.key_heads
    tiled = heads * _padded(problem.heads // problem.key_heads) * _padded(problem.seen)
    return Work(
        bytes=problem.compulsory_bytes,
        format=problem.dtype,
        operations=problem.operations,
        tiled_operations=2 * 2 * tiled * problem.head_dim,
        exponentials=problem.batch * problem.heads * problem.seen,
        tiled_exponentials=tiled,
    )


@work.register
def _(problem: SwinProblem) -> Work:
    """Windows of up to 64 tokens, which are filled up to whole rows of products; a part of a window that a shift cuts
    off costs as much as a whole one. Of exponentials there are always 64 a row. Backward, a block leaves its sums of
    the bias's gradient once for all cells that it walks over.
    """
    cells = problem.batch * cells_along(problem.height, problem) * cells_along(problem.width, problem)
    rows = problem.heads * cells * _padded(problem.tokens)
    run = min(max(cells * problem.heads // (BACKWARD_BLOCKS * GPUS[0].processors), 1), BACKWARD_RUN)
    sums = _ceil_div(cells, run) * problem.heads * problem.tokens**2 if problem.backward else 0
    format_, split = ("tf32", SPLIT) if problem.dtype == "fp32" else (problem.dtype, 1)
    products, times = (7, 2) if problem.backward else (2, 1)
    columns = _padded(problem.tokens) * _bucket(problem.head_dim, 32)
    return Work(
        bytes=problem.compulsory_bytes,
        format=format_,
        operations=split * problem.operations,
        tiled_operations=split * 2 * products * rows * columns,
        exponentials=times * problem.batch * problem.heads * problem.seen_pairs,
        tiled_exponentials=times * rows * 64,
        extra_bytes=2 * 4 * sums,
    )


def cells_along(size: int, problem: SwinProblem) -> int:
    """Windows and parts of windows along an axis: with a shift, the part before the first whole window is one more."""
    return (1 if problem.shift else 0) + _ceil_div(size - problem.shift, problem.window)


@work.register(ClipProblem)
@work.register(ListStepProblem)
def _(problem: ClipProblem | ListStepProblem) -> Work:
    count = problem.operations
    return Work(bytes=problem.compulsory_bytes, format="alu", operations=count, tiled_operations=count, share=1.0)


@work.register
def _(problem: MatmulProblem) -> Work:
    """Codes of weights alone are multiplied in the dtype of x: by us or, many rows, as floats by cuBLAS, which is taken
    to reach the rate. Of the others, x is rounded by a kernel of its own, to float16 for fp8. Sums of split products
    are of four bytes.
    """
    rows, columns, outs = problem.rows, problem.in_features, problem.out_features
    formats = {"int8_dynamic": "int8", "int8_static": "int8", "fp8_block": "fp8"}
    code_bytes = {"int8_dynamic": 1, "int8_static": 1, "fp8_block": 2}.get(problem.scheme, 0)
    is_dense = code_bytes == 0 and rows > FEW_ROWS
    extra = outs * columns * DTYPES[problem.dtype].itemsize if is_dense else rows * columns * code_bytes
    splits = splits_of(problem)
    extra += 4 * splits * rows * outs if splits > 1 else 0
    return Work(
        bytes=problem.compulsory_bytes,
        format=formats.get(problem.scheme, problem.dtype),
        operations=problem.operations,
        tiled_operations=2 * (rows if is_dense else _padded(rows, _rows_at_a_time(problem))) * columns * outs,
        extra_bytes=2 * extra,
        tiled_format="fp16" if problem.scheme == "fp8_block" else None,
        share=1.0 if is_dense else MMA_SYNC_SHARE,
    )


def _rows_at_a_time(problem: MatmulProblem) -> int:
    """Rows of a warp; those of int8 that have none do nothing."""
    if problem.rows <= ROW_TILE:
        return ROW_TILE
    return 32 if problem.scheme in ("int8_dynamic", "int8_static") and problem.rows <= 64 else 64


def splits_of(problem: MatmulProblem) -> int:
    """Blocks among which the columns of a tile of a quantized product are divided, in whole steps of a kernel."""
    columns = problem.in_features
    if problem.scheme in ("int8_dynamic", "int8_static"):
        tile = (16, 64) if problem.rows <= 16 else (64 if problem.rows <= 64 else 128, 128)
        tiles = _ceil_div(problem.rows, tile[0]) * _ceil_div(problem.out_features, tile[1])
        steps, most = _ceil_div(columns, 256), _ceil_div(columns, 512)
    elif problem.rows > FEW_ROWS:
        return 1
    else:
        tiles = _ceil_div(problem.out_features, 128)
        steps = _ceil_div(columns, 128 if problem.scheme == "int4_weight_only" else 64)
        most = steps // 4
    return _ceil_div(steps, _ceil_div(steps, max(min(ENOUGH_BLOCKS // tiles, most), 1)))


def _ceil_div(count: int, part: int) -> int:
    return -(-count // part)


def _padded(count: int, tile: int = ROW_TILE) -> int:
    return _ceil_div(count, tile) * tile


def _bucket(head_dim: int, least: int) -> int:
    """The columns that a kernel is compiled for: ``least`` times a power of two."""
    return least if head_dim <= least else _bucket(head_dim, 2 * least)


def tables() -> str:
    """The data sheets, and for every operator a table of its cases."""
    parts = ["\n".join(["### Data sheets", "", *_data_sheets()])]
    for op in op_names():
        problems = dict.fromkeys(lane.problem for case in cases_of(op, device="cuda") for lane in case.lanes)
        if problems:
            parts.append("\n".join([f"### {op}", "", *_table(problems)]))
    return "\n\n".join(parts)


def _data_sheets() -> list[str]:
    formats = list(_HOPPER)
    header = ["GPU", "TB/s", *(f"{name}, TFLOP/s" for name in formats), "ex2, T/s", "FLOP/B at the ridge, bf16"]
    rows = []
    for gpu in GPUS:
        rates = [_digits(gpu.rates[name] / 1e12) for name in formats]
        ridge = gpu.rates["bf16"] / gpu.bandwidth
        rows.append([gpu.name, f"{gpu.bandwidth / 1e12:g}", *rates, _digits(gpu.exponentials / 1e12), _digits(ridge)])
    return _lines(header, rows)


def _table(problems: Sequence[Any] | dict[Any, None]) -> list[str]:
    names = [gpu.name for gpu in GPUS]
    header = ["work", "MB", "GFLOP", "FLOP/B", *(f"memory, {name}" for name in names), "products", "ex2"]
    header += [f"bound, {name}" for name in names] + ["tiles", "passes"] + [f"expected, {name}" for name in names]
    return _lines(header, [_row(str(problem), work(problem)) for problem in problems])


def _lines(header: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def _row(title: str, job: Work) -> list[str]:
    first = GPUS[0]
    cells = [title, _digits(job.bytes / 1e6), _digits(job.operations / 1e9), _digits(job.operations / job.bytes)]
    cells += [_time(job.memory(gpu)) for gpu in GPUS]
    cells += [_time(job.products(first))]
    cells += [_time(job.exponentials / first.exponentials) if job.exponentials else ""]
    cells += [_named(job.bound(gpu)) for gpu in GPUS]
    cells += [f"{job.tiled_operations / job.operations:.2f}×", f"{1 + job.extra_bytes / job.bytes:.2f}×"]
    return cells + [_named(job.expected(gpu)) for gpu in GPUS]


def _named(bound: tuple[float, str]) -> str:
    return f"{_time(bound[0])} ({bound[1]})"


def _time(seconds: float) -> str:
    return f"{_digits(1e6 * seconds)} µs" if seconds < 1e-3 else f"{_digits(1e3 * seconds)} ms"


def _digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables, or puts them into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace what is between the page's markers")
    options = parser.parse_args(arguments)
    if options.write is None:
        print(tables())
    else:
        options.write.write_text(insert(options.write.read_text(), "roofline", tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
