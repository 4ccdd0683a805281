// Backward: for each cell and head, per tile of queries,
//   P = softmax(S), dP = grad_out V^T, dS = P (dP - delta), delta = rowsum(P dP),
//   grad_v += P^T grad_out, grad_k += dS^T q, grad_q = dS k,
// with q and k as they enter the products. A window's scores are all there at once, so P is made again from them, and
// neither out nor sums are kept from the forward. Every token lies in one cell: its gradients are written once.
//
// The gradients of the bias and of logit_scale sum over cells, in a fixed order: within a kind of cell in a table, then
// in the task's part of `shared`, then over the parts.
#pragma once

#include "swin_attention/cpu_forward.h"

namespace dskernels {
namespace {

constexpr int64_t kBackwardCells = 6, kBackwardMostTasks = 128;

// weights <- P and grad_weights <- dS, from scores and dP; dS is also added to `table` unless that is null.
DSKERNELS_NOINLINE void softmax_backward(int64_t keys, int vectors, float* weights, float* grad_weights, float* table,
                                         Softmax& softmax) {
  for (int v = 0; v < vectors; ++v) {
    const VecF subtracted = softmax.subtracted(v);
    VecF sums[2] = {}, products[2] = {};
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * kTile + v * kLanes;
      const VecF weight = Softmax::weight(load(weights + at), subtracted);
      store(weights + at, weight);
      sums[j & 1] += weight;
      products[j & 1] += weight * load(grad_weights + at);
    }
    softmax.set_sum(v, sums[0] + sums[1]);
    const VecF inverse = load(softmax.inverse + v * kLanes), delta = inverse * (products[0] + products[1]);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * kTile + v * kLanes;
      const VecF weight = inverse * load(weights + at), grad = weight * (load(grad_weights + at) - delta);
      store(weights + at, weight);
      store(grad_weights + at, grad);
      if (table != nullptr) store(table + at, load(table + at) + grad);
    }
  }
}

// Floats of a head in a task's part of `shared`: the gradients of its bias, then of its logit_scale.
inline int64_t shared_floats(const SwinAttentionBackwardArgs& args) {
  const int64_t tokens = args.forward.window_height * args.forward.window_width;
  return (args.grad_bias == nullptr ? 0 : tokens * tokens) + (args.grad_logit_scale == nullptr ? 0 : 1);
}

class BackwardTask {
 public:
  BackwardTask(const SwinAttentionBackwardArgs& args, int64_t first_head, int64_t heads, float* shared, Carver& carver)
      : args_(args),
        forward_(args.forward),
        first_head_(first_head),
        heads_(heads),
        shared_(shared),
        q_(forward_, carver),
        k_(forward_, carver),
        v_(forward_, carver),
        grad_out_(forward_, carver),
        grad_q_(forward_, carver),
        grad_k_(forward_, carver),
        grad_v_(forward_, carver) {
    const int64_t tokens = forward_.window_height * forward_.window_width;
    queries_ = carver.floats(forward_.dim * kTile);
    grad_outs_ = carver.floats(forward_.dim * kTile);
    weights_ = carver.floats(tokens * kTile);
    grad_weights_ = carver.floats(tokens * kTile);
    norms_q_ = carver.floats(tokens);
    norms_k_ = carver.floats(tokens);
    factors_ = carver.floats(tokens);
    ones_ = carver.floats(tokens);
    rows_ = carver.floats(tokens * kTile);
    biases_ = carver.floats(forward_.bias == nullptr ? 0 : heads * table_floats(forward_));
    grad_logit_scales_ = carver.part<double>(heads);
    grad_biases_ = carver.floats(args.grad_bias == nullptr ? 0 : heads * table_floats(forward_));
  }

  void begin() {
    for (int64_t i = 0; i < heads_ * shared_floats(args_); ++i) shared_[i] = 0.0f;
    for (int64_t h = 0; h < heads_; ++h) grad_logit_scales_[h] = 0.0;
    for (int64_t i = 0; i < forward_.window_height * forward_.window_width; ++i) ones_[i] = 1.0f;
  }

  // Leaves the sums in the task's part.
  void end() {
    end_kind();
    for (int64_t h = 0; args_.grad_logit_scale != nullptr && h < heads_; ++h) {
      shared_[(h + 1) * shared_floats(args_) - 1] = static_cast<float>(grad_logit_scales_[h]);
    }
  }

