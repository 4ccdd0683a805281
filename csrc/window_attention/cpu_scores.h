// What changes a tile's scores between the product and the softmax: the tanh cap, then the bias.
#pragma once

#include "window_attention/cpu_tile.h"

namespace dskernels {
namespace {

// tanh to 3 units in the last place: near 0 an odd polynomial (fitted by us on [-1/2, 1/2], relative error 1.5e-8),
// beyond it (1 - t) / (1 + t) with t = exp(-2 |x|), which loses no digits there.
DSKERNELS_INLINE VecF vtanh(VecF x) {
  const VecF magnitude = x < VecF{} ? -x : x;
  const VecF t = exp2_nonpositive(magnitude * (-2.0f * kLog2E));
  const VecF far = (1.0f - t) / (1.0f + t);
  const VecF square = x * x;
  VecF p = broadcast(0.017241491f);
  p = p * square - 0.053045493f;
  p = p * square + 0.13325879f;
  p = p * square - 0.33333144f;
  const VecF near = x + x * square * p;
  return magnitude < broadcast(0.5f) ? near : (x < VecF{} ? -far : far);
}

// Scores are in base 2 (times log2(e)) throughout, so cap and bias are brought there.
template <int kVectors>
class ScoreTransform {
 public:
  static constexpr int kTile = kVectors * kLanes;

  static int64_t scratch_floats(const WindowAttentionArgs& args) {
    return args.bias.data == nullptr ? 0 : 2 * (kBlockKeys + kLanes) * kTile;
  }

  ScoreTransform(const WindowAttentionArgs& args, const QueryTile<kVectors>& tile, int64_t b, int64_t h, float* scratch)
      : args_(args), tile_(tile), batch_(b), head_(h), cap_(args.softcap * kLog2E), scratch_(scratch) {}

  bool is_identity() const { return args_.softcap == 0.0f && args_.bias.data == nullptr; }

  // Brings the biases of the block's pairs in, transposed as the scores are.
  void begin_block(int64_t begin, int64_t end) {
    begin_ = begin;
    if (args_.bias.data == nullptr) return;
    const int64_t stride = round_up(end - begin, kLanes);
    for (int r = 0; r < kTile; ++r) {
      float* row = rows() + r * stride;
      for (int64_t j = 0; j < stride; ++j) row[j] = 0.0f;
      if (r >= tile_.count) continue;
      // Only what the query sees is read: the rest of the bias may hold anything.
      const int64_t first = clamp_to(tile_.low[r], begin, end), last = clamp_to(tile_.high[r], begin, end);
      const char* from = row_address(args_.bias, batch_, head_, tile_.begin + r) +
                         first * args_.bias.stride[3] * size_of(args_.bias.element);
      load_row(args_.bias.element, from, args_.bias.stride[3], last - first, row + first - begin);
    }
    transpose_tile<kTile>(rows(), stride, stride, biases());
    for (int64_t i = 0; i < stride * kTile; i += kLanes) store(biases() + i, kLog2E * load(biases() + i));
  }

  // The scores of one vector of queries and kScoreKeys keys from j on.
  DSKERNELS_INLINE void apply(int64_t j, int v, ScoreColumn& scores) const {
    DSKERNELS_UNROLL
    for (int m = 0; m < kScoreKeys; ++m) {
      if (cap_ != 0.0f) scores[m] = cap_ * vtanh(scores[m] / cap_);
      if (args_.bias.data != nullptr) scores[m] += bias(j + m, v);
    }
  }

  // d transformed / d score, from the transformed score.
  DSKERNELS_INLINE VecF slope(int64_t j, int v, VecF transformed) const {
    if (cap_ == 0.0f) return broadcast(1.0f);
    const VecF ratio = (args_.bias.data == nullptr ? transformed : transformed - bias(j, v)) / cap_;
    return 1.0f - ratio * ratio;
  }

 private:
  // Groups of keys run past the end of a block by less than kScoreKeys.
  float* biases() const { return scratch_; }
  float* rows() const { return scratch_ + (kBlockKeys + kLanes) * kTile; }
  DSKERNELS_INLINE VecF bias(int64_t j, int v) const { return load(biases() + (j - begin_) * kTile + v * kLanes); }

  const WindowAttentionArgs& args_;
  const QueryTile<kVectors>& tile_;
  int64_t batch_, head_, begin_ = 0;
  float cap_;
  float* scratch_;
};

// score_block for the scores proper; without cap and bias nothing is left of the transform but this one branch.
template <int kVectors, class Take>
inline void transformed_scores(const QueryTile<kVectors>& tile, const KeyRows& keys, const float* queries, int64_t dim,
                               int64_t begin, int64_t end, float* out, Prefetcher& prefetcher,
                               const ScoreMask<kVectors>& mask, ScoreTransform<kVectors>& transform, const Take& take) {
  if (transform.is_identity()) {
    score_block(
        tile, keys, queries, dim, begin, end, out, prefetcher, mask,
        [](int64_t, int, ScoreColumn&) __attribute__((always_inline)) {}, take);
    return;
  }
  transform.begin_block(begin, end);
  score_block(
      tile, keys, queries, dim, begin, end, out, prefetcher, mask,
      [&](int64_t j, int v, ScoreColumn& scores) __attribute__((always_inline)) { transform.apply(j, v, scores); },
      take);
}

}  // namespace
}  // namespace dskernels
