// The product of codes of x and codes of the weight on tensor cores, tile by tile.
//
// A step takes kDepth columns of a tile: rows of codes, int8 both or int8 and nibbles, in shared memory, 16 bytes at a
// time and swizzled so that ldmatrix meets no bank twice. For int4 an ldmatrix leaves word t of 16 bytes, columns 8t to
// 8t+7 of 32, with lane t: its low nibbles are one half of what mma takes, its high ones the other, and codes of x lie
// in that order, too.
#pragma once

#include "common/copy.cuh"
#include "common/ptx.cuh"
#include "quantized_matmul/args.h"

namespace dskernels {
namespace {

struct ProductArgs {
  const int8_t* codes;  // [rows][padded]
  const uint8_t* qweight;
  const float* scale;
  const uint8_t* zero_point;
  int64_t rows, columns, depth, padded, row_bytes, group_size, groups;
  int64_t row_tiles, segments, segment_columns;
  bool by_16;  // whether rows of the weight can be copied 16 bytes at a time
  bool is_split;
  void* parts;  // of split sums
  int* tickets;
  const float* row_scale;
  const float* unlift;
  const void* bias;
  Element bias_element, element;
  int64_t bias_stride;
  void* out;
};

// A block's part of the product: kMTiles x kNTiles products of 16 x 8 for each of kWarpsM x kWarpsN warps.
template <bool kInt4_, int kMTiles_, int kNTiles_, int kWarpsM_, int kWarpsN_, int kWeightBytes_, int kStages_,
          int kBlocks_>
struct IntegerTile {
  static constexpr bool kInt4 = kInt4_;
  static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_, kWarpsN = kWarpsN_;
  static constexpr int kThreads = kWarp * kWarpsM_ * kWarpsN_;
  // That a multiprocessor is to hold at a time.
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kRows = 16 * kMTiles * kWarpsM_, kColumns = 8 * kNTiles * kWarpsN_;
  // Bytes of a row of the weight, and of codes of x, in a step.
  static constexpr int kWeightBytes = kWeightBytes_, kDepth = kInt4 ? 2 * kWeightBytes : kWeightBytes;
  static constexpr int kStages = kStages_, kStageBytes = kRows * kDepth + kColumns * kWeightBytes;
  // Sums on their way out: eight words more than a row, so that rows begin in other banks.
  static constexpr int kSumStride = kColumns + 8, kSumBytes = 4 * kRows * kSumStride;
  // Sums of integers come when no stage is needed any more; those of segments of int4 groups in between.
  static constexpr int kPipelineBytes = kInt4 || kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static constexpr int kSharedBytes = kPipelineBytes + (kInt4 ? kSumBytes : 0);
  static_assert(kNTiles % 2 == 0 && kSharedBytes <= kMaxSharedBytes);
};

// Where 16 bytes of a row are, in a tile whose rows are of kBytes.
template <int kBytes>
__device__ inline int swizzled(int row, int chunk) {
  constexpr int kChunks = kBytes / 16, kRowsOfLine = kChunks >= 8 ? 1 : 8 / kChunks;
  constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;
  return row * kBytes + 16 * (chunk ^ (row / kRowsOfLine & kMask));
}

// Copies `count` of 16 bytes from an address that may be odd, and zeros behind them. A word after the other: this is
// not the way to be fast, and all at once would take registers from the one that is.
__device__ inline void copy_unaligned(uint8_t* shared, const uint8_t* from, int count) {
  const bool by_word = reinterpret_cast<uintptr_t>(from) % 4 == 0 && count == 16;
#pragma unroll 1
  for (int i = 0; i < 16; i += 4) {
    uint32_t word = 0;
    if (by_word) {
      word = *reinterpret_cast<const uint32_t*>(from + i);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j < count) word |= uint32_t{from[i + j]} << 8 * j;
      }
    }
    *reinterpret_cast<uint32_t*>(shared + i) = word;
  }
}

