// What softmaxes of attention are made of.
#pragma once

#include "common/ptx.cuh"

namespace dskernels {

constexpr float kLog2E = 1.4426950408889634f;

// What a row is shifted by. -inf - -inf is NaN: by 0 where it has seen nothing yet.
__device__ inline float shift_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// exp(x): differences are taken before the change of base, which keeps the digits of scores that are large and near
// each other.
__device__ inline float weight_of(float x) { return ptx::exp2_approximate(x * kLog2E); }

}  // namespace dskernels
