// The parts that the forward and the backward share: the window's geometry, tiles of queries, scores and sums.
//
// A task owns one key-value head and a chunk of queries, and walks over tiles of `kTile` queries. Queries lie along
// the vector lanes: scores are kept transposed as [key][query], so the softmax over keys is a vertical sum of vectors
// and needs no shuffle, and each product reads one operand by broadcast and the other in whole vectors.
#pragma once

#include "common/tile.h"
#include "common/transpose.h"
#include "window_attention/cpu_rows.h"

namespace dskernels {
namespace {

// Accumulators of a product, rows x vectors: as many as the registers hold beside the operands.
constexpr int kScoreKeys = kWide ? 8 : 4;
constexpr int kScoreVectors = 3;
constexpr int kSumRows = kWide ? 12 : 6;
constexpr int kSumVectors = 2;

// Keys whose scores are held at a time. Longer windows are walked in blocks of this size with a running maximum.
constexpr int64_t kBlockKeys = 512;

constexpr float kLn2 = 0.69314718055994530942f;

struct Window {
  int64_t left, right, offset, len_k;

  explicit Window(const WindowAttentionArgs& args)
      : left(args.left), right(args.right), offset(args.query_offset), len_k(args.len_k) {}

  // Query i sees the keys [first_key(i), end_key(i)); neither bound decreases with i.
  int64_t first_key(int64_t i) const { return clamp_to(i + offset - left, int64_t{0}, len_k); }
  int64_t end_key(int64_t i) const { return max_of(first_key(i), clamp_to(i + offset + right + 1, int64_t{0}, len_k)); }

  // Of the queries [begin, end), those that see key j are [first_query, end_query).
  int64_t first_query(int64_t j, int64_t begin, int64_t end) const { return clamp_to(j - right - offset, begin, end); }
  int64_t end_query(int64_t j, int64_t begin, int64_t end) const {
    return max_of(first_query(j, begin, end), clamp_to(j + left - offset + 1, begin, end));
  }
};

// to[d][r] = from[r][d] for a tile's rows of stride `stride`.
template <int kTile>
inline void transpose_tile(const float* from, int64_t stride, int64_t dim, float* to) {
  transpose<kTile>([&](int64_t r) __attribute__((always_inline)) { return from + r * stride; }, kTile, dim, to,
                   [](VecF x) __attribute__((always_inline)) { return x; });
}

// A tile of queries and the key range of each. Lanes past `count` repeat the last query's range and hold zeros.
template <int kVectors>
struct QueryTile {
  static constexpr int kTile = kVectors * kLanes;

  int64_t begin;
  int count;
  int64_t low[kTile], high[kTile];

  QueryTile(const Window& window, int64_t tile_begin, int64_t chunk_end)
      : begin(tile_begin), count(static_cast<int>(min_of(int64_t{kTile}, chunk_end - tile_begin))) {
    for (int r = 0; r < kTile; ++r) {
      const int64_t i = begin + min_of(r, count - 1);
      low[r] = window.first_key(i);
      high[r] = window.end_key(i);
    }
  }

  int64_t first_key() const { return low[0]; }
  int64_t end_key() const { return high[kTile - 1]; }

  // Keys of a block: the whole range where it fits, else equal parts of it, at least one key.
  int64_t block_keys() const {
    const int64_t range = end_key() - first_key(), blocks = max_of((range + kBlockKeys - 1) / kBlockKeys, int64_t{1});
    return max_of(round_up((range + blocks - 1) / blocks, kScoreKeys), int64_t{kScoreKeys});
  }

  // Steps of score_block, over which a Prefetcher can spread its rows.
  int64_t steps() const { return (end_key() - first_key()) / kScoreKeys; }