// Copies kBytes of each of kRows rows, `stride` bytes apart from `from` on, to a swizzled tile; zeros from `rows` rows
// and from `bytes` bytes on, both at least 1. Asynchronous where it goes `by_16`.
template <int kThreads, int kRows, int kBytes>
__device__ inline void copy_rows(uint8_t* shared, const uint8_t* from, int64_t stride, int64_t rows, int64_t bytes,
                                 bool by_16) {
  // A thread takes the same 16 bytes of every kStep-th row: all that is left to do for each of them is an addition.
  constexpr int kChunks = kBytes / 16, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kStep % 8 == 0 && kRows % kStep == 0);
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const int count = static_cast<int>(min(max(bytes - 16 * chunk, int64_t{0}), int64_t{16}));
  const uint8_t* at = from + first * stride + 16 * chunk;
  uint8_t* to = shared + swizzled<kBytes>(first, chunk);
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    const int there = first + row < rows ? count : 0;
    if (by_16) {
      // Without anything to read the address is not used, but has to be one.
      ptx::cp_async_16(to, there > 0 ? at : from, there);
    } else {
      copy_unaligned(to, at, there);
    }
    at += kStep * stride;
    to += kStep * kBytes;
  }
}

// Copies a step of x and of the weight from column `k` on, zeros where there is nothing.
template <class Tile>
__device__ inline void copy_step(const ProductArgs& args, int64_t row, int64_t column, int64_t k, uint8_t* stage) {
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(args.codes) + row * args.padded + k;
  copy_rows<Tile::kThreads, Tile::kRows, Tile::kDepth>(stage, codes, args.padded, args.rows - row, Tile::kDepth, true);
  const int64_t first = Tile::kInt4 ? k / 2 : k;
  const uint8_t* weight = args.qweight + column * args.row_bytes + first;
  copy_rows<Tile::kThreads, Tile::kColumns, Tile::kWeightBytes>(stage + Tile::kRows * Tile::kDepth, weight,
                                                                args.row_bytes, args.columns - column,
                                                                args.row_bytes - first, args.by_16);
}

// Rows of the warp's products of a 32-byte piece of codes of x.
template <class Tile>
__device__ inline void load_codes(uint32_t (&a)[Tile::kMTiles][4], const uint8_t* codes, int row, int piece) {
  const int lane = lane_index();
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m) {
    ptx::ldmatrix_x4(a[m], codes + swizzled<Tile::kDepth>(row + 16 * m + lane % 16, 2 * piece + lane / 16));
  }
}

// Words t of both halves of a 32-byte piece of the weight, for column g of each of the warp's products.
template <class Tile>
__device__ inline void load_weights(uint32_t (&b)[Tile::kNTiles][2], const uint8_t* weights, int column, int piece) {
  const int lane = lane_index();
#pragma unroll
  for (int n = 0; n < Tile::kNTiles; n += 2) {
    uint32_t r[4];
    const int row = column + 8 * n + lane % 8 + 8 * (lane / 16);
    ptx::ldmatrix_x4(r, weights + swizzled<Tile::kWeightBytes>(row, 2 * piece + lane / 8 % 2));
    b[n][0] = r[0], b[n][1] = r[1];
    b[n + 1][0] = r[2], b[n + 1][1] = r[3];
  }
}

// Sums of int8 products: integers, up to the end.
template <class Tile>
struct Int8Sums {
  int32_t sums[Tile::kMTiles][Tile::kNTiles][4] = {};

  __device__ void begin(const ProductArgs&, int64_t, int64_t) {}

  // Of a step that begins at column `k` and ends for good at column `end`.
  __device__ void add_step(const ProductArgs&, const uint8_t* stage, int row, int column, int64_t k, int64_t end) {
    const uint8_t* weights = stage + Tile::kRows * Tile::kDepth;
#pragma unroll
    for (int piece = 0; piece < Tile::kDepth / 32; ++piece) {
      if (k + 32 * piece >= end) break;
      uint32_t a[Tile::kMTiles][4], b[Tile::kNTiles][2];
      load_codes<Tile>(a, stage, row, piece);
      load_weights<Tile>(b, weights, column, piece);
#pragma unroll
      for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::kNTiles; ++n) ptx::mma_m16n8k32_s8(sums[m][n], a[m], b[n]);
      }
    }
  }

  __device__ void finish(const ProductArgs&) {}
};

}  // namespace
}  // namespace dskernels
