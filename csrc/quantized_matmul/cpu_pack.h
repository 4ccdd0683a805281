// Panels: kPanelColumns rows of the weight, some columns of them unpacked and turned, so that the lanes of a vector
// belong to different rows. Rows behind the last one repeat it, and what comes of them is not stored.
#pragma once

#include "quantized_matmul/cpu_prepare.h"

namespace dskernels {
namespace {

// The rows of the weight that a panel holds: panel[column][half] of floats, or panel[step][half] of bytes, four columns
// a step.
struct PanelRows {
  int64_t rows[kPanelColumns];
};

DSKERNELS_INLINE PanelRows panel_rows(const QuantizedMatmulArgs& args, int64_t first) {
  PanelRows result;
  for (int i = 0; i < kPanelColumns; ++i) result.rows[i] = min_of(first + i, args.out_features - 1);
  return result;
}

#if defined(__AVX2__)
// Of each 128 bits of four vectors, turned: v[i] gets element i of each.
DSKERNELS_INLINE void turn_fours(VecI* v) {
#if defined(DSKERNELS_TIER_AVX512)
  typedef __m512i Wide;
#define DSKERNELS_UNPACK(which) _mm512_unpack##which
#else
  typedef __m256i Wide;
#define DSKERNELS_UNPACK(which) _mm256_unpack##which
#endif
  const Wide a = reinterpret_cast<Wide>(v[0]), b = reinterpret_cast<Wide>(v[1]);
  const Wide c = reinterpret_cast<Wide>(v[2]), d = reinterpret_cast<Wide>(v[3]);
  const Wide ab_low = DSKERNELS_UNPACK(lo_epi32)(a, b), ab_high = DSKERNELS_UNPACK(hi_epi32)(a, b);
  const Wide cd_low = DSKERNELS_UNPACK(lo_epi32)(c, d), cd_high = DSKERNELS_UNPACK(hi_epi32)(c, d);
  v[0] = reinterpret_cast<VecI>(DSKERNELS_UNPACK(lo_epi64)(ab_low, cd_low));
  v[1] = reinterpret_cast<VecI>(DSKERNELS_UNPACK(hi_epi64)(ab_low, cd_low));
  v[2] = reinterpret_cast<VecI>(DSKERNELS_UNPACK(lo_epi64)(ab_high, cd_high));
  v[3] = reinterpret_cast<VecI>(DSKERNELS_UNPACK(hi_epi64)(ab_high, cd_high));
#undef DSKERNELS_UNPACK
}
#endif

// Element i of v[j] becomes element j of v[i].
DSKERNELS_INLINE void turn(VecI* v) {
#if defined(DSKERNELS_TIER_AVX512)
  DSKERNELS_UNROLL
  for (int i = 0; i < 16; i += 4) turn_fours(v + i);
  // v[4r + c] now holds, of rows 4r to 4r + 3, columns c, c + 4, c + 8 and c + 12.
  DSKERNELS_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512i r0 = reinterpret_cast<__m512i>(v[c]), r1 = reinterpret_cast<__m512i>(v[4 + c]);
    const __m512i r2 = reinterpret_cast<__m512i>(v[8 + c]), r3 = reinterpret_cast<__m512i>(v[12 + c]);
    const __m512i even = _mm512_shuffle_i32x4(r0, r1, 0x88), odd = _mm512_shuffle_i32x4(r0, r1, 0xdd);
    const __m512i even2 = _mm512_shuffle_i32x4(r2, r3, 0x88), odd2 = _mm512_shuffle_i32x4(r2, r3, 0xdd);
    v[c] = reinterpret_cast<VecI>(_mm512_shuffle_i32x4(even, even2, 0x88));
    v[4 + c] = reinterpret_cast<VecI>(_mm512_shuffle_i32x4(odd, odd2, 0x88));
    v[8 + c] = reinterpret_cast<VecI>(_mm512_shuffle_i32x4(even, even2, 0xdd));
    v[12 + c] = reinterpret_cast<VecI>(_mm512_shuffle_i32x4(odd, odd2, 0xdd));
  }
#elif defined(DSKERNELS_TIER_AVX2)
  turn_fours(v);
  turn_fours(v + 4);
  DSKERNELS_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m256i a = reinterpret_cast<__m256i>(v[c]), b = reinterpret_cast<__m256i>(v[4 + c]);
    v[c] = reinterpret_cast<VecI>(_mm256_permute2x128_si256(a, b, 0x20));
    v[4 + c] = reinterpret_cast<VecI>(_mm256_permute2x128_si256(a, b, 0x31));
  }
#else
  int32_t all[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) all[j][i] = v[i][j];
  }
  std::memcpy(v, all, sizeof(all));
#endif
}

// kLanes * 4 bytes from `byte` on of kLanes rows, turned: v[d] holds bytes 4 d to 4 d + 3 of each. Behind the end of
// rows stand zeros. Rows are read by the line, once: where they lie a power of two apart, few lines of a column fit
// into the first cache.
DSKERNELS_INLINE void load_turned(const void* base, int64_t row_bytes, const int64_t* rows, int64_t byte, VecI* v) {
  const uint8_t* from = static_cast<const uint8_t*>(base) + byte;
  const int64_t left = row_bytes - byte;
  if (left >= kVectorBytes) {
    DSKERNELS_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      const uint8_t* row = from + rows[i] * row_bytes;
      v[i] = reinterpret_cast<VecI>(load_bytes(row));
      // Too many rows at once for the hardware to see where they go on.
      __builtin_prefetch(row + kVectorBytes);
    }
  } else {
    DSKERNELS_UNROLL
    for (int i = 0; i < kLanes; ++i) v[i] = reinterpret_cast<VecI>(load_some_bytes(from + rows[i] * row_bytes, left));
  }
  turn(v);
}

