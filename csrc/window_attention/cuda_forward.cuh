// The forward of window attention for one tile of rows: softmax online, one tile of keys after the other (Dao,
// "FlashAttention-2", 2023, section 2.3).
#pragma once

#include "window_attention/cuda_rope.cuh"
#include "window_attention/cuda_scores.cuh"

namespace dskernels {

// How a block works on head dims up to kBucket: 4 warps of 16 rows each, which share the keys.
template <class T, int kBucket>
struct ForwardShape {
  using Element = T;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp, kRows = 16 * kWarps;
  static constexpr int kColumns = kBucket, kStride = kBucket + Mma<T>::kPad;
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kKeys = kWide ? (kBucket <= 128 ? 32 : 16) : (kBucket <= 128 ? 64 : 32);
  // Tiles of keys and of values, so that the next is copied while one is multiplied. What fits into kMaxSharedBytes.
  static constexpr int kStages = kWide && kBucket > 128 ? 1 : 2;
  // Whether queries stay in registers, and leave their place to the second tile of keys.
  static constexpr bool kHoldsQueries = !kWide && kBucket <= 128;
  // How many blocks a multiprocessor is to hold: as many as registers do without spilling and shared memory allows.
  static constexpr int kBlocks = kBucket <= 64 ? 3 : 2;
  static_assert(!kHoldsQueries || (kStages == 2 && kRows == kKeys));

  static constexpr int kTile = kKeys * kStride;
  static constexpr int kSharedBytes =
      (kHoldsQueries ? 0 : shared_bytes<T>(kRows * kStride)) + 2 * shared_bytes<T>(kStages * kTile);
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

template <class Shape>
struct ForwardTiles {
  using T = typename Shape::Element;
  T *q, *k, *v;  // [kRows][kStride], [kStages][kKeys][kStride]

  __device__ explicit ForwardTiles(SharedCarver& carver) {
    q = Shape::kHoldsQueries ? nullptr : carver.take<T>(Shape::kRows * Shape::kStride);
    k = carver.take<T>(Shape::kStages * Shape::kTile);
    v = carver.take<T>(Shape::kStages * Shape::kTile);
    if (Shape::kHoldsQueries) q = k + Shape::kTile;
  }
};

// Where a block finds the keys and values of its head.
template <class T>
struct KeySource {
  Rows<const T> k, v;
  int dim_k, dim_v;
  Rotation rotation;  // of k
};

// Brings keys [begin, end), at most kKeys, and their values into `stage`, zeros behind them; a cp.async group.
template <class Shape>
__device__ inline void load_keys(const ForwardTiles<Shape>& tiles, int stage,
                                 const KeySource<typename Shape::Element>& from, int begin, int end) {
  using T = typename Shape::Element;
  const int count = min(Shape::kKeys, end - begin);
  copy_rows<T, Shape::kThreads, Shape::kKeys, Shape::kColumns, Shape::kStride>(tiles.v + stage * Shape::kTile, from.v,
                                                                               begin, count, from.dim_v);
  load_rows<T, Shape::kThreads, Shape::kKeys, Shape::kColumns, Shape::kStride>(
      tiles.k + stage * Shape::kTile, TurnedRows<T>{from.k, begin, count, from.dim_k, from.rotation});
  ptx::cp_async_commit();
}

// The 16 rows of a warp: queries, running softmax and sum of values.
template <class Shape>
struct ForwardWarp {
  using T = typename Shape::Element;
  static constexpr int kDepth = Mma<T>::kDepth, kKeyGroups = Shape::kKeys / 8, kColumnGroups = Shape::kColumns / 8;
  typename Mma<T>::A q[Shape::kHoldsQueries ? Shape::kColumns / kDepth : 1];
  float largest[2], total[2];  // total is this thread's part of its rows' sums
  float out[kColumnGroups][4];

  // Before the first tile: as if the sink, a logit or -inf, had been a key without a value.
  __device__ void begin(const float (&sink)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = sink[i];
      total[i] = sink[i] != -INFINITY && lane_index() % 4 == 0 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kColumnGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0.0f;
    }
  }

  __device__ void hold_queries(const T* q_tile) {
    if constexpr (Shape::kHoldsQueries) {
#pragma unroll
      for (int k = 0; k < Shape::kColumns; k += kDepth) load_a<T>(q[k / kDepth], q_tile + k, Shape::kStride);
    }
  }

