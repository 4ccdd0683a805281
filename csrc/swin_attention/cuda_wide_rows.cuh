// Rows of scores in shared memory, a warp each.
#pragma once

#include "swin_attention/cuda_tile.cuh"
#include "swin_attention/cuda_wide.cuh"

namespace dskernels {
namespace {

// What a warp's lanes hold of a row of scores.
constexpr int kRowParts = kMostTokens / kWarp;

// The scores of a query over the tokens of its cell, from products; -inf for what is not there. Column j is part
// j / 32 of lane j % 32.
template <class T>
__device__ inline void row_of_scores(float (&x)[kRowParts], const Wide<T>& wide, const Bias& bias,
                                     const float* products, int query) {
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
    const int key = lane_index() + kWarp * i;
    x[i] = -INFINITY;
    if (key >= wide.tokens || !wide.cell.has(wide.places[key])) continue;
    x[i] = products[key] * wide.embedding.factor + (bias.data == nullptr ? 0.0f : bias.at(query, key));
  }
}

__device__ inline float largest_of_row(const float (&x)[kRowParts]) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < kRowParts; ++i) largest = fmaxf(largest, x[i]);
  return largest_of_lanes(largest, kWarp);
}

// Replaces scores by weights, yet to be divided by their sum, which is returned.
__device__ inline float exponentiate_row(float (&x)[kRowParts], float shift) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
    x[i] = weight_of(x[i] - shift);
    sum += x[i];
  }
  return sum_of_lanes(sum, kWarp);
}

}  // namespace
}  // namespace dskernels
