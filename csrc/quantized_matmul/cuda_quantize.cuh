// Rows of x as int8 codes, each with a scale.
#pragma once

#include "common/elements.cuh"
#include "quantized_matmul/args.h"

namespace dskernels {
namespace {

constexpr int kQuantizeThreads = 256;
// Columns that a thread takes at a time.
constexpr int kUnit = 16;
constexpr unsigned kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;
// Rows beyond these bounds are lifted into the middle of float32's range, as in
// dskernels/quantized_matmul/activations.py.
constexpr float kSmall = 0x1p-60f, kLarge = 0x1p60f, kLift = 0x1p64f;

struct QuantizeArgs {
  const void* x;
  int64_t stride_row, stride_column;
  Element element;
  bool by_16;  // whether a row can be read 16 bytes at a time
  const int64_t* input_order;
  const float* input_scale;
  int64_t columns, padded;
  bool is_int4;
  int8_t* codes;
  float* row_scale;
  float* unlift;
  int* tickets;
  int64_t ticket_count;
};

template <class T>
__device__ inline void load_one_by_one(const QuantizeArgs& args, const T* row, int64_t begin, float (&to)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const int64_t k = begin + i;
    float value = 0.0f;
    if (k < args.columns) {
      const int64_t from = args.input_order == nullptr ? k : args.input_order[k];
      // Nobody has looked at the order: what it names outside of the row is not a number.
      value = from >= 0 && from < args.columns ? to_float(row[from * args.stride_column]) : __uint_as_float(kNanBits);
    }
    to[i] = value;
  }
}

// Columns begin to begin + kUnit of a row in the order of the weight, zeros past its end.
template <class T>
__device__ inline void load_unit(const QuantizeArgs& args, int64_t begin, float (&to)[kUnit]) {
  const T* row = static_cast<const T*>(args.x) + blockIdx.x * args.stride_row;
  if (!args.by_16 || begin + kUnit > args.columns) return load_one_by_one(args, row, begin, to);
  constexpr int kVector = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kUnit; i += kVector) load_vector(row + begin + i, to + i);
}

__device__ inline void load_unit(const QuantizeArgs& args, int64_t begin, float (&to)[kUnit]) {
  switch (args.element) {
    case Element::kFloat32: return load_unit<float>(args, begin, to);
    case Element::kBFloat16: return load_unit<__nv_bfloat16>(args, begin, to);
    case Element::kFloat16: return load_unit<__half>(args, begin, to);
  }
}

// The largest of the values of all threads of the block.
__device__ inline unsigned block_maximum(unsigned value) {
  SIMT_SHARED(largest, unsigned[kQuantizeThreads / kWarp]);
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, lanes));
  if (lane_index() == 0) largest[warp_index()] = value;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kQuantizeThreads / kWarp; ++warp) value = max(value, largest[warp]);
  return value;
}

// How codes follow from the bits of the largest magnitude of a row, those of a NaN being larger than any number's: see
// quantize_rows and quantize_rows_by in dskernels/quantized_matmul/activations.py.
struct RowScale {
  float scale, lift, inverse;
};

// Four codes clamp(round(x * lift * inverse), -127, 127), ties to even, as bytes of a word.
template <int kStride>
__device__ inline uint32_t four_codes(const RowScale& row, const float* x) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scaled = __fmul_rn(__fmul_rn(x[i * kStride], row.lift), row.inverse);
    const int code = __float2int_rn(fminf(fmaxf(scaled, -127.0f), 127.0f));
    word |= (static_cast<uint32_t>(code) & 0xffu) << 8 * i;
  }
  return word;
}

__device__ inline RowScale scale_of(const QuantizeArgs& args, unsigned bits) {
  if (bits >= kInfinityBits) return {__uint_as_float(kNanBits), 1.0f, 0.0f};
  if (args.input_scale != nullptr) return {*args.input_scale, 1.0f, 1.0f / *args.input_scale};
  float largest = __uint_as_float(bits);
  const float lift = largest < kSmall ? kLift : largest > kLarge ? 1.0f / kLift : 1.0f;
  largest *= lift;
  return {largest / 127.0f, lift, largest > 0.0f ? 127.0f / largest : 0.0f};
}

// Writes the codes of a unit, zeros where `is_zero`.
__device__ inline void store_codes(const QuantizeArgs& args, const RowScale& row, bool is_zero, const float (&x)[kUnit],
                                   int8_t* row_codes, int64_t begin) {
  if (args.is_int4) {
    uint2 even{}, odd{};
    if (!is_zero) {
      even = {four_codes<2>(row, x), four_codes<2>(row, x + 8)};
      odd = {four_codes<2>(row, x + 1), four_codes<2>(row, x + 9)};
    }
    uint2* to = reinterpret_cast<uint2*>(row_codes + begin / 32 * 32 + begin % 32 / 2);
    to[0] = even;
    to[2] = odd;
    return;
  }
  uint4 words{};
  if (!is_zero) {
    words = {four_codes<1>(row, x), four_codes<1>(row, x + 4), four_codes<1>(row, x + 8), four_codes<1>(row, x + 12)};
  }
  *reinterpret_cast<uint4*>(row_codes + begin) = words;
}

// Writes a row of codes, zeros up to `padded` and in rows that are not finite; row_scale, NaN for those; unlift, the
// power of two that undoes the lift; and zeros to the tickets. For int4 of each 32 codes the even ones come first, then
// the odd ones, as the multiplying kernel takes nibbles. A block a row; reads x twice, the second time from a cache.
__global__ void __launch_bounds__(kQuantizeThreads, 4) quantize_rows_kernel(QuantizeArgs args) {
  const int64_t first = int64_t{threadIdx.x} * kUnit, step = kQuantizeThreads * kUnit;
  float values[kUnit];
  unsigned bits = 0;
  for (int64_t k = first; k < args.columns; k += step) {
    load_unit(args, k, values);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) bits = max(bits, __float_as_uint(values[i]) & 0x7fffffffu);
  }
  bits = block_maximum(bits);
  const RowScale row = scale_of(args, bits);
  if (threadIdx.x == 0) {
    args.row_scale[blockIdx.x] = row.scale;
    args.unlift[blockIdx.x] = 1.0f / row.lift;
  }
  int8_t* codes = args.codes + blockIdx.x * args.padded;
  for (int64_t k = first; k < args.padded; k += step) {
    const bool is_zero = k >= args.columns || bits >= kInfinityBits;
    if (!is_zero) load_unit(args, k, values);
    store_codes(args, row, is_zero, values, codes, k);
  }
  const int64_t all = int64_t{gridDim.x} * kQuantizeThreads;
  for (int64_t i = blockIdx.x * int64_t{kQuantizeThreads} + threadIdx.x; i < args.ticket_count; i += all) {
    args.tickets[i] = 0;
  }
}

}  // namespace
}  // namespace dskernels
