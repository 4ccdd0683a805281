// Products for windows and heads of any size: a block has 32 rows of scores in shared memory, against all tokens of the
// window, and takes the operands in chunks of 128 bytes a row. What it is compiled for is the element type alone.
#pragma once

#include "common/mma.cuh"
#include "swin_attention/cuda_embed.cuh"

namespace dskernels {
namespace {

constexpr int kWideRows = 32, kWideColumns = 64;
// Of the four warps, two share 16 rows, and each of these takes half of the columns.
constexpr int kColumnsOfWarp = kWideColumns / 2, kScoreBlocks = kColumnsOfWarp / 8;

template <class T>
constexpr int kChunk = 128 / sizeof(T);
template <class T>
constexpr int kChunkStride = kChunk<T> + Mma<T>::kPad;
template <class T>
constexpr int kChunkBlocks = kChunk<T> / 16;  // of a warp's half of a chunk

// Rows of 8 more words than a multiple of 32, so that pairs are loaded without conflicts of banks.
constexpr __host__ __device__ int score_stride(int columns) { return columns + 8; }
constexpr __host__ __device__ int score_columns(int tokens) {
  return (tokens + kWideColumns - 1) / kWideColumns * kWideColumns;
}

// One head of an image as rows of a product.
template <class T>
struct Operand {
  Image<const T> image;
  bool by_16;
  bool is_embedded;
  const float* inverse_norms;  // with cosine attention, of the tokens of a window from the tile's first on
  const float* seen;           // or null; tokens with 0 here are taken for zeros
};

// What a block works with.
template <class T>
struct Wide {
  const SwinAttentionArgs& args;
  const CellGrid& grid;
  const Embedding& embedding;
  Cell cell;
  int tokens, columns, dim;
  const int* places;
  T* rows_tile;
  T* columns_tile;

  __device__ int row_of_warp() const { return 16 * (warp_index() / 2); }
  __device__ int half_of_warp() const { return warp_index() % 2; }

  // Component d of a token that is there, as it enters the products; with `swapped`, its partner's.
  __device__ float component(const Operand<T>& x, int64_t at, int token, float inverse, int d, bool swapped) const {
    const float value = to_float(x.image.data[at + d * x.image.stride[3]]) * inverse;
    if (d >= 2 * embedding.half) return value;
    const int partner = embedding.partner_of(d);
    const float other = to_float(x.image.data[at + partner * x.image.stride[3]]) * inverse;
    return swapped ? embedding.turned(token, partner, other, value, false)
                   : embedding.turned(token, d, value, other, false);
  }

  // Fills a tile with a chunk of kRows tokens, zeros for what is not there. The copies are the caller's to wait for.
  template <int kRows>
  __device__ void load(T* tile, const Operand<T>& x, int first_token, int first_component, bool swapped) const {
    constexpr int kVector = 16 / sizeof(T), kVectors = kChunk<T> / kVector;
    const int64_t origin = x.image.origin(args, grid, cell);
    const bool is_embedded = x.is_embedded && !embedding.is_identity();
    const auto is_there = [&](int token) {
      return cell.has(places[token]) && (x.seen == nullptr || x.seen[token] != 0.0f);
    };
    if (x.by_16 && !is_embedded) {
      for (int i = threadIdx.x; i < kRows * kVectors; i += kThreads) {
        const int row = i / kVectors, column = i % kVectors * kVector, token = first_token + row;
        const bool reads = first_component + column < dim && is_there(token);
        const int64_t at = reads ? origin + x.image.offset(places[token]) + first_component + column : 0;
        ptx::cp_async_16(tile + row * kChunkStride<T> + column, x.image.data + at, reads ? 16 : 0);
      }
      return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kChunk<T>; i += kThreads) {
      const int row = i / kChunk<T>, column = i % kChunk<T>, token = first_token + row, d = first_component + column;
      T value = from_float<T>(0.0f);
      if (d < dim && is_there(token)) {
        const int64_t at = origin + x.image.offset(places[token]);
        const float inverse = embedding.is_cosine && is_embedded ? x.inverse_norms[row + first_token] : 1.0f;
        value = is_embedded ? from_float<T>(component(x, at, token, inverse, d, swapped))
                            : x.image.data[at + d * x.image.stride[3]];
      }
      tile[row * kChunkStride<T> + column] = value;
    }
  }

  // 1 / |x| of `count` tokens, a multiple of 16, from `first` on: at the place of the token. Followed by a barrier.
  __device__ void find_norms(float* inverse_norms, const Image<const T>& image, int first, int count) const {
    constexpr int kLanes = 8;
    const int64_t origin = image.origin(args, grid, cell);
    for (int token = first + threadIdx.x / kLanes; token < first + count; token += kThreads / kLanes) {
      float sum = 0.0f;
      if (cell.has(places[token])) {
        const int64_t at = origin + image.offset(places[token]);
        for (int d = threadIdx.x % kLanes; d < dim; d += kLanes) {
          const float x = to_float(image.data[at + d * image.stride[3]]);
          sum += x * x;
        }
      }
      sum = sum_of_lanes(sum, kLanes);
      if (threadIdx.x % kLanes == 0) inverse_norms[token] = inverse_norm(sum);
    }
  }

