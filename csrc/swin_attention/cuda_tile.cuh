// Tiles of 64 tokens in shared memory, and their products: 4 warps, each of which computes 16 rows of scores over all
// columns and keeps them in registers. Accumulators are laid out as in common/mma.cuh: c[n][i] is row g + 8 * (i / 2),
// column 8 * n + 2 * t + i % 2.
#pragma once

#include "common/elements.cuh"
#include "common/mma.cuh"
#include "common/softmax.cuh"
#include "swin_attention/cuda_embed.cuh"

namespace dskernels {
namespace {

constexpr int kTileTokens = 64, kRowsOfWarp = 16, kColumnBlocks = kTileTokens / 8;
static_assert(kRowsOfWarp * kWarps == kTileTokens);

using Scores = float[kColumnBlocks][4];

template <class T, int kDim>
constexpr int kTileStride = kDim + Mma<T>::kPad;
template <class T, int kDim>
constexpr int kTileElements = kTileTokens * kTileStride<T, kDim>;

// Copies the rows of 64 tokens, given by their places, to kParts tiles in a row; those of part i lie i * part further.
// Zeros stand for what is not there. Asynchronous with by_16, else done when the call returns.
template <class T, int kDim, int kParts>
__device__ inline void copy_tokens(T* tiles, const Image<const T>& image, int64_t part, int64_t origin,
                                   const Cell& cell, const int* places, int dim, bool by_16) {
  constexpr int kVector = 16 / sizeof(T), kVectors = kDim / kVector;
  if (by_16) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kTileTokens * kVectors; i += kThreads) {
      const int row = i / kVectors, column = i % kVectors * kVector, place = places[row];
      const bool is_there = column < dim && cell.has(place);
      // Without anything to read the address is not used, but has to be one.
      const int64_t at = is_there ? origin + image.offset(place) + column : 0;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        T* to = tiles + p * kTileElements<T, kDim> + row * kTileStride<T, kDim> + column;
        ptx::cp_async_16(to, image.data + p * part + at, is_there ? 16 : 0);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileTokens * kDim; i += kThreads) {
    const int row = i / kDim, column = i % kDim, place = places[row];
    const bool is_there = column < dim && cell.has(place);
    const int64_t at = is_there ? origin + image.offset(place) + column * image.stride[3] : 0;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      T* to = tiles + p * kTileElements<T, kDim> + row * kTileStride<T, kDim> + column;
      *to = is_there ? image.data[p * part + at] : from_float<T>(0.0f);
    }
  }
}

// Which of 64 tokens are there, a bit each. All lanes of the warp call it.
__device__ inline uint64_t tokens_there(const Cell& cell, const int* places) {
  const int lane = lane_index();
  const uint64_t low = __ballot_sync(kAllLanes, cell.has(places[lane]));
  const uint64_t high = __ballot_sync(kAllLanes, cell.has(places[lane + kWarp]));
  return high << 32 | low;
}

// c = a b^T for 16 rows of a tile and the first 16 * pairs rows of another; columns beyond are left 0.
template <class T, int kDim>
__device__ inline void multiply_rows(Scores& c, const T* a_rows, const T* b_tile, int pairs) {
  constexpr int kStride = kTileStride<T, kDim>, kDepth = Mma<T>::kDepth;
  typename Mma<T>::A a[kDim / kDepth];
#pragma unroll
  for (int k = 0; k < kDim / kDepth; ++k) load_a<T>(a[k], a_rows + k * kDepth, kStride);
#pragma unroll
  for (int j = 0; j < kColumnBlocks / 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[2 * j][i] = c[2 * j + 1][i] = 0.0f;
    if (j >= pairs) continue;
#pragma unroll
    for (int k = 0; k < kDim / kDepth; ++k) {
      typename Mma<T>::B b[2];
      load_b_transposed<T>(b, b_tile + 16 * j * kStride + k * kDepth, kStride);
      multiply<T>(c[2 * j], a[k], b[0]);
      multiply<T>(c[2 * j + 1], a[k], b[1]);
    }
  }
}

