// How a call is cut: columns into blocks that share a scale, rows of x into tiles.
#pragma once

#include "quantized_matmul/args.h"
#include "quantized_matmul/cpu_codes.h"

namespace dskernels {
namespace {

// Rows of x in a tile, whose sums with two vectors of columns fill the registers.
#if defined(DSKERNELS_TIER_AVX512)
constexpr int kTileRows = 12;
#elif defined(DSKERNELS_TIER_AVX2)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif

// Rows of the weight that are multiplied at a time: two vectors.
constexpr int kPanelColumns = 2 * kLanes;
// Columns of the weight that are unpacked at a time: with a tile of x they stay in the first cache. A scale is applied
// at the latest after so many, which also keeps sums of floats short, and their errors small.
constexpr int64_t kBlock = 128;
// Sums of int8 codes by int8 codes are exact and have no scale before the end.
constexpr int64_t kCodeBlock = 512;

// Rows of x for which int8 weights are packed into panels first, which pays when they are used often enough. Without
// AVX-512 it never does: there multiplying takes several instructions, and packing saves none of them.
#if defined(DSKERNELS_TIER_AVX512)
constexpr int64_t kFewRows = 8;
#else
constexpr int64_t kFewRows = INT64_MAX;
#endif

DSKERNELS_INLINE bool is_int4(Scheme scheme) {
  return scheme == Scheme::kInt4Dynamic || scheme == Scheme::kInt4WeightOnly;
}

DSKERNELS_INLINE bool is_int8_by_int8(Scheme scheme) {
  return scheme == Scheme::kInt8Dynamic || scheme == Scheme::kInt8Static;
}

DSKERNELS_INLINE bool has_codes(Scheme scheme) { return is_int8_by_int8(scheme) || scheme == Scheme::kInt4Dynamic; }

// Whether rows of x meet rows of the weight as they lie, in add_dots.
DSKERNELS_INLINE bool uses_dots(const QuantizedMatmulArgs& args) {
  return is_int8_by_int8(args.scheme) && args.rows <= kFewRows;
}

// Whether rows of nibbles are read as they lie, in add_nibble_rows: one or two rows of x wait for memory, which is read
// best in order. Without AVX-512 there are no registers for it.
DSKERNELS_INLINE bool uses_nibble_rows(const QuantizedMatmulArgs& args) {
  const bool whole = args.groups <= 1 || args.group_size % kBlock == 0;
  return kLanes == 16 && args.scheme == Scheme::kInt4Dynamic && args.rows <= 2 && whole;
}

// Whether prepared rows are tiles of their own.
DSKERNELS_INLINE bool has_single_rows(const QuantizedMatmulArgs& args) {
  return uses_dots(args) || uses_nibble_rows(args);
}

// A stretch of columns that share a scale: [first, end) of group `group`.
struct Columns {
  int64_t first, end, group;
};

// The block that starts at column `first`: it ends with its group, at a multiple of kBlock, or with the row.
DSKERNELS_INLINE Columns block_at(const QuantizedMatmulArgs& args, int64_t first) {
  const int64_t size = is_int8_by_int8(args.scheme) ? kCodeBlock : kBlock;
  int64_t end = min_of((first / size + 1) * size, args.in_features), group = 0;
  if (args.groups > 1) {
    group = first / args.group_size;
    end = min_of(end, (group + 1) * args.group_size);
  }
  return {first, end, group};
}

// How many blocks end before column `end`, where one begins.
inline int64_t count_blocks_before(const QuantizedMatmulArgs& args, int64_t end) {
  if (args.groups <= 1 || args.group_size % kBlock == 0) return (end + kBlock - 1) / kBlock;
  int64_t count = 0;
  for (int64_t k = 0; k < end; k = block_at(args, k).end) ++count;
  return count;
}

// Rows of the tile that holds `rows` rows: those behind them are zeros.
DSKERNELS_INLINE int tile_height(int64_t rows) {
  if (rows > 8) return 12;
  if (rows > 4) return kTileRows < 8 ? kTileRows : 8;
  return rows > 2 ? 4 : static_cast<int>(rows);
}

}  // namespace
}  // namespace dskernels
