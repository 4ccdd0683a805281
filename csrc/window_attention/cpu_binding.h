// What the CPU bindings of window attention share: the arguments that do not depend on how a call lays out its tensors.
#pragma once

#include <optional>

#include "common/binding.h"
#include "common/capability.h"
#include "window_attention/args.h"

namespace dskernels {

DSKERNELS_DECLARE_TIERS(WindowAttentionKernels, window_attention_kernels)

namespace {

// Row statistics of up to this many columns are kept on a kernel's stack.
constexpr int64_t kMaxHeadDim = 256;

// Set before: heads and head dims.
inline void check_heads(const WindowAttentionArgs& args) {
  STD_TORCH_CHECK(args.heads_kv > 0 ? args.heads_q % args.heads_kv == 0 : args.heads_q == 0,
                  "window_attention: q: expected a multiple of ", args.heads_kv, " heads, got ", args.heads_q);
  STD_TORCH_CHECK(args.dim_qk <= kMaxHeadDim && args.dim_v <= kMaxHeadDim,
                  "window_attention: expected head dims up to ", kMaxHeadDim, ", got ", args.dim_qk, " and ",
                  args.dim_v);
}

// Set before: the views, heads and head dims.
inline void check_operands(const WindowAttentionArgs& args) {
  check_heads(args);
  STD_TORCH_CHECK(args.q.element == args.k.element && args.q.element == args.v.element,
                  "window_attention: q, k, v: expected one dtype");
}

// Element i of a one-dimensional tensor of int32 or int64.
inline int64_t integer_at(const Tensor& t, int64_t i) {
  const int64_t place = i * t.stride(0);
  return t.scalar_type() == ScalarType::Int ? static_cast<const int32_t*>(t.data_ptr())[place]
                                            : static_cast<const int64_t*>(t.data_ptr())[place];
}

inline bool holds_integers(const Tensor& t) {
  return t.dim() == 1 && (t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long);
}

inline int64_t bounded(std::optional<int64_t> value) {
  return std::clamp(value.value_or(kUnbounded), -kUnbounded, kUnbounded);
}

inline void set_scores(WindowAttentionArgs& args, std::optional<int64_t> left, std::optional<int64_t> right,
                       double scale, double softcap) {
  args.left = bounded(left);
  args.right = bounded(right);
  args.scale = static_cast<float>(scale);
  args.softcap = static_cast<float>(softcap);
}

inline void set_sink(WindowAttentionArgs& args, const std::optional<Tensor>& sink) {
  if (!sink.has_value()) return;
  STD_TORCH_CHECK(sink->dim() == 1 && sink->size(0) == args.heads_q && sink->is_contiguous() &&
                      sink->scalar_type() == ScalarType::Float,
                  "window_attention: sink: expected contiguous float32 [Hq]");
  args.sink = static_cast<const float*>(sink->data_ptr());
}

inline void set_rope(WindowAttentionArgs& args, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                     bool interleaved) {
  if (!cos.has_value()) return;
  STD_TORCH_CHECK(sin.has_value() && cos->dim() == 2 && sin->dim() == 2 && cos->is_contiguous() &&
                      sin->is_contiguous() && cos->size(0) == sin->size(0) && cos->size(1) == sin->size(1) &&
                      cos->scalar_type() == ScalarType::Float && sin->scalar_type() == ScalarType::Float &&
                      2 * cos->size(1) <= args.dim_qk,
                  "window_attention: cos, sin: expected contiguous float32 [positions, rotary_dim / 2]");
  args.cos = static_cast<const float*>(cos->data_ptr());
  args.sin = static_cast<const float*>(sin->data_ptr());
  args.rotary_dim = 2 * cos->size(1);
  args.interleaved = interleaved;
}

// That every key and query stands in a table of `rows` positions, where each stands at its own. Set before: lengths
// and query_offset.
inline void check_table_rows(const WindowAttentionArgs& args, int64_t rows) {
  const int64_t last = std::max(args.len_k, args.len_q > 0 ? args.len_q + args.query_offset : 0) - 1;
  STD_TORCH_CHECK((args.len_q == 0 || args.query_offset >= 0) && last < rows,
                  "window_attention: cos, sin: expected positions ", args.query_offset, " to ", last, ", got ", rows,
                  " rows");
}

}  // namespace
}  // namespace dskernels
