// A weight in floats, from its codes.
#pragma once

#include "quantized_matmul/cuda_values.cuh"

namespace dskernels {
namespace {

constexpr int kDequantizeThreads = 256;
// Codes of a thread: neighbours in a row that share a scale, since groups are multiples of 16 or whole rows.
constexpr int kOwnCodes = 8;

struct Dequantize {
  QuantizedMatmulArgs args;
  void* weight;  // [out_features, in_features]
  // Whether a thread's codes can be read, and its floats written, as vectors.
  bool reads_vectors, writes_vectors;
};

__host__ __device__ inline bool is_int4(Scheme scheme) {
  return scheme == Scheme::kInt4Dynamic || scheme == Scheme::kInt4WeightOnly;
}

// The bytes of kOwnCodes codes from column k on; zeros behind the end of the row.
__device__ inline uint2 load_codes(const Dequantize& d, int64_t row, int64_t k) {
  const QuantizedMatmulArgs& args = d.args;
  const int64_t first = is_int4(args.scheme) ? k / 2 : k;
  const int count = is_int4(args.scheme) ? kOwnCodes / 2 : kOwnCodes;
  const uint8_t* from = args.qweight + row * args.row_bytes + first;
  if (d.reads_vectors && first + count <= args.row_bytes) {
    if (count == 8) return *reinterpret_cast<const uint2*>(from);
    return {*reinterpret_cast<const uint32_t*>(from), 0};
  }
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kOwnCodes; ++i) {
    if (i < count && first + i < args.row_bytes) words[i / 4] |= static_cast<uint32_t>(from[i]) << 8 * (i % 4);
  }
  return {words[0], words[1]};
}

// What the scale multiplies, of code i of those in `bytes`.
__device__ inline float code_value(Scheme scheme, uint2 bytes, int i, int zero) {
  if (is_int4(scheme)) return static_cast<float>(static_cast<int>(bytes.x >> 4 * i & 15) - zero);
  const int byte = static_cast<int>((i < 4 ? bytes.x : bytes.y) >> 8 * (i % 4) & 0xff);
  return scheme == Scheme::kFp8Block ? e4m3_value(byte) : static_cast<float>(static_cast<int8_t>(byte));
}

// weight[n][input_order[k]] = scale * (code[n][k] - zero point), in float32, then rounded to T. Grid: blocks of
// kDequantizeThreads times kOwnCodes codes, row by row. It waits for memory.
template <class T>
__global__ void __launch_bounds__(kDequantizeThreads) dequantize_codes(const Dequantize d) {
  const QuantizedMatmulArgs& args = d.args;
  const int64_t columns = args.in_features, chunks = ceil_div(columns, kOwnCodes);
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kDequantizeThreads + threadIdx.x;
  if (chunk >= args.out_features * chunks) return;
  const int64_t row = chunk / chunks, k = chunk % chunks * kOwnCodes;
  const bool is_fp8 = args.scheme == Scheme::kFp8Block;
  const bool has_groups = is_fp8 || is_int4(args.scheme);
  const int64_t group = has_groups ? k / args.group_size : 0;
  const int64_t of_scale = (is_fp8 ? row / kScaleBlock : row) * args.groups + group;
  const float scale = args.scale[of_scale];
  const int zero = args.zero_point != nullptr ? args.zero_point[of_scale] : 8;
  const uint2 bytes = load_codes(d, row, k);
  float values[kOwnCodes];
#pragma unroll
  for (int i = 0; i < kOwnCodes; ++i) values[i] = code_value(args.scheme, bytes, i, zero) * scale;
  T* to = static_cast<T*>(d.weight) + row * columns;
  if (d.writes_vectors) {
    constexpr int kVector = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kOwnCodes; i += kVector) store_vector(to + k + i, values + i);
    return;
  }
#pragma unroll
  for (int i = 0; i < kOwnCodes; ++i) {
    if (k + i >= columns) break;
    const int64_t place = args.input_order != nullptr ? args.input_order[k + i] : k + i;
    if (place >= 0 && place < columns) to[place] = from_float<T>(values[i]);
  }
}

}  // namespace
}  // namespace dskernels
