// Binds the CPU kernels of Swin attention to torch.
#include <tuple>

#include "common/capability.h"
#include "swin_attention/binding.h"

namespace dskernels {

DSKERNELS_DECLARE_TIERS(SwinAttentionKernels, swin_attention_kernels)

namespace {

// A fresh [batch, height, width, channels] tensor of the image's dtype.
Tensor new_image(const SwinAttentionArgs& args, const Tensor& like, int64_t channels) {
  Tensor result = torch::stable::new_empty(like, {args.batch, args.height, args.width, channels});
  advise_huge_pages(result);
  return result;
}

Tensor swin_attention_cpu(const Tensor& qkv, std::optional<Tensor> cos, std::optional<Tensor> sin,
                          std::optional<Tensor> bias, std::optional<Tensor> logit_scale, int64_t heads,
                          int64_t window_height, int64_t window_width, int64_t shift_height, int64_t shift_width,
                          double scale, bool interleaved) {
  SwinAttentionArgs args{};
  set_geometry(args, qkv, heads, window_height, window_width, shift_height, shift_width);
  set_rope(args, cos, sin, interleaved);
  const std::optional<Tensor> biases = set_bias(args, bias);
  const std::optional<Tensor> factors = set_factors(args, logit_scale, scale);
  Tensor out = new_image(args, qkv, heads * args.dim);
  args.out = view4(out, "out");
  const SwinAttentionKernels& kernels = DSKERNELS_SELECT_TIER(swin_attention_kernels);
  const SwinAttentionPlan plan = kernels.plan(args);
  run_tasks(plan.tasks, plan.scratch_bytes, [&](int64_t task, void* scratch) { kernels.run(args, task, scratch); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> swin_attention_backward_cpu(
    const Tensor& grad_out, const Tensor& qkv, std::optional<Tensor> cos, std::optional<Tensor> sin,
    std::optional<Tensor> bias, std::optional<Tensor> logit_scale, int64_t heads, int64_t window_height,
    int64_t window_width, int64_t shift_height, int64_t shift_width, double scale, bool interleaved,
    bool bias_needs_grad, bool logit_scale_needs_grad) {
  SwinAttentionBackwardArgs args{};
  set_geometry(args.forward, qkv, heads, window_height, window_width, shift_height, shift_width);
  set_rope(args.forward, cos, sin, interleaved);
  const std::optional<Tensor> biases = set_bias(args.forward, bias);
  const std::optional<Tensor> factors = set_factors(args.forward, logit_scale, scale);
  set_grad_out(args, grad_out, qkv);
  Tensor grad_qkv = new_image(args.forward, qkv, qkv.size(3));
  args.grad_qkv = view4(grad_qkv, "grad_qkv");
  const int64_t tokens = window_height * window_width;
  const auto new_floats = [&](std::initializer_list<int64_t> shape) {
    return torch::stable::new_empty(qkv, shape, ScalarType::Float);
  };
  const bool grads_bias = bias.has_value() && bias_needs_grad;
  const bool grads_logit_scale = logit_scale.has_value() && logit_scale_needs_grad;
  Tensor grad_bias = grads_bias ? new_floats({heads, tokens, tokens}) : new_floats({0});
  Tensor grad_logit_scale = new_floats({grads_logit_scale ? heads : 0});
  if (grads_bias) args.grad_bias = static_cast<float*>(grad_bias.data_ptr());
  if (grads_logit_scale) args.grad_logit_scale = static_cast<float*>(grad_logit_scale.data_ptr());

  const SwinAttentionKernels& kernels = DSKERNELS_SELECT_TIER(swin_attention_kernels);
  const SwinAttentionPlan plan = kernels.plan_backward(args);
  const Tensor shared = new_floats({plan.shared_floats});
  args.shared = static_cast<float*>(shared.data_ptr());
  run_tasks(plan.tasks, plan.scratch_bytes,
            [&](int64_t task, void* scratch) { kernels.run_backward(args, task, scratch); });
  run_tasks(plan.merge_tasks, 0, [&](int64_t head, void*) { kernels.merge_backward(args, head); });
  return {grad_qkv, grad_bias, grad_logit_scale};
}

}  // namespace
}  // namespace dskernels

STABLE_TORCH_LIBRARY_IMPL(dskernels, CPU, m) {
  m.impl("swin_attention", TORCH_BOX(&dskernels::swin_attention_cpu));
  m.impl("swin_attention_backward", TORCH_BOX(&dskernels::swin_attention_backward_cpu));
}
