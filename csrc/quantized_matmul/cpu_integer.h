// Products of integer codes: rows of x by rows of the weight, each pair a dot product along both.
//
// Nothing is packed: rows of both are read in order, lanes are summed at the end. What a pair computes does not depend
// on the pairs beside it, so neither do its bits.
#pragma once

#include "quantized_matmul/cpu_prepare.h"
#include "quantized_matmul/cpu_scales.h"

namespace dskernels {
namespace {

// Pairs of a tile that fills the registers.
#if defined(DSKERNELS_TIER_AVX512)
constexpr int kIntegerRows = 4, kIntegerColumns = 6;
#elif defined(DSKERNELS_TIER_AVX2)
constexpr int kIntegerRows = 2, kIntegerColumns = 4;
#else
constexpr int kIntegerRows = 1, kIntegerColumns = 1;
#endif

// int8 codes are summed in stretches of a weight's row that stay in the first cache with those of its tile.
constexpr int64_t kStretch = 4096;

// Prepared rows and weight rows of a tile, from column `first` on.
struct IntegerTile {
  const uint8_t* x;
  int64_t x_stride;
  const uint8_t* w;
  int64_t w_stride;
};

// sums[i][j] += the dot product of codes of columns [first, end), modulo 2^32.
template <int rows, int columns>
DSKERNELS_NOINLINE void add_int8_tile(const IntegerTile& tile, int64_t first, int64_t end, int32_t* sums,
                                      int64_t sums_stride) {
  VecI sum[rows * columns] = {};
  const uint8_t* x = tile.x + kHeadBytes;
  int64_t k = first;
  for (; k + kVectorBytes <= end; k += kVectorBytes) {
    Bytes w[columns];
    DSKERNELS_UNROLL
    for (int j = 0; j < columns; ++j) w[j] = as_factor(load_bytes(tile.w + j * tile.w_stride + k));
    DSKERNELS_UNROLL
    for (int i = 0; i < rows; ++i) {
      const Bytes codes = load_bytes(x + i * tile.x_stride + k);
      DSKERNELS_UNROLL
      for (int j = 0; j < columns; ++j) sum[i * columns + j] = dot_codes(sum[i * columns + j], w[j], codes);
    }
  }
  if (k < end) {
    DSKERNELS_UNROLL
    for (int j = 0; j < columns; ++j) {
      const Bytes w = as_factor(load_some_bytes(tile.w + j * tile.w_stride + k, end - k));
      DSKERNELS_UNROLL
      for (int i = 0; i < rows; ++i) {
        sum[i * columns + j] = dot_codes(sum[i * columns + j], w, load_bytes(x + i * tile.x_stride + k));
      }
    }
  }
  int32_t totals[rows * columns];
  tile_sums<rows, columns>(sum, totals);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      int32_t* to = sums + i * sums_stride + j;
      *to = static_cast<int32_t>(static_cast<uint32_t>(*to) + static_cast<uint32_t>(totals[i * columns + j]));
    }
  }
}

// Rows of an int4 weight with their groups.
struct NibbleTile {
  IntegerTile at;
  GroupRow groups[kIntegerColumns];
};

