// Tile products on tensor cores for one element type T: __half, __nv_bfloat16, or float, which is multiplied as three
// products of TF32 halves and so keeps float's precision (Ootomo and Yokota, "Recovering single precision accuracy from
// Tensor Cores", 2022). Kernels write C[16][8] += A[16][kDepth] * B[kDepth][8] for all three alike.
//
// Accumulators are as in ptx.cuh: c[0], c[1] hold columns 2t, 2t+1 of row g, and c[2], c[3] of row g+8, for g = lane /
// 4 and t = lane % 4. Tiles in shared memory are row-major; their stride counts elements and must be kPad more than a
// multiple of 32 * 4 / sizeof(T) elements, or of 16 at least, to be free of bank conflicts.
#pragma once

#include "common/ptx.cuh"

namespace dskernels {

template <class T>
struct Mma {
  static constexpr int kDepth = 16;
  // Elements to add to the stride of a tile: 16 bytes.
  static constexpr int kPad = 8;
  struct A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[2];
  };
};

template <>
struct Mma<float> {
  static constexpr int kDepth = 8;
  static constexpr int kPad = 4;
  // x = high + low, each of 11 bits. Of a depth of 8, slot t stands for column 2t and slot t+4 for column 2t+1, in A
  // and B alike: the order of a sum is free, and so neighbours are loaded together and accumulators become an A as they
  // are.
  struct A {
    uint32_t high[4], low[4];
  };
  struct B {
    uint32_t high[2], low[2];
  };
};

__device__ inline void split_tf32(float x, uint32_t& high, uint32_t& low) {
  high = ptx::to_tf32(x);
  low = ptx::to_tf32(x - __uint_as_float(high));
}

__device__ inline void set_a(Mma<float>::A& a, float x0, float x1, float x2, float x3) {
  split_tf32(x0, a.high[0], a.low[0]);
  split_tf32(x1, a.high[1], a.low[1]);
  split_tf32(x2, a.high[2], a.low[2]);
  split_tf32(x3, a.high[3], a.low[3]);
}

__device__ inline void set_b(Mma<float>::B& b, float x0, float x1) {
  split_tf32(x0, b.high[0], b.low[0]);
  split_tf32(x1, b.high[1], b.low[1]);
}

// A = tile[0..16)[0..kDepth).
template <class T>
__device__ inline void load_a(typename Mma<T>::A& a, const T* tile, int stride) {
  const int lane = lane_index();
  if constexpr (sizeof(T) == 2) {
    ptx::ldmatrix_x4(a.r, tile + (lane % 16) * stride + 8 * (lane / 16));
  } else {
    const float* row = tile + (lane / 4) * stride + 2 * (lane % 4);
    const float2 low = *reinterpret_cast<const float2*>(row), high = *reinterpret_cast<const float2*>(row + 8 * stride);
    set_a(a, low.x, high.x, low.y, high.y);
  }
}

// A = the transpose of tile[0..kDepth)[0..16).
template <class T>
__device__ inline void load_a_transposed(typename Mma<T>::A& a, const T* tile, int stride) {
  const int lane = lane_index();
  if constexpr (sizeof(T) == 2) {
    ptx::ldmatrix_x4_trans(a.r, tile + (lane % 8 + 8 * (lane / 16)) * stride + 8 * (lane / 8 % 2));
  } else {
    const float* column = tile + 2 * (lane % 4) * stride + lane / 4;
    set_a(a, column[0], column[8], column[stride], column[stride + 8]);
  }
}

// b[j] = the transpose of tile[8j..8j+8)[0..kDepth), j = 0, 1: for products with the rows of a tile, such as Q K^T.
template <class T>
__device__ inline void load_b_transposed(typename Mma<T>::B (&b)[2], const T* tile, int stride) {
  const int lane = lane_index();
  if constexpr (sizeof(T) == 2) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, tile + (lane % 8 + 8 * (lane / 16)) * stride + 8 * (lane / 8 % 2));
    b[0] = {{r[0], r[1]}};
    b[1] = {{r[2], r[3]}};
  } else {
    for (int j = 0; j < 2; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(tile + (lane / 4 + 8 * j) * stride + 2 * (lane % 4));
      set_b(b[j], pair.x, pair.y);
    }
  }
}

// b[j] = tile[0..kDepth)[8j..8j+8), j = 0, 1: for products with the columns of a tile, such as P V.
template <class T>
__device__ inline void load_b(typename Mma<T>::B (&b)[2], const T* tile, int stride) {
  const int lane = lane_index();
  if constexpr (sizeof(T) == 2) {
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, tile + (lane % 16) * stride + 8 * (lane / 16));
    b[0] = {{r[0], r[1]}};
    b[1] = {{r[2], r[3]}};
  } else {
    const float* column = tile + 2 * (lane % 4) * stride + lane / 4;
    for (int j = 0; j < 2; ++j) set_b(b[j], column[8 * j], column[stride + 8 * j]);
  }
}

// A = accumulators[0..16)[0..kDepth), rounded to T: those of kDepth / 8 products side by side.
template <class T>
__device__ inline void accumulators_as_a(typename Mma<T>::A& a, const float (*c)[4]) {
  if constexpr (sizeof(T) == 2) {
    for (int j = 0; j < 2; ++j) {
      a.r[2 * j] = pack_pair<T>(c[j][0], c[j][1]);
      a.r[2 * j + 1] = pack_pair<T>(c[j][2], c[j][3]);
    }
  } else {
    set_a(a, c[0][0], c[0][2], c[0][1], c[0][3]);
  }
}

// c += a * b.
template <class T>
__device__ inline void multiply(float (&c)[4], const typename Mma<T>::A& a, const typename Mma<T>::B& b) {
  if constexpr (sizeof(T) == 2) {
    ptx::mma_m16n8k16<T>(c, a.r, b.r);
  } else {
    // The small products first, so that they are not lost one by one.
    ptx::mma_m16n8k8_tf32(c, a.low, b.high);
    ptx::mma_m16n8k8_tf32(c, a.high, b.low);
    ptx::mma_m16n8k8_tf32(c, a.high, b.high);
  }
}

}  // namespace dskernels
