// Backward (FlashAttention-2, arXiv 2307.08691, algorithm 2, walked by query tiles): per block of keys
//   P = exp(S - lse), dP = grad_out V^T, dS = P (dP - delta), delta = rowsum(grad_out * out) - grad_lse,
//   grad_v += P^T grad_out, grad_k += dS^T q, grad_q += dS k,
// with q and k rotated, so grad_q and grad_k are turned back when they are written.
//
// A key's gradient sums over all queries that see it, in a fixed order: within a chunk in the chunk's scratch; a key
// that several chunks see leaves one part per chunk in `shared`, and merge_backward adds the parts in chunk order.
#pragma once

#include "window_attention/cpu_forward.h"

namespace dskernels {
namespace {

// Two passes of score vectors a tile: each key's gradient is then loaded and stored half as often.
constexpr int kBackwardVectors = kWide ? 3 : 6;
constexpr int kBackwardTile = kBackwardVectors * kLanes;
static_assert(kBackwardTile % kSumRows == 0);
constexpr int64_t kBackwardChunk = 4096 / kBackwardTile * kBackwardTile;
constexpr int64_t kBackwardTasksWanted = 32, kBackwardTasksNeeded = 8;
constexpr int64_t kMergeRows = 256;

// Short enough that there are many tasks, but not shorter than the window, so that few keys are shared between chunks;
// except where the heads alone would not even make a few tasks.
inline int64_t backward_chunk(const WindowAttentionArgs& args) {
  const int64_t queries = args.len_q * max_of(args.batch * args.heads_kv, int64_t{1});
  const int64_t extent = clamp_to(args.left + args.right, int64_t{0}, args.len_q);
  const int64_t shortest = max_of(min_of(extent, queries / kBackwardTasksNeeded), int64_t{4} * kBackwardTile);
  const int64_t longest = max_of(extent, kBackwardChunk);
  return round_up(clamp_to(queries / kBackwardTasksWanted, shortest, max_of(shortest, longest)), kBackwardTile);
}

// The keys that chunk c sees, and those of them that no other chunk sees.
struct ChunkKeys {
  int64_t begin, end, own_begin, own_end;

  ChunkKeys(const WindowAttentionArgs& args, int64_t chunk, int64_t c) {
    const Window window(args);
    const int64_t first = c * chunk, last = min_of(first + chunk, args.len_q) - 1;
    begin = window.first_key(first);
    end = window.end_key(last);
    own_begin = first > 0 ? clamp_to(window.end_key(first - 1), begin, end) : begin;
    own_end = last + 1 < args.len_q ? clamp_to(window.first_key(last + 1), own_begin, end) : end;
  }

  int64_t shared() const { return end - begin - (own_end - own_begin); }
  int64_t shared_row(int64_t j) const { return j < own_begin ? j - begin : j - begin - (own_end - own_begin); }
};

struct BackwardShape {
  int64_t chunk, chunks, stride_qk, stride_v, keys, shared_rows;

  explicit BackwardShape(const WindowAttentionArgs& args)
      : chunk(backward_chunk(args)),
        chunks((args.len_q + chunk - 1) / chunk),
        stride_qk(round_up(args.dim_qk, kLanes)),
        stride_v(round_up(args.dim_v, kLanes)),
        keys(0),
        shared_rows(0) {
    for (int64_t c = 0; c < chunks; ++c) {
      const ChunkKeys range(args, chunk, c);
      keys = max_of(keys, range.end - range.begin);
      shared_rows = max_of(shared_rows, range.shared());
    }
  }

  int64_t shared_floats() const { return shared_rows * (stride_qk + stride_v); }
};

struct BackwardScratch {
  float *query_rows, *queries, *grad_out_rows, *grad_outs, *weights, *grad_scores, *grad_q, *grad_k, *grad_v,
      *transform, *grad_bias;

