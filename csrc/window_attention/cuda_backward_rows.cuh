// What the kernels of the backward pass do with rows but for their products: the gradient of the softmax, and the way
// of a gradient from accumulators to its tensor.
#pragma once

#include "window_attention/cuda_backward.h"
#include "window_attention/cuda_backward_tile.cuh"
#include "window_attention/cuda_rope.cuh"
#include "window_attention/cuda_scores.cuh"

namespace dskernels {
namespace {

// How products become weights.
struct Weighing {
  float scale, softcap;
  bool is_plain;  // neither a cap nor a bias

  __device__ explicit Weighing(const WindowAttentionArgs& call)
      : scale(call.scale), softcap(call.softcap), is_plain(call.softcap == 0.0f && call.bias.data == nullptr) {}
};

// From the product of a query and a key and the gradient of their weight: the weight, in place of the product, and the
// gradient of the product but for the scale, in place of the other. Returns the gradient of the score, which is that of
// the bias. Where the key is not seen all are exactly 0, whatever came in.
template <bool kPlain>
__device__ inline float weigh(float& product, float& gradient, bool seen, float bias, float lse, float delta,
                              const Weighing& weighing) {
  float score = product * weighing.scale, slope = 1.0f;
  if constexpr (!kPlain) {
    if (weighing.softcap != 0.0f) {
      const float bend = tanh_of(score / weighing.softcap);
      score = weighing.softcap * bend;
      slope = 1.0f - bend * bend;
    }
    score += bias;
  }
  const float weight = seen ? weight_of(score - lse) : 0.0f;
  const float grad_score = seen ? weight * (gradient - delta) : 0.0f;
  product = weight;
  gradient = grad_score;
  // Without a weight the slope may be NaN.
  if constexpr (!kPlain) gradient = weight == 0.0f ? 0.0f : grad_score * slope;
  return grad_score;
}

// Where the gradients of a tile's rows go: rows first to first + count of `to`, turned back where the rotation has
// pairs.
template <class T>
struct GradientRows {
  Rows<T> to;
  int first, count, columns;
  Rotation rotation;
};

// Turns the live rows of float32 gradients back; a dead one is 0 and has, perhaps, no position.
template <class Tile, class IsLive>
__device__ inline void turn_back(float* staged, const GradientRows<typename Tile::Type>& x, const IsLive& is_live) {
  for (int row = warp_index(); row < x.count; row += Tile::kThreads / kWarp) {
    if (!is_live(row)) continue;
    const int64_t table_row = x.rotation.table_row(x.to.token(x.first + row));
    float* gradient = staged + row * Tile::kGradientStride;
    for (int pair = lane_index(); pair < x.rotation.half; pair += kWarp) {
      float& a = gradient[x.rotation.first(pair)];
      float& b = gradient[x.rotation.second(pair)];
      const float2 angle = angle_of(x.rotation, table_row, pair);
      const float2 back = turned(a, b, make_float2(angle.x, -angle.y));
      a = back.x;
      b = back.y;
    }
  }
}

template <class Tile>
__device__ inline void store_staged(const float* staged, const GradientRows<typename Tile::Type>& x) {
  using T = typename Tile::Type;
  constexpr int kVector = 16 / sizeof(T), kVectors = Tile::kDim / kVector;
  const bool by_16 = x.to.by_16();
  for (int i = threadIdx.x; i < Tile::kRows * kVectors; i += Tile::kThreads) {
    const int row = i / kVectors, column = i % kVectors * kVector;
    if (row >= x.count || column >= x.columns) continue;
    const float* from = staged + row * Tile::kGradientStride + column;
    T* to = x.to.at(x.first + row) + column * x.to.column_stride;
    if (by_16 && column + kVector <= x.columns) {
      store_vector(to, from);
    } else {
      const int count = min(kVector, x.columns - column);
      for (int c = 0; c < count; ++c) to[c * x.to.column_stride] = from_float<T>(from[c]);
    }
  }
}

// Stores factor * c in the rows where is_live(row of the tile), 0 in the others, through `staged`, [kRows] rows of
// kGradientStride. All threads of the block call it, when they are done with their products: what was there may go.
template <class Tile, class IsLive>
__device__ inline void store_gradients(float* staged, const Gradients<Tile>& c, float factor,
                                       const GradientRows<typename Tile::Type>& x, const Place<Tile>& place,
                                       const IsLive& is_live) {
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + 8 * half;
    // Not a factor of 0: a dead row has met the rows of its neighbours, which may hold NaN.
    const bool live = row < x.count && is_live(row);
    float* to = staged + row * Tile::kGradientStride + place.slice * Tile::kSlice + place.column;
#pragma unroll
    for (int n = 0; n < Tile::kSlice / 8; ++n) {
      const float low = live ? c[n][2 * half] * factor : 0.0f, high = live ? c[n][2 * half + 1] * factor : 0.0f;
      *reinterpret_cast<float2*>(to + 8 * n) = make_float2(low, high);
    }
  }
  __syncthreads();
  if (x.rotation.half > 0) {
    turn_back<Tile>(staged, x, is_live);
    __syncthreads();
  }
  store_staged<Tile>(staged, x);
}

}  // namespace
}  // namespace dskernels
