// Forward: per tile of queries, scores -> maximum -> exp2 and sum -> weighted sum of values, block of keys by block.
#pragma once

#include "window_attention/cpu_scores.h"

namespace dskernels {
namespace {

constexpr int kForwardVectors = 3;
constexpr int kForwardTile = kForwardVectors * kLanes;
static_assert(kForwardTile % kSumRows == 0);

// Queries a task takes: long enough that rotating the halo of keys before its first query costs little, short enough
// that a few heads already make tasks for every core.
constexpr int64_t kForwardChunk = 1024 / kForwardTile * kForwardTile;
constexpr int64_t kForwardTasksWanted = 16;

inline int64_t forward_chunk(const WindowAttentionArgs& args) {
  const int64_t heads = max_of(args.batch * args.heads_kv, int64_t{1});
  const int64_t chunk = round_up((args.len_q * heads + kForwardTasksWanted - 1) / kForwardTasksWanted, kForwardTile);
  return clamp_to(chunk, int64_t{4} * kForwardTile, kForwardChunk);
}

struct ForwardScratch {
  float *query_rows, *queries, *scores, *out, *transform;

  ForwardScratch(const WindowAttentionArgs& args, Carver& carver) {
    query_rows = carver.floats(kForwardTile * round_up(args.dim_qk, kLanes));
    queries = carver.floats(kForwardTile * args.dim_qk);
    scores = carver.floats((kBlockKeys + kScoreKeys) * kForwardTile);
    out = carver.floats(kForwardTile * round_up(args.dim_v, kLanes));
    transform = carver.floats(ScoreTransform<kForwardVectors>::scratch_floats(args));
  }
};

// Running maximum and sum of one tile's softmax, a vector of queries in each.
struct SoftmaxState {
  VecF maximum[kForwardVectors], sum[kForwardVectors];
  float rescale[kForwardTile];

