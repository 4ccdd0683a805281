// What the two kernels of the backward pass share. A block has a tile of rows of its own, which stays in shared memory,
// and the rows that these meet pass by in tiles: queries pass by keys (cuda_backward_keys.cuh), keys pass by queries
// (cuda_backward_queries.cuh). Either has two operands a row, of which one makes the scores and the other the gradient
// of the weights: q and grad_out for a query, k and v for a key.
#pragma once

#include <cmath>

#include "common/copy.cuh"
#include "common/mma.cuh"

namespace dskernels {
namespace {

// Blocks that are to fit a multiprocessor by their registers: what its shared memory has place for on sm_80.
constexpr int kBlocksWanted = 2;

// kRows rows stay and kOther pass by at a time, kStages such tiles on their way or in use. A warp has 16 of the block's
// own rows; where their gradients take more registers than it has, kSplit warps share them, each with a slice of the
// kDim columns: of the sums that make the scores, which then meet in shared memory, and of the gradients.
template <class T, int kDim_, int kRows_, int kOther_, int kSplit_, int kStages_>
struct BackwardTile {
  using Type = T;
  static constexpr int kDim = kDim_, kRows = kRows_, kOther = kOther_, kSplit = kSplit_, kStages = kStages_;
  static constexpr int kStride = kDim + Mma<T>::kPad;
  static constexpr int kSlice = kDim / kSplit;
  static constexpr int kThreads = kRows / 16 * kSplit * kWarp;
  // Of 8 columns in a row of partial sums, for accumulators to be stored without bank conflicts.
  static constexpr int kPartialStride = kOther + 8;
  static constexpr int kPartials = kSplit == 1 ? 0 : 2 * kSplit * kRows * kPartialStride;
  // Rows of gradients in float32, in the place of the own tile.
  static constexpr int kGradientStride = kDim + 4;
  static_assert(kRows % 16 == 0 && kOther % 16 == 0 && kSlice % 16 == 0 && (kStages == 1 || kStages == 2));
  static_assert(kGradientStride * sizeof(float) <= 2 * kStride * sizeof(T));

  static constexpr int kSharedBytes = shared_bytes<T>(2 * kRows * kStride) +
                                      shared_bytes<T>(kStages * 2 * kOther * kStride) + shared_bytes<float>(kPartials) +
                                      shared_bytes<float>(kStages * 2 * kOther);
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// The tiles by bits of the type and bucket of the head dims. Both kernels take the same: they keep two operands of
// their own rows, and of those that pass by.
template <class T, int kDim>
struct BackwardTileFor;

template <class T>
struct BackwardTileFor<T, 64> {
  using Type = BackwardTile<T, 64, 64, sizeof(T) == 2 ? 64 : 32, 1, 2>;
};

template <class T>
struct BackwardTileFor<T, 128> {
  using Type =
      std::conditional_t<sizeof(T) == 2, BackwardTile<T, 128, 64, 32, 1, 2>, BackwardTile<T, 128, 32, 16, 2, 2>>;
};

template <class T>
struct BackwardTileFor<T, 256> {
  using Type =
      std::conditional_t<sizeof(T) == 2, BackwardTile<T, 256, 32, 16, 2, 2>, BackwardTile<T, 256, 16, 16, 4, 1>>;
};

// The place of a thread's accumulators: element e of product n has row `row + 8 * (e / 2)` of the block's own and
// column `column + 8 * n + e % 2` of the tile or, in gradients, of the warp's slice.
template <class Tile>
struct Place {
  int first_row = 16 * (warp_index() / Tile::kSplit);  // of the warp
  int slice = warp_index() % Tile::kSplit;
  int row = first_row + lane_index() / 4;
  int column = 2 * (lane_index() % 4);
};

template <class Tile>
struct BackwardShared {
  using T = typename Tile::Type;
  T* own;          // [2][kRows][kStride]
  T* other;        // [kStages][2][kOther][kStride]
  float* partial;  // [kSplit][2][kRows][kPartialStride]; not with one slice
  float* rows;     // [kStages][2][kOther]: lse and delta of queries that pass by

  __device__ BackwardShared() {
    SharedCarver carver;
    own = carver.take<T>(2 * Tile::kRows * Tile::kStride);
    other = carver.take<T>(Tile::kStages * 2 * Tile::kOther * Tile::kStride);
    if constexpr (Tile::kPartials > 0) partial = carver.take<float>(Tile::kPartials);
    rows = carver.take<float>(Tile::kStages * 2 * Tile::kOther);
  }

