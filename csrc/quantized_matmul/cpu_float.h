// Products of floats with weights that are decoded on the way, exactly as QuantizedWeight.dequantize does.
//
// A block of 8 * kLanes weights decodes into eight vectors. Few rows of x meet them in registers; many, after they were
// written to scratch, a stretch of some rows at a time. Each pair of rows sums the same products in the same order
// either way.
#pragma once

#include "quantized_matmul/cpu_integer.h"

namespace dskernels {
namespace {

#if defined(DSKERNELS_TIER_AVX512)
constexpr int kFloatRows = 4, kFloatColumns = 6, kDirectColumns = 4;
#elif defined(DSKERNELS_TIER_AVX2)
constexpr int kFloatRows = 2, kFloatColumns = 6, kDirectColumns = 2;
#else
constexpr int kFloatRows = 2, kFloatColumns = 4, kDirectColumns = 2;
#endif
// Rows of x up to which weights are decoded for each tile anew.
constexpr int64_t kDirectRows = kFloatRows;

// Weights of a row that are decoded to scratch at a time: kFloatColumns of these and kFloatRows rows of x fit into the
// first cache.
constexpr int64_t kFloatStretch = 1024;

// `decode(n, first, f)` calls f(v, w) for the eight vectors of the block of row n that starts at column `first`. Behind
// the last column stand numbers, so that the zeros of x hide them.
struct Int8Weights {
  const QuantizedMatmulArgs& args;

  template <class F>
  DSKERNELS_INLINE void decode(int64_t n, int64_t first, const F& f) const {
    typedef int8_t Few __attribute__((vector_size(kLanes), aligned(1), may_alias));
    alignas(64) uint8_t some[kBlockFloats];
    const uint8_t* from = block_bytes(args, n, first, some);
    DSKERNELS_UNROLL
    for (int v = 0; v < 8; ++v) {
      const Few codes = *reinterpret_cast<const Few*>(from + v * kLanes);
      f(v, __builtin_convertvector(__builtin_convertvector(codes, VecI), VecF));
    }
  }

  // The block's bytes, or a copy with zeros behind the end of the row.
  static DSKERNELS_INLINE const uint8_t* block_bytes(const QuantizedMatmulArgs& args, int64_t n, int64_t first,
                                                     uint8_t* some) {
    const uint8_t* from = args.qweight + n * args.row_bytes + first;
    const int64_t left = args.in_features - first;
    if (left >= kBlockFloats) return from;
    std::memset(some, 0, kBlockFloats);
    std::memcpy(some, from, static_cast<size_t>(left));
    return some;
  }
};

struct Fp8Weights {
  const QuantizedMatmulArgs& args;

  // e4m3 moved into the place of a half-precision number: 2^-8 of its value.
  static DSKERNELS_INLINE VecF small_values(const uint8_t* from) {
#if defined(DSKERNELS_TIER_AVX512)
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(-0x8000));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
    return _mm512_cvtph_ps(_mm256_or_si256(_mm256_or_si256(magnitude, sign), nan));
#elif defined(DSKERNELS_TIER_AVX2)
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    const __m128i magnitude = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
    const __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(-0x8000));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
    return _mm256_cvtph_ps(_mm_or_si128(_mm_or_si128(magnitude, sign), nan));
#else
    VecF result;
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t magnitude = (from[l] & 0x7fu) << 7, sign = (from[l] & 0x80u) << 8;
      result[l] = to_float(Float16{static_cast<uint16_t>(magnitude == 0x3f80u ? 0x7fffu : magnitude | sign)});
    }
    return result;
#endif
  }

  template <class F>
  DSKERNELS_INLINE void decode(int64_t n, int64_t first, const F& f) const {
    alignas(64) uint8_t some[kBlockFloats];
    const uint8_t* from = Int8Weights::block_bytes(args, n, first, some);
    // 2^8 cannot overflow: scales of real weights are far from 2^120.
    const VecF step = broadcast(args.scale[n / 128 * args.groups + first / 128] * 256.0f);
    DSKERNELS_UNROLL
    for (int v = 0; v < 8; ++v) f(v, small_values(from + v * kLanes) * step);
  }
};

// `whole`: the nibbles of a vector share a scale; else its lanes have theirs.
template <bool whole>
struct Int4Weights {
  const QuantizedMatmulArgs& args;
  LaneGroups lanes = LaneGroups(args);

  template <class F>
  DSKERNELS_INLINE void decode(int64_t n, int64_t first, const F& f) const {
    const int64_t byte = first / 2, group = whole ? min_of(first / args.group_size, args.groups - 1) : 0;
    const VecI w = reinterpret_cast<VecI>(load_up_to(args.qweight + n * args.row_bytes + byte, args.row_bytes - byte));
    const GroupRow row = group_row(args, n);
    const VecF scale = whole ? broadcast(row.scale[group]) : lane_values(lanes, row.scale, first);
    VecF zero = broadcast(8.0f);
    if (row.zero_point != nullptr) {
      zero = whole ? broadcast(static_cast<float>(row.zero_point[group])) : lane_values(lanes, row.zero_point, first);
    }
#if defined(DSKERNELS_TIER_AVX512)
    // The values of all sixteen codes in one register, of which the low bits of each lane pick one.
    const VecF codes = __builtin_convertvector(lane_index(), VecF);
    const VecF table = whole ? (codes - zero) * scale : codes;
    DSKERNELS_UNROLL
    for (int v = 0; v < 8; ++v) {
      const VecF value = _mm512_permutexvar_ps(reinterpret_cast<__m512i>(w >> (4 * v)), table);
      f(v, whole ? value : (value - zero) * scale);
    }
#else
    DSKERNELS_UNROLL
    for (int v = 0; v < 8; ++v) f(v, (__builtin_convertvector((w >> (4 * v)) & 15, VecF) - zero) * scale);
#endif
  }
};

