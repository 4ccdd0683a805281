// Rows of a strided tensor of any floating type, read into and written from contiguous fp32 scratch.
#pragma once

#include "common/elements.h"
#include "common/vec.h"

namespace dskernels {
namespace {

DSKERNELS_INLINE float to_float(float x) { return x; }

DSKERNELS_INLINE float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to nearest even; a NaN stays a NaN (its payload may lose low bits, so the quiet bit is set).
DSKERNELS_INLINE void from_float(float x, BFloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  out->bits = static_cast<uint16_t>((x != x ? bits | 0x400000u : rounded) >> 16);
}

DSKERNELS_INLINE void from_float(float x, float* out) { *out = x; }

#if defined(__F16C__)
DSKERNELS_INLINE float to_float(Float16 x) { return _cvtsh_ss(x.bits); }

DSKERNELS_INLINE void from_float(float x, Float16* out) { out->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

#if defined(DSKERNELS_TIER_AVX512)
DSKERNELS_INLINE VecF load_halves(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

DSKERNELS_INLINE void store_halves(Float16* p, VecF x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#else
DSKERNELS_INLINE VecF load_halves(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

DSKERNELS_INLINE void store_halves(Float16* p, VecF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#endif
#else
// Moves exponent and mantissa into fp32's place and lets a multiplication correct the bias: exact, subnormals included.
DSKERNELS_INLINE float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  uint32_t bits = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  if (bits >= 0x0f800000u) {  // infinity or NaN
    bits |= 0x7f800000u;
  } else {
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
    magnitude *= 0x1p112f;
    std::memcpy(&bits, &magnitude, sizeof(bits));
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

DSKERNELS_INLINE void from_float(float x, Float16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // rounds to 65536 or beyond
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {  // subnormal: adding 2^-1 aligns the mantissa and rounds to nearest even
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
    magnitude += 0.5f;
    std::memcpy(&half, &magnitude, sizeof(half));
    half -= 0x3f000000u;
  } else {
    half = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;  // bias 127 -> 15, round to nearest even
  }
  out->bits = static_cast<uint16_t>(sign | half);
}
#endif

// Whether load_vector takes a type in vectors. Without F16C, halves are converted one by one, by load_row.
template <class T>
constexpr bool kLoadsVectors = true;
#if !defined(__F16C__)
template <>
constexpr bool kLoadsVectors<Float16> = false;
#endif

DSKERNELS_INLINE VecF load_vector(const float* p) { return load(p); }

DSKERNELS_INLINE VecF load_vector(const BFloat16* p) {
  typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
  typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
  return reinterpret_cast<VecF>(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16);
}

#if defined(__F16C__)
DSKERNELS_INLINE VecF load_vector(const Float16* p) { return load_halves(p); }
#endif

template <class T>
inline void load_row_as(const void* from, int64_t stride, int64_t count, float* __restrict to) {
  const T* __restrict source = static_cast<const T*>(from);
  int64_t i = 0;
#if defined(__F16C__)
  // The compiler vectorizes the loops below by itself, but for this conversion.
  if constexpr (__is_same(T, Float16)) {
    for (; stride == 1 && i + kLanes <= count; i += kLanes) store(to + i, load_halves(source + i));
  }
#endif
  if (stride == 1) {
    for (; i < count; ++i) to[i] = to_float(source[i]);
  } else {
    for (; i < count; ++i) to[i] = to_float(source[i * stride]);
  }
}

template <class T>
inline void store_row_as(const float* __restrict from, float factor, int64_t count, void* to, int64_t stride) {
  T* __restrict target = static_cast<T*>(to);
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (__is_same(T, Float16)) {
    for (; stride == 1 && i + kLanes <= count; i += kLanes) store_halves(target + i, factor * load(from + i));
  }
#endif
  if (stride == 1) {
    for (; i < count; ++i) from_float(from[i] * factor, target + i);
  } else {
    for (; i < count; ++i) from_float(from[i] * factor, target + i * stride);
  }
}

// to[i] = from[i * stride] as fp32, for i in [0, count).
inline void load_row(Element element, const void* from, int64_t stride, int64_t count, float* to) {
  switch (element) {
    case Element::kFloat32: return load_row_as<float>(from, stride, count, to);
    case Element::kBFloat16: return load_row_as<BFloat16>(from, stride, count, to);
    case Element::kFloat16: return load_row_as<Float16>(from, stride, count, to);
  }
}

// to[i * stride] = from[i] * factor, rounded once to the element type.
inline void store_row(Element element, const float* from, float factor, int64_t count, void* to, int64_t stride) {
  switch (element) {
    case Element::kFloat32: return store_row_as<float>(from, factor, count, to, stride);
    case Element::kBFloat16: return store_row_as<BFloat16>(from, factor, count, to, stride);
    case Element::kFloat16: return store_row_as<Float16>(from, factor, count, to, stride);
  }
}

}  // namespace
}  // namespace dskernels