  __device__ T* own_operand(int operand) const { return own + operand * Tile::kRows * Tile::kStride; }
  __device__ T* other_operand(int stage, int operand) const {
    return other + (2 * stage + operand) * Tile::kOther * Tile::kStride;
  }
  __device__ float* lse(int stage) const { return rows + 2 * stage * Tile::kOther; }
  __device__ float* delta(int stage) const { return lse(stage) + Tile::kOther; }
};

// Products of a warp's 16 rows with a tile that passes by.
template <class Tile>
using Products = float[Tile::kOther / 8][4];

// A warp's slice of the gradients of its 16 rows.
template <class Tile>
using Gradients = float[Tile::kSlice / 8][4];

// c = own * other^T over the columns of the warp's slice.
template <class Tile>
__device__ inline void multiply_rows(Products<Tile>& c, const typename Tile::Type* own,
                                     const typename Tile::Type* other, const Place<Tile>& place) {
  using T = typename Tile::Type;
  const T* left = own + place.first_row * Tile::kStride + place.slice * Tile::kSlice;
  const T* right = other + place.slice * Tile::kSlice;
#pragma unroll
  for (int n = 0; n < Tile::kOther / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < Tile::kSlice; k += Mma<T>::kDepth) {
    typename Mma<T>::A a;
    load_a<T>(a, left + k, Tile::kStride);
#pragma unroll
    for (int n = 0; n < Tile::kOther / 8; n += 2) {
      typename Mma<T>::B b[2];
      load_b_transposed<T>(b, right + 8 * n * Tile::kStride + k, Tile::kStride);
      multiply<T>(c[n], a, b[0]);
      multiply<T>(c[n + 1], a, b[1]);
    }
  }
}

// Adds up the slices' parts of both products, in the order of the slices. Has a barrier; before the next call there
// has to be another.
template <class Tile>
__device__ inline void join_slices(Products<Tile>& first, Products<Tile>& second, float* partial,
                                   const Place<Tile>& place) {
  constexpr int kOperand = Tile::kRows * Tile::kPartialStride;
  const auto at = [&](int slice, int operand, int n, int half) {
    return reinterpret_cast<float2*>(partial + (2 * slice + operand) * kOperand +
                                     (place.row + 8 * half) * Tile::kPartialStride + place.column + 8 * n);
  };
#pragma unroll
  for (int n = 0; n < Tile::kOther / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *at(place.slice, 0, n, half) = make_float2(first[n][2 * half], first[n][2 * half + 1]);
      *at(place.slice, 1, n, half) = make_float2(second[n][2 * half], second[n][2 * half + 1]);
    }
  }
  __syncthreads();
  const auto sum = [&](Products<Tile>& c, int operand) {
#pragma unroll
    for (int n = 0; n < Tile::kOther / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 total = *at(0, operand, n, half);
#pragma unroll
        for (int slice = 1; slice < Tile::kSplit; ++slice) {
          const float2 part = *at(slice, operand, n, half);
          total.x += part.x;
          total.y += part.y;
        }
        c[n][2 * half] = total.x;
        c[n][2 * half + 1] = total.y;
      }
    }
  };
  sum(first, 0);
  sum(second, 1);
}

// Both products of the warp's rows with the tile in `stage`: the raw scores, and the gradient of the weights.
template <class Tile>
__device__ inline void multiply_both(Products<Tile>& scores, Products<Tile>& grad_weights,
                                     const BackwardShared<Tile>& shared, int stage, const Place<Tile>& place) {
  multiply_rows<Tile>(scores, shared.own_operand(0), shared.other_operand(stage, 0), place);
  multiply_rows<Tile>(grad_weights, shared.own_operand(1), shared.other_operand(stage, 1), place);
  if constexpr (Tile::kSplit > 1) join_slices<Tile>(scores, grad_weights, shared.partial, place);
}

// low and high, of 8 columns each, += a * the 16 columns of `tile`.
template <class T>
__device__ inline void multiply_columns(float (&low)[4], float (&high)[4], const typename Mma<T>::A& a, const T* tile,
                                        int stride) {
  typename Mma<T>::B b[2];
  load_b<T>(b, tile, stride);
  multiply<T>(low, a, b[0]);
  multiply<T>(high, a, b[1]);
}

// c += weights * other, in the columns of the warp's slice; the weights are rounded to T.
template <class Tile>
__device__ inline void accumulate(Gradients<Tile>& c, const Products<Tile>& weights, const typename Tile::Type* other,
                                  const Place<Tile>& place) {
  using T = typename Tile::Type;
  constexpr int kDepth = Mma<T>::kDepth;
  const T* right = other + place.slice * Tile::kSlice;
  typename Mma<T>::A a[Tile::kOther / kDepth];
#pragma unroll
  for (int k = 0; k < Tile::kOther; k += kDepth) accumulators_as_a<T>(a[k / kDepth], weights + k / 8);
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int k = 0; k < Tile::kOther; k += kDepth) {
#pragma unroll
      for (int n = 0; n < Tile::kSlice / 8; n += 2) {
        multiply_columns<T>(c[n], c[n + 1], a[k / kDepth], right + k * Tile::kStride + 8 * n, Tile::kStride);
      }
    }
  } else {
    // A tile is summed by itself first: tensor cores cut off what does not fit when they add, which over many rows
    // would cost float32 its last digits.
#pragma unroll
    for (int n = 0; n < Tile::kSlice / 8; n += 2) {
      float sum[2][4] = {};
#pragma unroll
      for (int k = 0; k < Tile::kOther; k += kDepth) {
        multiply_columns<T>(sum[0], sum[1], a[k / kDepth], right + k * Tile::kStride + 8 * n, Tile::kStride);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        c[n][e] += sum[0][e];
        c[n + 1][e] += sum[1][e];
      }
    }
  }
}

// Calls use(i, stage) for every tile i that passes by, after load(i, stage) and with the next tile on its way where
// there are two stages. `load` makes cp.async copies or ordinary ones; copies that the caller has begun are waited for,
// too. When it returns, all threads still may read the last tile.
template <class Tile, class Load, class Use>
__device__ inline void pass_by(int tiles, const Load& load, const Use& use) {
  if (tiles > 0) load(0, 0);
  ptx::cp_async_commit();
  for (int i = 0; i < tiles; ++i) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (Tile::kStages == 2) {
      if (i + 1 < tiles) load(i + 1, (i + 1) % 2);
      ptx::cp_async_commit();
      use(i, i % 2);
    } else {
      use(i, 0);
      __syncthreads();
      if (i + 1 < tiles) load(i + 1, 0);
      ptx::cp_async_commit();
    }
  }
  ptx::cp_async_wait<0>();
}

}  // namespace
}  // namespace dskernels
