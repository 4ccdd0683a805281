// The kernels' arguments from tensors, for the bindings of the CPU and of CUDA. The public functions have checked them;
// what is checked again here is what memory safety needs when an operator is called directly. No value is looked at.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>

#include "common/binding.h"
#include "window_attention/args.h"

namespace dskernels {
namespace {

// Row statistics of up to this many columns are kept on a kernel's stack.
constexpr int64_t kMaxHeadDim = 256;

inline int64_t bounded(std::optional<int64_t> value) {
  return std::clamp(value.value_or(kUnbounded), -kUnbounded, kUnbounded);
}

// The views and sizes of [B, H, N, D] tensors.
inline void set_operands(WindowAttentionArgs& args, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& out, const char* k_name = "k", const char* v_name = "v") {
  args.q = view4(q, "q");
  args.k = view4(k, k_name);
  args.v = view4(v, v_name);
  args.out = view4(out, "out");
  args.batch = q.size(0);
  args.heads_q = q.size(1);
  args.len_q = q.size(2);
  args.dim_qk = q.size(3);
  args.heads_kv = k.size(1);
  args.len_k = k.size(2);
  args.dim_v = v.size(3);
}

// Whether those of k and v that `set_operands` did not take are what it took.
inline bool sizes_agree(const WindowAttentionArgs& args, const Tensor& k, const Tensor& v) {
  return k.size(0) == args.batch && v.size(0) == args.batch && v.size(1) == args.heads_kv && v.size(2) == args.len_k &&
         k.size(3) == args.dim_qk;
}

// A [tokens, heads, columns] tensor, from `token` on, as [1, heads, tokens, columns].
inline View4 packed_view(const Tensor& t, const char* name, int64_t token = 0) {
  STD_TORCH_CHECK(t.dim() == 3, "window_attention_varlen: ", name, ": expected 3 dimensions, got ", t.dim());
  char* data = static_cast<char*>(t.data_ptr()) + token * t.stride(0) * static_cast<int64_t>(t.element_size());
  return {data, element_of(t, name), {0, t.stride(1), t.stride(0), t.stride(2)}};
}

// The views and sizes of packed [T, H, D] tensors, as of one sequence.
inline void set_packed_operands(WindowAttentionArgs& args, const Tensor& q, const Tensor& k, const Tensor& v) {
  args.q = packed_view(q, "q");
  args.k = packed_view(k, "k");
  args.v = packed_view(v, "v");
  args.batch = 1;
  args.heads_q = q.size(1);
  args.len_q = q.size(0);
  args.dim_qk = q.size(2);
  args.heads_kv = k.size(1);
  args.len_k = k.size(0);
  args.dim_v = v.size(2);
  STD_TORCH_CHECK(v.size(0) == args.len_k && v.size(1) == args.heads_kv && k.size(2) == args.dim_qk,
                  "window_attention_varlen: q, k, v: expected [T, Hq, D], [S, Hkv, D], [S, Hkv, Dv]");
}

// Set before: heads and head dims.
inline void check_heads(const WindowAttentionArgs& args, const char* op = "window_attention") {
  STD_TORCH_CHECK(args.heads_kv > 0 ? args.heads_q % args.heads_kv == 0 : args.heads_q == 0, op,
                  ": q: expected a multiple of ", args.heads_kv, " heads, got ", args.heads_q);
  STD_TORCH_CHECK(args.dim_qk <= kMaxHeadDim && args.dim_v <= kMaxHeadDim, op, ": expected head dims up to ",
                  kMaxHeadDim, ", got ", args.dim_qk, " and ", args.dim_v);
}

// Set before: the views, heads and head dims.
inline void check_operands(const WindowAttentionArgs& args) {
  check_heads(args);
  STD_TORCH_CHECK(args.q.element == args.k.element && args.q.element == args.v.element,
                  "window_attention: q, k, v: expected one dtype");
}

inline bool holds_integers(const Tensor& t) {
  return t.dim() == 1 && (t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long);
}

inline void check_offsets(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.numel() > 0 && holds_integers(t), "window_attention_varlen: ", name,
                  ": expected int32 or int64 [n + 1]");
}

inline void check_as_many(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k) {
  STD_TORCH_CHECK(cu_seqlens_q.size(0) == cu_seqlens_k.size(0),
                  "window_attention_varlen: cu_seqlens_k: expected as many offsets as cu_seqlens_q, ",
                  cu_seqlens_q.size(0), ", got ", cu_seqlens_k.size(0));
}

inline void check_lengths(const Tensor& t, int64_t batch) {
  STD_TORCH_CHECK(holds_integers(t) && t.size(0) == batch,
                  "window_attention_decode: cache_lengths: expected int32 or int64 [B]");
}

// `lse` is [B, Hq, Nq], or [Hq, T] of packed sequences. Set before: sizes.
inline void set_lse(WindowAttentionArgs& args, const Tensor& lse) {
  STD_TORCH_CHECK(lse.is_contiguous() && lse.numel() == args.batch * args.heads_q * args.len_q &&
                      lse.scalar_type() == ScalarType::Float,
                  "window_attention: lse: expected contiguous float32 [B, Hq, Nq]");
  args.lse = static_cast<float*>(lse.data_ptr());
  args.lse_stride_batch = args.heads_q * args.len_q;
  args.lse_stride_head = args.len_q;
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

// The table's rows for each key and the query at its position. Set before: sizes and query_offset.
inline void set_positions(WindowAttentionArgs& args, const Tensor& positions) {
  const bool in_keys = args.query_offset >= 0 && args.query_offset + args.len_q <= args.len_k;
  STD_TORCH_CHECK(positions.scalar_type() == ScalarType::Long && positions.is_contiguous() && positions.dim() == 2 &&
                      positions.size(0) == args.batch && positions.size(1) == args.len_k && in_keys,
                  "window_attention: positions: expected contiguous int64 [B, Nk], with every query at a key");
  args.positions = static_cast<const int64_t*>(positions.data_ptr());
}

// That every key and query stands in a table of `rows` positions, where each stands at its own. Set before: lengths
// and query_offset.
inline void check_table_rows(const WindowAttentionArgs& args, int64_t rows) {
  const int64_t last = std::max(args.len_k, args.len_q > 0 ? args.len_q + args.query_offset : 0) - 1;
  STD_TORCH_CHECK((args.len_q == 0 || args.query_offset >= 0) && last < rows,
                  "window_attention: cos, sin: expected positions ", args.query_offset, " to ", last, ", got ", rows,
                  " rows");
}

// Fresh gradients of q, k, v and the bias, for either struct of the backward's arguments; without `grads_bias` the
// last one is empty.
template <class Args>
std::tuple<Tensor, Tensor, Tensor, Tensor> new_gradients(Args& args, const Tensor& q, const Tensor& k, const Tensor& v,
                                                         bool grads_bias) {
  const auto fresh = [](const Tensor& t) { return empty_in_order_of(t, t.size(0), t.size(1), t.size(2), t.size(3)); };
  const Tensor grad_q = fresh(q), grad_k = fresh(k), grad_v = fresh(v);
  args.grad_q = view4(grad_q, "grad_q");
  args.grad_k = view4(grad_k, "grad_k");
  args.grad_v = view4(grad_v, "grad_v");
  if (!grads_bias) return {grad_q, grad_k, grad_v, torch::stable::new_empty(q, {0}, ScalarType::Float)};
  // Zeros, since a pair out of the window has no gradient and is not visited.
  const Tensor grad_bias = torch::stable::new_zeros(q, {q.size(0), q.size(1), q.size(2), k.size(2)}, ScalarType::Float);
  args.grad_bias = static_cast<float*>(grad_bias.data_ptr());
  return {grad_q, grad_k, grad_v, grad_bias};
}

}  // namespace
}  // namespace dskernels
