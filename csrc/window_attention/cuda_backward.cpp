// Binds the CUDA kernels of window attention's backward pass to torch, dense and packed.
#include "window_attention/cuda_backward.h"

#include <tuple>

#include "window_attention/cuda_common.h"

namespace dskernels {
namespace {

// Turns the queries, once, and lets `args` read them: keep the result while the kernels run.
Tensor turn_queries(WindowAttentionCuda& args, const Tensor& q, void* stream) {
  const WindowAttentionArgs& call = args.call;
  const int64_t vector = 16 / size_of(call.q.element), width = (call.dim_qk + vector - 1) / vector * vector;
  Tensor turned = torch::stable::new_empty(q, {call.batch, call.heads_q, call.len_q, width});
  const View4 view = view4(turned, "q");
  window_attention_turn_queries_cuda(args, view, static_cast<int>(width), stream);
  args.call.q = view;
  return turned;
}

// Fills the gradients but for those of the bias, which has to hold zeros. Set before: all but delta.
void run(WindowAttentionCudaBackward& args, const Tensor& q, const Tensor& k, const Tensor& lse, void* stream) {
  const WindowAttentionArgs& call = args.forward.call;
  if (call.batch == 0 || call.heads_q == 0) return;
  const Tensor delta = torch::stable::new_empty(lse, {lse.numel()}, ScalarType::Float);
  args.delta = static_cast<float*>(delta.data_ptr());
  Tensor turned_q, turned_k;
  if (call.rotary_dim > 0) {
    turned_q = turn_queries(args.forward, q, stream);
    turned_k = turn_keys(args.forward, k, stream);
  }
  window_attention_backward_cuda(args, stream);
}

void set_grad_out(WindowAttentionCudaBackward& args, const Tensor& q, const Tensor& grad_out, const View4& view) {
  STD_TORCH_CHECK(view.element == args.forward.call.q.element,
                  "window_attention_backward: grad_out: expected the dtype of q");
  check_device(q, grad_out, "grad_out");
  args.grad_out = view;
}

// As dense rows: keep the result while the kernels run.
Tensor set_grad_lse(WindowAttentionCudaBackward& args, const Tensor& q, const std::optional<Tensor>& grad_lse,
                    const Tensor& lse) {
  if (!grad_lse.has_value()) return Tensor();
  STD_TORCH_CHECK(grad_lse->numel() == lse.numel() && grad_lse->scalar_type() == ScalarType::Float,
                  "window_attention_backward: grad_lse: expected float32 of the shape of lse");
  check_device(q, *grad_lse, "grad_lse");
  Tensor rows = torch::stable::contiguous(*grad_lse);
  args.grad_lse = static_cast<const float*>(rows.data_ptr());
  return rows;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> window_attention_backward_cuda(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, std::optional<Tensor> cos, std::optional<Tensor> sin,
    std::optional<Tensor> positions, std::optional<Tensor> bias, std::optional<Tensor> sink,
    std::optional<int64_t> left, std::optional<int64_t> right, int64_t query_offset, double scale, double softcap,
    bool interleaved, bool bias_needs_grad) {
  const OnDeviceOf device(q);
  WindowAttentionCudaBackward args{};
  args.forward = describe(q, k, v, out, lse, cos, sin, positions, bias, sink, left, right, query_offset, scale, softcap,
                          interleaved);
  set_grad_out(args, q, grad_out, view4(grad_out, "grad_out"));
  STD_TORCH_CHECK(grad_out.size(0) == q.size(0) && grad_out.size(1) == q.size(1) && grad_out.size(2) == q.size(2) &&
                      grad_out.size(3) == v.size(3),
                  "window_attention_backward: grad_out: expected [B, Hq, Nq, Dv]");
  const Tensor grad_lse_rows = set_grad_lse(args, q, grad_lse, lse);
  const auto gradients = new_gradients(args, q, k, v, bias.has_value() && bias_needs_grad);
  run(args, q, k, lse, device.stream());
  return gradients;
}

std::tuple<Tensor, Tensor, Tensor> window_attention_varlen_backward_cuda(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    std::optional<Tensor> cos, std::optional<Tensor> sin, std::optional<Tensor> sink, std::optional<int64_t> left,
    std::optional<int64_t> right, double scale, double softcap, bool interleaved) {
  const OnDeviceOf device(q);
  const Packed packed = describe_packed(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, cos, sin, sink, left, right,
                                        scale, softcap, interleaved);
  WindowAttentionCudaBackward args{};
  args.forward = packed.args;
  set_grad_out(args, q, grad_out, packed_view(grad_out, "grad_out"));
  STD_TORCH_CHECK(grad_out.size(0) == q.size(0) && grad_out.size(1) == q.size(1) && grad_out.size(2) == v.size(2),
                  "window_attention_varlen_backward: grad_out: expected [T, Hq, Dv]");
  const Tensor grad_lse_rows = set_grad_lse(args, q, grad_lse, lse);
  Tensor grad_q = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)});
  Tensor grad_k = torch::stable::new_empty(k, {k.size(0), k.size(1), k.size(2)});
  Tensor grad_v = torch::stable::new_empty(v, {v.size(0), v.size(1), v.size(2)});
  args.grad_q = packed_view(grad_q, "grad_q");
  args.grad_k = packed_view(grad_k, "grad_k");
  args.grad_v = packed_view(grad_v, "grad_v");
  run(args, q, k, lse, device.stream());
  return {grad_q, grad_k, grad_v};
}

template <class Library>
void add_backward(Library& m) {
  m.impl("window_attention_backward", TORCH_BOX(&window_attention_backward_cuda));
  m.impl("window_attention_varlen_backward", TORCH_BOX(&window_attention_varlen_backward_cuda));
}

}  // namespace
}  // namespace dskernels

DSKERNELS_CUDA_OPERATORS(dskernels::add_backward)
