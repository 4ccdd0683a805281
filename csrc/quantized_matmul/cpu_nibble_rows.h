// Products of one or two rows of codes with rows of nibbles as they lie, in memory's order.
//
// The products of a block of 128 columns are summed over the lanes of a vector, sixteen blocks at a time, so that each
// block's sum is exact and its scale is applied in the order of the blocks: the same bits as by panels.
#pragma once

#include "quantized_matmul/cpu_multiply.h"

namespace dskernels {
namespace {

#if defined(DSKERNELS_TIER_AVX512)
// Prepared rows and the results of a task: sums[row][column], sums_stride apart.
struct NibbleRows {
  const uint8_t* x;
  int64_t x_stride, first_column;
  float* sums;
  int64_t sums_stride;
};

// The values that belong to `count` blocks from number `first` on, as floats; 0 behind the last block.
template <int count, class T>
DSKERNELS_INLINE VecF block_values(const QuantizedMatmulArgs& args, const T* row, int64_t first, int64_t left) {
  if (args.group_size == kBlock && __is_same(T, float)) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << min_of<int64_t>(count, left)) - 1), row + first);
  }
  VecF values{};
  for (int64_t i = 0; i < min_of<int64_t>(count, left); ++i) {
    values[i] = args.groups <= 1 ? row[0] : row[(first + i) * kBlock / args.group_size];
  }
  return values;
}

// sums[i] += the products of row i of x and a row of the weight, of `count` blocks or those that are left.
template <int rows, int count>
DSKERNELS_INLINE void add_nibble_blocks(const QuantizedMatmulArgs& args, const NibbleRows& at, int64_t n, int64_t first,
                                        float* sums) {
  const int64_t padded = padded_columns(args), left = padded / kBlock - first;
  const int64_t byte = first * kVectorBytes, bytes = args.row_bytes - byte;
  const uint8_t* w = args.qweight + n * args.row_bytes + byte;
  const bool full = bytes >= count * kVectorBytes;
  VecI products[rows][count] = {};
  DSKERNELS_UNROLL
  for (int b = 0; b < count; ++b) {
    // Blocks behind the end are not there to be read of x, either.
    if (!full && b >= left) break;
    const Bytes codes =
        full ? load_bytes(w + b * kVectorBytes) : load_up_to(w + b * kVectorBytes, bytes - b * kVectorBytes);
    DSKERNELS_UNROLL
    for (int i = 0; i < rows; ++i) {
      const uint8_t* x = at.x + i * at.x_stride + kHeadBytes + (first + b) * kBlock;
      const VecI even = add_products(VecI{}, low_nibbles(codes), load_bytes(x));
      products[i][b] = add_products(even, high_nibbles(codes), load_bytes(x + kVectorBytes));
    }
  }
  alignas(64) float scale[kLanes], exact[kLanes];
  store(scale, block_values<count>(args, args.scale + n * args.groups, first, left));
  VecF zero{};
  if (args.zero_point != nullptr) zero = block_values<count>(args, args.zero_point + n * args.groups, first, left);
  DSKERNELS_UNROLL
  for (int i = 0; i < rows; ++i) {
    const VecI x_sums = reinterpret_cast<VecI>(load_bytes(at.x + i * at.x_stride + kHeadBytes + padded + first * 4));
    store(exact, exact_products(lane_sums<count>(products[i]), x_sums, args.zero_point == nullptr ? nullptr : &zero));
    for (int64_t b = 0; b < min_of<int64_t>(count, left); ++b) sums[i] += exact[b] * scale[b];
  }
}

template <int rows>
DSKERNELS_NOINLINE void add_nibble_row(const QuantizedMatmulArgs& args, const NibbleRows& at, int64_t column) {
  const int64_t n = at.first_column + column, blocks = padded_columns(args) / kBlock;
  float sums[rows] = {};
  int64_t first = 0;
  for (; first + kLanes <= blocks; first += kLanes) add_nibble_blocks<rows, kLanes>(args, at, n, first, sums);
  for (; first < blocks; first += 4) add_nibble_blocks<rows, 4>(args, at, n, first, sums);
  for (int i = 0; i < rows; ++i) at.sums[i * at.sums_stride + column] = sums[i];
}
#endif

// The sums of all pairs of a task.
inline void add_nibble_rows(const QuantizedMatmulArgs& args, const uint8_t* x, int64_t x_stride, int64_t rows,
                            int64_t first_column, int64_t columns, float* sums, int64_t sums_stride) {
#if defined(DSKERNELS_TIER_AVX512)
  const NibbleRows at{x, x_stride, first_column, sums, sums_stride};
  for (int64_t column = 0; column < columns; ++column) {
    rows == 1 ? add_nibble_row<1>(args, at, column) : add_nibble_row<2>(args, at, column);
  }
#endif
}

}  // namespace
}  // namespace dskernels
