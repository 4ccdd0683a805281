// From products of queries and keys to scores: scale, cap, bias and the window, on the accumulators of a warp.
#pragma once

#include "common/mma.cuh"
#include "common/softmax.cuh"
#include "window_attention/cuda_common.cuh"

namespace dskernels {

// Hyperbolic tangent, good to a few units in the last place.
__device__ inline float tanh_of(float x) {
  // Below 1/4 the exponentials cancel. Five terms of the series, Abramowitz and Stegun 4.5.64: the next is < 2**-24 x.
  const float square = x * x;
  const float series =
      x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
  const float by_exponential = 1.0f - __fdividef(2.0f, ptx::exp2_approximate(fabsf(x) * (2.0f * kLog2E)) + 1.0f);
  return fabsf(x) < 0.25f ? series : copysignf(by_exponential, x);
}

// The two rows of a thread among the 16 of its warp, as accumulators have them: g and g + 8, g = lane / 4.
struct RowPair {
  int row[2];       // of the sequence
  Span seen[2];     // the keys of each
  bool is_live[2];  // is one of the tile's rows and sees a key
};

// Of the 16 rows from `first` on, those below `end`. Further ones repeat the last.
__device__ inline RowPair row_pair(const Sequence& sequence, int first, int end, int group) {
  RowPair rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + lane_index() / 4 + 8 * i;
    rows.row[i] = min(row, end - 1);
    rows.seen[i] = sequence.keys_seen(rows.row[i] / group, rows.row[i] / group);
    rows.is_live[i] = row < end && !rows.seen[i].is_empty();
  }
  return rows;
}

// What 16 rows see together, and what all of them see.
struct WarpSpan {
  Span seen, shared;

  __device__ bool sees(int begin, int end) const { return begin < seen.end && seen.begin < end; }
  __device__ bool needs_mask(int begin, int end) const { return begin < shared.begin || shared.end < end; }
};

__device__ inline WarpSpan warp_span(const Sequence& sequence, int first, int end, int group) {
  if (first >= end) return {{0, 0}, {0, 0}};
  const int first_query = first / group, last_query = (min(first + 16, end) - 1) / group;
  const Span all = sequence.keys_seen(first_query, last_query);
  const int begin = sequence.keys_seen(last_query, last_query).begin;
  return {all, {begin, sequence.keys_seen(first_query, first_query).end}};
}

// How a product becomes a score.
struct Scoring {
  float scale, softcap;
  const float* bias[2];  // rows of the bias, or null
  int64_t bias_stride;
};

__device__ inline Scoring scoring_of(const WindowAttentionArgs& args, const BlockTile& tile, const RowPair& rows,
                                     int group) {
  Scoring result{args.scale, args.softcap, {nullptr, nullptr}, args.bias.stride[3]};
  if (args.bias.data != nullptr) {
    const auto bias = rows_of<const float>(args.bias, tile.batch, tile.head_kv * group, 0, group);
    for (int i = 0; i < 2; ++i) result.bias[i] = bias.at(rows.row[i]);
  }
  return result;
}

// Element e of group n of a thread's accumulators is of row e / 2 of its pair and of this column.
__device__ inline int column_of(int n, int e) { return 8 * n + 2 * (lane_index() % 4) + e % 2; }

// s += the biases of keys `begin` to begin + 8 * kGroups. Only what is seen is read: the rest may hold anything.
template <int kGroups>
__device__ inline void add_bias(float (&s)[kGroups][4], const Scoring& x, const RowPair& rows, int begin) {
  const int first = begin + column_of(0, 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // One address that moves on takes fewer registers than one for each key.
    const float* from = x.bias[i] + first * x.bias_stride;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int key = first + 8 * n;
      if (rows.seen[i].begin <= key && key < rows.seen[i].end) s[n][2 * i] += from[0];
      if (rows.seen[i].begin <= key + 1 && key + 1 < rows.seen[i].end) s[n][2 * i + 1] += from[x.bias_stride];
      from += 8 * x.bias_stride;
    }
  }
}

// Turns products with keys `begin` to begin + 8 * kGroups into scores, -inf where the row does not see the key.
template <int kGroups>
__device__ inline void score(float (&s)[kGroups][4], const Scoring& x, const RowPair& rows, int begin, bool masked) {
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] *= x.scale;
  }
  if (x.softcap != 0.0f) {
    const float inverse = 1.0f / x.softcap;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = x.softcap * tanh_of(s[n][e] * inverse);
    }
  }
  if (x.bias[0] != nullptr) add_bias(s, x, rows, begin);
  if (!masked) return;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = begin + column_of(n, e);
      if (key < rows.seen[e / 2].begin || rows.seen[e / 2].end <= key) s[n][e] = -INFINITY;
    }
  }
}

}  // namespace dskernels
