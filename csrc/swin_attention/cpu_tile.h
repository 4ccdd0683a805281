// Products on a tile: up to `kTile` queries of a window along the vector lanes, all keys of the window one by one.
//
// Scores are kept transposed, as [key][query]: the softmax over keys is a vertical sum of vectors and needs no shuffle,
// and each product reads one operand by broadcast and the other in whole vectors.
#pragma once

#include "common/tile.h"
#include "common/transpose.h"
#include "swin_attention/cpu_rows.h"

namespace dskernels {
namespace {

// A 7x7 or 8x8 window is one tile on every tier.
constexpr int kTile = 64;

// Vectors side by side in a product's accumulators, and the rows that the registers then hold beside the operands.
constexpr int kScoreVectors = kWide ? 2 : 3;
constexpr int kSumVectors = 2;
template <int kVectors>
constexpr int kMostRows = kWide           ? 8
                          : kVectors == 3 ? 4
                                          : 6;
// Fewer accumulators than this wait for each other.
constexpr int kFewestRows = 4;

// How many rows to take at a time, for every number of rows: the size of which the fewest are computed twice when the
// last group is moved back to end with the last row.
template <int kMost>
struct GroupSizes {
  uint8_t size[kMostTokens + 1] = {};

  constexpr GroupSizes() {
    for (int rows = 1; rows <= kMostTokens; ++rows) {
      int best = rows < kMost ? rows : kMost;
      for (int candidate = best - 1; candidate >= kFewestRows; --candidate) {
        if (computed(rows, candidate) < computed(rows, best)) best = candidate;
      }
      size[rows] = static_cast<uint8_t>(best);
    }
  }

