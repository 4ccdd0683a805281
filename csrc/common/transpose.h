// Transposition of rows of floats, so that rows lie along the vector lanes.
#pragma once

#include "common/vec.h"

namespace dskernels {
namespace {

// Four floats from d on of each of kLanes rows: row r + 4 p + i in the 128-bit part p of x[i].
template <class Row>
DSKERNELS_INLINE void load_quads(const Row& row, int64_t r, int64_t d, VecF (&x)[4]) {
  DSKERNELS_UNROLL
  for (int i = 0; i < 4; ++i) {
#if defined(DSKERNELS_TIER_AVX512)
    __m512 quad = _mm512_castps128_ps512(_mm_loadu_ps(row(r + i) + d));
    quad = _mm512_insertf32x4(quad, _mm_loadu_ps(row(r + 4 + i) + d), 1);
    quad = _mm512_insertf32x4(quad, _mm_loadu_ps(row(r + 8 + i) + d), 2);
    x[i] = _mm512_insertf32x4(quad, _mm_loadu_ps(row(r + 12 + i) + d), 3);
#elif defined(DSKERNELS_TIER_AVX2)
    x[i] =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row(r + i) + d)), _mm_loadu_ps(row(r + 4 + i) + d), 1);
#else
    x[i] = load(row(r + i) + d);
#endif
  }
}

// x[i] <- column i of the 4 x 4 blocks that stand in the 128-bit parts of x[0] to x[3].
DSKERNELS_INLINE void transpose_quads(VecF (&x)[4]) {
#if defined(DSKERNELS_TIER_AVX512)
  const __m512 low01 = _mm512_unpacklo_ps(x[0], x[1]), high01 = _mm512_unpackhi_ps(x[0], x[1]);
  const __m512 low23 = _mm512_unpacklo_ps(x[2], x[3]), high23 = _mm512_unpackhi_ps(x[2], x[3]);
  x[0] = _mm512_shuffle_ps(low01, low23, 0x44);
  x[1] = _mm512_shuffle_ps(low01, low23, 0xee);
  x[2] = _mm512_shuffle_ps(high01, high23, 0x44);
  x[3] = _mm512_shuffle_ps(high01, high23, 0xee);
#elif defined(DSKERNELS_TIER_AVX2)
  const __m256 low01 = _mm256_unpacklo_ps(x[0], x[1]), high01 = _mm256_unpackhi_ps(x[0], x[1]);
  const __m256 low23 = _mm256_unpacklo_ps(x[2], x[3]), high23 = _mm256_unpackhi_ps(x[2], x[3]);
  x[0] = _mm256_shuffle_ps(low01, low23, 0x44);
  x[1] = _mm256_shuffle_ps(low01, low23, 0xee);
  x[2] = _mm256_shuffle_ps(high01, high23, 0x44);
  x[3] = _mm256_shuffle_ps(high01, high23, 0xee);
#else
  const VecF low01 = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
  const VecF high01 = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  const VecF low23 = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
  const VecF high23 = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  x[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  x[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
#endif
}

// to[d * kStride + r] = finish(row(r)[d]) for r < rows, a multiple of kLanes, and d < dim; `finish` takes a vector.
template <int kStride, class Row, class Finish>
DSKERNELS_INLINE void transpose(const Row& row, int64_t rows, int64_t dim, float* to, const Finish& finish) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
      VecF x[4];
      load_quads(row, r, d, x);
      transpose_quads(x);
      DSKERNELS_UNROLL
      for (int i = 0; i < 4; ++i) store(to + (d + i) * kStride + r, finish(x[i]));
    }
    for (; d < dim; ++d) {
      VecF x{};
      DSKERNELS_UNROLL
      for (int i = 0; i < kLanes; ++i) x[i] = row(r + i)[d];
      store(to + d * kStride + r, finish(x));
    }
  }
}

}  // namespace
}  // namespace dskernels