  // The keys that vector v sees, clipped to a block.
  int64_t vector_first(int v, int64_t block_begin) const { return max_of(low[v * kLanes], block_begin); }
  int64_t vector_end(int v, int64_t block_end) const { return min_of(high[v * kLanes + kLanes - 1], block_end); }
};

// Reads the tile's rows of q (or of grad_out, which is not rotated), times `factor`, as rows and transposed.
template <int kVectors>
inline void load_tile(const WindowAttentionArgs& args, const QueryTile<kVectors>& tile, const View4& view, int64_t dim,
                      bool rotated, float factor, int64_t b, int64_t h, float* rows, float* transposed) {
  constexpr int kTile = kVectors * kLanes;
  const int64_t stride = round_up(dim, kLanes);
  for (int r = 0; r < kTile; ++r) {
    float* row = rows + r * stride;
    if (r >= tile.count) {
      for (int64_t d = 0; d < stride; ++d) row[d] = 0.0f;
      continue;
    }
    const int64_t i = tile.begin + r;
    load_rotated(args, view, dim, b, h, i, rotated ? i + args.query_offset : -1, row);
    for (int64_t d = 0; d < stride; d += kLanes) store(row + d, factor * load(row + d));
  }
  transpose_tile<kTile>(rows, stride, dim, transposed);
}

// The sums of kScoreKeys keys for one vector of queries.
typedef VecF ScoreColumn[kScoreKeys];

// -inf where the key is outside the lane's window, so that softmax gives exactly 0 there.
template <int kVectors>
struct ScoreMask {
  const QueryTile<kVectors>& tile;
  int64_t origin;  // lanes compare as int32 offsets from here
  VecI low[kVectors], high[kVectors];

  ScoreMask(const QueryTile<kVectors>& query_tile, int64_t block_begin, int64_t block_end)
      : tile(query_tile), origin(block_begin) {
    for (int v = 0; v < kVectors; ++v) {
      for (int i = 0; i < kLanes; ++i) {
        low[v][i] = static_cast<int32_t>(clamp_to(tile.low[v * kLanes + i], block_begin, block_end) - origin);
        high[v][i] = static_cast<int32_t>(clamp_to(tile.high[v * kLanes + i], block_begin, block_end) - origin);
      }
    }
  }

