// Binds the CUDA kernels of clip_and_scale to torch. They work on a table of chunks (common/tensor_table.h), whose
// maker answers for its pointers (dskernels/clip_and_scale/chunks.py).
#include "clip_and_scale/cuda.h"

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "clip_and_scale/norm_kind.h"
#include "common/cuda_binding.h"

namespace dskernels {
namespace {

const Run* chunks_of(const Tensor& table) {
  STD_TORCH_CHECK(
      table.dim() == 2 && table.size(1) == 4 && table.is_contiguous() && table.scalar_type() == ScalarType::Long,
      "clip_and_scale: table: expected contiguous int64 [chunks, 4]");
  STD_TORCH_CHECK(table.size(0) <= std::numeric_limits<int32_t>::max(),
                  "clip_and_scale: table: expected less than 2^31 chunks, got ", table.size(0));
  return static_cast<const Run*>(table.data_ptr());
}

RunType type_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return RunType::kFloat32;
    case ScalarType::BFloat16: return RunType::kBFloat16;
    case ScalarType::Half: return RunType::kFloat16;
    case ScalarType::Double: return RunType::kFloat64;
    default: STD_TORCH_CHECK(false, name, ": expected float32, bfloat16, float16 or float64, got another dtype");
  }
}

void check_device(const Tensor& t, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(t.device() == like.device(), name, ": expected a tensor on the device of the others");
}

// float64 [chunks, 2], as power_sums_cuda writes it.
Tensor chunk_power_sums_cuda(const Tensor& table, double power) {
  const Run* chunks = chunks_of(table);
  const OnDeviceOf device(table);
  const Tensor rows = torch::stable::new_empty(table, {table.size(0), 2}, ScalarType::Double);
  power_sums_cuda(chunks, table.size(0), kind_of(power), power, static_cast<double (*)[2]>(rows.data_ptr()),
                  device.stream());
  return rows;
}

// The norm and the flag, float32 scalars, and the factor, float64: see FactorArgs.
std::tuple<Tensor, Tensor, Tensor> norm_and_factor_cuda(const Tensor& rows, double power,
                                                        std::optional<Tensor> loss_scale, double loss_scale_number,
                                                        std::optional<double> max_norm) {
  STD_TORCH_CHECK(
      rows.dim() == 2 && rows.size(1) == 2 && rows.is_contiguous() && rows.scalar_type() == ScalarType::Double,
      "clip_and_scale: rows: expected contiguous float64 [rows, 2]");
  FactorArgs args{};
  args.rows = static_cast<const double (*)[2]>(rows.data_ptr());
  args.count = rows.size(0);
  args.kind = kind_of(power);
  args.power = power;
  args.loss_scale = loss_scale_number;
  if (loss_scale.has_value()) {
    STD_TORCH_CHECK(loss_scale->numel() == 1, "clip_and_scale: loss_scale: expected one number");
    check_device(*loss_scale, rows, "clip_and_scale: loss_scale");
    args.loss_scale_data = loss_scale->data_ptr();
    args.loss_scale_type = type_of(*loss_scale, "clip_and_scale: loss_scale");
  }
  args.max_norm = max_norm.value_or(INFINITY);
  const OnDeviceOf device(rows);
  const Tensor norm = torch::stable::new_empty(rows, {}, ScalarType::Float);
  const Tensor found_inf = torch::stable::new_empty(rows, {}, ScalarType::Float);
  const Tensor factor = torch::stable::new_empty(rows, {}, ScalarType::Double);
  args.norm = static_cast<float*>(norm.data_ptr());
  args.found_inf = static_cast<float*>(found_inf.data_ptr());
  args.factor = static_cast<double*>(factor.data_ptr());
  clip_factor_cuda(args, device.stream());
  return {norm, found_inf, factor};
}

void chunk_scale_cuda(const Tensor& table, const Tensor& factor) {
  const Run* chunks = chunks_of(table);
  STD_TORCH_CHECK(factor.numel() == 1 && factor.scalar_type() == ScalarType::Double,
                  "clip_and_scale: factor: expected one float64 number");
  check_device(factor, table, "clip_and_scale: factor");
  const OnDeviceOf device(table);
  scale_cuda(chunks, table.size(0), static_cast<const double*>(factor.data_ptr()), device.stream());
}

}  // namespace
}  // namespace dskernels

STABLE_TORCH_LIBRARY_IMPL(dskernels_cuda, DSKERNELS_CUDA_KEY, m) {
  m.impl("chunk_power_sums", TORCH_BOX(&dskernels::chunk_power_sums_cuda));
  m.impl("clip_factor", TORCH_BOX(&dskernels::norm_and_factor_cuda));
  m.impl("chunk_scale", TORCH_BOX(&dskernels::chunk_scale_cuda));
}
