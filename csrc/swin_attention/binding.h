// The kernels' arguments from tensors, for the bindings of the CPU and of CUDA. The public function has checked them;
// what is checked again here is what memory safety needs when the op is called directly.
#pragma once

#include <optional>

#include "common/binding.h"
#include "swin_attention/args.h"

namespace dskernels {

inline constexpr int64_t kMaxHeadDim = 256, kMaxTokens = 256;

inline void set_geometry(SwinAttentionArgs& args, const Tensor& qkv, int64_t heads, int64_t window_height,
                         int64_t window_width, int64_t shift_height, int64_t shift_width) {
  args.qkv = view4(qkv, "qkv");
  // Not more heads than channels: 3 * heads must not overflow.
  STD_TORCH_CHECK(heads > 0 && heads <= qkv.size(3) && qkv.size(3) % (3 * heads) == 0,
                  "swin_attention: qkv: expected [B, H, W, 3 * C] with C a positive multiple of ", heads,
                  " heads, got ", qkv.size(3), " channels");
  STD_TORCH_CHECK(window_height > 0 && window_width > 0 && window_height <= kMaxTokens && window_width <= kMaxTokens &&
                      window_height * window_width <= kMaxTokens,
                  "swin_attention: window_size: expected 1 to ", kMaxTokens, " tokens, got ", window_height, " x ",
                  window_width);
  STD_TORCH_CHECK(shift_height >= 0 && shift_height < window_height && shift_width >= 0 && shift_width < window_width,
                  "swin_attention: shift: expected 0 to below the window, got ", shift_height, ", ", shift_width);
  args.batch = qkv.size(0);
  args.height = qkv.size(1);
  args.width = qkv.size(2);
  args.heads = heads;
  args.dim = qkv.size(3) / (3 * heads);
  STD_TORCH_CHECK(args.dim <= kMaxHeadDim, "swin_attention: expected head dims up to ", kMaxHeadDim, ", got ",
                  args.dim);
  args.window_height = window_height;
  args.window_width = window_width;
  args.shift_height = shift_height;
  args.shift_width = shift_width;
}

// Set before: geometry.
inline void set_rope(SwinAttentionArgs& args, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                     bool interleaved) {
  if (!cos.has_value()) return;
  STD_TORCH_CHECK(sin.has_value() && cos->dim() == 3 && sin->dim() == 3 && cos->is_contiguous() &&
                      sin->is_contiguous() && cos->scalar_type() == ScalarType::Float &&
                      sin->scalar_type() == ScalarType::Float && (cos->size(0) == 1 || cos->size(0) == args.heads) &&
                      cos->size(1) == args.window_height * args.window_width && 2 * cos->size(2) <= args.dim &&
                      sin->size(0) == cos->size(0) && sin->size(1) == cos->size(1) && sin->size(2) == cos->size(2),
                  "swin_attention: cos, sin: expected contiguous float32 [1 or heads, h * w, rotary_dim / 2]");
  args.cos = static_cast<const float*>(cos->data_ptr());
  args.sin = static_cast<const float*>(sin->data_ptr());
  args.rotary_dim = 2 * cos->size(2);
  args.table_stride = cos->size(0) == 1 ? 0 : cos->size(1) * cos->size(2);
  args.interleaved = interleaved;
}

// Set before: geometry. Returns what keeps the biases alive.
inline std::optional<Tensor> set_bias(SwinAttentionArgs& args, const std::optional<Tensor>& bias) {
  if (!bias.has_value()) return std::nullopt;
  const int64_t tokens = args.window_height * args.window_width;
  STD_TORCH_CHECK(bias->dim() == 3 && bias->scalar_type() == ScalarType::Float && bias->size(0) == args.heads &&
                      bias->size(1) == tokens && bias->size(2) == tokens,
                  "swin_attention: bias: expected float32 [heads, h * w, h * w]");
  const Tensor rows = bias->stride(2) == 1 ? *bias : torch::stable::contiguous(*bias);
  args.bias = static_cast<const float*>(rows.data_ptr());
  args.bias_stride_head = rows.stride(0);
  args.bias_stride_query = rows.stride(1);
  return rows;
}

// Set before: geometry. Returns what keeps the factors alive.
inline std::optional<Tensor> set_factors(SwinAttentionArgs& args, const std::optional<Tensor>& logit_scale,
                                         double scale) {
  args.scale = static_cast<float>(scale);
  if (!logit_scale.has_value()) return std::nullopt;
  STD_TORCH_CHECK(
      logit_scale->dim() == 1 && logit_scale->size(0) == args.heads && logit_scale->scalar_type() == ScalarType::Float,
      "swin_attention: logit_scale: expected float32 [heads]");
  const Tensor dense = torch::stable::contiguous(*logit_scale);
  args.logit_scale = static_cast<const float*>(dense.data_ptr());
  return dense;
}

inline void set_grad_out(SwinAttentionBackwardArgs& args, const Tensor& grad_out, const Tensor& qkv) {
  args.grad_out = view4(grad_out, "grad_out");
  STD_TORCH_CHECK(grad_out.size(0) == qkv.size(0) && grad_out.size(1) == qkv.size(1) &&
                      grad_out.size(2) == qkv.size(2) && 3 * grad_out.size(3) == qkv.size(3),
                  "swin_attention_backward: grad_out: expected [B, H, W, C]");
}

}  // namespace dskernels
