// Binds the CPU kernels of window attention to torch. The public function has checked the arguments; what is checked
// again here is what memory safety needs when the op is called directly.
#include <tuple>

#include "window_attention/cpu_binding.h"

namespace dskernels {
namespace {

// Set before: positions.
void check_positions(const WindowAttentionArgs& args, int64_t rows) {
  for (int64_t i = 0; i < args.batch * args.len_k; ++i) {
    STD_TORCH_CHECK(args.positions[i] >= 0 && args.positions[i] < rows, "window_attention: positions: expected 0 to ",
                    rows - 1, ", got ", args.positions[i]);
  }
}

WindowAttentionArgs describe(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                             const std::optional<Tensor>& positions, const std::optional<Tensor>& bias,
                             const std::optional<Tensor>& sink, std::optional<int64_t> left,
                             std::optional<int64_t> right, int64_t query_offset, double scale, double softcap,
                             bool interleaved) {
  WindowAttentionArgs args{};
  set_operands(args, q, k, v, out);
  STD_TORCH_CHECK(sizes_agree(args, k, v),
                  "window_attention: q, k, v: expected [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv]");
  check_operands(args);
  set_lse(args, lse);
  args.query_offset = bounded(query_offset);
  set_scores(args, left, right, scale, softcap);
  set_sink(args, sink);
  set_rope(args, cos, sin, interleaved);
  if (cos.has_value() && positions.has_value()) {
    set_positions(args, *positions);
    check_positions(args, cos->size(0));
  } else if (cos.has_value()) {
    check_table_rows(args, cos->size(0));
  }
  if (bias.has_value()) {
    args.bias = view4(*bias, "bias");
    STD_TORCH_CHECK(bias->size(0) == args.batch && bias->size(1) == args.heads_q && bias->size(2) == args.len_q &&
                        bias->size(3) == args.len_k,
                    "window_attention: bias: expected [B, Hq, Nq, Nk], expanded");
  }
  return args;
}

std::tuple<Tensor, Tensor> window_attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                                std::optional<Tensor> cos, std::optional<Tensor> sin,
                                                std::optional<Tensor> positions, std::optional<Tensor> bias,
                                                std::optional<Tensor> sink, std::optional<int64_t> left,
                                                std::optional<int64_t> right, int64_t query_offset, double scale,
                                                double softcap, bool interleaved) {
  Tensor out = empty_in_order_of(q, q.size(0), q.size(1), q.size(2), v.size(3));
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  const WindowAttentionArgs args = describe(q, k, v, out, lse, cos, sin, positions, bias, sink, left, right,
                                            query_offset, scale, softcap, interleaved);
  if (out.numel() == 0 && lse.numel() == 0) return {out, lse};
  const WindowAttentionKernels& kernels = DSKERNELS_SELECT_TIER(window_attention_kernels);
  const WindowAttentionPlan plan = kernels.plan(args);
  run_tasks(plan.tasks, plan.scratch_bytes, [&](int64_t task, void* scratch) { kernels.run(args, task, scratch); });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> window_attention_backward_cpu(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, std::optional<Tensor> cos, std::optional<Tensor> sin,
    std::optional<Tensor> positions, std::optional<Tensor> bias, std::optional<Tensor> sink,
    std::optional<int64_t> left, std::optional<int64_t> right, int64_t query_offset, double scale, double softcap,
    bool interleaved, bool bias_needs_grad) {
  WindowAttentionBackwardArgs args{};
  args.forward = describe(q, k, v, out, lse, cos, sin, positions, bias, sink, left, right, query_offset, scale, softcap,
                          interleaved);
  args.grad_out = view4(grad_out, "grad_out");
  STD_TORCH_CHECK(grad_out.size(0) == q.size(0) && grad_out.size(1) == q.size(1) && grad_out.size(2) == q.size(2) &&
                      grad_out.size(3) == v.size(3) && out.size(0) == q.size(0) && out.size(1) == q.size(1) &&
                      out.size(2) == q.size(2) && out.size(3) == v.size(3),
                  "window_attention_backward: grad_out, out: expected [B, Hq, Nq, Dv]");
  Tensor grad_lse_rows;
  if (grad_lse.has_value()) {
    STD_TORCH_CHECK(grad_lse->numel() == lse.numel() && grad_lse->scalar_type() == ScalarType::Float,
                    "window_attention_backward: grad_lse: expected float32 [B, Hq, Nq]");
    grad_lse_rows = torch::stable::contiguous(*grad_lse);
    args.grad_lse = static_cast<const float*>(grad_lse_rows.data_ptr());
  }
  const auto gradients = new_gradients(args, q, k, v, bias.has_value() && bias_needs_grad);
  if (args.forward.batch == 0 || args.forward.heads_q == 0) return gradients;

  const WindowAttentionKernels& kernels = DSKERNELS_SELECT_TIER(window_attention_kernels);
  const WindowAttentionPlan plan = kernels.plan_backward(args.forward);
  const Tensor shared = torch::stable::new_empty(lse, {plan.shared_bytes / int64_t{sizeof(float)}}, ScalarType::Float);
  advise_huge_pages(shared);
  args.shared = static_cast<float*>(shared.data_ptr());
  run_tasks(plan.tasks, plan.scratch_bytes,
            [&](int64_t task, void* scratch) { kernels.run_backward(args, task, scratch); });
  run_tasks(plan.merge_tasks, 0, [&](int64_t task, void* scratch) { kernels.merge_backward(args, task, scratch); });
  return gradients;
}

}  // namespace
}  // namespace dskernels

STABLE_TORCH_LIBRARY_IMPL(dskernels, CPU, m) {
  m.impl("window_attention", TORCH_BOX(&dskernels::window_attention_cpu));
  m.impl("window_attention_backward", TORCH_BOX(&dskernels::window_attention_backward_cpu));
}
