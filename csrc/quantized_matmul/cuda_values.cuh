// Single values as the kernels read and write them, in types that are known when they run.
#pragma once

#include "common/elements.cuh"
#include "quantized_matmul/args.h"

namespace dskernels {
namespace {

// Sides of a block of fp8 that shares a scale.
constexpr int kScaleBlock = 128;

// Two factors that make up for codes of 1 / unit, a power of two: scale times unit, neither of which leaves float32's
// range before their product with a sum does.
struct Scale {
  float first, second;
};

__device__ inline Scale split_scale(float scale, float unit) {
  return fabsf(scale) < 1.0f ? Scale{1.0f, scale * unit} : Scale{unit, scale};
}

// data[at] and data[at + 1], the second only where there is `both`; at once where `at` is known to be even.
__device__ inline void store_two(void* data, Element element, int64_t at, float x, float y, bool both, bool even) {
  if (!both || !even) {
    store_element(data, element, at, x);
    if (both) store_element(data, element, at + 1, y);
    return;
  }
  switch (element) {
    case Element::kFloat16: return store_pair(static_cast<__half*>(data) + at, x, y);
    case Element::kBFloat16: return store_pair(static_cast<__nv_bfloat16*>(data) + at, x, y);
    default: return store_pair(static_cast<float*>(data) + at, x, y);
  }
}

// What is left to do with the sum of a column: sum * scale + bias. Where groups share scales, sums have met them.
struct Finish {
  Scale scale = {1.0f, 1.0f};
  float bias = 0.0f;

  // Written as it is to be rounded, which compilers may else choose anew for every kernel.
  __device__ float operator()(float sum) const { return fmaf(sum * scale.first, scale.second, bias); }
};

__device__ inline Finish finish_of(const QuantizedMatmulArgs& args, int64_t column, float unit) {
  Finish finish;
  if (args.scheme == Scheme::kInt8WeightOnly) finish.scale = split_scale(args.scale[column], unit);
  if (args.bias != nullptr) finish.bias = load_element(args.bias, args.bias_element, column * args.bias_stride);
  return finish;
}

// The float of e4m3 that bits stand for: one bit of sign, four of exponent, three of mantissa; all ones is NaN.
__device__ inline float e4m3_value(int bits) {
  const int size = bits & 0x7f;
  // The seven bits atop a float32's mantissa, with its exponent 120 more, are off by a power of two, also where
  // numbers are subnormal: there they are multiples of 2 ** -9.
  const float value = size >= 8 ? __uint_as_float((static_cast<unsigned>(size) << 20) + (120u << 23))
                                : static_cast<float>(size) * 0x1p-9f;
  return size == 0x7f ? __uint_as_float(0x7fc00000u) : bits & 0x80 ? -value : value;
}

// x, at most 448 and its rounding in magnitude, to the nearest float of e4m3, ties to even.
__device__ inline float rounded_to_e4m3(float x) {
  constexpr float kSmallestNormal = 0x1p-6f;
  // Added and taken away again, it rounds to a multiple of 2 ** -9.
  constexpr float kSteps = 1.5f * 0x1p14f;
  if (fabsf(x) < kSmallestNormal) return (x + kSteps) - kSteps;
  // Half a unit of the fourth digit, less a little where that digit is even, carries or does not; the rest is cut.
  const unsigned bits = __float_as_uint(x);
  return __uint_as_float((bits + 0x7ffffu + (bits >> 20 & 1)) & 0xfff00000u);
}

}  // namespace
}  // namespace dskernels