  static constexpr int computed(int rows, int group) { return (rows + group - 1) / group * group; }
};

template <int kMost>
constexpr GroupSizes<kMost> kGroupSizes{};

// Calls group.operator()<M>() for the M in [1, kMost] that suits this number of rows. Sizes above kMost do not occur:
// their cases are empty, and falling through them reaches nothing.
template <int kMost, class F>
DSKERNELS_INLINE void with_group_size(int64_t rows, const F& group) {
  static_assert(kMost <= 8);
  switch (kGroupSizes<kMost>.size[rows]) {
    case 1: return group.template operator()<1>();
    case 2: return group.template operator()<2>();
    case 3: return group.template operator()<3>();
    case 4: return group.template operator()<4>();
    case 5:
      if constexpr (kMost >= 5) return group.template operator()<5>();
    case 6:
      if constexpr (kMost >= 6) return group.template operator()<6>();
    case 7:
      if constexpr (kMost >= 7) return group.template operator()<7>();
    case 8:
      if constexpr (kMost >= 8) return group.template operator()<8>();
  }
}

inline int tile_vectors(int64_t queries) { return static_cast<int>((queries + kLanes - 1) / kLanes); }

alignas(64) const float kZeroRow[kMostDim] = {};

// to[d][r] = factor * rows[r][d] for `count` rows; zeros in the lanes past them, up to a whole number of vectors.
inline void transpose_rows(const float* const* rows, int64_t count, int64_t dim, float factor, float* to) {
  const float* row[kTile];
  const int64_t lanes = round_up(count, kLanes);
  for (int64_t r = 0; r < lanes; ++r) row[r] = r < count ? rows[r] : kZeroRow;
  transpose<kTile>([&](int64_t r) __attribute__((always_inline)) { return row[r]; }, lanes, dim, to,
                   [&](VecF x) __attribute__((always_inline)) { return factor * x; });
}

// out[j][r] = sum over d of keys[j][d] * queries[d][r] + bias[j][r] for all keys j and N vectors of queries r, and the
// maximum over j. `queries`, `bias` and `out` begin with those queries; bias may be null.
template <int M, int N>
DSKERNELS_NOINLINE void score_columns(const float* const* keys, int64_t count, const float* queries, int64_t dim,
                                      const float* bias, float* out, VecF* maximum, Prefetcher& prefetcher) {
  VecF most[N];
  DSKERNELS_UNROLL
  for (int n = 0; n < N; ++n) most[n] = broadcast(-kInfinity);
  for (int64_t next = 0; next < count; next += M) {
    prefetcher.step();
    const int64_t j = min_of(next, count - M);
    RowPointers<M> operand;
    DSKERNELS_UNROLL
    for (int m = 0; m < M; ++m) operand.row[m] = keys[j + m];
    VecF acc[M][N] = {};
    multiply_accumulate(acc, operand, queries, kTile, 0, dim);
    DSKERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      DSKERNELS_UNROLL
      for (int n = 0; n < N; ++n) {
        const int64_t at = (j + m) * kTile + n * kLanes;
        if (bias != nullptr) acc[m][n] += load(bias + at);
        most[n] = vmax(most[n], acc[m][n]);
        store(out + at, acc[m][n]);
      }
    }
  }
  DSKERNELS_UNROLL
  for (int n = 0; n < N; ++n) maximum[n] = most[n];
}

// The same for the first `vectors` vectors of a tile's queries.
inline void scores(const float* const* keys, int64_t count, const float* queries, int64_t dim, int vectors,
                   const float* bias, float* out, VecF* maximum, Prefetcher& prefetcher) {
  const auto columns = [&]<int N>(int v) __attribute__((always_inline)) {
    with_group_size<kMostRows<N>>(count, [&]<int M>() __attribute__((always_inline)) {
      score_columns<M, N>(keys, count, queries + v * kLanes, dim, bias == nullptr ? nullptr : bias + v * kLanes,
                          out + v * kLanes, maximum + v, prefetcher);
    });
  };
  int v = 0;
  // A single vector of queries has too few accumulators to be quick, so four are taken as two and two.
  while (vectors - v >= kScoreVectors && vectors - v != kScoreVectors + 1) {
    columns.template operator()<kScoreVectors>(v);
    v += kScoreVectors;
  }
  for (; vectors - v >= 2; v += 2) columns.template operator()<2>(v);
  if (v < vectors) columns.template operator()<1>(v);
}

// target[r] (+)= factor[r] * sum over k < steps of weight(r, k) * rows[k], for `count` rows r and N vectors from
// `column` on, where weight(r, k) is weights[r * kRowStride + k * kStepStride].
template <int M, int N, int kRowStride, int kStepStride>
DSKERNELS_NOINLINE void sum_columns(const float* weights, int64_t count, const float* const* rows, int64_t steps,
                                    int64_t column, float* const* target, const float* factor, bool add,
                                    Prefetcher& prefetcher) {
  for (int64_t next = 0; next < count; next += M) {
    prefetcher.step();
    const int64_t first = min_of(next, count - M);
    VecF acc[M][N] = {};
    const TileOperand<kRowStride, kStepStride> operand{weights + first * kRowStride};
    multiply_accumulate(acc, operand, ScatteredRows{rows, column}, 0, steps);
    DSKERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      // Rows before `next` have been written with the group before.
      if (first + m < next) continue;
      float* place = target[first + m] + column;
      DSKERNELS_UNROLL
      for (int n = 0; n < N; ++n) {
        const VecF sum = factor[first + m] * acc[m][n];
        store(place + n * kLanes, add ? load(place + n * kLanes) + sum : sum);
      }
    }
  }
}

// The same for rows of `vectors` vectors.
template <int kRowStride, int kStepStride>
inline void sum_rows(const float* weights, int64_t count, const float* const* rows, int64_t steps, int64_t vectors,
                     float* const* target, const float* factor, bool add, Prefetcher& prefetcher) {
  const auto columns = [&]<int N>(int64_t v) __attribute__((always_inline)) {
    with_group_size<kMostRows<N>>(count, [&]<int M>() __attribute__((always_inline)) {
      sum_columns<M, N, kRowStride, kStepStride>(weights, count, rows, steps, v * kLanes, target, factor, add,
                                                 prefetcher);
    });
  };
  int64_t v = 0;
  for (; v + kSumVectors <= vectors; v += kSumVectors) columns.template operator()<kSumVectors>(v);
  if (v < vectors) columns.template operator()<1>(v);
}

}  // namespace
}  // namespace dskernels
