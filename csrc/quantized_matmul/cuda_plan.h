// How a product of codes is cut and where its parts lie in `prepared`: of shapes alone, so that it is the same on every
// device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quantized_matmul/cuda.h"

namespace dskernels {

// Codes of a row of x, and columns of a segment, are whole numbers of this: the longest step of a kernel.
constexpr int64_t kPaddedColumns = 256;
// Columns up to which the sum of products of int8, 127 * 128 each, stays within int32.
constexpr int64_t kExactColumns = int64_t{1} << 17;

// Columns below which a segment of its own costs more than it saves.
constexpr int64_t kLeastSegment = 512;
// Columns of the narrowest tile.
constexpr int64_t kNarrowTile = 64;

struct IntegerPlan {
  int tile_rows, tile_columns;
  int64_t row_tiles, column_tiles;
  int64_t padded;           // columns of a row of codes
  int64_t segments;         // of the columns; the sums of each are added up in their order
  int64_t segment_columns;  // of all but the last
  bool is_split;            // a block for each segment of a tile, else one for all of them
  // Byte offsets in `prepared`: float [rows], float [rows], int [tiles], int8 [rows][padded], and for split sums 4-byte
  // [segments][tiles][tile_rows][tile_columns].
  int64_t row_scale, unlift, tickets, codes, parts, bytes;

  int64_t tiles() const { return row_tiles * column_tiles; }
};

inline int64_t count_of(int64_t size, int64_t part) { return (size + part - 1) / part; }
inline int64_t padded_to(int64_t size, int64_t part) { return count_of(size, part) * part; }

// Of `columns`, for a product that has `tiles` blocks without.
inline int64_t segments_for(int64_t tiles, int64_t columns) {
  return std::max<int64_t>(1, std::min(kEnoughBlocks / tiles, count_of(columns, kLeastSegment)));
}

inline void place(IntegerPlan& plan, int64_t rows) {
  int64_t end = 0;
  const auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end = padded_to(end + bytes, 64);
    return begin;
  };
  plan.row_scale = take(rows * 4);
  plan.unlift = take(rows * 4);
  plan.tickets = take(plan.is_split ? plan.tiles() * 4 : 0);
  plan.codes = take(rows * plan.padded);
  plan.parts = take(plan.is_split ? plan.segments * plan.tiles() * plan.tile_rows * plan.tile_columns * 4 : 0);
  plan.bytes = end;
}

inline IntegerPlan integer_plan(const QuantizedMatmulArgs& args) {
  const bool is_int4 = args.scheme == Scheme::kInt4Dynamic;
  IntegerPlan plan{};
  plan.tile_rows = args.rows <= 16 ? 16 : is_int4 || args.rows <= 64 ? 64 : 128;
  plan.tile_columns = args.rows <= 16 ? static_cast<int>(kNarrowTile) : 128;
  plan.row_tiles = count_of(args.rows, plan.tile_rows);
  plan.column_tiles = count_of(args.out_features, plan.tile_columns);
  plan.padded = padded_to(args.in_features, kPaddedColumns);
  if (is_int4) {
    // Whatever the number of rows, so that a row has the same bits in every batch; sums of integers have them anyway.
    plan.segments = segments_for(count_of(args.out_features, kNarrowTile), args.in_features);
  } else {
    plan.segments = std::max(segments_for(plan.tiles(), args.in_features), count_of(args.in_features, kExactColumns));
  }
  plan.segment_columns = std::max(kPaddedColumns, padded_to(count_of(args.in_features, plan.segments), kPaddedColumns));
  plan.segments = std::max<int64_t>(1, count_of(args.in_features, plan.segment_columns));
  plan.is_split = plan.segments > 1 && (!is_int4 || plan.tiles() <= kEnoughBlocks / 2);
  place(plan, args.rows);
  return plan;
}

}  // namespace dskernels
