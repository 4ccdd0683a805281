// One vector of floats per tier, on GCC's and Clang's vector extensions.
//
// A tier file is compiled with its own instruction set (CMakeLists.txt), so everything here lives in an anonymous
// namespace and must be inlined: a shared inline function would let the linker keep the AVX-512 copy for every tier.
// For the same reason no header of the C++ library with function templates is included.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define DSKERNELS_INLINE inline __attribute__((always_inline))
// For the loops that take the time: inlined into a large function they lose registers to their surroundings.
#define DSKERNELS_NOINLINE __attribute__((noinline))
#define DSKERNELS_UNROLL _Pragma("GCC unroll 32")

namespace dskernels {
namespace {

#if defined(DSKERNELS_TIER_AVX512)
constexpr int kLanes = 16;
constexpr int kVectorRegisters = 32;
#elif defined(DSKERNELS_TIER_AVX2)
constexpr int kLanes = 8;
constexpr int kVectorRegisters = 16;
#else
constexpr int kLanes = 4;
constexpr int kVectorRegisters = 16;
#endif

// Room for accumulators of more rows beside the operands of a product.
constexpr bool kWide = kVectorRegisters == 32;

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896340736f;

constexpr int64_t kVectorBytes = kLanes * sizeof(float);

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef float VecFUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef float Vec4 __attribute__((vector_size(16), aligned(4), may_alias));

template <class T>
DSKERNELS_INLINE T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
DSKERNELS_INLINE T max_of(T a, T b) {
  return a > b ? a : b;
}

template <class T>
DSKERNELS_INLINE T clamp_to(T x, T low, T high) {
  return min_of(max_of(x, low), high);
}

DSKERNELS_INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

DSKERNELS_INLINE VecF load(const float* p) { return *reinterpret_cast<const VecFUnaligned*>(p); }

DSKERNELS_INLINE void store(float* p, VecF x) { *reinterpret_cast<VecFUnaligned*>(p) = x; }

DSKERNELS_INLINE VecF broadcast(float x) { return x - VecF{}; }

DSKERNELS_INLINE VecI broadcast(int32_t x) { return x - VecI{}; }

// 0, 1, 2, ... in the lanes.
DSKERNELS_INLINE VecI lane_index() {
  VecI index{};
  DSKERNELS_UNROLL
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

// NaN in b is kept, as maxps does.
DSKERNELS_INLINE VecF vmax(VecF a, VecF b) {
#if defined(DSKERNELS_TIER_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(DSKERNELS_TIER_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// 2^x by a minimax polynomial on [-1/2, 1/2] (relative error 9e-8 before rounding, fitted by us) times 2^round(x).
// 2^-inf is 0, a NaN stays one, and below 2^-126 the result is at most the smallest normal number.
// Only for x <= 0: softmax subtracts the maximum first.
DSKERNELS_INLINE VecF exp2_nonpositive(VecF x) {
#if defined(DSKERNELS_TIER_AVX512)
  const VecF whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // The order keeps a NaN: maxps returns its second operand.
  x = vmax(broadcast(-127.0f), x);
  // 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits of the sum.
  const VecF shifted = x + 12582912.0f;
  const VecF whole = shifted - 12582912.0f;
#endif
  const VecF f = x - whole;
  VecF p = broadcast(0.0013264727f);
  p = p * f + 0.009671513f;
  p = p * f + 0.055507336f;
  p = p * f + 0.24022242f;
  p = p * f + 0.693147f;
  p = p * f + 1.0f;
#if defined(DSKERNELS_TIER_AVX512)
  return _mm512_scalef_ps(p, whole);
#else
  // Unsigned: of a row with a NaN, which is NaN whatever comes out here, x may be above 0, and then the sum wraps.
  typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
  return reinterpret_cast<VecF>(reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 23));
#endif
}

}  // namespace
}  // namespace dskernels