  DSKERNELS_INLINE void apply(int64_t j, int v, ScoreColumn& scores) const {
    if (tile.low[v * kLanes + kLanes - 1] <= j && j + kScoreKeys <= tile.high[v * kLanes]) return;
    DSKERNELS_UNROLL
    for (int m = 0; m < kScoreKeys; ++m) {
      const VecI key = broadcast(static_cast<int32_t>(j + m - origin));
      scores[m] = (key >= low[v]) & (key < high[v]) ? scores[m] : broadcast(-kInfinity);
    }
  }
};

// out[m][r] = sum over d of keys(m, d) * transposed[d][r] for the vectors [v, v + N) of the tile's queries r.
// `finish(v, sums)` may change each column of sums before it is stored.
template <int N, int kTile, class Finish>
DSKERNELS_INLINE void score_group(const RowPointers<kScoreKeys>& keys, const float* transposed, int64_t dim, int v,
                                  float* out, const Finish& finish) {
  VecF acc[kScoreKeys][N] = {};
  multiply_accumulate(acc, keys, transposed + v * kLanes, kTile, 0, dim);
  DSKERNELS_UNROLL
  for (int n = 0; n < N; ++n) {
    ScoreColumn sums;
    DSKERNELS_UNROLL
    for (int m = 0; m < kScoreKeys; ++m) sums[m] = acc[m][n];
    finish(v + n, sums);
    DSKERNELS_UNROLL
    for (int m = 0; m < kScoreKeys; ++m) store(out + m * kTile + (v + n) * kLanes, sums[m]);
  }
}

// out[j - block_begin][r] for the block's keys j, in groups of kScoreKeys, each with the vectors whose queries see any
// of the group: the rest of `out` is not written. On a column of sums `transform(j, v, sums)` acts first, then `mask`
// where not all queries of the tile see the group, then `take(v, sums)`.
template <int kVectors, class Transform, class Take>
DSKERNELS_NOINLINE void score_block(const QueryTile<kVectors>& tile, const KeyRows& rows, const float* transposed,
                                    int64_t dim, int64_t block_begin, int64_t block_end, float* out,
                                    Prefetcher& prefetcher, const ScoreMask<kVectors>& mask, const Transform& transform,
                                    const Take& take) {
  constexpr int kTile = kVectors * kLanes;
  static_assert(kVectors % kScoreVectors == 0);
  const int64_t bulk_begin = tile.low[kTile - 1], bulk_end = min_of(tile.high[0], block_end);
  for (int64_t j = block_begin; j < block_end; j += kScoreKeys) {
    prefetcher.step();
    RowPointers<kScoreKeys> keys;
    float* target = out + (j - block_begin) * kTile;
    if (j >= bulk_begin && j + kScoreKeys <= bulk_end) {
      const auto unmasked = [&](int v, ScoreColumn& sums) __attribute__((always_inline)) {
        transform(j, v, sums);
        take(v, sums);
      };
      for (int m = 0; m < kScoreKeys; ++m) keys.row[m] = rows.row(j + m);
      for (int v = 0; v < kVectors; v += kScoreVectors) {
        score_group<kScoreVectors, kTile>(keys, transposed, dim, v, target, unmasked);
      }
      continue;
    }
    int v = 0, v_end = kVectors;
    while (v < kVectors && tile.vector_end(v, block_end) <= j) ++v;
    while (v_end > v && tile.vector_first(v_end - 1, block_begin) >= j + kScoreKeys) --v_end;
    for (int m = 0; m < kScoreKeys; ++m) keys.row[m] = rows.row(min_of(j + m, block_end - 1));
    const auto masked = [&](int vector, ScoreColumn& sums) __attribute__((always_inline)) {
      transform(j, vector, sums);
      mask.apply(j, vector, sums);
      take(vector, sums);
    };
    for (; v_end - v >= kScoreVectors; v += kScoreVectors) {
      score_group<kScoreVectors, kTile>(keys, transposed, dim, v, target, masked);
    }
    if (v_end - v == 2) score_group<2, kTile>(keys, transposed, dim, v, target, masked);
    if (v_end - v == 1) score_group<1, kTile>(keys, transposed, dim, v, target, masked);
  }
}

// target[m][:] (+)= sum over k in [low[m], high[m]) of a(m, k) * b[k][:] for kSumRows rows of `vectors` vectors.
template <bool kAdd, class A>
DSKERNELS_NOINLINE void sum_rows(const A& a, const float* b, int64_t stride, const int64_t* low, const int64_t* high,
                                 float* target, int64_t target_stride, int64_t vectors) {
  const auto columns = [&]<int N>(int64_t vector) __attribute__((always_inline)) {
    float* column = target + vector * kLanes;
    VecF acc[kSumRows][N] = {};
    multiply_accumulate_banded(acc, a, b + vector * kLanes, stride, low, high);
    DSKERNELS_UNROLL
    for (int m = 0; m < kSumRows; ++m) {
      DSKERNELS_UNROLL
      for (int n = 0; n < N; ++n) {
        float* place = column + m * target_stride + n * kLanes;
        store(place, kAdd ? load(place) + acc[m][n] : acc[m][n]);
      }
    }
  };
  int64_t v = 0;
  for (; v + kSumVectors <= vectors; v += kSumVectors) columns.template operator()<kSumVectors>(v);
  if (v < vectors) columns.template operator()<1>(v);
}

// target[r] (+)= sum over the block's keys j that query r sees of factor[j][r] * rows[j].
template <bool kAdd, int kVectors>
inline void sum_over_keys(const QueryTile<kVectors>& tile, const KeyRows& rows, int64_t block_begin, int64_t block_end,
                          const float* factor, float* target) {
  constexpr int kTile = kVectors * kLanes;
  const int64_t stride = rows.stride();
  for (int r = 0; r < tile.count; r += kSumRows) {
    int64_t low[kSumRows], high[kSumRows];
    for (int m = 0; m < kSumRows; ++m) {
      low[m] = clamp_to(tile.low[r + m], block_begin, block_end) - block_begin;
      high[m] = clamp_to(tile.high[r + m], block_begin, block_end) - block_begin;
    }
    const TileOperand<1, kTile> operand{factor + r};
    sum_rows<kAdd>(operand, rows.row(block_begin), stride, low, high, target + r * stride, stride, stride / kLanes);
  }
}

}  // namespace
}  // namespace dskernels