  // s = the products of the warp's rows, which begin at q_tile, with a tile of keys.
  __device__ void multiply_keys(float (&s)[kKeyGroups][4], const T* q_tile, const T* k_tile) {
    // Registers that are chosen by k want all steps unrolled; else that only makes the compiler load too far ahead.
    constexpr int kUnrolled = Shape::kHoldsQueries ? Shape::kColumns / kDepth : 4;
#pragma unroll kUnrolled
    for (int k = 0; k < Shape::kColumns; k += kDepth) {
      if constexpr (!Shape::kHoldsQueries) load_a<T>(q[0], q_tile + k, Shape::kStride);
#pragma unroll
      for (int n = 0; n < kKeyGroups; n += 2) {
        typename Mma<T>::B b[2];
        load_b_transposed<T>(b, k_tile + 8 * n * Shape::kStride + k, Shape::kStride);
        multiply<T>(s[n], q[Shape::kHoldsQueries ? k / kDepth : 0], b[0]);
        multiply<T>(s[n + 1], q[Shape::kHoldsQueries ? k / kDepth : 0], b[1]);
      }
    }
  }

  // Replaces scores by weights relative to the largest score so far, and brings sums to the same measure.
  __device__ void soften(float (&s)[kKeyGroups][4]) {
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float now = largest[i];
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) now = fmaxf(now, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      now = largest_of_lanes(now, 4);
      const float shift = shift_of(now);
      shrink[i] = weight_of(largest[i] - shift);
      largest[i] = now;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          s[n][e] = weight_of(s[n][e] - shift);
          sum += s[n][e];
        }
      }
      total[i] = total[i] * shrink[i] + sum;
    }
#pragma unroll
    for (int n = 0; n < kColumnGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= shrink[e / 2];
    }
  }

  // out += weights times values. A tile is summed by itself first: tensor cores cut off what does not fit when they
  // add, which over a long row would cost float32 its last digits.
  __device__ void add_values(const float (&p)[kKeyGroups][4], const T* v_tile) {
    typename Mma<T>::A a[Shape::kKeys / kDepth];
#pragma unroll
    for (int k = 0; k < Shape::kKeys; k += kDepth) accumulators_as_a<T>(a[k / kDepth], p + k / 8);
#pragma unroll
    for (int n = 0; n < kColumnGroups; n += 2) {
      float sum[2][4] = {};
      float (&low)[4] = Shape::kWide ? sum[0] : out[n];
      float (&high)[4] = Shape::kWide ? sum[1] : out[n + 1];
#pragma unroll
      for (int k = 0; k < Shape::kKeys; k += kDepth) {
        typename Mma<T>::B b[2];
        load_b<T>(b, v_tile + k * Shape::kStride + 8 * n, Shape::kStride);
        multiply<T>(low, a[k / kDepth], b[0]);
        multiply<T>(high, a[k / kDepth], b[1]);
      }
      if constexpr (Shape::kWide) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          out[n][e] += sum[0][e];
          out[n + 1][e] += sum[1][e];
        }
      }
    }
  }

  // Divides by the sums, and returns lse. Rows without weights become exactly 0: they have met the values of their
  // neighbours, which may be NaN, with weights of 0.
  __device__ void finish(const RowPair& rows, float (&lse)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sum_of_lanes(total[i], 4);
      const bool is_nothing = sum == 0.0f;
      lse[i] = is_nothing ? -INFINITY : largest[i] + logf(sum);
      const bool has_result = rows.is_live[i] && !is_nothing;
      const float factor = 1.0f / sum;
#pragma unroll
      for (int n = 0; n < kColumnGroups; ++n) {
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) out[n][e] = has_result ? out[n][e] * factor : 0.0f;
      }
    }
  }
};

// Stores the 16 rows of a warp, from `first` on and below `end`, by way of its part of shared memory, which nobody else
// uses any more.
template <class Shape>
__device__ inline void store_rows(const ForwardWarp<Shape>& warp, typename Shape::Element* shared,
                                  const Rows<typename Shape::Element>& to, int first, int end, int columns) {
  using T = typename Shape::Element;
  constexpr int kVector = 16 / sizeof(T);
  const int lane = lane_index();
#pragma unroll
  for (int n = 0; n < Shape::kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      T* pair = shared + (lane / 4 + 8 * i) * Shape::kStride + column_of(n, 0);
      store_pair(pair, warp.out[n][2 * i], warp.out[n][2 * i + 1]);
    }
  }
  __syncwarp();
  const int rows = min(16, end - first);
  const bool by_16 = to.by_16() && columns % kVector == 0;
  const int step = by_16 ? kVector : 1, steps = columns / step;
  for (int i = lane; i < rows * steps; i += kWarp) {
    const int row = i / steps, column = i % steps * step;
    const T* from = shared + row * Shape::kStride + column;
    T* target = to.at(first + row) + column * to.column_stride;
    if (by_16) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(from);
    } else {
      *target = *from;
    }
  }
}

}  // namespace dskernels
