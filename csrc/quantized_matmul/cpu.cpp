// Binds the CPU kernels of quantized_matmul to torch. The public function has checked the arguments; what is checked
// again here is what memory safety needs when the op is called directly.
#include <vector>

#include "common/binding.h"
#include "common/capability.h"
#include "quantized_matmul/args.h"

namespace dskernels {

DSKERNELS_DECLARE_TIERS(QuantizedMatmulKernels, quantized_matmul_kernels)

namespace {

constexpr int64_t kFp8Block = 128;
// Activations up to which one thread prepares them all.
constexpr int64_t kSerialActivations = 32768;

bool is_dense(const Tensor& t, ScalarType type, std::initializer_list<int64_t> sizes) {
  if (t.scalar_type() != type || t.dim() != static_cast<int64_t>(sizes.size()) || !t.is_contiguous()) return false;
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    if (t.size(dim++) != size) return false;
  }
  return true;
}

int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

void set_weight(QuantizedMatmulArgs& args, const Tensor& qweight, const Tensor& scale,
                const std::optional<Tensor>& zero_point, const std::optional<Tensor>& input_scale, int64_t group_size) {
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
  STD_TORCH_CHECK(input_scale.has_value() == (args.scheme == Scheme::kInt8Static) &&
                      (!input_scale.has_value() || is_dense(*input_scale, ScalarType::Float, {})),
                  "quantized_matmul: input_scale: expected a float32 scalar for int8_static, and only for it");
  if (input_scale.has_value()) args.input_scale = static_cast<const float*>(input_scale->data_ptr());
}

void set_input_order(QuantizedMatmulArgs& args, const Tensor& order) {
  STD_TORCH_CHECK(is_dense(order, ScalarType::Long, {args.in_features}),
                  "quantized_matmul: input_order: expected contiguous int64 [K]");
  args.input_order = static_cast<const int64_t*>(order.data_ptr());
  for (int64_t k = 0; k < args.in_features; ++k) {
    STD_TORCH_CHECK(args.input_order[k] >= 0 && args.input_order[k] < args.in_features,
                    "quantized_matmul: input_order: expected 0 to ", args.in_features - 1, ", got ",
                    args.input_order[k]);
  }
}

// x as rows, one stride apart; a copy where its leading dimensions have no common stride.
Tensor as_rows(QuantizedMatmulArgs& args, const Tensor& x) {
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

template <class F>
void run_all(bool serial, int64_t tasks, int64_t scratch_bytes, const F& f) {
  if (!serial) return run_tasks(tasks, scratch_bytes, f);
  const std::unique_ptr<void, decltype(&std::free)> scratch(
      std::aligned_alloc(64, static_cast<size_t>(scratch_bytes + 63) / 64 * 64 + 64), &std::free);
  if (scratch == nullptr) throw std::bad_alloc();
  for (int64_t task = 0; task < tasks; ++task) f(task, scratch.get());
}

Tensor quantized_matmul_cpu(const Tensor& x, const Tensor& qweight, const Tensor& scale,
                            std::optional<Tensor> zero_point, std::optional<Tensor> input_scale,
                            std::optional<Tensor> input_order, std::optional<Tensor> bias, int64_t scheme,
                            int64_t group_size) {
  STD_TORCH_CHECK(
      x.dim() >= 1 && qweight.dim() == 2 && scheme >= 0 && scheme <= static_cast<int64_t>(Scheme::kFp8Block),
      "quantized_matmul: expected x [..., K], qweight of two dimensions and a scheme");
  QuantizedMatmulArgs args{};
  args.scheme = static_cast<Scheme>(scheme);
  args.in_features = x.size(x.dim() - 1);
  args.out_features = qweight.size(0);
  args.element = element_of(x, "quantized_matmul: x");
  set_weight(args, qweight, scale, zero_point, input_scale, group_size);
  if (input_order.has_value()) set_input_order(args, *input_order);
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == args.out_features, "quantized_matmul: bias: expected [N]");
    args.bias = bias->data_ptr();
    args.bias_element = element_of(*bias, "quantized_matmul: bias");
    args.bias_stride = bias->stride(0);
  }
  std::vector<int64_t> sizes;
  args.rows = 1;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
    sizes.push_back(x.size(dim));
    args.rows *= x.size(dim);
  }
  sizes.push_back(args.out_features);
  Tensor out = torch::stable::new_empty(x, sizes);
  if (out.numel() == 0) return out;
  advise_huge_pages(out);
  const Tensor rows = as_rows(args, x);
  args.out = out.data_ptr();

  const QuantizedMatmulKernels& kernels = DSKERNELS_SELECT_TIER(quantized_matmul_kernels);
  const QuantizedMatmulPlan plan = kernels.plan(args);
  const std::unique_ptr<uint8_t, decltype(&std::free)> prepared(
      static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(plan.tiles * plan.tile_bytes))), &std::free);
  if (prepared == nullptr) throw std::bad_alloc();
  args.prepared = prepared.get();
  run_all(args.rows * args.in_features <= kSerialActivations, plan.tiles, plan.prepare_scratch,
          [&](int64_t tile, void* scratch) { kernels.prepare(args, plan, tile, scratch); });
  run_all(plan.serial, plan.row_blocks * plan.column_blocks, plan.scratch_bytes,
          [&](int64_t task, void* scratch) { kernels.run(args, plan, task, scratch); });
  return out;
}

}  // namespace
}  // namespace dskernels

STABLE_TORCH_LIBRARY_IMPL(dskernels, CPU, m) {
  m.impl("quantized_matmul", TORCH_BOX(&dskernels::quantized_matmul_cpu));
}
