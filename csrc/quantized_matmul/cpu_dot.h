// int8 products of few rows of x, or without AVX-512 of any number: dot products along rows of both, which are read as
// they lie. Integer sums are exact, so it makes no difference to the result that many rows go another way.
#pragma once

#include "quantized_matmul/args.h"
#include "quantized_matmul/cpu_codes.h"

namespace dskernels {
namespace {

// Pairs of a tile that fills the registers.
#if defined(DSKERNELS_TIER_AVX512)
constexpr int kDotRows = 4, kDotColumns = 6;
#elif defined(DSKERNELS_TIER_AVX2)
constexpr int kDotRows = 2, kDotColumns = 4;
#else
constexpr int kDotRows = 1, kDotColumns = 1;
#endif

// Codes are summed in stretches of rows that stay in the first cache with those of their tile.
constexpr int64_t kDotStretch = 4096;

// Rows of codes, x 16-byte aligned and zero behind its end, w exactly as long as it is.
struct DotOperands {
  const int8_t* x;
  int64_t x_stride;
  const uint8_t* w;
  int64_t w_stride;
  int64_t first, end;  // columns
  int32_t* sums;
  int64_t sums_stride;
};

// sums[i][j] += the products of codes of columns [first, end), modulo 2^32.
template <int rows, int columns>
DSKERNELS_NOINLINE void add_dot_tile(const DotOperands& at, int64_t row, int64_t column) {
  VecI sum[rows * columns] = {};
  const int8_t* x = at.x + row * at.x_stride;
  const uint8_t* w = at.w + column * at.w_stride;
  int64_t k = at.first;
  for (; k + kVectorBytes <= at.end; k += kVectorBytes) {
    Bytes factors[columns];
    DSKERNELS_UNROLL
    for (int j = 0; j < columns; ++j) factors[j] = as_factor(load_bytes(w + j * at.w_stride + k));
    DSKERNELS_UNROLL
    for (int i = 0; i < rows; ++i) {
      const Bytes codes = load_bytes(x + i * at.x_stride + k);
      DSKERNELS_UNROLL
      for (int j = 0; j < columns; ++j) sum[i * columns + j] = add_products(sum[i * columns + j], factors[j], codes);
    }
  }
  if (k < at.end) {
    DSKERNELS_UNROLL
    for (int j = 0; j < columns; ++j) {
      const Bytes factor = as_factor(load_some_bytes(w + j * at.w_stride + k, at.end - k));
      DSKERNELS_UNROLL
      for (int i = 0; i < rows; ++i) {
        sum[i * columns + j] = add_products(sum[i * columns + j], factor, load_bytes(x + i * at.x_stride + k));
      }
    }
  }
  int32_t totals[rows * columns];
  constexpr int count = rows * columns, whole = count / kLanes * kLanes;
  DSKERNELS_UNROLL
  for (int i = 0; i < whole; i += kLanes) sum_lanes<kLanes>(sum + i, totals + i);
  if constexpr (whole < count) sum_lanes<count - whole>(sum + whole, totals + whole);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      int32_t* to = at.sums + (row + i) * at.sums_stride + column + j;
      *to = static_cast<int32_t>(static_cast<uint32_t>(*to) + static_cast<uint32_t>(totals[i * columns + j]));
    }
  }
}

template <int columns>
DSKERNELS_INLINE void add_dot_columns(const DotOperands& at, int64_t rows, int64_t column) {
  int64_t row = 0;
  for (; row + kDotRows <= rows; row += kDotRows) add_dot_tile<kDotRows, columns>(at, row, column);
  if constexpr (kDotRows > 2) {
    for (; row + 2 <= rows; row += 2) add_dot_tile<2, columns>(at, row, column);
  }
  if constexpr (kDotRows > 1) {
    for (; row < rows; ++row) add_dot_tile<1, columns>(at, row, column);
  }
}

// Adds to all sums of a block of rows by columns.
inline void add_dots(DotOperands at, int64_t rows, int64_t columns) {
  const int64_t end = at.end;
  for (; at.first < end; at.first = at.end) {
    at.end = min_of(at.first + kDotStretch, end);
    int64_t column = 0;
    for (; column + kDotColumns <= columns; column += kDotColumns) add_dot_columns<kDotColumns>(at, rows, column);
    if constexpr (kDotColumns > 1) {
      for (; column < columns; ++column) add_dot_columns<1>(at, rows, column);
    }
  }
}

}  // namespace
}  // namespace dskernels