  BackwardScratch(const BackwardShape& shape, const WindowAttentionArgs& args, Carver& carver) {
    query_rows = carver.floats(kBackwardTile * shape.stride_qk);
    queries = carver.floats(kBackwardTile * args.dim_qk);
    grad_out_rows = carver.floats(kBackwardTile * shape.stride_v);
    grad_outs = carver.floats(kBackwardTile * args.dim_v);
    weights = carver.floats((kBlockKeys + kScoreKeys) * kBackwardTile);
    grad_scores = carver.floats((kBlockKeys + kScoreKeys) * kBackwardTile);
    grad_q = carver.floats(kBackwardTile * shape.stride_qk);
    grad_k = carver.floats((shape.keys + kSumRows) * shape.stride_qk);
    grad_v = carver.floats((shape.keys + kSumRows) * shape.stride_v);
    transform = carver.floats(ScoreTransform<kBackwardVectors>::scratch_floats(args));
    grad_bias = carver.floats(args.bias.data == nullptr ? 0 : kBlockKeys * kBackwardTile);
  }
};

// Per query of the tile: lse in base 2 and delta.
struct TileStatistics {
  float lse[kBackwardTile], delta[kBackwardTile];

  TileStatistics(const WindowAttentionBackwardArgs& args, const QueryTile<kBackwardVectors>& tile,
                 const float* grad_out_rows, int64_t stride, int64_t b, int64_t h) {
    const WindowAttentionArgs& forward = args.forward;
    const int64_t row = b * forward.lse_stride_batch + h * forward.lse_stride_head + tile.begin;
    // Zeros past dim_v, as in the rows of grad_out.
    float out[256 + kLanes] = {};
    for (int r = 0; r < kBackwardTile; ++r) {
      lse[r] = delta[r] = 0.0f;
      if (r >= tile.count) continue;
      load_row(forward.out.element, row_address(forward.out, b, h, tile.begin + r), forward.out.stride[3],
               forward.dim_v, out);
      VecF products{};
      for (int64_t d = 0; d < stride; d += kLanes) products += load(out + d) * load(grad_out_rows + r * stride + d);
      float sum = 0.0f;
      for (int i = 0; i < kLanes; ++i) sum += products[i];
      delta[r] = args.grad_lse ? sum - args.grad_lse[row + r] : sum;
      // A query that sees no key has lse -inf and only masked scores; with 0 its weights are exp2(-inf) = 0.
      const float natural = forward.lse[row + r];
      lse[r] = natural == -kInfinity ? 0.0f : natural * kLog2E;
    }
  }
};

// weights <- exp2(score - lse), grad_scores <- weights * (grad_weights - delta), in place.
DSKERNELS_NOINLINE void grad_softmax_block(const QueryTile<kBackwardVectors>& tile, const TileStatistics& statistics,
                                           int64_t block_begin, int64_t block_end, float* weights, float* grad_scores) {
  for (int v = 0; v < kBackwardVectors; ++v) {
    const VecF lse = load(statistics.lse + v * kLanes), delta = load(statistics.delta + v * kLanes);
    const int64_t begin = tile.vector_first(v, block_begin), end = tile.vector_end(v, block_end);
    for (int64_t j = begin; j < end; ++j) {
      const int64_t place = (j - block_begin) * kBackwardTile + v * kLanes;
      // Rounding can put a score a little above lse where one key has all the weight.
      const VecF weight = exp2_nonpositive(load(weights + place) - lse);
      store(weights + place, weight);
      store(grad_scores + place, weight * (load(grad_scores + place) - delta));
    }
  }
}

// The same where cap or bias act between score and weight; the gradient of the bias is that of the weights' exponent.
DSKERNELS_NOINLINE void grad_transform_block(const QueryTile<kBackwardVectors>& tile, const TileStatistics& statistics,
                                             const ScoreTransform<kBackwardVectors>& transform, int64_t block_begin,
                                             int64_t block_end, float* weights, float* grad_scores, float* grad_bias) {
  for (int v = 0; v < kBackwardVectors; ++v) {
    const VecF lse = load(statistics.lse + v * kLanes), delta = load(statistics.delta + v * kLanes);
    const int64_t begin = tile.vector_first(v, block_begin), end = tile.vector_end(v, block_end);
    for (int64_t j = begin; j < end; ++j) {
      const int64_t place = (j - block_begin) * kBackwardTile + v * kLanes;
      const VecF score = load(weights + place), weight = exp2_nonpositive(score - lse);
      const VecF grad = weight * (load(grad_scores + place) - delta);
      store(weights + place, weight);
      if (grad_bias != nullptr) store(grad_bias + place, grad);
      // A bias of -inf leaves no weight and no slope.
      store(grad_scores + place, weight == VecF{} ? VecF{} : grad * transform.slope(j, v, score));
    }
  }
}

// Writes the block's gradients of the bias, kept as [key][query], into the rows of the result.
inline void store_grad_bias(const WindowAttentionBackwardArgs& args, const QueryTile<kBackwardVectors>& tile, int64_t b,
                            int64_t h, int64_t block_begin, int64_t block_end, const float* grad_bias) {
  const WindowAttentionArgs& forward = args.forward;
  for (int r = 0; r < tile.count; ++r) {
    float* row = args.grad_bias + ((b * forward.heads_q + h) * forward.len_q + tile.begin + r) * forward.len_k;
    const int64_t end = clamp_to(tile.high[r], block_begin, block_end);
    for (int64_t j = clamp_to(tile.low[r], block_begin, block_end); j < end; ++j) {
      row[j] = grad_bias[(j - block_begin) * kBackwardTile + r];
    }
  }
}

// grad[j] += sum over the tile's queries r that see key j of factor[j][r] * rows[r], for the block's keys.
inline void sum_over_queries(const Window& window, const QueryTile<kBackwardVectors>& tile, const float* factor,
                             const float* rows, int64_t stride, int64_t block_begin, int64_t block_end, float* grad) {
  for (int64_t j = block_begin; j < block_end; j += kSumRows) {
    int64_t low[kSumRows], high[kSumRows];
    for (int m = 0; m < kSumRows; ++m) {
      low[m] = window.first_query(j + m, tile.begin, tile.begin + tile.count) - tile.begin;
      high[m] = window.end_query(j + m, tile.begin, tile.begin + tile.count) - tile.begin;
      if (j + m >= block_end) low[m] = high[m] = tile.count;
    }
    const TileOperand<kBackwardTile, 1> operand{factor + (j - block_begin) * kBackwardTile};
    sum_rows<true>(operand, rows, stride, low, high, grad + (j - block_begin) * stride, stride, stride / kLanes);
  }
}

inline void backward_tile(const WindowAttentionBackwardArgs& args, const QueryTile<kBackwardVectors>& tile,
                          const KeyRows& keys, const KeyRows& values, int64_t first_key, int64_t b, int64_t h,
                          const BackwardScratch& scratch) {
  const WindowAttentionArgs& forward = args.forward;
  const Window window(forward);
  const int64_t stride_qk = keys.stride(), stride_v = values.stride();
  load_tile(forward, tile, forward.q, forward.dim_qk, true, forward.scale * kLog2E, b, h, scratch.query_rows,
            scratch.queries);
  load_tile(forward, tile, args.grad_out, forward.dim_v, false, 1.0f, b, h, scratch.grad_out_rows, scratch.grad_outs);
  const TileStatistics statistics(args, tile, scratch.grad_out_rows, stride_v, b, h);
  std::memset(scratch.grad_q, 0, kBackwardTile * stride_qk * sizeof(float));

  ScoreTransform<kBackwardVectors> transform(forward, tile, b, h, scratch.transform);
  Prefetcher prefetcher;
  const int64_t steps = 2 * tile.steps(), next = tile.begin + kBackwardTile;
  const int64_t next_end = min_of(next + kBackwardTile, forward.len_q);
  keys.prefetch_next(kBackwardTile, steps, prefetcher);
  values.prefetch_next(kBackwardTile, steps, prefetcher);
  prefetcher.add(forward.q, forward.dim_qk, b, h, next, next_end, steps, false);
  prefetcher.add(forward.out, forward.dim_v, b, h, next, next_end, steps, false);
  prefetcher.add(args.grad_out, forward.dim_v, b, h, next, next_end, steps, false);
  prefetcher.add(args.grad_q, forward.dim_qk, b, h, tile.begin, tile.begin + tile.count, steps, true);

  const int64_t block = tile.block_keys();
  for (int64_t begin = tile.first_key(); begin < tile.end_key(); begin += block) {
    const int64_t end = min_of(begin + block, tile.end_key());
    const ScoreMask<kBackwardVectors> mask(tile, begin, end);
    const auto keep = [](int, ScoreColumn&) __attribute__((always_inline)) {};
    transformed_scores(tile, keys, scratch.queries, forward.dim_qk, begin, end, scratch.weights, prefetcher, mask,
                       transform, keep);
    score_block(
        tile, values, scratch.grad_outs, forward.dim_v, begin, end, scratch.grad_scores, prefetcher, mask,
        [](int64_t, int, ScoreColumn&) __attribute__((always_inline)) {}, keep);
    if (transform.is_identity()) {
      grad_softmax_block(tile, statistics, begin, end, scratch.weights, scratch.grad_scores);
    } else {
      float* grad_bias = args.grad_bias == nullptr ? nullptr : scratch.grad_bias;
      grad_transform_block(tile, statistics, transform, begin, end, scratch.weights, scratch.grad_scores, grad_bias);
      if (grad_bias != nullptr) store_grad_bias(args, tile, b, h, begin, end, grad_bias);
    }
    sum_over_queries(window, tile, scratch.weights, scratch.grad_out_rows, stride_v, begin, end,
                     scratch.grad_v + (begin - first_key) * stride_v);
    sum_over_queries(window, tile, scratch.grad_scores, scratch.query_rows, stride_qk, begin, end,
                     scratch.grad_k + (begin - first_key) * stride_qk);
    sum_over_keys<true>(tile, keys, begin, end, scratch.grad_scores, scratch.grad_q);
  }
  for (int r = 0; r < tile.count; ++r) {
    float* row = scratch.grad_q + r * stride_qk;
    rotate(forward, row, row, b, tile.begin + r + forward.query_offset, -1.0f);
    store_row(args.grad_q.element, row, forward.scale, forward.dim_qk, row_address(args.grad_q, b, h, tile.begin + r),
              args.grad_q.stride[3]);
  }
}

// Writes the summed gradients of key j and its value. The rows of q carried scale * log2(e): log2(e) is taken out.
inline void store_key_gradients(const WindowAttentionBackwardArgs& args, float* grad_k, const float* grad_v, int64_t b,
                                int64_t h, int64_t j) {
  const WindowAttentionArgs& forward = args.forward;
  rotate(forward, grad_k, grad_k, b, j, -1.0f);
  store_row(args.grad_k.element, grad_k, kLn2, forward.dim_qk, row_address(args.grad_k, b, h, j),
            args.grad_k.stride[3]);
  store_row(args.grad_v.element, grad_v, 1.0f, forward.dim_v, row_address(args.grad_v, b, h, j), args.grad_v.stride[3]);
}

inline WindowAttentionPlan plan_backward(const WindowAttentionArgs& args) {
  const BackwardShape shape(args);
  Carver carver(nullptr);
  BackwardScratch scratch(shape, args, carver);
  carver.floats(shape.keys * shape.stride_qk);
  carver.floats(shape.keys * shape.stride_v);
  const int64_t heads = args.batch * args.heads_kv, tasks = heads * shape.chunks;
  return {tasks, carver.used(), heads * ((args.len_k + kMergeRows - 1) / kMergeRows),
          tasks * shape.shared_floats() * int64_t{sizeof(float)}};
}

inline void run_backward(const WindowAttentionBackwardArgs& args, int64_t task, void* memory) {
  const WindowAttentionArgs& forward = args.forward;
  const BackwardShape shape(forward);
  const int64_t head = task / shape.chunks, b = head / forward.heads_kv, h_kv = head % forward.heads_kv;
  const int64_t c = task % shape.chunks, begin = c * shape.chunk, end = min_of(begin + shape.chunk, forward.len_q);
  const int64_t group = forward.heads_q / forward.heads_kv;
  const ChunkKeys range(forward, shape.chunk, c);
  const int64_t count = range.end - range.begin;

  Carver carver(memory);
  const BackwardScratch scratch(shape, forward, carver);
  const Window window(forward);
  KeyRows keys(forward, forward.k, forward.dim_qk, true, b, h_kv, range.begin, count, carver);
  KeyRows values(forward, forward.v, forward.dim_v, false, b, h_kv, range.begin, count, carver);
  std::memset(scratch.grad_k, 0, count * shape.stride_qk * sizeof(float));
  std::memset(scratch.grad_v, 0, count * shape.stride_v * sizeof(float));
  float* shared_k = args.shared + task * shape.shared_floats();
  float* shared_v = shared_k + shape.shared_rows * shape.stride_qk;
  int64_t stored = range.begin;
  const auto store_to = [&](int64_t key_end) {
    for (; stored < key_end; ++stored) {
      float* grad_k = scratch.grad_k + (stored - range.begin) * shape.stride_qk;
      float* grad_v = scratch.grad_v + (stored - range.begin) * shape.stride_v;
      if (stored >= range.own_begin && stored < range.own_end) {
        store_key_gradients(args, grad_k, grad_v, b, h_kv, stored);
      } else {
        const int64_t row = range.shared_row(stored);
        std::memcpy(shared_k + row * shape.stride_qk, grad_k, shape.stride_qk * sizeof(float));
        std::memcpy(shared_v + row * shape.stride_v, grad_v, shape.stride_v * sizeof(float));
      }
    }
  };
  const int64_t last_head = (h_kv + 1) * group - 1;
  for (int64_t h = h_kv * group; h <= last_head; ++h) {
    for (int64_t i = begin; i < end; i += kBackwardTile) {
      const QueryTile<kBackwardVectors> tile(window, i, end);
      keys.fill_to(tile.end_key());
      values.fill_to(tile.end_key());
      backward_tile(args, tile, keys, values, range.begin, b, h, scratch);
      // The keys that the window leaves behind are complete, and still in cache.
      if (h == last_head) store_to(i + kBackwardTile < end ? window.first_key(i + kBackwardTile) : range.end);
    }
  }
}

// Sums the parts of the keys that several chunks see, and writes zeros for those that nobody sees.
inline void run_merge(const WindowAttentionBackwardArgs& args, int64_t task, void*) {
  const WindowAttentionArgs& forward = args.forward;
  const BackwardShape shape(forward);
  const Window window(forward);
  const int64_t blocks = (forward.len_k + kMergeRows - 1) / kMergeRows, head = task / blocks;
  const int64_t b = head / forward.heads_kv, h = head % forward.heads_kv;
  const int64_t begin = task % blocks * kMergeRows, end = min_of(begin + kMergeRows, forward.len_k);
  float grad_k[256 + kLanes], grad_v[256 + kLanes];
  for (int64_t j = begin; j < end; ++j) {
    const int64_t first = window.first_query(j, 0, forward.len_q), last = window.end_query(j, 0, forward.len_q) - 1;
    const int64_t first_chunk = first / shape.chunk, last_chunk = last / shape.chunk;
    if (first <= last && first_chunk == last_chunk) continue;
    std::memset(grad_k, 0, sizeof(grad_k));
    std::memset(grad_v, 0, sizeof(grad_v));
    for (int64_t c = first_chunk; first <= last && c <= last_chunk; ++c) {
      const int64_t row = ChunkKeys(forward, shape.chunk, c).shared_row(j);
      const float* shared_k = args.shared + (head * shape.chunks + c) * shape.shared_floats();
      const float* shared_v = shared_k + shape.shared_rows * shape.stride_qk;
      for (int64_t d = 0; d < shape.stride_qk; ++d) grad_k[d] += shared_k[row * shape.stride_qk + d];
      for (int64_t d = 0; d < shape.stride_v; ++d) grad_v[d] += shared_v[row * shape.stride_v + d];
    }
    store_key_gradients(args, grad_k, grad_v, b, h, j);
  }
}

}  // namespace
}  // namespace dskernels
