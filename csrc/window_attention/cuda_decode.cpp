// Binds the CUDA kernel of window_attention_decode to torch. The public function has checked the arguments; what is
// checked again here is what memory safety needs when the op is called directly. Lengths are on the device: the kernel
// reads nothing outside the tensors, whatever they are.
#include "window_attention/cuda_decode.h"

#include <tuple>

#include "common/cuda_binding.h"
#include "window_attention/cuda_common.h"
#include "window_attention/cuda_decode.h"

namespace dskernels {
namespace {

// Set before: views and sizes but for k_cache's batch and width, and those of v_cache.
void check_caches(const WindowAttentionArgs& call, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(sizes_agree(call, k, v) && call.k.element == call.v.element,
                  "window_attention_decode: q, k_cache, v_cache: expected [B, Hq, Nq, D], [B, Hkv, S, D], "
                  "[B, Hkv, S, Dv], caches of one dtype");
  check_heads(call, "window_attention_decode");
  const int64_t rows = call.batch * call.heads_q * std::max(call.len_q, int64_t{1});
  STD_TORCH_CHECK(call.len_q <= kMaxCudaRows && rows <= kMaxCudaRows && call.len_k <= kMaxCudaRows,
                  "window_attention_decode: expected up to ", kMaxCudaRows, " queries of all heads, and slots");
}

void set_lengths(WindowAttentionCudaDecode& args, const Tensor& q, const Tensor& t) {
  check_lengths(t, args.call.batch);
  check_device(q, t, "cache_lengths");
  args.lengths = t.data_ptr();
  args.length_stride = t.stride(0);
  args.wide_lengths = t.scalar_type() == ScalarType::Long;
}

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                  const Tensor& cache_lengths, std::optional<Tensor> cos, std::optional<Tensor> sin,
                                  std::optional<Tensor> sink, std::optional<int64_t> left, std::optional<int64_t> right,
                                  double scale, double softcap, bool interleaved, bool keys_rotated) {
  STD_TORCH_CHECK(q.dim() == 4 && v_cache.dim() == 4, "window_attention_decode: q, v_cache: expected 4 dimensions");
  const OnDeviceOf device(q);
  Tensor out = empty_in_order_of(q, q.size(0), q.size(1), q.size(2), v_cache.size(3));
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  WindowAttentionCudaDecode args{};
  WindowAttentionArgs& call = args.call;
  set_operands(call, q, k_cache, v_cache, out, "k_cache", "v_cache");
  check_caches(call, k_cache, v_cache);
  check_device(q, k_cache, "k_cache");
  check_device(q, v_cache, "v_cache");
  set_lse(call, lse);
  set_scores(call, left, right, scale, softcap);
  set_sink(call, q, sink);
  set_rope(args, q, cos, sin, interleaved);
  args.keys_turned = keys_rotated;
  set_lengths(args, q, cache_lengths);
  if (lse.numel() == 0) return {out, lse};

  args.splits = window_attention_splits_cuda(call);
  const Tensor partial = torch::stable::new_empty(lse, {window_attention_partial_cuda(args)});
  args.partial = static_cast<float*>(partial.data_ptr());
  window_attention_decode_cuda(args, device.stream());
  return {out, lse};
}

template <class Library>
void add_window_attention_decode(Library& m) {
  m.impl("window_attention_decode", TORCH_BOX(&decode));
}

}  // namespace
}  // namespace dskernels

DSKERNELS_CUDA_OPERATORS(dskernels::add_window_attention_decode)
