// What the CUDA bindings of window attention share beyond binding.h. No value on the device is looked at, which would
// wait for it.
#pragma once

#include "common/cuda_binding.h"
#include "window_attention/binding.h"
#include "window_attention/cuda.h"

namespace dskernels {
namespace {

// The device memory of everything else must be that of q.
inline void check_device(const Tensor& q, const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() == q.is_cpu() && t.get_device_index() == q.get_device_index(), "window_attention: ", name,
                  ": expected a tensor on the device of q");
}

// Set before: batch, lengths, and heads as checked.
inline void check_counts(const WindowAttentionArgs& args) {
  const int64_t group = args.heads_kv > 0 ? args.heads_q / args.heads_kv : 1;
  STD_TORCH_CHECK(args.len_q <= kMaxCudaRows / std::max(group, int64_t{1}) && args.len_k <= kMaxCudaRows &&
                      args.batch <= kMaxCudaRows && args.heads_q <= kMaxCudaRows,
                  "window_attention: expected up to ", kMaxCudaRows, " queries, over the heads of a group, and keys");
}

inline void set_sink(WindowAttentionArgs& args, const Tensor& q, const std::optional<Tensor>& sink) {
  set_sink(args, sink);
  if (sink.has_value()) check_device(q, *sink, "sink");
}

inline void set_rope(WindowAttentionCuda& args, const Tensor& q, const std::optional<Tensor>& cos,
                     const std::optional<Tensor>& sin, bool interleaved) {
  if (!cos.has_value()) return;
  set_rope(args.call, cos, sin, interleaved);
  check_device(q, *cos, "cos");
  check_device(q, *sin, "sin");
  args.table_rows = cos->size(0);
}

inline void set_bias(WindowAttentionArgs& args, const Tensor& q, const std::optional<Tensor>& bias) {
  if (!bias.has_value()) return;
  args.bias = view4(*bias, "bias");
  check_device(q, *bias, "bias");
  STD_TORCH_CHECK(bias->size(0) == args.batch && bias->size(1) == args.heads_q && bias->size(2) == args.len_q &&
                      bias->size(3) == args.len_k && bias->scalar_type() == ScalarType::Float,
                  "window_attention: bias: expected float32 [B, Hq, Nq, Nk], expanded");
}

// The arguments of a call on [B, H, N, D] tensors; `out` is [B, Hq, Nq, Dv].
inline WindowAttentionCuda describe(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                                    const Tensor& lse, const std::optional<Tensor>& cos,
                                    const std::optional<Tensor>& sin, const std::optional<Tensor>& positions,
                                    const std::optional<Tensor>& bias, const std::optional<Tensor>& sink,
                                    std::optional<int64_t> left, std::optional<int64_t> right, int64_t query_offset,
                                    double scale, double softcap, bool interleaved) {
  WindowAttentionCuda result{};
  WindowAttentionArgs& args = result.call;
  set_operands(args, q, k, v, out);
  STD_TORCH_CHECK(sizes_agree(args, k, v),
                  "window_attention: q, k, v: expected [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv]");
  STD_TORCH_CHECK(out.size(0) == args.batch && out.size(1) == args.heads_q && out.size(2) == args.len_q &&
                      out.size(3) == args.dim_v && args.out.element == args.q.element,
                  "window_attention: out: expected [B, Hq, Nq, Dv] of q's dtype");
  check_operands(args);
  check_counts(args);
  check_device(q, k, "k");
  check_device(q, v, "v");
  check_device(q, out, "out");
  set_lse(args, lse);
  check_device(q, lse, "lse");
  args.query_offset = bounded(query_offset);
  set_scores(args, left, right, scale, softcap);
  set_sink(args, q, sink);
  set_rope(result, q, cos, sin, interleaved);
  if (positions.has_value() && args.cos != nullptr) {
    set_positions(args, *positions);
    check_device(q, *positions, "positions");
  } else if (args.rotary_dim > 0) {
    check_table_rows(args, result.table_rows);
  }
  set_bias(args, q, bias);
  return result;
}

// Turns the keys that somebody sees, once, and lets `args` read them: keep the result while the kernels run.
inline Tensor turn_keys(WindowAttentionCuda& args, const Tensor& k, void* stream) {
  const WindowAttentionKeys keys = window_attention_keys_cuda(args);
  const WindowAttentionArgs& call = args.call;
  const Tensor turned = torch::stable::new_empty(k, {call.batch, call.heads_kv, keys.count, keys.width});
  // Where key 0 would be: what nobody sees has no place in it.
  const int64_t before = keys.first * keys.width * size_of(call.k.element);
  void* data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(turned.data_ptr()) - before);
  const View4 view{data, call.k.element, {turned.stride(0), turned.stride(1), keys.width, 1}};
  window_attention_turn_cuda(args, view, stream);
  args.call.k = view;
  args.keys_turned = true;
  return turned;
}

// Offsets of packed sequences as the kernels read them: keep the result while they run.
inline Tensor packed_offsets(const Tensor& t, const Tensor& q, const char* name) {
  check_offsets(t, name);
  check_device(q, t, name);
  return torch::stable::contiguous(t);
}

struct Packed {
  WindowAttentionCuda args;
  Tensor offsets_q, offsets_k;  // what args point to
};

// The arguments of a call on packed [T, H, D] tensors; `out` is [T, Hq, Dv].
inline Packed describe_packed(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                              const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const std::optional<Tensor>& cos,
                              const std::optional<Tensor>& sin, const std::optional<Tensor>& sink,
                              std::optional<int64_t> left, std::optional<int64_t> right, double scale, double softcap,
                              bool interleaved) {
  Packed result{{}, packed_offsets(cu_seqlens_q, q, "cu_seqlens_q"), packed_offsets(cu_seqlens_k, q, "cu_seqlens_k")};
  WindowAttentionArgs& args = result.args.call;
  set_packed_operands(args, q, k, v);
  args.out = packed_view(out, "out");
  STD_TORCH_CHECK(out.size(0) == args.len_q && out.size(1) == args.heads_q && out.size(2) == args.dim_v &&
                      args.out.element == args.q.element,
                  "window_attention_varlen: out: expected [T, Hq, Dv] of q's dtype");
  check_as_many(result.offsets_q, result.offsets_k);
  STD_TORCH_CHECK(result.offsets_q.size(0) <= kMaxCudaRows, "window_attention_varlen: expected up to ", kMaxCudaRows,
                  " offsets");
  check_operands(args);
  check_counts(args);
  check_device(q, k, "k");
  check_device(q, v, "v");
  check_device(q, out, "out");
  set_lse(args, lse);
  check_device(q, lse, "lse");
  set_scores(args, left, right, scale, softcap);
  set_sink(args, q, sink);
  set_rope(result.args, q, cos, sin, interleaved);
  result.args.offsets_q = result.offsets_q.data_ptr();
  result.args.offsets_k = result.offsets_k.data_ptr();
  result.args.wide_offsets_q = result.offsets_q.scalar_type() == ScalarType::Long;
  result.args.wide_offsets_k = result.offsets_k.scalar_type() == ScalarType::Long;
  result.args.sequences = static_cast<int>(result.offsets_q.size(0) - 1);
  return result;
}

}  // namespace
}  // namespace dskernels
