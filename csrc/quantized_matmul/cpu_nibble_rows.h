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

// Sixteen blocks from number `first` on of the values that belong to groups, as floats; those behind the end are 0.
template <class T>
DSKERNELS_INLINE VecF block_values(const QuantizedMatmulArgs& args, const T* row, int64_t first) {
  const int64_t blocks = (args.in_features + kBlock - 1) / kBlock, left = min_of<int64_t>(blocks - first, kLanes);
  const auto mask = static_cast<__mmask16>((1u << left) - 1);
  if (args.group_size == kBlock && __is_same(T, float)) return _mm512_maskz_loadu_ps(mask, row + first);
  VecF values{};
  for (int64_t i = 0; i < left; ++i) {
    values[i] = args.groups <= 1 ? row[0] : row[(first + i) * kBlock / args.group_size];
  }
  return values;
}

template <int rows>
DSKERNELS_NOINLINE void add_nibble_row(const QuantizedMatmulArgs& args, const NibbleRows& at, int64_t column) {
  const int64_t n = at.first_column + column, padded = padded_columns(args), blocks = padded / kBlock;
  const uint8_t* w = args.qweight + n * args.row_bytes;
  const float* scales = args.scale + n * args.groups;
  const uint8_t* zeros = args.zero_point == nullptr ? nullptr : args.zero_point + n * args.groups;
  float sums[rows] = {};
  for (int64_t first = 0; first < blocks; first += kLanes) {
    VecI products[rows][kLanes];
    const auto multiply = [&](int b, Bytes codes) __attribute__((always_inline)) {
      DSKERNELS_UNROLL
      for (int i = 0; i < rows; ++i) {
        const uint8_t* x = at.x + i * at.x_stride + kHeadBytes + (first + b) * kBlock;
        products[i][b] = add_products(add_products(VecI{}, low_nibbles(codes), load_bytes(x)), high_nibbles(codes),
                                      load_bytes(x + kVectorBytes));
      }
    };
    const uint8_t* from = w + first * kVectorBytes;
    const int64_t bytes = args.row_bytes - first * kVectorBytes;
    if (bytes >= kLanes * kVectorBytes) {
      DSKERNELS_UNROLL
      for (int b = 0; b < kLanes; ++b) multiply(b, load_bytes(from + b * kVectorBytes));
    } else {
      // Blocks behind the end are not read of x, either.
      const int64_t left = blocks - first;
      for (int b = 0; b < kLanes; ++b) {
        for (int i = 0; i < rows; ++i) products[i][b] = VecI{};
        if (b < left) multiply(b, load_up_to(from + b * kVectorBytes, bytes - b * kVectorBytes));
      }
    }
    alignas(64) float scale[kLanes];
    store(scale, block_values(args, scales, first));
    const VecF zero = zeros == nullptr ? VecF{} : block_values(args, zeros, first);
    const int64_t count = min_of<int64_t>(blocks - first, kLanes);
    DSKERNELS_UNROLL
    for (int i = 0; i < rows; ++i) {
      const uint8_t* x_sums = at.x + i * at.x_stride + kHeadBytes + padded + first * 4;
      const VecI of_x = reinterpret_cast<VecI>(load_bytes(x_sums));
      alignas(64) float exact[kLanes];
      store(exact, exact_products(lane_sums<kLanes>(products[i]), of_x, zeros == nullptr ? nullptr : &zero));
      for (int64_t b = 0; b < count; ++b) sums[i] += exact[b] * scale[b];
    }
  }
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