// Of a block of columns, codes as they are stored, or int8 codes as factors, turned: turned[dword][half].
constexpr int64_t kMostDwords = kCodeBlock / 4;

// `columns`: in a dword, four or eight.
template <int columns, bool factors = false>
DSKERNELS_NOINLINE void turn_block(const QuantizedMatmulArgs& args, const PanelRows& panel, int64_t first, int64_t end,
                                   VecI* turned) {
  for (int64_t k = first; k < end; k += kLanes * columns) {
    for (int half = 0; half < 2; ++half) {
      VecI v[kLanes];
      load_turned(args.qweight, args.row_bytes, panel.rows + half * kLanes, k * 4 / columns, v);
      VecI* to = turned + (k - first) / columns * 2 + half;
      DSKERNELS_UNROLL
      for (int d = 0; d < kLanes; ++d) {
        to[2 * d] = factors ? reinterpret_cast<VecI>(as_factor(reinterpret_cast<Bytes>(v[d]))) : v[d];
      }
    }
  }
}

// to[group][half]: the values of each group of each row of the panel, as floats.
inline void turn_groups(const float* values, int64_t groups, const PanelRows& panel, VecF* to) {
  for (int64_t group = 0; group < groups; group += kLanes) {
    for (int half = 0; half < 2; ++half) {
      VecI v[kLanes];
      load_turned(values, groups * 4, panel.rows + half * kLanes, group * 4, v);
      for (int64_t i = 0; i < min_of<int64_t>(kLanes, groups - group); ++i) {
        to[2 * (group + i) + half] = reinterpret_cast<VecF>(v[i]);
      }
    }
  }
}

inline void turn_groups(const uint8_t* values, int64_t groups, const PanelRows& panel, VecF* to) {
  float* at = reinterpret_cast<float*>(to);
  for (int i = 0; i < kPanelColumns; ++i) {
    const uint8_t* row = values + panel.rows[i] * groups;
    for (int64_t group = 0; group < groups; ++group) at[group * kPanelColumns + i] = row[group];
  }
}

// What becomes of a dword of codes: `columns` of them, value(v, i, zero) the one of column i in float.
struct Int8Codes {
  static constexpr int columns = 4;

  DSKERNELS_INLINE VecF value(VecI v, int i, const VecF*) const {
    return __builtin_convertvector((v << (24 - 8 * i)) >> 24, VecF);
  }
};

struct Fp8Codes {
  static constexpr int columns = 4;

  DSKERNELS_INLINE VecF value(VecI v, int i, const VecF*) const {
    v <<= 24 - 8 * i;
    const VecI sign = v & INT32_MIN, magnitude = (v & 0x7f000000) >> 4;
    // Exponents are 120 below float32's.
    VecF value = reinterpret_cast<VecF>(magnitude + (120 << 23));
    // Without a leading one: (1 + m / 8) 2^-7 has to become m / 8 * 2^-6.
    value = magnitude < (1 << 23) ? value * 2.0f - 0x1p-6f : value;
    const VecI nan = magnitude == 0x07f00000 ? broadcast(kNanBits) : VecI{};
    return reinterpret_cast<VecF>(reinterpret_cast<VecI>(value) | sign | nan);
  }
};

// `asymmetric`: minus *zero; else minus 8.
template <bool asymmetric>
struct Int4Codes {
  static constexpr int columns = 8;
#if defined(DSKERNELS_TIER_AVX512)
  // The values of all sixteen codes in one register, of which the low bits of each lane pick one.
  VecF table = __builtin_convertvector(lane_index(), VecF) - broadcast(asymmetric ? 0.0f : 8.0f);

  DSKERNELS_INLINE VecF value(VecI v, int i, const VecF* zero) const {
    const VecF code = _mm512_permutexvar_ps(reinterpret_cast<__m512i>(v >> (4 * i)), table);
    return asymmetric ? code - *zero : code;
  }
#else
  DSKERNELS_INLINE VecF value(VecI v, int i, const VecF* zero) const {
    const VecF code = __builtin_convertvector((v >> (4 * i)) & 15, VecF);
    return code - (asymmetric ? *zero : broadcast(8.0f));
  }
#endif
};

// Codes of a block as floats: panel[column][half], up to a whole dword.
template <class Codes>
DSKERNELS_NOINLINE void unpack_floats(const VecI* turned, int64_t columns, const VecF* zero, VecF* panel) {
  const Codes codes{};
  for (int64_t k = 0; k < columns; k += Codes::columns, turned += 2) {
    DSKERNELS_UNROLL
    for (int i = 0; i < Codes::columns; ++i) {
      DSKERNELS_UNROLL
      for (int half = 0; half < 2; ++half) *panel++ = codes.value(turned[half], i, zero + half);
    }
  }
}

// Nibbles of a block: a dword of eight becomes two of four codes.
DSKERNELS_NOINLINE void unpack_nibbles(const VecI* turned, int64_t dwords, Bytes* panel) {
  for (int64_t d = 0; d < dwords; ++d, turned += 2, panel += 4) {
    DSKERNELS_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Bytes codes = reinterpret_cast<Bytes>(turned[half]);
      panel[half] = low_nibbles(codes);
      panel[2 + half] = high_nibbles(codes);
    }
  }
}

}  // namespace
}  // namespace dskernels
