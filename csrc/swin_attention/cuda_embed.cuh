// How queries and keys enter the products: of length 1 with cosine attention, then rotated, in float32.
#pragma once

#include "swin_attention/cuda_cells.cuh"

namespace dskernels {
namespace {

// What torch.nn.functional.normalize divides by at least.
constexpr float kSmallestNorm = 1e-12f;

struct Embedding {
  const float* cos;  // of the head: [tokens, half]
  const float* sin;
  int half;
  bool is_interleaved, is_cosine;
  float factor;  // of the products

  __device__ Embedding(const SwinAttentionArgs& args, int head)
      : cos(args.cos + head * args.table_stride),
        sin(args.sin + head * args.table_stride),
        half(static_cast<int>(args.rotary_dim / 2)),
        is_interleaved(args.interleaved),
        is_cosine(args.logit_scale != nullptr),
        factor(args.logit_scale == nullptr ? args.scale : args.logit_scale[head]) {}

  __device__ bool is_identity() const { return half == 0 && !is_cosine; }

  // The components of pair i.
  __device__ int first_of(int i) const { return is_interleaved ? 2 * i : i; }
  __device__ int second_of(int i) const { return is_interleaved ? 2 * i + 1 : i + half; }

  // Of component d, which is one of a pair.
  __device__ bool is_first(int d) const { return is_interleaved ? d % 2 == 0 : d < half; }
  __device__ int pair_of(int d) const { return is_interleaved ? d / 2 : d < half ? d : d - half; }
  __device__ int partner_of(int d) const { return is_interleaved ? d ^ 1 : d < half ? d + half : d - half; }

  // Component d of what the table makes of (x, its partner), or, with `back`, of the gradients: the transpose.
  __device__ float turned(int token, int d, float x, float partner, bool back) const {
    const int at = token * half + pair_of(d);
    const float s = is_first(d) != back ? -sin[at] : sin[at];
    return x * cos[at] + partner * s;
  }
};

__device__ inline float inverse_norm(float sum_of_squares) {
  return 1.0f / fmaxf(sqrtf(sum_of_squares), kSmallestNorm);
}

// Embeds in place the rows of a tile, those of tokens `first` to first + kRows. All threads of the block call it.
template <class T, int kRows, int kStride>
__device__ inline void embed_rows(const Embedding& embedding, T* tile, int first, int tokens, int dim) {
  constexpr int kLanes = 8;  // a row
  static_assert(kRows % (kThreads / kLanes) == 0);
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int row = threadIdx.x / kLanes; row < kRows; row += kThreads / kLanes) {
    T* x = tile + row * kStride;
    float inverse = 1.0f;
    if (embedding.is_cosine) {
      float sum = 0.0f;
      for (int d = lane; d < dim; d += kLanes) sum += to_float(x[d]) * to_float(x[d]);
      inverse = inverse_norm(sum_of_lanes(sum, kLanes));
      // Others write what has been read here.
      __syncwarp();
    }
    if (first + row >= tokens) continue;
    for (int i = lane; i < embedding.half; i += kLanes) {
      const int one = embedding.first_of(i), other = embedding.second_of(i);
      const float a = to_float(x[one]) * inverse, b = to_float(x[other]) * inverse;
      x[one] = from_float<T>(embedding.turned(first + row, one, a, b, false));
      x[other] = from_float<T>(embedding.turned(first + row, other, b, a, false));
    }
    if (!embedding.is_cosine) continue;
    for (int d = 2 * embedding.half + lane; d < dim; d += kLanes) x[d] = from_float<T>(to_float(x[d]) * inverse);
  }
}

}  // namespace
}  // namespace dskernels
