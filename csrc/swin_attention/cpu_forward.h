// Forward: for each cell and head, per tile of queries, scores -> maximum -> exp and sum -> weighted sum of values.
#pragma once

#include "swin_attention/cpu_tables.h"

namespace dskernels {
namespace {

constexpr int64_t kForwardCells = 4, kForwardMostTasks = 1024;

// The softmax of a tile, a vector of queries in each.
struct Softmax {
  VecF maximum[kTile / kLanes];
  float inverse[kTile];  // 1 / sum, and 0 where there is no weight

  // exp(score - maximum). The maximum is taken away before the change of base, which keeps the digits of scores that
  // are large and near each other.
  static DSKERNELS_INLINE VecF weight(VecF score, VecF maximum) { return exp2_nonpositive((score - maximum) * kLog2E); }

  // What is subtracted in place of a maximum of -inf: -inf - -inf would be NaN.
  DSKERNELS_INLINE VecF subtracted(int v) const { return maximum[v] == broadcast(-kInfinity) ? VecF{} : maximum[v]; }

  DSKERNELS_INLINE void set_sum(int v, VecF sum) { store(inverse + v * kLanes, sum == VecF{} ? VecF{} : 1.0f / sum); }
};

// Replaces scores by weights that are yet to be divided by their sum.
DSKERNELS_NOINLINE void exponentiate(int64_t keys, int vectors, float* scores, Softmax& softmax) {
  for (int v = 0; v < vectors; ++v) {
    const VecF subtracted = softmax.subtracted(v);
    VecF sums[4] = {};
    float* row = scores + v * kLanes;
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4, row += 4 * kTile) {
      DSKERNELS_UNROLL
      for (int u = 0; u < 4; ++u) {
        const VecF weight = Softmax::weight(load(row + u * kTile), subtracted);
        store(row + u * kTile, weight);
        sums[u] += weight;
      }
    }
    for (; j < keys; ++j, row += kTile) {
      const VecF weight = Softmax::weight(load(row), subtracted);
      store(row, weight);
      sums[0] += weight;
    }
    softmax.set_sum(v, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

// What a task holds: the rows of one head of one cell, and the tables of its heads for one kind of cell.
class ForwardTask {
 public:
  ForwardTask(const SwinAttentionArgs& args, int64_t first_head, int64_t heads, Carver& carver)
      : args_(args),
        first_head_(first_head),
        heads_(heads),
        q_(args, carver),
        k_(args, carver),
        v_(args, carver),
        out_(args, carver) {
    const int64_t tokens = args.window_height * args.window_width;
    queries_ = carver.floats(args.dim * kTile);
    scores_ = carver.floats(tokens * kTile);
    norms_ = carver.floats(tokens);
    bias_rows_ = carver.floats(args.bias == nullptr ? 0 : tokens * kTile);
    biases_ = carver.floats(args.bias == nullptr ? 0 : heads * table_floats(args));
  }

  void begin_kind(const Cell& cell) {
    places_.find(args_, cell);
    for (int64_t h = 0; args_.bias != nullptr && h < heads_; ++h) {
      load_bias(args_, places_, first_head_ + h, bias_rows_, biases_ + h * table_floats(args_));
    }
  }

  // Head h of the cell whose tokens lie at tokens[0] in qkv and at tokens[1] in out.
  void run_head(const Tokens* tokens, int64_t h, const Coming& coming) {
    const Tokens &image = tokens[0], &result = tokens[1];
    const int64_t channels = args_.heads * args_.dim, channel = (first_head_ + h) * args_.dim, count = places_.count;
    Prefetcher prefetcher;
    if (coming.tokens != nullptr) {
      const int64_t next = (first_head_ + coming.head) * args_.dim;
      for (int part = 0; part < 3; ++part) prefetcher.add(coming.tokens[0], part * channels + next, args_.dim, false);
      prefetcher.add(coming.tokens[1], next, args_.dim, true);
    }
    const Embedding embedding(args_, first_head_ + h, places_);
    const bool in_place = image.in_place(args_.dim);
    q_.load(image, channel, args_.dim, in_place && embedding.is_identity());
    k_.load(image, channels + channel, args_.dim, in_place && embedding.is_identity());
    v_.load(image, 2 * channels + channel, args_.dim, in_place);
    if (!embedding.is_identity()) {
      embedding.apply(q_, norms_);
      embedding.apply(k_, norms_);
    }
    out_.begin(result, channel, result.in_place(args_.dim));
    for (int64_t begin = 0; begin < count; begin += kTile) {
      const int64_t queries = min_of(int64_t{kTile}, count - begin);
      const int vectors = tile_vectors(queries);
      const float* bias = args_.bias == nullptr ? nullptr : biases_ + h * table_floats(args_) + begin * count;
      transpose_rows(q_.rows() + begin, queries, args_.dim, embedding.factor(), queries_);
      scores(k_.rows(), count, queries_, args_.dim, vectors, bias, scores_, softmax_.maximum, prefetcher);
      exponentiate(count, vectors, scores_, softmax_);
      sum_rows<1, kTile>(scores_, queries, v_.rows(), count, tile_vectors(args_.dim), out_.rows() + begin,
                         softmax_.inverse, false, prefetcher);
    }
    out_.finish(result, channel, args_.dim);
  }

 private:
  const SwinAttentionArgs& args_;
  int64_t first_head_, heads_;
  Places places_;
  Rows q_, k_, v_;
  Results out_;
  Softmax softmax_;
  float *queries_, *scores_, *norms_, *bias_rows_, *biases_;
};

inline Division divide_forward(const SwinAttentionArgs& args, const Grid& grid) {
  return Division(args, grid, args.bias == nullptr ? 0 : table_floats(args), kForwardCells, kForwardMostTasks);
}

inline SwinAttentionPlan plan_forward(const SwinAttentionArgs& args) {
  const Division division = divide_forward(args, Grid(args));
  Carver carver(nullptr);
  ForwardTask(args, 0, division.most_heads(args), carver);
  return {division.tasks(), carver.used(), 0, 0};
}

inline void run_forward(const SwinAttentionArgs& args, int64_t task, void* scratch) {
  const Grid grid(args);
  const Share share(args, grid, divide_forward(args, grid), task);
  Carver carver(scratch);
  ForwardTask forward(args, share.head_begin, share.heads(), carver);
  const View4 views[] = {args.qkv, args.out};
  walk(
      grid, share, views, [&](const Cell& cell) { forward.begin_kind(cell); },
      [&](const Tokens* tokens, int64_t h, const Coming& coming) { forward.run_head(tokens, h, coming); });
}

}  // namespace
}  // namespace dskernels
