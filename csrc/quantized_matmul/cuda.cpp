// Binds the CUDA kernels of quantized_matmul to torch.
#include "quantized_matmul/cuda.h"

#include <array>

#include "common/cuda_binding.h"
#include "quantized_matmul/binding.h"

namespace dskernels {
namespace {

bool is_integer(Scheme scheme) {
  return scheme == Scheme::kInt8Dynamic || scheme == Scheme::kInt8Static || scheme == Scheme::kInt4Dynamic;
}

void check_device(const Tensor& like, const std::optional<Tensor>& t, const char* name) {
  STD_TORCH_CHECK(!t.has_value() || t->device() == like.device(), "quantized_matmul: ", name,
                  ": expected a tensor on the device of the first argument");
}

// W [out_features, in_features] in the dtype of `like`.
Tensor dequantize(const QuantizedMatmulArgs& args, const Tensor& like, void* stream) {
  const Tensor weight = torch::stable::new_empty(like, {args.out_features, args.in_features});
  dequantize_cuda(args, weight.data_ptr(), stream);
  return weight;
}

// x @ weight^T + bias by torch.
Tensor linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
  if (bias.has_value()) bias = torch::stable::to(*bias, x.scalar_type());
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// out = a @ b by torch; the variant that autocast, which may be on in a backward pass, leaves alone.
void multiply_into(const Tensor& out, const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  // A second handle of `out`, which is owned like the first.
  (void)torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor quantized_matmul_cuda(const Tensor& x, const Tensor& qweight, const Tensor& scale,
                             std::optional<Tensor> zero_point, std::optional<Tensor> input_scale,
                             std::optional<Tensor> input_order, std::optional<Tensor> bias, int64_t scheme,
                             int64_t group_size) {
  STD_TORCH_CHECK(x.dim() >= 1 && qweight.dim() == 2,
                  "quantized_matmul: expected x [..., K] and qweight of two dimensions");
  check_device(x, qweight, "qweight");
  check_device(x, scale, "scale");
  check_device(x, zero_point, "zero_point");
  check_device(x, input_scale, "input_scale");
  check_device(x, input_order, "input_order");
  check_device(x, bias, "bias");
  QuantizedMatmulArgs args{};
  set_scheme(args, scheme);
  args.in_features = x.size(x.dim() - 1);
  args.out_features = qweight.size(0);
  args.element = element_of(x, "quantized_matmul: x");
  set_weight(args, qweight, scale, zero_point, group_size);
  set_input_scale(args, input_scale);
  set_input_order(args, input_order);
  set_bias(args, bias);
  const std::vector<int64_t> sizes = sizes_with_last(args, x, args.out_features);
  const OnDeviceOf device(x);
  if (args.rows > 0 && args.out_features > 0 && !is_integer(args.scheme) && quantized_matmul_wants_dense_weight(args)) {
    return linear(x, dequantize(args, x, device.stream()), bias);
  }
  Tensor out = torch::stable::new_empty(x, sizes);
  if (out.numel() == 0) return out;
  const Tensor rows = as_rows(args, x);
  args.out = out.data_ptr();
  const bool integer = is_integer(args.scheme);
  const Tensor prepared = torch::stable::new_empty(
      x, {integer ? quantized_matmul_integer_scratch_bytes(args) : quantized_matmul_float_scratch_bytes(args)},
      ScalarType::Byte);
  args.prepared = static_cast<uint8_t*>(prepared.data_ptr());
  integer ? quantized_matmul_integer_cuda(args, device.stream()) : quantized_matmul_float_cuda(args, device.stream());
  return out;
}

// grad @ W, with W rounded to the dtype of grad.
Tensor quantized_matmul_backward_cuda(const Tensor& grad, const Tensor& qweight, const Tensor& scale,
                                      std::optional<Tensor> zero_point, std::optional<Tensor> input_order,
                                      int64_t scheme, int64_t group_size, int64_t in_features) {
  STD_TORCH_CHECK(grad.dim() >= 1 && qweight.dim() == 2 && grad.size(grad.dim() - 1) == qweight.size(0),
                  "quantized_matmul_backward: expected grad [..., N] and qweight [N, row]");
  check_device(grad, qweight, "qweight");
  check_device(grad, scale, "scale");
  check_device(grad, zero_point, "zero_point");
  check_device(grad, input_order, "input_order");
  QuantizedMatmulArgs args{};
  set_scheme(args, scheme);
  args.in_features = in_features;
  args.out_features = qweight.size(0);
  args.element = element_of(grad, "quantized_matmul_backward: grad");
  set_weight(args, qweight, scale, zero_point, group_size);
  set_input_order(args, input_order);
  const std::vector<int64_t> sizes = sizes_with_last(args, grad, in_features);
  const OnDeviceOf device(grad);
  const Tensor result = torch::stable::new_empty(grad, sizes);
  if (result.numel() == 0) return result;
  const Tensor rows = torch::stable::reshape(grad, {args.rows, args.out_features});
  multiply_into(torch::stable::view(result, {args.rows, in_features}), rows, dequantize(args, grad, device.stream()));
  return result;
}

template <class Library>
void add_quantized_matmul(Library& m) {
  m.impl("quantized_matmul", TORCH_BOX(&quantized_matmul_cuda));
  m.impl("quantized_matmul_backward", TORCH_BOX(&quantized_matmul_backward_cuda));
}

}  // namespace
}  // namespace dskernels

DSKERNELS_CUDA_OPERATORS(dskernels::add_quantized_matmul)
