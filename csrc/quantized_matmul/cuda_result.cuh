// From sums of products to results: the sums of a tile's segments added up in their order, scales, bias, one rounding.
#pragma once

#include "common/elements.cuh"
#include "quantized_matmul/cuda_product.cuh"
#include "quantized_matmul/cuda_values.cuh"

namespace dskernels {
namespace {

// Results that a thread makes at a time: 16 bytes of the shortest of them.
constexpr int kResults = 8;

// Writes the warp's sums, from (row, column) of a tile on, to `to`, [row][stride]; adds them where `adds`. Rows from
// `rows` on are not there.
template <class Tile, class T>
__device__ inline void put_sums(const T (&sums)[Tile::kMTiles][Tile::kNTiles][4], T* to, int stride, int row,
                                int column, int64_t rows, bool adds) {
  struct alignas(8) Pair {
    T low, high;
  };
  const int lane = lane_index();
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 16 * m + 8 * half + lane / 4;
      if (r >= rows) continue;
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; ++n) {
        Pair* at = reinterpret_cast<Pair*>(to + r * stride + column + 8 * n + 2 * (lane % 4));
        Pair pair = {sums[m][n][2 * half], sums[m][n][2 * half + 1]};
        if (adds) pair = {at->low + pair.low, at->high + pair.high};
        *at = pair;
      }
    }
  }
}

// Rounds the first `count` results into out[index...].
template <class T>
__device__ inline void store_results(void* out, int64_t index, const float (&results)[kResults], int count) {
  T* to = static_cast<T*>(out) + index;
  if (count == kResults && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    constexpr int kVector = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kResults; i += kVector) store_vector(to + i, results + i);
    return;
  }
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    if (i < count) to[i] = from_float<T>(results[i]);
  }
}

// out[row][column...] = total * row_scale * scale * unlift + bias, in this order; for int4 scales are in the sums.
template <class Tile, class Total>
__device__ inline void write_results(const ProductArgs& args, const Total (&totals)[kResults], int64_t row,
                                     int64_t column) {
  const int count = static_cast<int>(min(args.columns - column, int64_t{kResults}));
  const float row_scale = args.row_scale[row], unlift = args.unlift[row];
  float results[kResults];
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    results[i] = __fmul_rn(static_cast<float>(totals[i]), row_scale);
    if (i >= count) continue;
    if constexpr (!Tile::kInt4) results[i] = __fmul_rn(results[i], args.scale[column + i]);
    results[i] = __fmul_rn(results[i], unlift);
    if (args.bias == nullptr) continue;
    results[i] = __fadd_rn(results[i], load_element(args.bias, args.bias_element, (column + i) * args.bias_stride));
  }
  const int64_t index = row * args.columns + column;
  switch (args.element) {
    case Element::kFloat32: return store_results<float>(args.out, index, results, count);
    case Element::kBFloat16: return store_results<__nv_bfloat16>(args.out, index, results, count);
    case Element::kFloat16: return store_results<__half>(args.out, index, results, count);
  }
}

// Makes a tile of results from `parts` arrays [kRows][stride] of sums, `part_stride` apart. Sums of integers, which
// together may be beyond int32, are added exactly.
template <class Tile, class T>
__device__ inline void write_tile(const ProductArgs& args, const T* sums, int stride, int64_t part_stride,
                                  int64_t parts, int64_t row, int64_t column) {
  using Total = std::conditional_t<Tile::kInt4, float, int64_t>;
  constexpr int kVectors = Tile::kColumns / kResults;
  for (int i = threadIdx.x; i < Tile::kRows * kVectors; i += Tile::kThreads) {
    const int r = i / kVectors, c = i % kVectors * kResults;
    if (row + r >= args.rows || column + c >= args.columns) continue;
    Total totals[kResults] = {};
    for (int64_t part = 0; part < parts; ++part) {
      const uint4* from = reinterpret_cast<const uint4*>(sums + part * part_stride + r * stride + c);
      const uint4 vectors[2] = {from[0], from[1]};
      T values[kResults];
      memcpy(values, vectors, sizeof(values));
#pragma unroll
      for (int j = 0; j < kResults; ++j) totals[j] += values[j];
    }
    write_results<Tile>(args, totals, row + r, column + c);
  }
}

}  // namespace
}  // namespace dskernels
