// What the bindings of quantized_matmul share: tensors as QuantizedMatmulArgs. The public function has checked the
// arguments; what is checked again here is what memory safety needs when the op is called directly.
#pragma once

#include <vector>

#include "common/binding.h"
#include "quantized_matmul/args.h"

namespace dskernels {

constexpr int64_t kFp8Block = 128;

inline bool is_dense(const Tensor& t, ScalarType type, std::initializer_list<int64_t> sizes) {
  if (t.scalar_type() != type || t.dim() != static_cast<int64_t>(sizes.size()) || !t.is_contiguous()) return false;
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    if (t.size(dim++) != size) return false;
  }
  return true;
}

inline int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

inline void set_scheme(QuantizedMatmulArgs& args, int64_t scheme) {
  STD_TORCH_CHECK(scheme >= 0 && scheme <= static_cast<int64_t>(Scheme::kFp8Block),
                  "quantized_matmul: scheme: expected 0 to ", static_cast<int64_t>(Scheme::kFp8Block), ", got ",
                  scheme);
  args.scheme = static_cast<Scheme>(scheme);
}

// Takes scheme, in_features and out_features as set.
inline void set_weight(QuantizedMatmulArgs& args, const Tensor& qweight, const Tensor& scale,
                       const std::optional<Tensor>& zero_point, int64_t group_size) {
  const bool is_int4 = args.scheme == Scheme::kInt4Dynamic || args.scheme == Scheme::kInt4WeightOnly;
  const bool is_fp8 = args.scheme == Scheme::kFp8Block;
  const int64_t n = args.out_features, k = args.in_features;
  args.row_bytes = is_int4 ? (k + 1) / 2 : k;
  STD_TORCH_CHECK(is_dense(qweight, is_int4 || is_fp8 ? ScalarType::Byte : ScalarType::Char, {n, args.row_bytes}),
                  "quantized_matmul: qweight: expected contiguous int8 [N, K], uint8 [N, ceil(K / 2)] for int4");
  STD_TORCH_CHECK(!is_int4 || k == 0 || (group_size > 0 && (group_size >= k || group_size % 16 == 0)),
                  "quantized_matmul: group_size: expected a multiple of 16, got ", group_size);
  // No longer than a row, so that the ends of groups are numbers.
  args.group_size = is_fp8 ? kFp8Block : std::min(group_size, k);
  args.groups = is_int4 || is_fp8 ? (k == 0 ? 0 : blocks(k, args.group_size)) : 1;
  const bool fits = is_int4  ? is_dense(scale, ScalarType::Float, {n, args.groups})
                    : is_fp8 ? is_dense(scale, ScalarType::Float, {blocks(n, kFp8Block), args.groups})
                             : is_dense(scale, ScalarType::Float, {n});
  STD_TORCH_CHECK(fits, "quantized_matmul: scale: expected contiguous float32, one for each group");
  args.qweight = static_cast<const uint8_t*>(qweight.data_ptr());
  args.scale = static_cast<const float*>(scale.data_ptr());
  if (zero_point.has_value()) {
    STD_TORCH_CHECK(is_int4 && is_dense(*zero_point, ScalarType::Byte, {n, args.groups}),
                    "quantized_matmul: zero_point: expected contiguous uint8, one for each group of int4");
    args.zero_point = static_cast<const uint8_t*>(zero_point->data_ptr());
  }
}

inline void set_input_scale(QuantizedMatmulArgs& args, const std::optional<Tensor>& input_scale) {
  STD_TORCH_CHECK(input_scale.has_value() == (args.scheme == Scheme::kInt8Static) &&
                      (!input_scale.has_value() || is_dense(*input_scale, ScalarType::Float, {})),
                  "quantized_matmul: input_scale: expected a float32 scalar for int8_static, and only for it");
  if (input_scale.has_value()) args.input_scale = static_cast<const float*>(input_scale->data_ptr());
}

// Its values are for the caller to look at.
inline void set_input_order(QuantizedMatmulArgs& args, const std::optional<Tensor>& order) {
  if (!order.has_value()) return;
  STD_TORCH_CHECK(is_dense(*order, ScalarType::Long, {args.in_features}),
                  "quantized_matmul: input_order: expected contiguous int64 [K]");
  args.input_order = static_cast<const int64_t*>(order->data_ptr());
}

inline void set_bias(QuantizedMatmulArgs& args, const std::optional<Tensor>& bias) {
  if (!bias.has_value()) return;
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == args.out_features, "quantized_matmul: bias: expected [N]");
  args.bias = bias->data_ptr();
  args.bias_element = element_of(*bias, "quantized_matmul: bias");
  args.bias_stride = bias->stride(0);
}

// The sizes of `t` with the last one replaced; counts the rows.
inline std::vector<int64_t> sizes_with_last(QuantizedMatmulArgs& args, const Tensor& t, int64_t last) {
  std::vector<int64_t> sizes;
  args.rows = 1;
  for (int64_t dim = 0; dim + 1 < t.dim(); ++dim) {
    sizes.push_back(t.size(dim));
    args.rows *= t.size(dim);
  }
  sizes.push_back(last);
  return sizes;
}

// x as rows, one stride apart; a copy where its leading dimensions have no common stride.
inline Tensor as_rows(QuantizedMatmulArgs& args, const Tensor& x) {
  const int64_t last = x.dim() - 1;
  bool has_rows = true, is_first = true;
  int64_t stride = 0, extent = 0;
  for (int64_t dim = last - 1; dim >= 0; --dim) {
    if (x.size(dim) == 1) continue;
    if (is_first) {
      stride = x.stride(dim);
      extent = stride * x.size(dim);
      is_first = false;
    } else {
      has_rows = has_rows && x.stride(dim) == extent;
      extent *= x.size(dim);
    }
  }
  const Tensor rows = has_rows ? x : torch::stable::contiguous(x);
  args.x = rows.data_ptr();
  args.x_stride_row = has_rows ? stride : args.in_features;
  args.x_stride_column = rows.stride(last);
  return rows;
}

}  // namespace dskernels