  void begin_kind(const Cell& cell) {
    end_kind();
    places_.find(forward_, cell);
    for (int64_t h = 0; forward_.bias != nullptr && h < heads_; ++h) {
      load_bias(forward_, places_, first_head_ + h, rows_, biases_ + h * table_floats(forward_));
    }
    if (args_.grad_bias != nullptr) {
      std::memset(grad_biases_, 0, heads_ * table_floats(forward_) * sizeof(float));
    }
  }

  // Head h of the cell whose tokens lie at tokens[0] in qkv, at tokens[1] in grad_out and at tokens[2] in grad_qkv.
  void run_head(const Tokens* tokens, int64_t h, const Coming& coming) {
    const int64_t dim = forward_.dim, channels = forward_.heads * dim, channel = (first_head_ + h) * dim;
    const Embedding embedding(forward_, first_head_ + h, places_);
    Prefetcher prefetcher;
    if (coming.tokens != nullptr) {
      const int64_t next = (first_head_ + coming.head) * dim;
      for (int part = 0; part < 3; ++part) {
        prefetcher.add(coming.tokens[0], part * channels + next, dim, false);
        prefetcher.add(coming.tokens[2], part * channels + next, dim, true);
      }
      prefetcher.add(coming.tokens[1], next, dim, false);
    }
    load(tokens, embedding, channel, channels);
    for (int64_t begin = 0; begin < places_.count; begin += kTile) run_tile(h, begin, embedding, prefetcher);
    if (!embedding.is_identity()) {
      grad_logit_scales_[h] += embedding.apply_backward(q_, tokens[0], channel, norms_q_, grad_q_.rows());
      embedding.apply_backward(k_, tokens[0], channels + channel, norms_k_, grad_k_.rows());
    }
    grad_q_.finish(tokens[2], channel, dim);
    grad_k_.finish(tokens[2], channels + channel, dim);
    grad_v_.finish(tokens[2], 2 * channels + channel, dim);
  }

 private:
  // Adds what the kind of cell so far has summed to the task's part.
  void end_kind() {
    for (int64_t h = 0; args_.grad_bias != nullptr && h < heads_; ++h) {
      flush_grad_bias(forward_, places_, grad_biases_ + h * table_floats(forward_), rows_,
                      shared_ + h * shared_floats(args_));
    }
  }

  void load(const Tokens* tokens, const Embedding& embedding, int64_t channel, int64_t channels) {
    const Tokens &image = tokens[0], &result = tokens[1], &gradient = tokens[2];
    const int64_t dim = forward_.dim;
    const bool identity = embedding.is_identity(), in_place = image.in_place(dim);
    q_.load(image, channel, dim, in_place && identity);
    k_.load(image, channels + channel, dim, in_place && identity);
    v_.load(image, 2 * channels + channel, dim, in_place);
    grad_out_.load(result, channel, dim, result.in_place(dim));
    if (!identity) {
      embedding.apply(q_, norms_q_);
      embedding.apply(k_, norms_k_);
    }
    // Sums over several tiles of queries are kept in scratch.
    const bool direct = gradient.in_place(dim), one_tile = places_.count <= kTile;
    grad_q_.begin(gradient, channel, direct && identity);
    grad_k_.begin(gradient, channels + channel, direct && identity && one_tile);
    grad_v_.begin(gradient, 2 * channels + channel, direct && one_tile);
    // With cosine attention the factor comes in when the normalization is taken back.
    for (int64_t i = 0; i < places_.count; ++i) {
      factors_[i] = forward_.logit_scale == nullptr ? embedding.factor() : 1.0f;
    }
  }

