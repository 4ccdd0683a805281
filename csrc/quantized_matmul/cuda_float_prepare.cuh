// Activations as the product of float schemes takes them: in the order of the weight's columns, aligned, those of fp8
// rounded to its numbers.
#pragma once

#include "quantized_matmul/cuda_values.cuh"

namespace dskernels {
namespace {

constexpr int kPrepareThreads = 256;

// Where in its row the activation of column k of the weight stands, or -1.
__device__ inline int64_t input_of(const QuantizedMatmulArgs& args, int64_t k) {
  if (args.input_order == nullptr) return k;
  const int64_t input = args.input_order[k];
  return input >= 0 && input < args.in_features ? input : -1;
}

// copy[row][k] = x[row][input_of(k)], rows `stride` apart, for elements of Bits' size; NaN where there is none. Grid:
// blocks of kPrepareThreads elements.
template <class Bits>
__global__ void __launch_bounds__(kPrepareThreads)
    copy_activations(const QuantizedMatmulArgs args, Bits* copy, int64_t stride) {
  constexpr Bits kNaN = static_cast<Bits>(~Bits{0}) >> 1;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kPrepareThreads + threadIdx.x;
  if (at >= args.rows * args.in_features) return;
  const int64_t row = at / args.in_features, k = at % args.in_features, input = input_of(args, k);
  const Bits* x = static_cast<const Bits*>(args.x) + row * args.x_stride_row;
  copy[row * stride + k] = input >= 0 ? x[input * args.x_stride_column] : kNaN;
}

// For each block of 128 columns of a row, with a its largest magnitude: scale = max(a / 448, 2 ** -126), and codes =
// e4m3(x / scale), as float16; zeros behind the last column. A block that is not finite has the scale NaN. codes is
// [rows, 128 * groups], scales [rows, groups]. Grid: warps of a block each, kPrepareThreads / 32 to a block of threads.
__global__ void __launch_bounds__(kPrepareThreads)
    round_activations(const QuantizedMatmulArgs args, __half* codes, float* scales) {
  constexpr int kValues = kScaleBlock / kWarp;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (kPrepareThreads / kWarp) + warp_index();
  // A warp as a whole.
  if (block >= args.rows * args.groups) return;
  const int64_t row = block / args.groups, first = block % args.groups * kScaleBlock + lane_index();
  float x[kValues], largest = 0.0f;
  bool is_finite = true;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int64_t k = first + kWarp * i, input = k < args.in_features ? input_of(args, k) : 0;
    const int64_t at = row * args.x_stride_row + input * args.x_stride_column;
    const float value = k >= args.in_features ? 0.0f : input < 0 ? NAN : load_element(args.x, args.element, at);
    const bool counts = fabsf(value) < INFINITY;
    is_finite = is_finite && counts;
    x[i] = counts ? value : 0.0f;
    largest = fmaxf(largest, fabsf(x[i]));
  }
  largest = largest_of_lanes(largest, kWarp);
  is_finite = __all_sync(kAllLanes, is_finite);
  const float scale = fmaxf(largest / 448.0f, 0x1p-126f);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    codes[row * args.groups * kScaleBlock + first + kWarp * i] = from_float<__half>(rounded_to_e4m3(x[i] / scale));
  }
  if (lane_index() == 0) scales[block] = is_finite ? scale : NAN;
}

}  // namespace
}  // namespace dskernels
