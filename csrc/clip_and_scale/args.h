// What the clip-and-scale kernels take: plain data, so that a caller needs no torch.
#pragma once

#include <cstdint>

#include "common/tensor_table.h"

namespace dskernels {

// A share of the work: `count` elements from element `offset` of run `run` on, into the runs that follow it.
struct RunSpan {
  int64_t run, offset, count;
};

enum class NormKind { kSum, kSumOfSquares, kSumOfCubes, kMaximum, kSumOfPowers };

// `sum` is over |x|^p in double; for kMaximum it is the largest |x| of those that are no NaN.
struct NormPart {
  double sum;
  bool has_nonfinite;
};

struct ClipAndScaleKernels {
  NormPart (*norm)(const Run* runs, const RunSpan& span, NormKind kind, double power);
  // x *= factor, rounded once.
  void (*scale)(const Run* runs, const RunSpan& span, double factor);
};

}  // namespace dskernels
