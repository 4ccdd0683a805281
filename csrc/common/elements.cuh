// Elements as float32: single ones of a type that is known when a kernel runs, and 16 bytes at a time.
#pragma once

#include "common/cuda.cuh"
#include "common/elements.h"

namespace dskernels {

__device__ inline float load_element(const void* data, Element element, int64_t at) {
  switch (element) {
    case Element::kFloat16: return to_float(static_cast<const __half*>(data)[at]);
    case Element::kBFloat16: return to_float(static_cast<const __nv_bfloat16*>(data)[at]);
    default: return static_cast<const float*>(data)[at];
  }
}

__device__ inline void store_element(void* data, Element element, int64_t at, float x) {
  switch (element) {
    case Element::kFloat16: static_cast<__half*>(data)[at] = from_float<__half>(x); break;
    case Element::kBFloat16: static_cast<__nv_bfloat16*>(data)[at] = from_float<__nv_bfloat16>(x); break;
    default: static_cast<float*>(data)[at] = x;
  }
}

// 16 bytes, at a multiple of 16.
template <class T>
__device__ inline void load_vector(const T* from, float* to) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  T values[16 / sizeof(T)];
  memcpy(static_cast<void*>(values), &bits, sizeof(bits));
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) to[i] = to_float(values[i]);
}

template <class T>
__device__ inline void store_vector(T* to, const float* from) {
  T values[16 / sizeof(T)];
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) values[i] = from_float<T>(from[i]);
  uint4 bits;
  memcpy(&bits, values, sizeof(bits));
  *reinterpret_cast<uint4*>(to) = bits;
}

// Two neighbours at once, at a multiple of their size.
template <class T>
__device__ inline void store_pair(T* to, float low, float high) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(low, high);
  } else {
    *reinterpret_cast<float2*>(to) = {low, high};
  }
}

}  // namespace dskernels
