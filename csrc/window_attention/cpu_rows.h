// How rows of q, k, v and their kin come into a task's fp32 scratch: converted, rotated, ahead of their use.
#pragma once

#include "common/carver.h"
#include "common/rope.h"
#include "common/rows.h"
#include "window_attention/args.h"

namespace dskernels {
namespace {

DSKERNELS_INLINE char* row_address(const View4& view, int64_t b, int64_t h, int64_t i) {
  const int64_t element = b * view.stride[0] + h * view.stride[1] + i * view.stride[2];
  return static_cast<char*>(view.data) + element * size_of(view.element);
}

// Turns a row of batch b that stands at `position`, with `sign` -1 back.
inline void rotate(const WindowAttentionArgs& args, const float* from, float* to, int64_t b, int64_t position,
                   float sign) {
  const int64_t half = args.rotary_dim / 2;
  if (half == 0) return;
  const int64_t table_row = args.positions == nullptr ? position : args.positions[b * args.len_k + position];
  rotate_row(from, to, args.cos + table_row * half, args.sin + table_row * half, half, args.interleaved, sign);
}

// Reads row i of a tensor into `to`, padded with zeros to whole vectors, and turns it to `position` unless negative.
inline void load_rotated(const WindowAttentionArgs& args, const View4& view, int64_t dim, int64_t b, int64_t h,
                         int64_t i, int64_t position, float* to) {
  const char* from = row_address(view, b, h, i);
  const int64_t pairs = position < 0 ? 0 : args.rotary_dim;
  // The plain case turns on the way in, without a second pass.
  const bool direct = pairs > 0 && view.element == Element::kFloat32 && view.stride[3] == 1;
  const int64_t copied = direct ? pairs : 0;
  load_row(view.element, from + copied * size_of(view.element), view.stride[3], dim - copied, to + copied);
  if (pairs > 0) rotate(args, direct ? reinterpret_cast<const float*>(from) : to, to, b, position, 1.0f);
  for (int64_t d = dim; d < round_up(dim, kLanes); ++d) to[d] = 0.0f;
}

// Asks for the rows that the next tile will need while this one computes, a few at each step: asked for all at once
// they would fill the line buffers and be waited for, and runs of rows this short escape the hardware's prefetcher.
class Prefetcher {
 public:
  // The rows [begin, end) of a tensor, spread over `steps` steps. `write` asks for ownership of the lines.
  void add(const View4& view, int64_t dim, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t steps,
           bool write) {
    if (view.stride[3] != 1 || begin >= end) return;
    streams_[count_++] = {row_address(view, b, h, begin),
                          view.stride[2] * size_of(view.element),
                          dim * size_of(view.element),
                          end - begin,
                          (end - begin + steps - 1) / max_of(steps, int64_t{1}),
                          write};
  }

  DSKERNELS_INLINE void step() {
    for (int s = 0; s < count_; ++s) {
      Stream& stream = streams_[s];
      const int64_t rows = min_of(stream.rows_a_step, stream.rows);
      for (int64_t i = 0; i < rows; ++i, stream.row += stream.stride) {
        for (int64_t byte = 0; byte < stream.bytes; byte += 64) {
          if (stream.write) {
            __builtin_prefetch(stream.row + byte, 1, 3);
          } else {
            __builtin_prefetch(stream.row + byte, 0, 2);
          }
        }
      }
      stream.rows -= rows;
    }
  }

 private:
  struct Stream {
    const char* row;
    int64_t stride, bytes, rows, rows_a_step;
    bool write;
  };
  static constexpr int kMaxStreams = 8;
  Stream streams_[kMaxStreams];
  int count_ = 0;
};

// The rows [first, end) of one head's keys or values as contiguous fp32 rows padded to whole vectors with zeros,
// rotated where asked. Rows are converted once, when the walk first reaches them; where the tensor already has this
// form it is read in place.
class KeyRows {
 public:
  // Whether a tensor can be read in place: dense fp32 rows of whole vectors.
  static bool in_place(const View4& view, int64_t dim, bool rotated) {
    return view.element == Element::kFloat32 && view.stride[3] == 1 && view.stride[2] == dim && dim % kLanes == 0 &&
           !rotated;
  }

  KeyRows(const WindowAttentionArgs& args, const View4& view, int64_t dim, bool rotated, int64_t b, int64_t h,
          int64_t first, int64_t count, Carver& carver)
      : args_(args),
        view_(view),
        dim_(dim),
        rotated_(rotated && args.rotary_dim > 0),
        batch_(b),
        head_(h),
        first_(first),
        end_(first + count),
        filled_(first),
        stride_(round_up(dim, kLanes)) {
    in_place_ = in_place(view, dim, rotated_);
    rows_ = in_place_ ? reinterpret_cast<float*>(row_address(view, b, h, first)) : carver.floats(count * stride_);
  }

  int64_t stride() const { return stride_; }

  const float* row(int64_t j) const { return rows_ + (j - first_) * stride_; }

  // Brings the rows up to `end` in.
  void fill_to(int64_t end) {
    for (; filled_ < end; ++filled_) {
      if (in_place_) continue;
      load_rotated(args_, view_, dim_, batch_, head_, filled_, rotated_ ? filled_ : -1,
                   rows_ + (filled_ - first_) * stride_);
    }
  }

  // The next `count` rows that fill_to would bring in.
  void prefetch_next(int64_t count, int64_t steps, Prefetcher& prefetcher) const {
    prefetcher.add(view_, dim_, batch_, head_, filled_, min_of(filled_ + count, end_), steps, false);
  }

 private:
  const WindowAttentionArgs& args_;
  const View4& view_;
  int64_t dim_;
  bool rotated_, in_place_;
  int64_t batch_, head_, first_, end_, filled_, stride_;
  float* rows_;
};

}  // namespace
}  // namespace dskernels
