// Binds the CUDA kernels of window attention, forward, to torch. The public functions have checked the arguments; what
// is checked again here is what memory safety needs when an operator is called directly.
#include <tuple>

#include "window_attention/cuda_common.h"

namespace dskernels {
namespace {

void run_forward(WindowAttentionCuda& args, const Tensor& k, void* stream) {
  if (args.call.batch == 0 || args.call.heads_q == 0 || args.call.len_q == 0) return;
  Tensor turned;
  if (window_attention_turns_keys_cuda(args)) turned = turn_keys(args, k, stream);
  window_attention_forward_cuda(args, stream);
}

std::tuple<Tensor, Tensor> window_attention_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 std::optional<Tensor> cos, std::optional<Tensor> sin,
                                                 std::optional<Tensor> positions, std::optional<Tensor> bias,
                                                 std::optional<Tensor> sink, std::optional<int64_t> left,
                                                 std::optional<int64_t> right, int64_t query_offset, double scale,
                                                 double softcap, bool interleaved) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "window_attention: q, k, v: expected 4 dimensions");
  const OnDeviceOf device(q);
  Tensor out = empty_in_order_of(q, q.size(0), q.size(1), q.size(2), v.size(3));
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  WindowAttentionCuda args = describe(q, k, v, out, lse, cos, sin, positions, bias, sink, left, right, query_offset,
                                      scale, softcap, interleaved);
  run_forward(args, k, device.stream());
  return {out, lse};
}

std::tuple<Tensor, Tensor> window_attention_varlen_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                                                        const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                        std::optional<Tensor> cos, std::optional<Tensor> sin,
                                                        std::optional<Tensor> sink, std::optional<int64_t> left,
                                                        std::optional<int64_t> right, double scale, double softcap,
                                                        bool interleaved) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3,
                  "window_attention_varlen: q, k, v: expected 3 dimensions");
  const OnDeviceOf device(q);
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), v.size(2)});
  Tensor lse = torch::stable::new_empty(q, {q.size(1), q.size(0)}, ScalarType::Float);
  Packed packed = describe_packed(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, cos, sin, sink, left, right, scale,
                                  softcap, interleaved);
  run_forward(packed.args, k, device.stream());
  return {out, lse};
}

template <class Library>
void add_forward(Library& m) {
  m.impl("window_attention", TORCH_BOX(&window_attention_cuda));
  m.impl("window_attention_varlen", TORCH_BOX(&window_attention_varlen_cuda));
}

}  // namespace
}  // namespace dskernels

DSKERNELS_CUDA_OPERATORS(dskernels::add_forward)
