// Register-blocked multiply-accumulate: the inner loop of every product of two matrices in the fused kernels.
#pragma once

#include "common/vec.h"

namespace dskernels {
namespace {

// Operand A of a product: element (m, k) is broadcast over a vector of columns of B.
// Rows by pointer (rows of a tensor), or a tile in scratch with a stride known at compile time.
template <int M>
struct RowPointers {
  const float* row[M];
  DSKERNELS_INLINE float operator()(int m, int64_t k) const { return row[m][k]; }
};

template <int RowStride, int StepStride>
struct TileOperand {
  const float* data;
  DSKERNELS_INLINE float operator()(int m, int64_t k) const { return data[m * RowStride + k * StepStride]; }
};

// Operand B: rows of vectors that lie `stride` floats apart, or anywhere.
struct StridedRows {
  const float* data;
  int64_t stride;
  DSKERNELS_INLINE const float* operator()(int64_t k) const { return data + k * stride; }
};

struct ScatteredRows {
  const float* const* row;
  int64_t column;
  DSKERNELS_INLINE const float* operator()(int64_t k) const { return row[k] + column; }
};

// acc[m][n] += sum over k in [begin, end) of a(m, k) * b(k)[n].
template <int M, int N, class A, class B>
DSKERNELS_INLINE void multiply_accumulate(VecF (&acc)[M][N], const A& a, const B& b, int64_t begin, int64_t end) {
  _Pragma("GCC unroll 2") for (int64_t k = begin; k < end; ++k) {
    const float* row = b(k);
    VecF columns[N];
    DSKERNELS_UNROLL
    for (int n = 0; n < N; ++n) columns[n] = load(row + n * kLanes);
    DSKERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      const float factor = a(m, k);
      DSKERNELS_UNROLL
      for (int n = 0; n < N; ++n) acc[m][n] += factor * columns[n];
    }
  }
}

template <int M, int N, class A>
DSKERNELS_INLINE void multiply_accumulate(VecF (&acc)[M][N], const A& a, const float* b, int64_t stride, int64_t begin,
                                          int64_t end) {
  multiply_accumulate(acc, a, StridedRows{b, stride}, begin, end);
}

// The same where row m only takes part for k in [low[m], high[m]), one branch a row: for the edges of a band.
template <int M, int N, class A>
DSKERNELS_INLINE void multiply_accumulate_edge(VecF (&acc)[M][N], const A& a, const float* b, int64_t stride,
                                               const int64_t* low, const int64_t* high, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    VecF columns[N];
    DSKERNELS_UNROLL
    for (int n = 0; n < N; ++n) columns[n] = load(b + k * stride + n * kLanes);
    DSKERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      if (k < low[m] || k >= high[m]) continue;
      const float factor = a(m, k);
      DSKERNELS_UNROLL
      for (int n = 0; n < N; ++n) acc[m][n] += factor * columns[n];
    }
  }
}

// The staircase edges of a band that moves by one with each row, unrolled so that no row needs a branch: the first
// M - 1 steps from `begin` on, where step s belongs to the rows up to s (opening) or from s + 1 on (closing).
template <bool kOpening, int M, int N, class A>
DSKERNELS_INLINE void multiply_accumulate_stairs(VecF (&acc)[M][N], const A& a, const float* b, int64_t stride,
                                                 int64_t begin) {
  DSKERNELS_UNROLL
  for (int s = 0; s < M - 1; ++s) {
    const int64_t k = begin + s;
    VecF columns[N];
    DSKERNELS_UNROLL
    for (int n = 0; n < N; ++n) columns[n] = load(b + k * stride + n * kLanes);
    DSKERNELS_UNROLL
    for (int m = kOpening ? 0 : s + 1; m < (kOpening ? s + 1 : M); ++m) {
      const float factor = a(m, k);
      DSKERNELS_UNROLL
      for (int n = 0; n < N; ++n) acc[m][n] += factor * columns[n];
    }
  }
}

template <int M>
DSKERNELS_INLINE bool is_staircase(const int64_t* bound) {
  bool result = true;
  for (int m = 1; m < M; ++m) result &= bound[m] == bound[0] + m;
  return result;
}

// Row m takes part for k in [low[m], high[m]) only; what lies outside is never multiplied into that row, so a NaN
// there stays there. low and high do not decrease with m and low <= high, so all rows share the bulk of the range.
template <int M, int N, class A>
DSKERNELS_INLINE void multiply_accumulate_banded(VecF (&acc)[M][N], const A& a, const float* b, int64_t stride,
                                                 const int64_t* low, const int64_t* high) {
  const int64_t bulk_begin = low[M - 1], bulk_end = high[0];
  if (bulk_begin >= bulk_end) return multiply_accumulate_edge(acc, a, b, stride, low, high, low[0], high[M - 1]);
  if (is_staircase<M>(low)) {
    multiply_accumulate_stairs<true>(acc, a, b, stride, low[0]);
  } else {
    multiply_accumulate_edge(acc, a, b, stride, low, high, low[0], bulk_begin);
  }
  multiply_accumulate(acc, a, b, stride, bulk_begin, bulk_end);
  if (is_staircase<M>(high)) {
    multiply_accumulate_stairs<false>(acc, a, b, stride, bulk_end);
  } else {
    multiply_accumulate_edge(acc, a, b, stride, low, high, bulk_end, high[M - 1]);
  }
}

}  // namespace
}  // namespace dskernels
