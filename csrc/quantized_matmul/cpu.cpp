// Binds the CPU kernels of quantized_matmul to torch.
#include "common/capability.h"
#include "quantized_matmul/binding.h"

namespace dskernels {

DSKERNELS_DECLARE_TIERS(QuantizedMatmulKernels, quantized_matmul_kernels)

namespace {

// Activations up to which one thread prepares them all.
constexpr int64_t kSerialActivations = 32768;

void check_input_order(const QuantizedMatmulArgs& args) {
  if (args.input_order == nullptr) return;
  for (int64_t k = 0; k < args.in_features; ++k) {
    STD_TORCH_CHECK(args.input_order[k] >= 0 && args.input_order[k] < args.in_features,
                    "quantized_matmul: input_order: expected 0 to ", args.in_features - 1, ", got ",
                    args.input_order[k]);
  }
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
  STD_TORCH_CHECK(x.dim() >= 1 && qweight.dim() == 2,
                  "quantized_matmul: expected x [..., K] and qweight of two dimensions");
  QuantizedMatmulArgs args{};
  set_scheme(args, scheme);
  args.in_features = x.size(x.dim() - 1);
  args.out_features = qweight.size(0);
  args.element = element_of(x, "quantized_matmul: x");
  set_weight(args, qweight, scale, zero_point, group_size);
  set_input_scale(args, input_scale);
  set_input_order(args, input_order);
  check_input_order(args);
  set_bias(args, bias);
  const std::vector<int64_t> sizes = sizes_with_last(args, x, args.out_features);
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
