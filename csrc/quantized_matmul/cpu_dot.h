// Dot products of small integers in the lanes of a vector, and sums over lanes.
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

// Weights as dot_codes takes them.
DSKERNELS_INLINE Bytes as_factor(Bytes w) {
#if defined(DSKERNELS_TIER_AVX512)
  return w ^ static_cast<int8_t>(-128);
#else
  return w;
#endif
}

// What dot_codes adds for each code of x, too much: there is no product of two signed bytes, so that weights are made
// unsigned by adding 128.
#if defined(DSKERNELS_TIER_AVX512)
constexpr int32_t kDotOffset = 128;
#else
constexpr int32_t kDotOffset = 0;
#endif

// sum + the dot product of w (as_factor of -128..127) and x (-127..127), four codes a lane, modulo 2^32.
DSKERNELS_INLINE VecI dot_codes(VecI sum, Bytes w, Bytes x) {
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

// sum + the dot products of `vectors` vectors of nibbles w and codes x, eight a lane. Those of x stand as the even
// codes of a vector of nibbles, then its odd ones.
template <int vectors>
DSKERNELS_INLINE VecI dot_nibbles(VecI sum, const Bytes* low, const Bytes* high, const int8_t* x) {
#if defined(DSKERNELS_TIER_AVX2)
  // A pair of products is at most 3810: sixteen of them fit into 16 bits, and there are four.
  static_assert(vectors <= 2);
  __m256i pairs = _mm256_setzero_si256();
  DSKERNELS_UNROLL
  for (int v = 0; v < vectors; ++v) {
    const Bytes even = load_bytes(x + 2 * v * kVectorBytes), odd = load_bytes(x + (2 * v + 1) * kVectorBytes);
    const __m256i first = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(low[v]), reinterpret_cast<__m256i>(even));
    const __m256i second = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(high[v]), reinterpret_cast<__m256i>(odd));
    const __m256i both = _mm256_add_epi16(first, second);
    pairs = v == 0 ? both : _mm256_add_epi16(pairs, both);
  }
  return sum + reinterpret_cast<VecI>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  DSKERNELS_UNROLL
  for (int v = 0; v < vectors; ++v) {
    const Bytes even = load_bytes(x + 2 * v * kVectorBytes), odd = load_bytes(x + (2 * v + 1) * kVectorBytes);
    sum = dot_codes(dot_codes(sum, low[v], even), high[v], odd);
  }
  return sum;
#endif
}

DSKERNELS_INLINE Bytes low_nibbles(Bytes w) { return w & 15; }

DSKERNELS_INLINE Bytes high_nibbles(Bytes w) {
  typedef uint16_t Words __attribute__((vector_size(kVectorBytes)));
  return reinterpret_cast<Bytes>(reinterpret_cast<Words>(w) >> 4) & 15;
}

#if defined(__AVX2__)
template <class V>
DSKERNELS_INLINE V unpack_pairs(V a, V b) {
#if defined(DSKERNELS_TIER_AVX512)
  const __m512 x = reinterpret_cast<__m512>(a), y = reinterpret_cast<__m512>(b);
  return reinterpret_cast<V>(_mm512_unpacklo_ps(x, y)) + reinterpret_cast<V>(_mm512_unpackhi_ps(x, y));
#else
  const __m256 x = reinterpret_cast<__m256>(a), y = reinterpret_cast<__m256>(b);
  return reinterpret_cast<V>(_mm256_unpacklo_ps(x, y)) + reinterpret_cast<V>(_mm256_unpackhi_ps(x, y));
#endif
}

template <class V>
DSKERNELS_INLINE V unpack_quads(V a, V b) {
#if defined(DSKERNELS_TIER_AVX512)
  const __m512d x = reinterpret_cast<__m512d>(a), y = reinterpret_cast<__m512d>(b);
  return reinterpret_cast<V>(_mm512_unpacklo_pd(x, y)) + reinterpret_cast<V>(_mm512_unpackhi_pd(x, y));
#else
  const __m256d x = reinterpret_cast<__m256d>(a), y = reinterpret_cast<__m256d>(b);
  return reinterpret_cast<V>(_mm256_unpacklo_pd(x, y)) + reinterpret_cast<V>(_mm256_unpackhi_pd(x, y));
#endif
}

// Adds the 128-bit parts of a and of b in pairs: those of a come first.
template <class V>
DSKERNELS_INLINE V add_parts(V a, V b) {
#if defined(DSKERNELS_TIER_AVX512)
  const __m512 x = reinterpret_cast<__m512>(a), y = reinterpret_cast<__m512>(b);
  return reinterpret_cast<V>(_mm512_shuffle_f32x4(x, y, 0x88)) + reinterpret_cast<V>(_mm512_shuffle_f32x4(x, y, 0xdd));
#else
  const __m256 x = reinterpret_cast<__m256>(a), y = reinterpret_cast<__m256>(b);
  return reinterpret_cast<V>(_mm256_permute2f128_ps(x, y, 0x20)) +
         reinterpret_cast<V>(_mm256_permute2f128_ps(x, y, 0x31));
#endif
}
#endif

// to[i] = the sum over the lanes of v[i], for `count` up to kLanes vectors. The order of the additions is the same for
// every vector, whatever stands beside it.
template <int count, class V, class T>
DSKERNELS_INLINE void sum_lanes(const V* v, T* to) {
  static_assert(count <= kLanes);
#if defined(__AVX2__)
  V fours[kLanes / 4];
  DSKERNELS_UNROLL
  for (int i = 0; i < kLanes / 4; ++i) {
    V pairs[2];
    DSKERNELS_UNROLL
    for (int p = 0; p < 2; ++p) {
      const int first = 4 * i + 2 * p;
      pairs[p] = first >= count ? V{} : unpack_pairs(v[first], first + 1 < count ? v[first + 1] : V{});
    }
    fours[i] = 4 * i >= count ? V{} : unpack_quads(pairs[0], pairs[1]);
  }
#if defined(DSKERNELS_TIER_AVX512)
  const V high = count > 8 ? add_parts(fours[2], fours[3]) : V{};
  const V sums = add_parts(add_parts(fours[0], fours[1]), high);
#else
  const V sums = add_parts(fours[0], fours[1]);
#endif
  T all[kLanes];
  std::memcpy(all, &sums, sizeof(sums));
  DSKERNELS_UNROLL
  for (int i = 0; i < count; ++i) to[i] = all[i];
#else
  for (int i = 0; i < count; ++i) to[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
#endif
}

// The sums over the lanes of a tile of vectors.
template <int rows, int columns, class V, class T>
DSKERNELS_INLINE void tile_sums(const V* v, T* to) {
  constexpr int count = rows * columns, whole = count / kLanes * kLanes;
  DSKERNELS_UNROLL
  for (int i = 0; i < whole; i += kLanes) sum_lanes<kLanes>(v + i, to + i);
  if constexpr (whole < count) sum_lanes<count - whole>(v + whole, to + whole);
}

template <int rows, int columns>
DSKERNELS_INLINE void store_sums(const VecF* v, float* to, int64_t stride) {
  float totals[rows * columns];
  tile_sums<rows, columns>(v, totals);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) to[i * stride + j] = totals[i * columns + j];
  }
}

}  // namespace
}  // namespace dskernels
