// How the tokens of a cell come into the products and go back into the image: row by row, in place where that can be.
#pragma once

#include "common/carver.h"
#include "common/rope.h"
#include "common/rows.h"
#include "swin_attention/cpu_grid.h"

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
  int64_t element_bytes() const { return size_of(view_.element); }
  bool is_dense() const { return view_.stride[3] == 1; }

  // Whether rows of `dim` channels can be read as whole vectors of floats where they lie.
  bool in_place(int64_t dim) const {
    return view_.element == Element::kFloat32 && view_.stride[3] == 1 && dim % kLanes == 0;
  }

  const char* address(int64_t i) const { return address_[i]; }

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

// What a walk comes to next: a head of some cell, or nothing.
struct Coming {
  const Tokens* tokens;
  int64_t head;
};

// Visits a task's cells, and in each its heads. `views` are the tensors in which tokens are looked up.
template <int kViews, class BeginKind, class RunHead>
inline void walk(const Grid& grid, const Share& share, const View4 (&views)[kViews], const BeginKind& begin_kind,
                 const RunHead& run_head) {
  Tokens tokens[2][kViews];
  const auto find = [&](int64_t i) {
    const Cell cell = grid.cell(i);
    for (int view = 0; view < kViews; ++view) tokens[i & 1][view].find(views[view], cell);
    return cell.kind;
  };
  int kind = -1, next_kind = share.cell_begin < share.cell_end ? find(share.cell_begin) : -1;
  for (int64_t i = share.cell_begin; i < share.cell_end; ++i) {
    if (kind != next_kind) begin_kind(grid.cell(i));
    kind = next_kind;
    const bool is_last = i + 1 == share.cell_end;
    if (!is_last) next_kind = find(i + 1);
    for (int64_t h = 0; h < share.heads(); ++h) {
      const bool stays = h + 1 < share.heads();
      const Coming coming{stays ? tokens[i & 1] : is_last ? nullptr : tokens[(i + 1) & 1], stays ? h + 1 : 0};
      run_head(tokens[i & 1], h, coming);
    }
  }
}

// Asks for the rows of the next head while this one is computed, a few at each step of its products: asked for all at
// once they would fill the line buffers and be waited for, and runs this short escape the hardware's prefetcher.
class Prefetcher {
 public:
  // The rows from `channel` on; `write` asks for ownership of their lines.
  void add(const Tokens& tokens, int64_t channel, int64_t dim, bool write) {
    if (!tokens.is_dense()) return;
    streams_[count_++] = {&tokens, channel * tokens.element_bytes(), dim * tokens.element_bytes(), write};
  }

  DSKERNELS_NOINLINE void step() {
    if (count_ == 0 || next_ >= streams_[0].tokens->count()) return;
    const int64_t end = min_of(next_ + kTokensAStep, streams_[0].tokens->count());
    for (int s = 0; s < count_; ++s) {
      const Stream& stream = streams_[s];
      for (int64_t i = next_; i < end; ++i) {
        const char* row = stream.tokens->address(i) + stream.offset;
        for (int64_t byte = 0; byte < stream.bytes; byte += 64) {
          if (stream.write) {
            __builtin_prefetch(row + byte, 1, 3);
          } else {
            __builtin_prefetch(row + byte, 0, 2);
          }
        }
      }
    }
    next_ = end;
  }

 private:
  struct Stream {
    const Tokens* tokens;
    int64_t offset, bytes;
    bool write;
  };
  static constexpr int64_t kTokensAStep = 2;
  static constexpr int kMaxStreams = 7;
  Stream streams_[kMaxStreams];
  int count_ = 0;
  int64_t next_ = 0;
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
        divide(row, norms[i]);
      }
      rotate(row, i, 1.0f);
    }
  }

  // Takes the gradients of rows as they entered the products back to those of the rows as they lie in `tokens` from
  // `channel` on, in place. Returns the sum of the products of gradients and rows. What `rows` holds is lost.
  double apply_backward(const Rows& rows, const Tokens& tokens, int64_t channel, const float* norms,
                        float* const* grads) const {
    double sum = 0.0;
    for (int64_t i = 0; i < places_.count; ++i) {
      float* grad = grads[i];
      rotate(grad, i, -1.0f);
      if (args_.logit_scale == nullptr) continue;
      float* row = rows.own(i);
      if (args_.rotary_dim > 0) {
        // Loaded again, not turned back: a table may scale as well (YaRN's does), and then its transpose, which takes
        // gradients back, is not its inverse.
        tokens.load(i, channel, args_.dim, row);
        divide(row, norms[i]);
      }
      const float along = dot(grad, row, stride_), slope = factor_ / norms[i];
      sum += along;
      // At the smallest norm the divisor is a constant.
      const float removed = norms[i] > kSmallestNorm ? along : 0.0f;
      for (int64_t d = 0; d < stride_; d += kLanes) store(grad + d, slope * (load(grad + d) - removed * load(row + d)));
    }
    return sum;
  }

 private:
  void divide(float* row, float by) const {
    for (int64_t d = 0; d < stride_; d += kLanes) store(row + d, load(row + d) / by);
  }

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
