// Binds the CUDA kernels of Swin attention to torch.
#include "swin_attention/cuda.h"

#include <initializer_list>
#include <tuple>

#include "common/cuda_binding.h"
#include "swin_attention/binding.h"

namespace dskernels {
namespace {

// A kernel would follow the address of another device's memory.
void check_device(const std::optional<Tensor>& t, const Tensor& qkv, const char* name) {
  STD_TORCH_CHECK(!t.has_value() || (t->is_cpu() == qkv.is_cpu() && t->get_device() == qkv.get_device()),
                  "swin_attention: ", name, ": expected a tensor on the device of qkv");
}

void check_devices(const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                   const std::optional<Tensor>& bias, const std::optional<Tensor>& logit_scale) {
  check_device(cos, qkv, "cos");
  check_device(sin, qkv, "sin");
  check_device(bias, qkv, "bias");
  check_device(logit_scale, qkv, "logit_scale");
}

// Cells are counted along each axis in 32 bits.
void check_sizes(const SwinAttentionArgs& args) {
  constexpr int64_t kMost = int64_t{1} << 30;
  STD_TORCH_CHECK(args.batch < kMost && args.height < kMost && args.width < kMost,
                  "swin_attention: qkv: expected batch, height and width below ", kMost);
}

Tensor swin_attention_cuda(const Tensor& qkv, std::optional<Tensor> cos, std::optional<Tensor> sin,
                           std::optional<Tensor> bias, std::optional<Tensor> logit_scale, int64_t heads,
                           int64_t window_height, int64_t window_width, int64_t shift_height, int64_t shift_width,
                           double scale, bool interleaved) {
  const OnDeviceOf device(qkv);
  check_devices(qkv, cos, sin, bias, logit_scale);
  SwinAttentionArgs args{};
  set_geometry(args, qkv, heads, window_height, window_width, shift_height, shift_width);
  check_sizes(args);
  set_rope(args, cos, sin, interleaved);
  const std::optional<Tensor> biases = set_bias(args, bias);
  const std::optional<Tensor> factors = set_factors(args, logit_scale, scale);
  Tensor out = torch::stable::new_empty(qkv, {args.batch, args.height, args.width, heads * args.dim});
  args.out = view4(out, "out");
  run_swin_attention(args, device.stream());
  return out;
}

std::tuple<Tensor, Tensor, Tensor> swin_attention_backward_cuda(
    const Tensor& grad_out, const Tensor& qkv, std::optional<Tensor> cos, std::optional<Tensor> sin,
    std::optional<Tensor> bias, std::optional<Tensor> logit_scale, int64_t heads, int64_t window_height,
    int64_t window_width, int64_t shift_height, int64_t shift_width, double scale, bool interleaved,
    bool bias_needs_grad, bool logit_scale_needs_grad) {
  const OnDeviceOf device(qkv);
  check_devices(qkv, cos, sin, bias, logit_scale);
  check_device(grad_out, qkv, "grad_out");
  SwinAttentionBackwardArgs args{};
  set_geometry(args.forward, qkv, heads, window_height, window_width, shift_height, shift_width);
  check_sizes(args.forward);
  set_rope(args.forward, cos, sin, interleaved);
  const std::optional<Tensor> biases = set_bias(args.forward, bias);
  const std::optional<Tensor> factors = set_factors(args.forward, logit_scale, scale);
  set_grad_out(args, grad_out, qkv);
  STD_TORCH_CHECK(args.grad_out.element == args.forward.qkv.element,
                  "swin_attention_backward: grad_out: expected the dtype of qkv");
  Tensor grad_qkv = torch::stable::new_empty(qkv, {qkv.size(0), qkv.size(1), qkv.size(2), qkv.size(3)});
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
  const Tensor shared = new_floats({swin_attention_backward_floats(args)});
  args.shared = static_cast<float*>(shared.data_ptr());
  run_swin_attention_backward(args, device.stream());
  return {grad_qkv, grad_bias, grad_logit_scale};
}

template <class Library>
void add_operators(Library& library) {
  library.impl("swin_attention", TORCH_BOX(&swin_attention_cuda));
  library.impl("swin_attention_backward", TORCH_BOX(&swin_attention_backward_cuda));
}

}  // namespace
}  // namespace dskernels

DSKERNELS_CUDA_OPERATORS(dskernels::add_operators)