// c += a b for 16 rows of a, as the accumulators of another product hold them, and the first 16 * pairs rows of a tile.
template <class T, int kDim>
__device__ inline void multiply_accumulators(float (&c)[kDim / 8][4], const Scores& a, const T* b_tile, int pairs) {
  constexpr int kStride = kTileStride<T, kDim>, kDepth = Mma<T>::kDepth;
#pragma unroll
  for (int k = 0; k < kTileTokens / kDepth; ++k) {
    if (k * kDepth >= 16 * pairs) continue;
    typename Mma<T>::A left;
    accumulators_as_a<T>(left, a + k * kDepth / 8);
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      typename Mma<T>::B b[2];
      load_b<T>(b, b_tile + k * kDepth * kStride + 8 * n, kStride);
      multiply<T>(c[n], left, b[0]);
      multiply<T>(c[n + 1], left, b[1]);
    }
  }
}

// The biases of a head of a window.
struct Bias {
  const float* data;  // or null
  int64_t stride;     // of a query
  int tokens;

  __device__ Bias(const SwinAttentionArgs& args, int head)
      : data(args.bias == nullptr ? nullptr : args.bias + head * args.bias_stride_head),
        stride(args.bias_stride_query),
        tokens(tokens_of_window(args)) {}

  __device__ static int tokens_of_window(const SwinAttentionArgs& args) {
    return static_cast<int>(args.window_height * args.window_width);
  }

  // 0 beyond the window.
  __device__ float at(int query, int key) const {
    return query < tokens && key < tokens ? data[query * stride + key] : 0.0f;
  }

  // Those of block n of the accumulators of a warp whose rows begin at `query`.
  __device__ float4 of_block(int n, int query, int key) const {
    const int row = query + lane_index() / 4, column = key + 8 * n + 2 * (lane_index() % 4);
    return {at(row, column), at(row, column + 1), at(row + 8, column), at(row + 8, column + 1)};
  }
};

// The biases of a tile of a window, kept in shared memory by each thread for itself.
class KeptBias {
 public:
  static constexpr int kElements = kColumnBlocks * kThreads;

  __device__ KeptBias(float4* shared) : own_(shared + threadIdx.x) {}

  __device__ void keep(const Bias& bias, int query) const {
    for (int n = 0; n < kColumnBlocks; ++n) own_[n * kThreads] = bias.of_block(n, query, 0);
  }

  __device__ float4 of_block(int n) const { return own_[n * kThreads]; }

 private:
  float4* own_;
};

// Scores from products: times `factor`, plus what bias_of(n) gives of block n; -inf for tokens that are not there.
template <class BiasOf>
__device__ inline void finish_scores(Scores& c, float factor, const BiasOf& bias_of, uint64_t there) {
  const uint64_t own = there >> 2 * (lane_index() % 4);
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
    const float4 bias = bias_of(n);
    const float added[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c[n][i] = (own >> (8 * n + i % 2) & 1) != 0 ? c[n][i] * factor + added[i] : -INFINITY;
    }
  }
}

// The largest of rows g and g + 8.
__device__ inline void largest_of_rows(const Scores& c, float (&largest)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) largest[h] = fmaxf(largest[h], fmaxf(c[n][2 * h], c[n][2 * h + 1]));
    largest[h] = largest_of_lanes(largest[h], 4);
  }
}

// Scores become weights, yet to be divided by their sums. Returns this lane's parts of the sums.
__device__ inline void exponentiate(Scores& c, const float (&largest)[2], float (&sums)[2]) {
  const float shift[2] = {shift_of(largest[0]), shift_of(largest[1])};
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c[n][i] = weight_of(c[n][i] - shift[i / 2]);
      sums[i / 2] += c[n][i];
    }
  }
}

}  // namespace
}  // namespace dskernels
