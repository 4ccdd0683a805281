// Backward of windows whose scores are on chip as a whole and of small heads:
//   P = softmax(S), dP = grad_out V^T, dS = P (dP - delta), delta = rowsum(P dP),
//   grad_v = P^T grad_out, grad_k = dS^T q, grad_q = dS k,
// with q and k as they enter the products. The softmax is computed again, which costs less than to read it.
#pragma once

#include "swin_attention/cuda_tile.cuh"

namespace dskernels {
namespace {

struct Backward {
  SwinAttentionBackwardArgs args;
  CellGrid grid;
  int run;
  bool reads_by_16, reads_grad_by_16, writes_by_16;
  float* bias_parts;         // [run, heads, query, key], or null
  float* logit_scale_parts;  // [run and tile, heads], or null
  float* stats;              // [3, cells, heads, tokens]: what kernels of wide windows hand on
};

// A block leaves its sums of the bias's gradients once a run: as much as is written for half a cell of 7 x 7 tokens.
constexpr int kBackwardBlocks = 8, kBackwardRun = 32;

template <class T>
constexpr int kWeightStride = kTileTokens + Mma<T>::kPad;

// The gradients of a bias, added up over the cells of a block, in shared memory by each thread for itself.
class BiasSums {
 public:
  static constexpr int kElements = kColumnBlocks * kThreads;

  __device__ explicit BiasSums(float4* shared) : own_(shared + threadIdx.x) {}

  __device__ void clear() const {
    for (int n = 0; n < kColumnBlocks; ++n) own_[n * kThreads] = {0.0f, 0.0f, 0.0f, 0.0f};
  }

  __device__ void add(const Scores& ds) const {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      const float4 sum = own_[n * kThreads];
      own_[n * kThreads] = {sum.x + ds[n][0], sum.y + ds[n][1], sum.z + ds[n][2], sum.w + ds[n][3]};
    }
  }

  // Leaves the sums to `sum_parts`, as [tokens, tokens].
  __device__ void write(float* part, int tokens, int warp_row) const {
    const int row = warp_row + lane_index() / 4, column = 2 * (lane_index() % 4);
    for (int n = 0; n < kColumnBlocks; ++n) {
      const float4 sum = own_[n * kThreads];
      const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = row + 8 * (i / 2), key = column + 8 * n + i % 2;
        if (query < tokens && key < tokens) part[query * tokens + key] = sums[i];
      }
    }
  }

 private:
  float4* own_;
};

// In float32 there is no room to keep the bias.
template <class T>
constexpr bool kKeepsBias = sizeof(T) == 2;

template <class T, int kDim>
struct BackwardTiles {
  // Rows of gradients in float32, for each warp its own, once the weights are done with.
  static constexpr int kStagingStride = kDim + Mma<float>::kPad;
  static constexpr int kWeightBytes = 2 * kTileTokens * kWeightStride<T> * static_cast<int>(sizeof(T));
  static_assert(kTileTokens * kStagingStride * static_cast<int>(sizeof(float)) <= kWeightBytes);

  T* qkv;  // queries, keys, values
  T* grad_out;
  float* staging;
  T* weights;  // P, then dS, where the staging is
  int* places;
  float4* bias;
  float4* grad_bias;

  __device__ BackwardTiles(bool keeps_bias, bool grads_bias) {
    SharedCarver carver;
    qkv = carver.take<T>(3 * kTileElements<T, kDim>);
    grad_out = carver.take<T>(kTileElements<T, kDim>);
    staging = carver.take<float>(kWeightBytes / static_cast<int>(sizeof(float)));
    weights = reinterpret_cast<T*>(staging);
    places = carver.take<int>(kTileTokens);
    bias = carver.take<float4>(keeps_bias ? KeptBias::kElements : 0);
    grad_bias = carver.take<float4>(grads_bias ? BiasSums::kElements : 0);
  }

