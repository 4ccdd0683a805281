// The kind of a norm, for bindings: not for the kernels of CPU tiers, whose inline functions the linker would merge.
#pragma once

#include <cmath>

#include "clip_and_scale/args.h"

namespace dskernels {

inline NormKind kind_of(double power) {
  if (power == 1.0) return NormKind::kSum;
  if (power == 2.0) return NormKind::kSumOfSquares;
  if (power == 3.0) return NormKind::kSumOfCubes;
  return std::isinf(power) ? NormKind::kMaximum : NormKind::kSumOfPowers;
}

}  // namespace dskernels