// sums[i][j] = the dot product of row i of x, `x_stride` floats apart, and row first_row + j of the weight.
template <class Weights, int rows, int columns>
DSKERNELS_NOINLINE void direct_tile(const QuantizedMatmulArgs& args, const float* x, int64_t x_stride,
                                    int64_t first_row, float* sums, int64_t sums_stride) {
  const Weights weights{args};
  VecF sum[rows * columns] = {};
  for (int64_t first = 0; first < args.in_features; first += kBlockFloats) {
    DSKERNELS_UNROLL
    for (int j = 0; j < columns; ++j) {
      weights.decode(first_row + j, first, [&](int v, VecF w) {
        DSKERNELS_UNROLL
        for (int i = 0; i < rows; ++i) sum[i * columns + j] += load(x + i * x_stride + first + v * kLanes) * w;
      });
    }
  }
  store_sums<rows, columns>(sum, sums, sums_stride);
}

// sum[i][j] += the products of `count` floats (a multiple of kLanes) of x and of decoded rows, kFloatStretch apart.
// With `last` the lanes are summed and stored.
template <int rows, int columns>
DSKERNELS_NOINLINE void add_float_tile(const float* x, int64_t x_stride, const float* w, int64_t count, VecF* lanes,
                                       bool first, bool last, float* sums, int64_t sums_stride) {
  VecF sum[rows * columns] = {};
  if (!first) {
    DSKERNELS_UNROLL
    for (int i = 0; i < rows * columns; ++i) sum[i] = lanes[i];
  }
  for (int64_t k = 0; k < count; k += kLanes) {
    VecF values[rows];
    DSKERNELS_UNROLL
    for (int i = 0; i < rows; ++i) values[i] = load(x + i * x_stride + k);
    DSKERNELS_UNROLL
    for (int j = 0; j < columns; ++j) {
      const VecF weight = load(w + j * kFloatStretch + k);
      DSKERNELS_UNROLL
      for (int i = 0; i < rows; ++i) sum[i * columns + j] += values[i] * weight;
    }
  }
  if (last) {
    store_sums<rows, columns>(sum, sums, sums_stride);
  } else {
    DSKERNELS_UNROLL
    for (int i = 0; i < rows * columns; ++i) lanes[i] = sum[i];
  }
}

// The products of a block of prepared rows and of rows of the weight.
template <class Weights>
struct FloatBlock {
  const QuantizedMatmulArgs& args;
  const float* x;
  int64_t x_stride;  // in floats
  int64_t first_row;
  float* sums;
  int64_t sums_stride;

  template <int rows, int columns>
  DSKERNELS_INLINE void tile(int64_t row, int64_t column) const {
    direct_tile<Weights, rows, columns>(args, x + row * x_stride, x_stride, first_row + column,
                                        sums + row * sums_stride + column, sums_stride);
  }

  // All rows by `columns` rows of the weight, decoded stretch by stretch. `lanes` has room for `rows` rows of sums.
  template <int columns>
  DSKERNELS_INLINE void strip(int64_t rows, int64_t column, float* decoded, VecF* lanes) const {
    const Weights weights{args};
    const int64_t padded = padded_columns(args);
    for (int64_t first = 0; first < padded; first += kFloatStretch) {
      const int64_t count = min_of(kFloatStretch, padded - first);
      for (int j = 0; j < columns; ++j) {
        for (int64_t k = 0; k < count; k += kBlockFloats) {
          float* to = decoded + j * kFloatStretch + k;
          weights.decode(first_row + column + j, first + k, [&](int v, VecF w) { store(to + v * kLanes, w); });
        }
      }
      const bool is_first = first == 0, is_last = first + count == padded;
      int64_t row = 0;
      const auto some_rows = [&]<int height>() {
        for (; row + height <= rows; row += height) {
          add_float_tile<height, columns>(x + row * x_stride + first, x_stride, decoded, count, lanes + row * columns,
                                          is_first, is_last, sums + row * sums_stride + column, sums_stride);
        }
      };
      some_rows.template operator()<kFloatRows>();
      some_rows.template operator()<1>();
    }
  }
};

template <class Weights>
inline void multiply_floats(const FloatBlock<Weights>& block, int64_t rows, int64_t columns, float* decoded,
                            VecF* lanes) {
  if (rows <= kDirectRows || block.args.in_features == 0) {
    return for_each_tile<kFloatRows, kDirectColumns>(rows, columns, block);
  }
  int64_t column = 0;
  for (; column + kFloatColumns <= columns; column += kFloatColumns) {
    block.template strip<kFloatColumns>(rows, column, decoded, lanes);
  }
  for (; column < columns; ++column) block.template strip<1>(rows, column, decoded, lanes);
}

}  // namespace
}  // namespace dskernels