  static int bytes(bool keeps_bias, bool grads_bias) {
    return shared_bytes<T>(3 * kTileElements<T, kDim>) + shared_bytes<T>(kTileElements<T, kDim>) +
           shared_bytes<float>(kWeightBytes / static_cast<int>(sizeof(float))) + shared_bytes<int>(kTileTokens) +
           shared_bytes<float4>(keeps_bias ? KeptBias::kElements : 0) +
           shared_bytes<float4>(grads_bias ? BiasSums::kElements : 0);
  }
};

// c = the 16 rows from `row` on of the transpose of weights[64][64], times the first 16 * blocks rows of a tile.
template <class T, int kDim>
__device__ inline void multiply_transposed(float (&c)[kDim / 8][4], const T* weights, int row, const T* b_tile,
                                           int blocks) {
  constexpr int kStride = kTileStride<T, kDim>, kDepth = Mma<T>::kDepth;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
#pragma unroll
  for (int k = 0; k < kTileTokens / kDepth; ++k) {
    if (k * kDepth >= 16 * blocks) continue;
    typename Mma<T>::A left;
    load_a_transposed<T>(left, weights + k * kDepth * kWeightStride<T> + row, kWeightStride<T>);
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      typename Mma<T>::B b[2];
      load_b<T>(b, b_tile + k * kDepth * kStride + 8 * n, kStride);
      multiply<T>(c[n], left, b[0]);
      multiply<T>(c[n + 1], left, b[1]);
    }
  }
}

// Whether rows g and g + 8 see anything.
struct Seeing {
  bool row[2];
};

// Scores become P, and products dP become dS. Both are 0 where a query or a key is not there, and, whatever stands
// there, in pairs without weight. `there`: whether rows g and g + 8 are.
__device__ inline Seeing softmax_backward(Scores& p, Scores& dp, const bool (&there)[2]) {
  float largest[2] = {-INFINITY, -INFINITY}, sums[2] = {0.0f, 0.0f};
  largest_of_rows(p, largest);
  exponentiate(p, largest, sums);
  Seeing sees;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = sum_of_lanes(sums[h], 4), inverse = 1.0f / sum;
    sees.row[h] = sum != 0.0f;
    const bool counts = sees.row[h] && there[h];
    float delta = 0.0f;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        p[n][i] = counts && p[n][i] != 0.0f ? p[n][i] * inverse : 0.0f;
        delta += p[n][i] != 0.0f ? p[n][i] * dp[n][i] : 0.0f;
      }
    }
    delta = sum_of_lanes(delta, 4);
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        dp[n][i] = p[n][i] != 0.0f ? p[n][i] * (dp[n][i] - delta) : 0.0f;
      }
    }
  }
  return sees;
}

// Writes 16 rows of a warp, rounded to T.
template <class T>
__device__ inline void store_weights(T* rows, const Scores& c) {
  T* to = rows + (lane_index() / 4) * kWeightStride<T> + 2 * (lane_index() % 4);
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
    store_pair<T>(to + 8 * n, c[n][0], c[n][1]);
    store_pair<T>(to + 8 * kWeightStride<T> + 8 * n, c[n][2], c[n][3]);
  }
}

// Takes 16 rows of gradients, those of tokens `first` on, to where they lie.
template <class T, int kDim>
struct Rows {
  static constexpr int kStride = BackwardTiles<T, kDim>::kStagingStride, kVector = 16 / sizeof(T);
  static constexpr int kLanes = kDim / kVector;  // of a row
  static_assert(kWarp % kLanes == 0 && kRowsOfWarp % (kWarp / kLanes) == 0);

  const Backward& call;
  const Embedding& embedding;
  const Cell& cell;
  const int* places;
  int first;
  float* staging;  // of the warp: 16 rows