  // out[32][columns] = a b^T, for the tokens of a from `first_row` on. Begins with a barrier; the caller's follows.
  __device__ void multiply_rows(float* out, const Operand<T>& a, int first_row, const Operand<T>& b) const {
    const int g = lane_index() / 4, t = lane_index() % 4;
    for (int first = 0; first < columns; first += kWideColumns) {
      float c[kScoreBlocks][4] = {};
      for (int chunk = 0; chunk < dim; chunk += kChunk<T>) {
        __syncthreads();
        // A single chunk of the rows stays.
        if (first == 0 || dim > kChunk<T>) load<kWideRows>(rows_tile, a, first_row, chunk, false);
        load<kWideColumns>(columns_tile, b, first, chunk, false);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kChunk<T>; k += Mma<T>::kDepth) {
          typename Mma<T>::A left;
          load_a<T>(left, rows_tile + row_of_warp() * kChunkStride<T> + k, kChunkStride<T>);
#pragma unroll
          for (int n = 0; n < kScoreBlocks; n += 2) {
            typename Mma<T>::B right[2];
            const int column = kColumnsOfWarp * half_of_warp() + 8 * n;
            load_b_transposed<T>(right, columns_tile + column * kChunkStride<T> + k, kChunkStride<T>);
            multiply<T>(c[n], left, right[0]);
            multiply<T>(c[n + 1], left, right[1]);
          }
        }
      }
      float* to = out + (row_of_warp() + g) * score_stride(columns) + first + kColumnsOfWarp * half_of_warp() + 2 * t;
#pragma unroll
      for (int n = 0; n < kScoreBlocks; ++n) {
        *reinterpret_cast<float2*>(to + 8 * n) = {c[n][0], c[n][1]};
        *reinterpret_cast<float2*>(to + 8 * score_stride(columns) + 8 * n) = {c[n][2], c[n][3]};
      }
    }
  }

  // A = weights[0..16)[0..kDepth), rounded to T.
  __device__ static void load_weights(typename Mma<T>::A& a, const float* weights, int stride) {
    if constexpr (sizeof(T) == 2) {
      const float* row = weights + (lane_index() / 4) * stride + 2 * (lane_index() % 4);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 low = *reinterpret_cast<const float2*>(row + 8 * j);
        const float2 high = *reinterpret_cast<const float2*>(row + 8 * stride + 8 * j);
        a.r[2 * j] = pack_pair<T>(low.x, low.y);
        a.r[2 * j + 1] = pack_pair<T>(high.x, high.y);
      }
    } else {
      load_a<T>(a, weights, stride);
    }
  }

  // c = the warp's part of weights[32][columns] x, for a chunk of the components of x; with `swapped`, of their
  // partners. Begins with a barrier.
  __device__ void multiply_weights(float (&c)[kChunkBlocks<T>][4], const float* weights, const Operand<T>& x, int chunk,
                                   bool swapped) const {
#pragma unroll
    for (int n = 0; n < kChunkBlocks<T>; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
    for (int first = 0; first < columns; first += kWideColumns) {
      __syncthreads();
      load<kWideColumns>(columns_tile, x, first, chunk, swapped);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kWideColumns; k += Mma<T>::kDepth) {
        typename Mma<T>::A left;
        load_weights(left, weights + row_of_warp() * score_stride(columns) + first + k, score_stride(columns));
#pragma unroll
        for (int n = 0; n < kChunkBlocks<T>; n += 2) {
          typename Mma<T>::B right[2];
          const int column = kChunk<T> / 2 * half_of_warp() + 8 * n;
          load_b<T>(right, columns_tile + k * kChunkStride<T> + column, kChunkStride<T>);
          multiply<T>(c[n], left, right[0]);
          multiply<T>(c[n + 1], left, right[1]);
        }
      }
    }
  }

  // Calls f(row, component, value of c, value of swapped) for what is there of the warp's part of 32 rows by a chunk.
  template <class F>
  __device__ void for_each_of_chunk(const float (&c)[kChunkBlocks<T>][4], const float (&swapped)[kChunkBlocks<T>][4],
                                    int first_row, int chunk, const F& f) const {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int n = 0; n < kChunkBlocks<T>; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row_of_warp() + g + 8 * (i / 2);
        const int d = chunk + kChunk<T> / 2 * half_of_warp() + 8 * n + 2 * t + i % 2;
        if (d < dim && cell.has(places[first_row + row])) f(row, d, c[n][i], swapped[n][i]);
      }
    }
  }
};

}  // namespace
}  // namespace dskernels