  SoftmaxState() {
    for (int v = 0; v < kForwardVectors; ++v) {
      maximum[v] = broadcast(-kInfinity);
      sum[v] = VecF{};
    }
  }
};

// Replaces the scores of the block by exp2(score - maximum) and brings the sums up to date.
DSKERNELS_NOINLINE void softmax_block(const QueryTile<kForwardVectors>& tile, const VecF* block_maximum,
                                      int64_t block_begin, int64_t block_end, float* scores, SoftmaxState& state) {
  for (int v = 0; v < kForwardVectors; ++v) {
    const VecF maximum = vmax(state.maximum[v], block_maximum[v]);
    // A query that has seen no key yet has maximum -inf; subtracting 0 instead keeps -inf - -inf = NaN out.
    const VecF subtracted = maximum == broadcast(-kInfinity) ? VecF{} : maximum;
    const VecF rescale = exp2_nonpositive(state.maximum[v] - subtracted);
    VecF sums[4] = {};
    const int64_t begin = tile.vector_first(v, block_begin), end = tile.vector_end(v, block_end);
    float* row = scores + (begin - block_begin) * kForwardTile + v * kLanes;
    int64_t j = begin;
    for (; j + 4 <= end; j += 4, row += 4 * kForwardTile) {
      DSKERNELS_UNROLL
      for (int u = 0; u < 4; ++u) {
        const VecF weight = exp2_nonpositive(load(row + u * kForwardTile) - subtracted);
        store(row + u * kForwardTile, weight);
        sums[u] += weight;
      }
    }
    for (; j < end; ++j, row += kForwardTile) {
      const VecF weight = exp2_nonpositive(load(row) - subtracted);
      store(row, weight);
      sums[0] += weight;
    }
    state.maximum[v] = maximum;
    state.sum[v] = state.sum[v] * rescale + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    store(state.rescale + v * kLanes, rescale);
  }
}

// Divides the sums by the softmax's denominator, in which the sink takes part, and writes them and lse.
inline void finish_rows(const WindowAttentionArgs& args, const QueryTile<kForwardVectors>& tile,
                        const SoftmaxState& state, int64_t b, int64_t h, const float* out, int64_t stride) {
  const float sink = args.sink == nullptr ? -kInfinity : args.sink[h] * kLog2E;
  float* lse = args.lse + b * args.lse_stride_batch + h * args.lse_stride_head + tile.begin;
  for (int r = 0; r < tile.count; ++r) {
    const float keys_sum = state.sum[r / kLanes][r % kLanes], keys_maximum = state.maximum[r / kLanes][r % kLanes];
    const float maximum = max_of(keys_maximum, sink);
    // One of the two factors is 1, and a sum over nothing is 0; without sink and keys there is nothing to divide by.
    const float factor = keys_sum == 0.0f ? 0.0f : __builtin_exp2f(keys_maximum - maximum);
    const float sum = keys_sum * factor + (sink == -kInfinity ? 0.0f : __builtin_exp2f(sink - maximum));
    const bool sees_nothing = sum == 0.0f;
    lse[r] = sees_nothing ? -kInfinity : maximum * kLn2 + __builtin_logf(sum);
    store_row(args.out.element, out + r * stride, sees_nothing ? 0.0f : factor / sum, args.dim_v,
              row_address(args.out, b, h, tile.begin + r), args.out.stride[3]);
  }
}

inline void forward_tile(const WindowAttentionArgs& args, const QueryTile<kForwardVectors>& tile, const KeyRows& keys,
                         const KeyRows& values, int64_t b, int64_t h, const ForwardScratch& scratch) {
  const int64_t stride = values.stride();
  load_tile(args, tile, args.q, args.dim_qk, true, args.scale * kLog2E, b, h, scratch.query_rows, scratch.queries);
  SoftmaxState state;
  ScoreTransform<kForwardVectors> transform(args, tile, b, h, scratch.transform);
  Prefetcher prefetcher;
  const int64_t steps = tile.steps(), next = tile.begin + kForwardTile;
  keys.prefetch_next(kForwardTile, steps, prefetcher);
  values.prefetch_next(kForwardTile, steps, prefetcher);
  prefetcher.add(args.q, args.dim_qk, b, h, next, min_of(next + kForwardTile, args.len_q), steps, false);
  prefetcher.add(args.out, args.dim_v, b, h, tile.begin, tile.begin + tile.count, steps, true);
  const int64_t block = tile.block_keys();
  for (int64_t begin = tile.first_key(); begin < tile.end_key() || begin == tile.first_key(); begin += block) {
    const int64_t end = min_of(begin + block, tile.end_key());
    const bool first_block = begin == tile.first_key();
    VecF block_maximum[kForwardVectors];
    for (VecF& maximum : block_maximum) maximum = broadcast(-kInfinity);
    const ScoreMask<kForwardVectors> mask(tile, begin, end);
    transformed_scores(tile, keys, scratch.queries, args.dim_qk, begin, end, scratch.scores, prefetcher, mask,
                       transform, [&](int v, ScoreColumn& scores) __attribute__((always_inline)) {
                         VecF maximum = scores[0];
                         DSKERNELS_UNROLL
                         for (int m = 1; m < kScoreKeys; ++m) maximum = vmax(maximum, scores[m]);
                         block_maximum[v] = vmax(block_maximum[v], maximum);
                       });
    softmax_block(tile, block_maximum, begin, end, scratch.scores, state);
    if (!first_block) {
      for (int r = 0; r < tile.count; ++r) {
        for (int64_t d = 0; d < stride; ++d) scratch.out[r * stride + d] *= state.rescale[r];
      }
    }
    if (first_block) {
      sum_over_keys<false>(tile, values, begin, end, scratch.scores, scratch.out);
    } else {
      sum_over_keys<true>(tile, values, begin, end, scratch.scores, scratch.out);
    }
  }
  finish_rows(args, tile, state, b, h, scratch.out, stride);
}

// Keys that a chunk of queries may see, at most.
inline int64_t chunk_keys(const WindowAttentionArgs& args, int64_t chunk) {
  const int64_t extent = max_of(args.left + args.right, int64_t{0});
  return min_of(args.len_k, chunk + min_of(extent, args.len_k));
}

inline WindowAttentionPlan plan_forward(const WindowAttentionArgs& args) {
  const int64_t chunk = forward_chunk(args);
  Carver carver(nullptr);
  ForwardScratch scratch(args, carver);
  const int64_t keys = chunk_keys(args, chunk);
  carver.floats(keys * round_up(args.dim_qk, kLanes));
  carver.floats(keys * round_up(args.dim_v, kLanes));
  return {args.batch * args.heads_kv * ((args.len_q + chunk - 1) / chunk), carver.used(), 0, 0};
}

inline void run_forward(const WindowAttentionArgs& args, int64_t task, void* memory) {
  const int64_t chunk = forward_chunk(args), chunks = (args.len_q + chunk - 1) / chunk;
  const int64_t head = task / chunks, b = head / args.heads_kv, h_kv = head % args.heads_kv;
  const int64_t group = args.heads_q / args.heads_kv;
  const int64_t begin = task % chunks * chunk, end = min_of(begin + chunk, args.len_q);

  Carver carver(memory);
  const ForwardScratch scratch(args, carver);
  const Window window(args);
  const int64_t first = window.first_key(begin), count = window.end_key(end - 1) - first;
  KeyRows keys(args, args.k, args.dim_qk, true, b, h_kv, first, count, carver);
  KeyRows values(args, args.v, args.dim_v, false, b, h_kv, first, count, carver);
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    for (int64_t i = begin; i < end; i += kForwardTile) {
      const QueryTile<kForwardVectors> tile(window, i, end);
      keys.fill_to(tile.end_key());
      values.fill_to(tile.end_key());
      forward_tile(args, tile, keys, values, b, h, scratch);
    }
  }
}

}  // namespace
}  // namespace dskernels
