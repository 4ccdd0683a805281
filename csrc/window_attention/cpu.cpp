// Binds the CPU kernels of window attention to torch. The public function has checked the arguments; what is checked
// again here is what memory safety needs when the op is called directly.
#include <tuple>

#include "common/binding.h"
#include "common/capability.h"
#include "window_attention/args.h"

namespace dskernels {

DSKERNELS_DECLARE_TIERS(WindowAttentionKernels, window_attention_kernels)

namespace {

// Row statistics of up to this many columns are kept on a kernel's stack.
constexpr int64_t kMaxHeadDim = 256;

WindowAttentionArgs describe(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                             std::optional<int64_t> left, std::optional<int64_t> right, int64_t query_offset,
                             double scale, bool interleaved) {
  WindowAttentionArgs args{};
  args.q = view4(q, "q");
  args.k = view4(k, "k");
  args.v = view4(v, "v");
  args.out = view4(out, "out");
  args.batch = q.size(0);
  args.heads_q = q.size(1);
  args.len_q = q.size(2);
  args.dim_qk = q.size(3);
  args.heads_kv = k.size(1);
  args.len_k = k.size(2);
  args.dim_v = v.size(3);
  STD_TORCH_CHECK(k.size(0) == args.batch && v.size(0) == args.batch && v.size(1) == args.heads_kv &&
                      v.size(2) == args.len_k && k.size(3) == args.dim_qk,
                  "window_attention: q, k, v: expected [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv]");
  STD_TORCH_CHECK(args.heads_kv > 0 ? args.heads_q % args.heads_kv == 0 : args.heads_q == 0,
                  "window_attention: q: expected a multiple of ", args.heads_kv, " heads, got ", args.heads_q);
  STD_TORCH_CHECK(args.q.element == args.k.element && args.q.element == args.v.element,
                  "window_attention: q, k, v: expected one dtype");
  STD_TORCH_CHECK(args.dim_qk <= kMaxHeadDim && args.dim_v <= kMaxHeadDim,
                  "window_attention: expected head dims up to ", kMaxHeadDim, ", got ", args.dim_qk, " and ",
                  args.dim_v);
  STD_TORCH_CHECK(lse.is_contiguous() && lse.numel() == args.batch * args.heads_q * args.len_q &&
                      lse.scalar_type() == ScalarType::Float,
                  "window_attention: lse: expected contiguous float32 [B, Hq, Nq]");
  args.lse = static_cast<float*>(lse.data_ptr());

  const auto bound = [](std::optional<int64_t> value) {
    return std::clamp(value.value_or(kUnbounded), -kUnbounded, kUnbounded);
  };
  args.left = bound(left);
  args.right = bound(right);
  args.query_offset = bound(query_offset);
  args.scale = static_cast<float>(scale);
  args.interleaved = interleaved;
  if (cos.has_value()) {
    STD_TORCH_CHECK(sin.has_value() && cos->dim() == 2 && sin->dim() == 2 && cos->is_contiguous() &&
                        sin->is_contiguous() && cos->size(0) == sin->size(0) && cos->size(1) == sin->size(1) &&
                        cos->scalar_type() == ScalarType::Float && sin->scalar_type() == ScalarType::Float &&
                        2 * cos->size(1) <= args.dim_qk,
                    "window_attention: cos, sin: expected contiguous float32 [positions, rotary_dim / 2]");
    const int64_t last = std::max(args.len_k, args.len_q + args.query_offset) - 1;
    STD_TORCH_CHECK(args.len_q == 0 || (args.query_offset >= 0 && last < cos->size(0)),
                    "window_attention: cos, sin: expected positions ", args.query_offset, " to ", last, ", got ",
                    cos->size(0), " rows");
    args.cos = static_cast<const float*>(cos->data_ptr());
    args.sin = static_cast<const float*>(sin->data_ptr());
    args.rotary_dim = 2 * cos->size(1);
  }
  return args;
}

std::tuple<Tensor, Tensor> window_attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                                std::optional<Tensor> cos, std::optional<Tensor> sin,
                                                std::optional<int64_t> left, std::optional<int64_t> right,
                                                int64_t query_offset, double scale, bool interleaved) {
  Tensor out = empty_in_order_of(q, q.size(0), q.size(1), q.size(2), v.size(3));
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  const WindowAttentionArgs args = describe(q, k, v, out, lse, cos, sin, left, right, query_offset, scale, interleaved);
  if (out.numel() == 0 && lse.numel() == 0) return {out, lse};
  const WindowAttentionKernels& kernels = DSKERNELS_SELECT_TIER(window_attention_kernels);
  const WindowAttentionPlan plan = kernels.plan(args);
  run_tasks(plan.tasks, plan.scratch_bytes, [&](int64_t task, void* scratch) { kernels.run(args, task, scratch); });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> window_attention_backward_cpu(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, std::optional<Tensor> cos, std::optional<Tensor> sin,
    std::optional<int64_t> left, std::optional<int64_t> right, int64_t query_offset, double scale, bool interleaved) {
  WindowAttentionBackwardArgs args{};
  args.forward = describe(q, k, v, out, lse, cos, sin, left, right, query_offset, scale, interleaved);
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
  Tensor grad_q = empty_in_order_of(q, q.size(0), q.size(1), q.size(2), q.size(3));
  Tensor grad_k = empty_in_order_of(k, k.size(0), k.size(1), k.size(2), k.size(3));
  Tensor grad_v = empty_in_order_of(v, v.size(0), v.size(1), v.size(2), v.size(3));
  if (args.forward.batch == 0 || args.forward.heads_q == 0) return {grad_q, grad_k, grad_v};
  args.grad_q = view4(grad_q, "grad_q");
  args.grad_k = view4(grad_k, "grad_k");
  args.grad_v = view4(grad_v, "grad_v");

  const WindowAttentionKernels& kernels = DSKERNELS_SELECT_TIER(window_attention_kernels);
  const WindowAttentionPlan plan = kernels.plan_backward(args.forward);
  const Tensor shared = torch::stable::new_empty(lse, {plan.shared_bytes / int64_t{sizeof(float)}}, ScalarType::Float);
  advise_huge_pages(shared);
  args.shared = static_cast<float*>(shared.data_ptr());
  run_tasks(plan.tasks, plan.scratch_bytes,
            [&](int64_t task, void* scratch) { kernels.run_backward(args, task, scratch); });
  run_tasks(plan.merge_tasks, 0, [&](int64_t task, void* scratch) { kernels.merge_backward(args, task, scratch); });
  return {grad_q, grad_k, grad_v};
}

}  // namespace
}  // namespace dskernels

STABLE_TORCH_LIBRARY_IMPL(dskernels, CPU, m) {
  m.impl("window_attention", TORCH_BOX(&dskernels::window_attention_cpu));
  m.impl("window_attention_backward", TORCH_BOX(&dskernels::window_attention_backward_cpu));
}