  __device__ void stage(const float (&c)[kDim / 8][4]) const {
    float* to = staging + (lane_index() / 4) * kStride + 2 * (lane_index() % 4);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(to + 8 * n) = {c[n][0], c[n][1]};
      *reinterpret_cast<float2*>(to + 8 * kStride + 8 * n) = {c[n][2], c[n][3]};
    }
    __syncwarp();
  }

  // Rows of values, as they are; `channel` is the head's first.
  __device__ void store(const float (&c)[kDim / 8][4], int64_t channel) const {
    stage(c);
    for_each([&](int row, int column, bool is_there, int64_t at) {
      float x[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] = staging[row * kStride + column + i];
      if (is_there) write(x, channel, at, column);
    });
  }

  // Rows of queries or keys: turned back, and taken through the division by their norm. Returns this lane's part of
  // the sum of the products of gradients and rows.
  __device__ float store_embedded(const float (&c)[kDim / 8][4], int64_t channel) const {
    float sum = 0.0f;
    stage(c);
    const Image<const T> image(call.args.forward.qkv, channel);
    const int64_t origin = image.origin(call.args.forward, call.grid, cell);
    const int dim = static_cast<int>(call.args.forward.dim);
    for_each([&](int row, int column, bool is_there, int64_t at) {
      float grad[kVector], x[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int d = column + i;
        grad[i] = staging[row * kStride + d];
        if (is_there && d < 2 * embedding.half) {
          const float partner = staging[row * kStride + embedding.partner_of(d)];
          grad[i] = embedding.turned(first + row, d, grad[i], partner, true);
        }
      }
      if (embedding.is_cosine) {
        read(x, image, origin, is_there, row, column, dim);
        float squares = 0.0f, along = 0.0f;
#pragma unroll
        for (int i = 0; i < kVector; ++i) squares += x[i] * x[i];
        const float norm = sqrtf(sum_of_lanes(squares, kLanes)), inverse = 1.0f / fmaxf(norm, kSmallestNorm);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          x[i] *= inverse;
          along += is_there ? x[i] * grad[i] : 0.0f;
        }
        sum += along;
        along = sum_of_lanes(along, kLanes);
        // At the smallest norm the divisor is a constant.
        if (norm <= kSmallestNorm) along = 0.0f;
#pragma unroll
        for (int i = 0; i < kVector; ++i) grad[i] = (grad[i] - along * x[i]) * inverse;
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) grad[i] *= embedding.factor;
      if (is_there) write(grad, channel, at, column);
    });
    return sum;
  }

 private:
  // Calls f(row, column, whether it is there, where its token lies in the gradients) by all lanes together.
  template <class F>
  __device__ void for_each(const F& f) const {
    const Image<T> result(call.args.grad_qkv, 0);
    const int64_t origin = result.origin(call.args.forward, call.grid, cell);
    const int column = lane_index() % kLanes * kVector;
#pragma unroll 1
    for (int row = lane_index() / kLanes; row < kRowsOfWarp; row += kWarp / kLanes) {
      const int place = places[first + row];
      const bool is_there = cell.has(place) && column < call.args.forward.dim;
      f(row, column, is_there, is_there ? origin + result.offset(place) : 0);
    }
  }

  __device__ void read(float (&x)[kVector], const Image<const T>& image, int64_t origin, bool is_there, int row,
                       int column, int dim) const {
    const int64_t at = is_there ? origin + image.offset(places[first + row]) : 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = 0.0f;
    if (is_there && call.reads_by_16) {
      T vector[kVector];
      const uint4 bits = *reinterpret_cast<const uint4*>(image.data + at + column);
      memcpy(vector, &bits, sizeof(bits));
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] = to_float(vector[i]);
    } else if (is_there) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (column + i < dim) x[i] = to_float(image.data[at + (column + i) * image.stride[3]]);
      }
    }
  }

  __device__ void write(const float (&x)[kVector], int64_t channel, int64_t at, int column) const {
    T* to = static_cast<T*>(call.args.grad_qkv.data) + at + channel + column;
    T vector[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) vector[i] = from_float<T>(x[i]);
    if (call.writes_by_16) {
      uint4 bits;
      memcpy(&bits, vector, sizeof(bits));
      *reinterpret_cast<uint4*>(to) = bits;
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (column + i < call.args.forward.dim) to[i] = vector[i];
    }
  }
};

}  // namespace
}  // namespace dskernels
