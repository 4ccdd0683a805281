// What a warp does with 16 keys: rotation, scores, softmax and the weighted sum of values of 16 rows.
#pragma once

#include "window_attention/cuda_decode_part.cuh"

namespace dskernels {

// What a warp has of 16 rows: the largest score (base 2), the sum of weights relative to it, of this lane's keys, and
// the weighted sum of values. Accumulators are as in common/mma.cuh: a lane has rows g and g + 8.
template <int kWidth>
struct DecodeRows {
  float largest[2] = {-INFINITY, -INFINITY};
  float total[2] = {};
  float sums[kWidth / 8][4] = {};
};

// Turns the keys n to n + 15 of the part to their positions, in float32, and rounds them to T as the tensor cores take
// them. Each pair belongs to one lane. All lanes of a warp call it.
template <class T, int kWidth>
__device__ inline void turn_slot(T* slot, const Rotation& rotation, int n) {
  constexpr int kStride = DecodeShape<T, kWidth>::kStride;
  // Angles of so many keys are loaded before the first is used: they come from the L2 cache, at two float32 for each
  // pair of a key, and are what this costs.
  constexpr int kBatch = 4;
  if (rotation.half == 0) return;
  for (int i = lane_index(); i < rotation.half; i += kWarp) {
    T *const first = slot + rotation.first(i), *const second = slot + rotation.second(i);
#pragma unroll 1
    for (int begin = 0; begin < kDecodeKeys; begin += kBatch) {
      float2 angles[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) angles[j] = angle_of(rotation, rotation.table_row(n + begin + j), i);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        T &x = first[(begin + j) * kStride], &y = second[(begin + j) * kStride];
        const float2 pair = turned(to_float(x), to_float(y), angles[j]);
        x = from_float<T>(pair.x);
        y = from_float<T>(pair.y);
      }
    }
  }
  __syncwarp();
}

// scores[j] = the products of the 16 rows of `queries` and the keys 8j to 8j + 7 of the slot.
template <class T, int kWidth>
__device__ inline void multiply_keys(float (&scores)[2][4], const T* queries, const T* slot, int columns) {
  constexpr int kStride = DecodeShape<T, kWidth>::kStride, kDepth = Mma<T>::kDepth;
  // The tensor cores cut their sums off instead of rounding them. Sums of few columns are added up outside.
  constexpr int kColumns = 64;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] = 0.0f;
  }
  for (int begin = 0; begin < columns; begin += kColumns) {
    float part[2][4] = {};
#pragma unroll 4
    for (int column = 0; column < kColumns; column += kDepth) {
      if (begin + column >= columns) break;
      typename Mma<T>::A a;
      typename Mma<T>::B b[2];
      load_a<T>(a, queries + begin + column, kStride);
      load_b_transposed<T>(b, slot + begin + column, kStride);
      multiply<T>(part[0], a, b[0]);
      multiply<T>(part[1], a, b[1]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] += part[j][i];
    }
  }
}

// Turns the scores of keys n to n + 15 into weights relative to the largest so far, and brings `rows` up to date but
// for its sums, which are to be multiplied by `rescale`.
template <int kWidth>
__device__ inline void weigh(float (&scores)[2][4], float (&rescale)[2], DecodeRows<kWidth>& rows,
                             const Span (&seen)[2], int n, float scale, float softcap) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = rows.largest[h];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[i / 2][2 * h + i % 2];
      const int key = n + 8 * (i / 2) + 2 * (lane_index() % 4) + i % 2;
      score = softcap == 0.0f ? score * (scale * kLog2E) : softcap * kLog2E * tanhf(score * scale / softcap);
      if (key < seen[h].begin || key >= seen[h].end) score = -INFINITY;
      largest = fmaxf(largest, score);
    }
    // fmaxf passes over NaN; the sum below does not.
    largest = largest_of_lanes(largest, 4);
    const float shift = shift_of(largest);
    rescale[h] = ptx::exp2_approximate(rows.largest[h] - shift);
    rows.largest[h] = largest;
    rows.total[h] *= rescale[h];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[i / 2][2 * h + i % 2];
      score = ptx::exp2_approximate(score - shift);
      rows.total[h] += score;
    }
  }
}

// sums = sums * rescale + weights * the 16 values of the slot.
template <class T, int kWidth>
__device__ inline void add_values(float (&sums)[kWidth / 8][4], const float (&weights)[2][4], const float (&rescale)[2],
                                  const T* slot, int columns) {
  constexpr int kStride = DecodeShape<T, kWidth>::kStride, kDepth = Mma<T>::kDepth, kSteps = kDecodeKeys / kDepth;
  typename Mma<T>::A a[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) accumulators_as_a<T>(a[step], weights + step * (kDepth / 8));
#pragma unroll
  for (int n = 0; n < kWidth / 8; n += 2) {
    if (8 * n >= columns) break;
    // From 0, not from what is there: sums of sums lose less than one long sum, and the tensor cores cut theirs off.
    float part[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      typename Mma<T>::B b[2];
      load_b<T>(b, slot + step * kDepth * kStride + 8 * n, kStride);
      multiply<T>(part[0], a[step], b[0]);
      multiply<T>(part[1], a[step], b[1]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n + j][i] = sums[n + j][i] * rescale[i / 2] + part[j][i];
    }
  }
}

}  // namespace dskernels