// sums[i][j] = the dot product of codes and weights, in steps of the codes' scale. `whole`: a block of 128 weights has
// one scale; else its lanes have theirs.
template <int rows, int columns, bool whole, bool asymmetric>
DSKERNELS_NOINLINE void int4_tile(const QuantizedMatmulArgs& args, const NibbleTile& tile, float* sums,
                                  int64_t sums_stride) {
  constexpr int64_t block = whole ? kWholeBlock : kNibbles;
  constexpr int vectors = block / kNibbles;
  VecF sum[rows * columns] = {};
  const int64_t padded = padded_columns(args);
  const LaneGroups lanes(args);
  const int8_t* codes = reinterpret_cast<const int8_t*>(tile.at.x + kHeadBytes);
  for (int64_t first = 0, number = 0; first < args.in_features; first += block, ++number) {
    const int64_t byte = first / 2, bytes = args.row_bytes - byte;
    const bool full = bytes >= block / 2;
    const int64_t group = whole ? min_of(first / args.group_size, args.groups - 1) : 0;
    DSKERNELS_UNROLL
    for (int j = 0; j < columns; ++j) {
      Bytes low[vectors], high[vectors];
      DSKERNELS_UNROLL
      for (int v = 0; v < vectors; ++v) {
        const uint8_t* from = tile.at.w + j * tile.at.w_stride + byte + v * kVectorBytes;
        const Bytes w = full ? load_bytes(from) : load_up_to(from, max_of<int64_t>(bytes - v * kVectorBytes, 0));
        low[v] = low_nibbles(w);
        high[v] = high_nibbles(w);
      }
      const GroupRow& row = tile.groups[j];
      const VecF scale = whole ? broadcast(row.scale[group]) : lane_values(lanes, row.scale, first);
      VecF zero{};
      if constexpr (asymmetric) {
        zero = whole ? broadcast(static_cast<float>(row.zero_point[group])) : lane_values(lanes, row.zero_point, first);
      }
      DSKERNELS_UNROLL
      for (int i = 0; i < rows; ++i) {
        const int8_t* x = codes + i * tile.at.x_stride;
        const int8_t* x_sum = x + padded + number * kVectorBytes;
        VecF part;
        if constexpr (asymmetric) {
          // All of it are integers below 2^24: exact.
          part = __builtin_convertvector(dot_nibbles<vectors>(VecI{}, low, high, x + first), VecF) -
                 zero * load(reinterpret_cast<const float*>(x_sum));
        } else {
          const VecI excess = reinterpret_cast<VecI>(load_bytes(x_sum));
          part = __builtin_convertvector(dot_nibbles<vectors>(excess, low, high, x + first), VecF);
        }
        sum[i * columns + j] += part * scale;
      }
    }
  }
  store_sums<rows, columns>(sum, sums, sums_stride);
}

// f.template tile<rows, columns>(row, column) for tiles that cover a block, the largest that fit first.
template <int most_rows, int most_columns, class F>
inline void for_each_tile(int64_t rows, int64_t columns, const F& f) {
  int64_t column = 0;
  const auto for_rows = [&]<int width>() {
    int64_t row = 0;
    for (; row + most_rows <= rows; row += most_rows) f.template tile<most_rows, width>(row, column);
    if constexpr (most_rows > 2) {
      for (; row + 2 <= rows; row += 2) f.template tile<2, width>(row, column);
    }
    if constexpr (most_rows > 1) {
      for (; row < rows; ++row) f.template tile<1, width>(row, column);
    }
  };
  for (; column + most_columns <= columns; column += most_columns) for_rows.template operator()<most_columns>();
  if constexpr (most_columns > 1) {
    for (; column < columns; ++column) for_rows.template operator()<1>();
  }
}

struct Int8Block {
  IntegerTile at;
  int64_t first, end;
  int32_t* sums;
  int64_t sums_stride;

  template <int rows, int columns>
  DSKERNELS_INLINE void tile(int64_t row, int64_t column) const {
    const IntegerTile tile{at.x + row * at.x_stride, at.x_stride, at.w + column * at.w_stride, at.w_stride};
    add_int8_tile<rows, columns>(tile, first, end, sums + row * sums_stride + column, sums_stride);
  }
};

struct Int4Block {
  const QuantizedMatmulArgs& args;
  IntegerTile at;
  int64_t first_column;
  float* sums;
  int64_t sums_stride;

  template <int rows, int columns>
  DSKERNELS_INLINE void tile(int64_t row, int64_t column) const {
    NibbleTile tile{{at.x + row * at.x_stride, at.x_stride, at.w + column * at.w_stride, at.w_stride}, {}};
    for (int j = 0; j < columns; ++j) tile.groups[j] = group_row(args, first_column + column + j);
    float* to = sums + row * sums_stride + column;
    if (has_whole_groups(args)) {
      args.zero_point == nullptr ? int4_tile<rows, columns, true, false>(args, tile, to, sums_stride)
                                 : int4_tile<rows, columns, true, true>(args, tile, to, sums_stride);
    } else {
      args.zero_point == nullptr ? int4_tile<rows, columns, false, false>(args, tile, to, sums_stride)
                                 : int4_tile<rows, columns, false, true>(args, tile, to, sums_stride);
    }
  }
};

}  // namespace
}  // namespace dskernels
