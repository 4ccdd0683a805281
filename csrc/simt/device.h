// The words of CUDA C++ and the functions of its library that need no other thread.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// CUDA's headers define these for other compilers, too, as attributes that they do not know.
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

// Of the thread that is running.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

using std::max;
using std::min;

namespace dskernels::simt {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace dskernels::simt

inline unsigned __float_as_uint(float x) { return dskernels::simt::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return dskernels::simt::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return dskernels::simt::bits_as<float>(x); }
inline float __int_as_float(int x) { return dskernels::simt::bits_as<float>(x); }

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return x > 0.0f ? std::min(x, 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}

// Four bytes of the eight of y:x, by the low three bits of each digit of `selector`.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return c;
}

// One after the other over the blocks; between threads of a block, in the order in which they go on.
template <class T>
T atomicAdd(T* p, T value) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  __atomic_store_n(p, static_cast<T>(old + value), __ATOMIC_RELAXED);
  return old;
}

template <class T>
T atomicMax(T* p, T value) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  if (value > old) __atomic_store_n(p, value, __ATOMIC_RELAXED);
  return old;
}

// CUDA's header gives the host the other operations of half precision. The product is exact in double.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const double low = double{__low2float(a)} * __low2float(b) + __low2float(c);
  const double high = double{__high2float(a)} * __high2float(b) + __high2float(c);
  return __halves2half2(__double2half(low), __double2half(high));
}
