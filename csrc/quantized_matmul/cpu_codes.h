// int8 codes and nibbles in vectors: loads, products, and the sums over lanes.
#pragma once

#include "common/vec.h"

namespace dskernels {
namespace {

// Codes of a vector: each int32 lane covers four int8 codes, or eight nibbles.
typedef int8_t Bytes __attribute__((vector_size(kVectorBytes)));

DSKERNELS_INLINE Bytes load_bytes(const void* p) {
  typedef int8_t Unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  return *static_cast<const Unaligned*>(p);
}

// The first `count` bytes, then zeros: nothing is read behind them.
DSKERNELS_INLINE Bytes load_some_bytes(const void* p, int64_t count) {
  if (count <= 0) return Bytes{};
#if defined(DSKERNELS_TIER_AVX512)
  return reinterpret_cast<Bytes>(_mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, p));
#else
  int8_t bytes[kVectorBytes] = {};
  std::memcpy(bytes, p, static_cast<size_t>(count));
  return load_bytes(bytes);
#endif
}

// `count` may be that of a whole vector and more.
DSKERNELS_INLINE Bytes load_up_to(const void* p, int64_t count) {
  return count >= kVectorBytes ? load_bytes(p) : load_some_bytes(p, count);
}

// int8 weights as `add_products` takes them. AVX-512 multiplies unsigned by signed bytes only, so 128 is added to them;
// kCodeOffset times the codes of x is then too much.
#if defined(DSKERNELS_TIER_AVX512)
constexpr int32_t kCodeOffset = 128;
#else
constexpr int32_t kCodeOffset = 0;
#endif

DSKERNELS_INLINE Bytes as_factor(Bytes w) { return kCodeOffset == 0 ? w : w ^ static_cast<int8_t>(-128); }

// sum + the products of w (as_factor of -128..127) and x (-127..127), four to a lane, modulo 2^32.
DSKERNELS_INLINE VecI add_products(VecI sum, Bytes w, Bytes x) {
#if defined(DSKERNELS_TIER_AVX512)
  return reinterpret_cast<VecI>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(x)));
#elif defined(DSKERNELS_TIER_AVX2)
  // |w| is at most 128 and |x| 127, so two products, 32512, fit into the 16 bits that they are summed in.
  const __m256i wide = reinterpret_cast<__m256i>(w);
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(wide), _mm256_sign_epi8(reinterpret_cast<__m256i>(x), wide));
  return sum + reinterpret_cast<VecI>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  DSKERNELS_UNROLL
  for (int i = 0; i < kVectorBytes; ++i) sum[i / 4] += int32_t{w[i]} * x[i];
  return sum;
#endif
}

DSKERNELS_INLINE Bytes low_nibbles(Bytes w) { return w & 15; }

DSKERNELS_INLINE Bytes high_nibbles(Bytes w) {
  typedef uint16_t Words __attribute__((vector_size(kVectorBytes)));
  return reinterpret_cast<Bytes>(reinterpret_cast<Words>(w) >> 4) & 15;
}

// The integers -128 to 127 of the lanes, as bytes.
DSKERNELS_INLINE void store_as_bytes(VecI v, int8_t* to) {
#if defined(DSKERNELS_TIER_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)));
#elif defined(DSKERNELS_TIER_AVX2)
  const __m256i wide = reinterpret_cast<__m256i>(v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(v[i]);
#endif
}

// Four codes of x in every lane.
DSKERNELS_INLINE Bytes broadcast_codes(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof(four));
  return reinterpret_cast<Bytes>(broadcast(four));
}

#if defined(__AVX2__)
// Of each 128 bits: a0 + a2, b0 + b2, a1 + a3, b1 + b3.
DSKERNELS_INLINE VecI add_pairs(VecI a, VecI b) {
#if defined(DSKERNELS_TIER_AVX512)
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  return reinterpret_cast<VecI>(_mm512_unpacklo_epi32(x, y)) + reinterpret_cast<VecI>(_mm512_unpackhi_epi32(x, y));
#else
  const __m256i x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
  return reinterpret_cast<VecI>(_mm256_unpacklo_epi32(x, y)) + reinterpret_cast<VecI>(_mm256_unpackhi_epi32(x, y));
#endif
}

// Of each 128 bits: a0 + a2, a1 + a3, b0 + b2, b1 + b3.
DSKERNELS_INLINE VecI add_halves(VecI a, VecI b) {
#if defined(DSKERNELS_TIER_AVX512)
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  return reinterpret_cast<VecI>(_mm512_unpacklo_epi64(x, y)) + reinterpret_cast<VecI>(_mm512_unpackhi_epi64(x, y));
#else
  const __m256i x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
  return reinterpret_cast<VecI>(_mm256_unpacklo_epi64(x, y)) + reinterpret_cast<VecI>(_mm256_unpackhi_epi64(x, y));
#endif
}

// Adds the 128-bit parts of a and of b in pairs: those of a come first.
DSKERNELS_INLINE VecI add_parts(VecI a, VecI b) {
#if defined(DSKERNELS_TIER_AVX512)
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  return reinterpret_cast<VecI>(_mm512_shuffle_i32x4(x, y, 0x88)) +
         reinterpret_cast<VecI>(_mm512_shuffle_i32x4(x, y, 0xdd));
#else
  const __m256i x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
  return reinterpret_cast<VecI>(_mm256_permute2x128_si256(x, y, 0x20)) +
         reinterpret_cast<VecI>(_mm256_permute2x128_si256(x, y, 0x31));
#endif
}
#endif

#if defined(__AVX2__)
// In lane i the sum over the lanes of v[i], for `count` up to kLanes vectors; 0 in the others.
template <int count>
DSKERNELS_INLINE VecI lane_sums(const VecI* v) {
  static_assert(count <= kLanes);
  VecI fours[kLanes / 4];
  DSKERNELS_UNROLL
  for (int i = 0; i < kLanes / 4; ++i) {
    VecI pairs[2];
    DSKERNELS_UNROLL
    for (int p = 0; p < 2; ++p) {
      const int first = 4 * i + 2 * p;
      pairs[p] = first >= count ? VecI{} : add_pairs(v[first], first + 1 < count ? v[first + 1] : VecI{});
    }
    fours[i] = 4 * i >= count ? VecI{} : add_halves(pairs[0], pairs[1]);
  }
#if defined(DSKERNELS_TIER_AVX512)
  return add_parts(add_parts(fours[0], fours[1]), count > 8 ? add_parts(fours[2], fours[3]) : VecI{});
#else
  return add_parts(fours[0], fours[1]);
#endif
}
#endif

// to[i] = the sum over the lanes of v[i], for `count` up to kLanes vectors.
template <int count>
DSKERNELS_INLINE void sum_lanes(const VecI* v, int32_t* to) {
#if defined(__AVX2__)
  const VecI sums = lane_sums<count>(v);
  int32_t all[kLanes];
  std::memcpy(all, &sums, sizeof(sums));
  DSKERNELS_UNROLL
  for (int i = 0; i < count; ++i) to[i] = all[i];
#else
  for (int i = 0; i < count; ++i) to[i] = v[i][0] + v[i][1] + v[i][2] + v[i][3];
#endif
}

}  // namespace
}  // namespace dskernels
