// Binds the CPU kernels of clip_and_scale to torch. They work on a table of memory runs (common/tensor_table.h), whose
// maker answers for its pointers.
#include <tuple>
#include <vector>

#include "clip_and_scale/args.h"
#include "clip_and_scale/norm_kind.h"
#include "common/binding.h"
#include "common/capability.h"

namespace dskernels {

DSKERNELS_DECLARE_TIERS(ClipAndScaleKernels, clip_and_scale_kernels)

namespace {

// Elements of a task: some 100 KiB, far more than it costs to take one, and enough tasks for every core to the end.
constexpr int64_t kTaskElements = 32768;
// Up to here one thread is done before a second has woken up.
constexpr int64_t kSerialElements = 65536;

const Run* runs_of(const Tensor& table) {
  STD_TORCH_CHECK(
      table.dim() == 2 && table.size(1) == 4 && table.is_contiguous() && table.scalar_type() == ScalarType::Long,
      "clip_and_scale: table: expected contiguous int64 [runs, 4]");
  return static_cast<const Run*>(table.data_ptr());
}

// Cuts the runs into tasks, by their sizes alone, so that sums do not depend on the number of threads.
std::vector<RunSpan> spans_of(const Run* runs, int64_t count) {
  std::vector<RunSpan> spans;
  RunSpan span{0, 0, 0};
  for (int64_t run = 0; run < count; ++run) {
    for (int64_t offset = 0; offset < runs[run].count;) {
      if (span.count == 0) span = {run, offset, 0};
      const int64_t taken = std::min(kTaskElements - span.count, runs[run].count - offset);
      span.count += taken;
      offset += taken;
      if (span.count == kTaskElements) {
        spans.push_back(span);
        span.count = 0;
      }
    }
  }
  if (span.count > 0) spans.push_back(span);
  return spans;
}

template <class F>
void run_spans(const std::vector<RunSpan>& spans, const F& f) {
  const int64_t tasks = static_cast<int64_t>(spans.size());
  if (tasks * kTaskElements <= kSerialElements) {
    for (int64_t task = 0; task < tasks; ++task) f(task);
    return;
  }
  run_tasks(tasks, 0, [&](int64_t task, void*) { f(task); });
}

// The sum over all elements of |x|^p (their maximum for p = inf), and whether any is not finite.
std::tuple<double, bool> table_power_sum_cpu(const Tensor& table, double power) {
  const Run* runs = runs_of(table);
  const std::vector<RunSpan> spans = spans_of(runs, table.size(0));
  const ClipAndScaleKernels& kernels = DSKERNELS_SELECT_TIER(clip_and_scale_kernels);
  const NormKind kind = kind_of(power);
  std::vector<NormPart> parts(spans.size());
  run_spans(spans, [&](int64_t task) { parts[task] = kernels.norm(runs, spans[task], kind, power); });
  double sum = 0.0;
  bool has_nonfinite = false;
  for (const NormPart& part : parts) {
    sum = kind == NormKind::kMaximum ? std::max(sum, part.sum) : sum + part.sum;
    has_nonfinite |= part.has_nonfinite;
  }
  return {sum, has_nonfinite};
}

// Multiplies all elements. From the end, whose elements were read last and may be in cache still.
void table_scale_cpu(const Tensor& table, double factor) {
  const Run* runs = runs_of(table);
  const std::vector<RunSpan> spans = spans_of(runs, table.size(0));
  const ClipAndScaleKernels& kernels = DSKERNELS_SELECT_TIER(clip_and_scale_kernels);
  const int64_t last = static_cast<int64_t>(spans.size()) - 1;
  run_spans(spans, [&](int64_t task) { kernels.scale(runs, spans[last - task], factor); });
}

}  // namespace
}  // namespace dskernels

STABLE_TORCH_LIBRARY_IMPL(dskernels, CPU, m) {
  m.impl("table_power_sum", TORCH_BOX(&dskernels::table_power_sum_cpu));
  m.impl("table_scale", TORCH_BOX(&dskernels::table_scale_cpu));
}
