// How the tokens of a cell come into the products and go back into the image: row by row, in place where that can be.
#pragma once

#include "common/carver.h"
#include "common/rope.h"
#include "common/rows.h"
#include "swin_attention/cpu_grid.h"
#include "swin_attention/cpu_tile.h"

namespace dskernels {
namespace {

// Where the tokens of a cell lie in a [batch, height, width, channels] tensor.
class Tokens {
 public:
  void find(const View4& view, const Cell& cell) {
    view_ = view;
    count_ = cell.tokens();
    const int64_t size = size_of(view.element);
    char* corner = static_cast<char*>(view.data) +
                   (cell.batch * view.stride[0] + cell.y * view.stride[1] + cell.x * view.stride[2]) * size;
    for (int64_t i = 0, y = 0; y < cell.height; ++y) {
      for (int64_t x = 0; x < cell.width; ++x)
        address_[i++] = corner + (y * view.stride[1] + x * view.stride[2]) * size;
    }
  }

  int64_t count() const { return count_; }

  // Whether rows of `dim` channels can be read as whole vectors of floats where they lie.
  bool in_place(int64_t dim) const {
    return view_.element == Element::kFloat32 && view_.stride[3] == 1 && dim % kLanes == 0;
  }

  char* row(int64_t i, int64_t channel) const {
    return address_[i] + channel * view_.stride[3] * size_of(view_.element);
  }

  // Row i from `channel` on, padded with zeros to whole vectors.
  void load(int64_t i, int64_t channel, int64_t dim, float* to) const {
    load_row(view_.element, row(i, channel), view_.stride[3], dim, to);
    for (int64_t d = dim; d < round_up(dim, kLanes); ++d) to[d] = 0.0f;
  }

  void store(int64_t i, int64_t channel, int64_t dim, const float* from) const {
    store_row(view_.element, from, 1.0f, dim, row(i, channel), view_.stride[3]);
  }

 private:
  View4 view_;
  int64_t count_;
  char* address_[kMostTokens];
};

// Rows of floats to read: those of one head of a cell, in place or in scratch.
class Rows {
 public:
  Rows(const SwinAttentionArgs& args, Carver& carver)
      : stride_(round_up(args.dim, kLanes)),
        scratch_(carver.floats(args.window_height * args.window_width * stride_)) {}

  void load(const Tokens& tokens, int64_t channel, int64_t dim, bool in_place) {
    for (int64_t i = 0; i < tokens.count(); ++i) {
      row_[i] = in_place ? reinterpret_cast<const float*>(tokens.row(i, channel)) : scratch_ + i * stride_;
    }
    for (int64_t i = 0; !in_place && i < tokens.count(); ++i) tokens.load(i, channel, dim, own(i));
  }

  const float* const* rows() const { return row_; }
  float* own(int64_t i) const { return scratch_ + i * stride_; }

 private:
  int64_t stride_;
  float* scratch_;
  const float* row_[kMostTokens];
};

// Rows of floats to write, which may be the image itself.
class Results {
 public:
  Results(const SwinAttentionArgs& args, Carver& carver)
      : stride_(round_up(args.dim, kLanes)),
        scratch_(carver.floats(args.window_height * args.window_width * stride_)) {}

  void begin(const Tokens& tokens, int64_t channel, bool in_place) {
    in_place_ = in_place;
    for (int64_t i = 0; i < tokens.count(); ++i) {
      row_[i] = in_place ? reinterpret_cast<float*>(tokens.row(i, channel)) : scratch_ + i * stride_;
    }
  }

  void finish(const Tokens& tokens, int64_t channel, int64_t dim) const {
    for (int64_t i = 0; !in_place_ && i < tokens.count(); ++i) tokens.store(i, channel, dim, row_[i]);
  }

  float* const* rows() const { return row_; }

 private:
  int64_t stride_;
  float* scratch_;
  bool in_place_;
  float* row_[kMostTokens];
};

// The places in their window of the tokens of a kind of cell.
struct Places {
  int64_t count;
  int32_t place[kMostTokens];

  Places() : count(0) {}

  void find(const SwinAttentionArgs& args, const Cell& cell) {
    count = 0;
    for (int64_t y = 0; y < cell.height; ++y) {
      for (int64_t x = 0; x < cell.width; ++x) {
        place[count++] = static_cast<int32_t>((cell.place_y + y) * args.window_width + cell.place_x + x);
      }
    }
  }

  bool whole(const SwinAttentionArgs& args) const { return count == args.window_height * args.window_width; }
};

// What torch.nn.functional.normalize divides by at least.
constexpr float kSmallestNorm = 1e-12f;

inline float dot(const float* a, const float* b, int64_t stride) {
  VecF sums{};
  for (int64_t d = 0; d < stride; d += kLanes) sums += load(a + d) * load(b + d);
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  return sum;
}

// Queries or keys of a head as they enter the scores: of length 1 with cosine attention, then rotated.
class Embedding {
 public:
  Embedding(const SwinAttentionArgs& args, int64_t head, const Places& places)
      : args_(args),
        places_(places),
        table_(head * args.table_stride),
        stride_(round_up(args.dim, kLanes)),
        factor_(args.logit_scale == nullptr ? args.scale : args.logit_scale[head]) {}

  // Of the products of queries and keys.
  float factor() const { return factor_; }

  bool is_identity() const { return args_.logit_scale == nullptr && args_.rotary_dim == 0; }

  // In place in the scratch of `rows`; the lengths go to `norms`.
  void apply(const Rows& rows, float* norms) const {
    for (int64_t i = 0; i < places_.count; ++i) {
      float* row = rows.own(i);
      if (args_.logit_scale != nullptr) {
        norms[i] = max_of(__builtin_sqrtf(dot(row, row, stride_)), kSmallestNorm);
        for (int64_t d = 0; d < stride_; d += kLanes) store(row + d, load(row + d) / norms[i]);
      }
      rotate(row, i, 1.0f);
    }
  }

  // Takes the gradients of rows as they entered the products, which `rows` still holds, back to those of the rows as
  // they were, in place. Returns the sum of their products with the rows.
  float apply_backward(const Rows& rows, const float* norms, float* const* grads) const {
    float sum = 0.0f;
    for (int64_t i = 0; i < places_.count; ++i) {
      float* grad = grads[i];
      if (args_.logit_scale != nullptr) {
        // A rotation keeps products, so the part along the row can be taken out before turning back.
        const float* row = rows.rows()[i];
        const float along = dot(grad, row, stride_), slope = factor_ / norms[i];
        sum += along;
        // At the smallest norm the divisor is a constant.
        const float removed = norms[i] > kSmallestNorm ? along : 0.0f;
        for (int64_t d = 0; d < stride_; d += kLanes)
          store(grad + d, slope * (load(grad + d) - removed * load(row + d)));
      }
      rotate(grad, i, -1.0f);
    }
    return sum;
  }

 private:
  void rotate(float* row, int64_t i, float sign) const {
    const int64_t half = args_.rotary_dim / 2, at = table_ + places_.place[i] * half;
    if (half > 0) rotate_row(row, row, args_.cos + at, args_.sin + at, half, args_.interleaved, sign);
  }

  const SwinAttentionArgs& args_;
  const Places& places_;
  int64_t table_, stride_;
  float factor_;
};

}  // namespace
}  // namespace dskernels