  void run_tile(int64_t h, int64_t begin, const Embedding& embedding, Prefetcher& prefetcher) {
    const int64_t dim = forward_.dim, keys = places_.count, queries = min_of(int64_t{kTile}, keys - begin);
    const int vectors = tile_vectors(queries), dim_vectors = tile_vectors(dim);
    const int64_t table = h * table_floats(forward_) + begin * keys;
    transpose_rows(q_.rows() + begin, queries, dim, embedding.factor(), queries_);
    transpose_rows(grad_out_.rows() + begin, queries, dim, 1.0f, grad_outs_);
    scores(k_.rows(), keys, queries_, dim, vectors, forward_.bias == nullptr ? nullptr : biases_ + table, weights_,
           softmax_.maximum, prefetcher);
    VecF unused[kTile / kLanes];
    scores(v_.rows(), keys, grad_outs_, dim, vectors, nullptr, grad_weights_, unused, prefetcher);
    softmax_backward(keys, vectors, weights_, grad_weights_,
                     args_.grad_bias == nullptr ? nullptr : grad_biases_ + table, softmax_);
    sum_rows<kTile, 1>(weights_, keys, grad_out_.rows() + begin, queries, dim_vectors, grad_v_.rows(), ones_, begin > 0,
                       prefetcher);
    sum_rows<kTile, 1>(grad_weights_, keys, q_.rows() + begin, queries, dim_vectors, grad_k_.rows(), factors_,
                       begin > 0, prefetcher);
    sum_rows<1, kTile>(grad_weights_, queries, k_.rows(), keys, dim_vectors, grad_q_.rows() + begin, factors_, false,
                       prefetcher);
  }

  const SwinAttentionBackwardArgs& args_;
  const SwinAttentionArgs& forward_;
  int64_t first_head_, heads_;
  float* shared_;
  Places places_;
  Rows q_, k_, v_, grad_out_;
  Results grad_q_, grad_k_, grad_v_;
  Softmax softmax_;
  float *queries_, *grad_outs_, *weights_, *grad_weights_, *norms_q_, *norms_k_, *factors_, *ones_, *rows_, *biases_,
      *grad_biases_;
  double* grad_logit_scales_;
};

inline Division divide_backward(const SwinAttentionBackwardArgs& args, const Grid& grid) {
  const int64_t tables = (args.forward.bias == nullptr ? 0 : 1) + (args.grad_bias == nullptr ? 0 : 1);
  return Division(args.forward, grid, tables * table_floats(args.forward), kBackwardCells, kBackwardMostTasks);
}

inline SwinAttentionPlan plan_backward(const SwinAttentionBackwardArgs& args) {
  const Division division = divide_backward(args, Grid(args.forward));
  const int64_t heads = division.most_heads(args.forward), shared = division.tasks() * heads * shared_floats(args);
  Carver carver(nullptr);
  BackwardTask(args, 0, heads, nullptr, carver);
  return {division.tasks(), carver.used(), shared, shared > 0 ? args.forward.heads : 0};
}

inline void run_backward(const SwinAttentionBackwardArgs& args, int64_t task, void* scratch) {
  const Grid grid(args.forward);
  const Division division = divide_backward(args, grid);
  const Share share(args.forward, grid, division, task);
  float* shared = args.shared + task * division.most_heads(args.forward) * shared_floats(args);
  Carver carver(scratch);
  BackwardTask backward(args, share.head_begin, share.heads(), shared, carver);
  backward.begin();
  const View4 views[] = {args.forward.qkv, args.grad_out, args.grad_qkv};
  walk(
      grid, share, views, [&](const Cell& cell) { backward.begin_kind(cell); },
      [&](const Tokens* tokens, int64_t h, const Coming& coming) { backward.run_head(tokens, h, coming); });
  backward.end();
}

// Sums the parts of head h, in the order of the tasks.
inline void merge_backward(const SwinAttentionBackwardArgs& args, int64_t h) {
  const SwinAttentionArgs& forward = args.forward;
  const Grid grid(forward);
  const Division division = divide_backward(args, grid);
  const int64_t tokens = forward.window_height * forward.window_width, floats = shared_floats(args);
  int64_t group = 0;
  while (h >= forward.heads * (group + 1) / division.groups) ++group;
  float* grad_bias = args.grad_bias == nullptr ? nullptr : args.grad_bias + h * tokens * tokens;
  if (grad_bias != nullptr) std::memset(grad_bias, 0, tokens * tokens * sizeof(float));
  double grad_logit_scale = 0.0;
  for (int64_t chunk = 0; chunk < division.chunks; ++chunk) {
    const int64_t task = group * division.chunks + chunk;
    const Share share(forward, grid, division, task);
    const float* part = args.shared + (task * division.most_heads(forward) + h - share.head_begin) * floats;
    for (int64_t i = 0; grad_bias != nullptr && i < tokens * tokens; ++i) grad_bias[i] += part[i];
    if (args.grad_logit_scale != nullptr) grad_logit_scale += part[floats - 1];
  }
  if (args.grad_logit_scale != nullptr) args.grad_logit_scale[h] = static_cast<float>(grad_logit_scale);
}

}  // namespace
}  // namespace dskernels
