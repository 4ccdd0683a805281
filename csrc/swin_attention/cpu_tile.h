// Products on a tile: up to `kTile` queries of a window along the vector lanes, all keys of the window one by one.
//
// Scores are kept transposed, as [key][query]: the softmax over keys is a vertical sum of vectors and needs no shuffle,
// and each product reads one operand by broadcast and the other in whole vectors.
#pragma once

#include "common/tile.h"

namespace dskernels {
namespace {

// A 7x7 or 8x8 window is one tile on every tier.
constexpr int kTile = 64;
constexpr int kMostTokens = 256;
constexpr int kMostDim = 256;

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896340736f;

// Accumulators of a product, rows x vectors: as many as the registers hold beside the operands.
constexpr bool kWide = kVectorRegisters == 32;
constexpr int kScoreKeys = kWide ? 8 : 4;
constexpr int kScoreVectors = kWide ? 2 : 3;
constexpr int kSumRows = kWide ? 12 : 6;
constexpr int kSumVectors = 2;

inline int tile_vectors(int64_t queries) { return static_cast<int>((queries + kLanes - 1) / kLanes); }

alignas(64) const float kZeroRow[kMostDim] = {};

// to[d][r] = factor * rows[r][d] for `count` rows; zeros in the lanes past them, up to a whole number of vectors.
inline void transpose_rows(const float* const* rows, int64_t count, int64_t dim, float factor, float* to) {
  const int64_t lanes = round_up(count, kLanes);
  for (int64_t r = 0; r < lanes; r += 4) {
    const float* row[4];
    for (int i = 0; i < 4; ++i) row[i] = r + i < count ? rows[r + i] : kZeroRow;
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
      Vec4 x[4];
      DSKERNELS_UNROLL
      for (int i = 0; i < 4; ++i) x[i] = factor * *reinterpret_cast<const Vec4*>(row[i] + d);
      const Vec4 low01 = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
      const Vec4 high01 = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
      const Vec4 low23 = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
      const Vec4 high23 = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
      float* target = to + d * kTile + r;
      *reinterpret_cast<Vec4*>(target) = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
      *reinterpret_cast<Vec4*>(target + kTile) = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
      *reinterpret_cast<Vec4*>(target + 2 * kTile) = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
      *reinterpret_cast<Vec4*>(target + 3 * kTile) = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
    }
    for (; d < dim; ++d) {
      for (int i = 0; i < 4; ++i) to[d * kTile + r + i] = factor * row[i][d];
    }
  }
}

// out[m][v..] = sum over d of keys[m][d] * queries[d][v..] for M keys and N vectors of queries; `finish(m, v, sum)` may
// change a sum before it is stored.
template <int M, int N, class Finish>
DSKERNELS_INLINE void score_group(const float* const* keys, const float* queries, int64_t dim, int v, float* out,
                                  const Finish& finish) {
  RowPointers<M> operand;
  DSKERNELS_UNROLL
  for (int m = 0; m < M; ++m) operand.row[m] = keys[m];
  VecF acc[M][N] = {};
  multiply_accumulate(acc, operand, queries + v * kLanes, kTile, 0, dim);
  DSKERNELS_UNROLL
  for (int n = 0; n < N; ++n) {
    DSKERNELS_UNROLL
    for (int m = 0; m < M; ++m) store(out + m * kTile + (v + n) * kLanes, finish(m, v + n, acc[m][n]));
  }
}

// out[key][query] for all keys and the first `vectors` vectors of queries; `finish(key, v, sum)` as above.
template <class Finish>
DSKERNELS_INLINE void scores(const float* const* keys, int64_t count, const float* queries, int64_t dim, int vectors,
                             float* out, const Finish& finish) {
  const auto group = [&]<int M>(int64_t j) __attribute__((always_inline)) {
    const auto finish_key = [&](int m, int v, VecF sum)
                                __attribute__((always_inline)) { return finish(j + m, v, sum); };
    float* target = out + j * kTile;
    int v = 0;
    for (; v + kScoreVectors <= vectors; v += kScoreVectors) {
      score_group<M, kScoreVectors>(keys + j, queries, dim, v, target, finish_key);
    }
    if (kScoreVectors == 3 && v + 2 == vectors) {
      score_group<M, 2>(keys + j, queries, dim, v, target, finish_key);
    } else if (v < vectors) {
      score_group<M, 1>(keys + j, queries, dim, v, target, finish_key);
    }
  };
  int64_t j = 0;
  for (; j + kScoreKeys <= count; j += kScoreKeys) group.template operator()<kScoreKeys>(j);
  if (kScoreKeys > 4 && j + 4 <= count) {
    group.template operator()<4>(j);
    j += 4;
  }
  for (; j < count; ++j) group.template operator()<1>(j);
}

// target[r] (+)= factor[r] * sum over k < steps of weight(r, k) * rows[k], for `count` rows of `vectors` vectors, where
// weight(r, k) is weights[r * kRowStride + k * kStepStride].
template <int kRowStride, int kStepStride>
DSKERNELS_NOINLINE void sum_rows(const float* weights, int64_t count, const float* const* rows, int64_t steps,
                                 int64_t vectors, float* const* target, const float* factor, bool add) {
  const auto columns = [&]<int M, int N>(int64_t r, int64_t column) __attribute__((always_inline)) {
    VecF acc[M][N] = {};
    const TileOperand<kRowStride, kStepStride> operand{weights + r * kRowStride};
    multiply_accumulate(acc, operand, ScatteredRows{rows, column}, 0, steps);
    DSKERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      float* place = target[r + m] + column;
      DSKERNELS_UNROLL
      for (int n = 0; n < N; ++n) {
        const VecF sum = factor[r + m] * acc[m][n];
        store(place + n * kLanes, add ? load(place + n * kLanes) + sum : sum);
      }
    }
  };
  const auto group = [&]<int M>(int64_t r) __attribute__((always_inline)) {
    int64_t v = 0;
    for (; v + kSumVectors <= vectors; v += kSumVectors) columns.template operator()<M, kSumVectors>(r, v * kLanes);
    if (v < vectors) columns.template operator()<M, 1>(r, v * kLanes);
  };
  constexpr int kHalf = kSumRows / 3;
  int64_t r = 0;
  for (; r + kSumRows <= count; r += kSumRows) group.template operator()<kSumRows>(r);
  for (; r + kHalf <= count; r += kHalf) group.template operator()<kHalf>(r);
  for (; r < count; ++r) group.template operator()<1>(r);
}

}  // namespace
}  // namespace dskernels
