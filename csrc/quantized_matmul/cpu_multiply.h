// Products of a tile of x and a panel of the weight, block by block.
//
// Each sum is over the columns of a block in order, then over blocks in order, whatever the height of the tile and
// however the panel is read: a row has the same bits in every batch.
//
// With few rows of x, codes are decoded between loading and multiplying, and several panels are worked on at once, as
// one alone has too few sums to keep the multipliers busy. With many, a panel is unpacked once for all of them.
#pragma once

#include "quantized_matmul/cpu_pack.h"

namespace dskernels {
namespace {

// Tiles of so few rows decode as they multiply.
constexpr int kFusedRows = 4;

// The block of a panel that is worked on: its codes, turned, and unpacked if they are; two vectors of scales and, or
// null, zero points.
struct PanelBlock {
  const VecI* turned;
  const void* unpacked;
  const VecF* scale;
  const VecF* zero;
};

DSKERNELS_INLINE VecF broadcast_at(const float* x) { return broadcast(*x); }

// sums[i][half] += scale[half] * the products of `columns` floats of x, [column][rows], and of the panel.
template <int rows>
DSKERNELS_NOINLINE void multiply_floats(const float* x, int64_t columns, const PanelBlock& block, VecF* sums) {
  const VecF* panel = static_cast<const VecF*>(block.unpacked);
  VecF part[2 * rows] = {};
  for (int64_t k = 0; k < columns; ++k) {
    const VecF first = panel[2 * k], second = panel[2 * k + 1];
    DSKERNELS_UNROLL
    for (int i = 0; i < rows; ++i) {
      const VecF value = broadcast_at(x + k * rows + i);
      part[2 * i] += value * first;
      part[2 * i + 1] += value * second;
    }
  }
  DSKERNELS_UNROLL
  for (int i = 0; i < 2 * rows; ++i) sums[i] += part[i] * block.scale[i % 2];
}

// As multiply_floats, from codes: sums[i][panel][half].
template <class Codes, int rows, int panels>
DSKERNELS_NOINLINE void multiply_coded_floats(const float* x, int64_t columns, const PanelBlock* blocks, VecF* sums) {
  constexpr int width = 2 * panels;
  const Codes codes{};
  VecF part[width * rows] = {};
  VecF zero[width] = {};
  const VecI* turned[panels];
  DSKERNELS_UNROLL
  for (int p = 0; p < panels; ++p) {
    turned[p] = blocks[p].turned;
    if (blocks[p].zero != nullptr) {
      zero[2 * p] = blocks[p].zero[0];
      zero[2 * p + 1] = blocks[p].zero[1];
    }
  }
  const auto add_dword = [&](int64_t dword, int count) __attribute__((always_inline)) {
    VecI v[width];
    DSKERNELS_UNROLL
    for (int j = 0; j < width; ++j) v[j] = turned[j / 2][2 * dword + j % 2];
    DSKERNELS_UNROLL
    for (int i = 0; i < Codes::columns; ++i) {
      if (i >= count) break;
      VecF value[rows];
      DSKERNELS_UNROLL
      for (int r = 0; r < rows; ++r) value[r] = broadcast_at(x + (dword * Codes::columns + i) * rows + r);
      DSKERNELS_UNROLL
      for (int j = 0; j < width; ++j) {
        const VecF weight = codes.value(v[j], i, zero + j);
        DSKERNELS_UNROLL
        for (int r = 0; r < rows; ++r) part[width * r + j] += value[r] * weight;
      }
    }
  };
  const int64_t whole = columns / Codes::columns;
  for (int64_t dword = 0; dword < whole; ++dword) add_dword(dword, Codes::columns);
  if (whole * Codes::columns < columns) add_dword(whole, static_cast<int>(columns - whole * Codes::columns));
  DSKERNELS_UNROLL
  for (int i = 0; i < width * rows; ++i) sums[i] += part[i] * blocks[i % width / 2].scale[i % 2];
}

// sums[i][half] += the products of codes of x, [step][rows][4], and of the panel, modulo 2^32.
template <int rows>
DSKERNELS_NOINLINE void multiply_codes(const int8_t* x, int64_t steps, const PanelBlock& block, VecI* sums) {
  typedef uint32_t VecU __attribute__((vector_size(kVectorBytes)));
  VecI part[2 * rows] = {};
  for (int64_t s = 0; s < steps; ++s) {
    const Bytes first = reinterpret_cast<Bytes>(block.turned[2 * s]);
    const Bytes second = reinterpret_cast<Bytes>(block.turned[2 * s + 1]);
    DSKERNELS_UNROLL
    for (int i = 0; i < rows; ++i) {
      const Bytes codes = broadcast_codes(x + (s * rows + i) * 4);
      part[2 * i] = add_products(part[2 * i], first, codes);
      part[2 * i + 1] = add_products(part[2 * i + 1], second, codes);
    }
  }
  DSKERNELS_UNROLL
  for (int i = 0; i < 2 * rows; ++i) {
    sums[i] = reinterpret_cast<VecI>(reinterpret_cast<VecU>(sums[i]) + reinterpret_cast<VecU>(part[i]));
  }
}

// Sums of products of nibbles, 0 to 15, and codes: `sum` takes up to kSafeProducts products a lane before they have to
// be added to a wider one.
#if defined(DSKERNELS_TIER_AVX2)
typedef int16_t NibbleSum __attribute__((vector_size(kVectorBytes)));
// A pair of products is at most 3810, so the sum of eight, 30480, fits into 16 bits.
constexpr int64_t kSafeProducts = 8;

DSKERNELS_INLINE NibbleSum add_nibble_products(NibbleSum sum, Bytes nibbles, Bytes x) {
  return sum + reinterpret_cast<NibbleSum>(
                   _mm256_maddubs_epi16(reinterpret_cast<__m256i>(nibbles), reinterpret_cast<__m256i>(x)));
}

DSKERNELS_INLINE VecI widened(NibbleSum sum) {
  return reinterpret_cast<VecI>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(1)));
}
#else
typedef VecI NibbleSum;
constexpr int64_t kSafeProducts = kBlock;

DSKERNELS_INLINE NibbleSum add_nibble_products(NibbleSum sum, Bytes nibbles, Bytes x) {
  return add_products(sum, nibbles, x);
}

DSKERNELS_INLINE VecI widened(NibbleSum sum) { return sum; }
#endif

// part[i][j] = the products of codes of x, [step][rows][4], and nibbles: nibbles(step, j) for `width` vectors.
template <int rows, int width, class Nibbles>
DSKERNELS_INLINE void sum_nibble_products(const int8_t* x, int64_t steps, const Nibbles& nibbles, VecI* part) {
  DSKERNELS_UNROLL
  for (int i = 0; i < width * rows; ++i) part[i] = VecI{};
  for (int64_t begin = 0; begin < steps; begin += kSafeProducts) {
    NibbleSum sum[width * rows] = {};
    for (int64_t s = begin; s < min_of(begin + kSafeProducts, steps); s += 2) {
      DSKERNELS_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        Bytes codes[rows];
        DSKERNELS_UNROLL
        for (int i = 0; i < rows; ++i) codes[i] = broadcast_codes(x + ((s + odd) * rows + i) * 4);
        DSKERNELS_UNROLL
        for (int j = 0; j < width; ++j) {
          const Bytes w = nibbles(s + odd, j);
          DSKERNELS_UNROLL
          for (int i = 0; i < rows; ++i) sum[width * i + j] = add_nibble_products(sum[width * i + j], w, codes[i]);
        }
      }
    }
    DSKERNELS_UNROLL
    for (int i = 0; i < width * rows; ++i) part[i] += widened(sum[i]);
  }
}

// The products of codes and nibbles of a block, less those of the codes and the zero points: x_sum is -8 times the sum
// of the codes, as int32; with zero points the sum, as float. All are integers below 2^24, so the result is exact.
DSKERNELS_INLINE VecF exact_products(VecI products, VecI x_sum, const VecF* zero) {
  if (zero == nullptr) return __builtin_convertvector(products + x_sum, VecF);
  return __builtin_convertvector(products, VecF) - *zero * reinterpret_cast<VecF>(x_sum);
}

// sums[i][panel][half] += scale[panel][half] * the exact products of a block.
template <int rows, int panels>
DSKERNELS_INLINE void scale_nibble_products(const VecI* part, const int32_t* x_sums, const PanelBlock* blocks,
                                            VecF* sums) {
  constexpr int width = 2 * panels;
  DSKERNELS_UNROLL
  for (int i = 0; i < width * rows; ++i) {
    const PanelBlock& block = blocks[i % width / 2];
    const VecF* zero = block.zero == nullptr ? nullptr : block.zero + i % 2;
    sums[i] += exact_products(part[i], broadcast(x_sums[i / width]), zero) * block.scale[i % 2];
  }
}

template <int rows>
DSKERNELS_NOINLINE void multiply_nibbles(const int8_t* x, int64_t dwords, const int32_t* x_sums,
                                         const PanelBlock& block, VecF* sums) {
  const Bytes* panel = static_cast<const Bytes*>(block.unpacked);
  VecI part[2 * rows];
  sum_nibble_products<rows, 2>(x, 2 * dwords, [&](int64_t step, int j) { return panel[2 * step + j]; }, part);
  scale_nibble_products<rows, 1>(part, x_sums, &block, sums);
}

template <int rows, int panels>
DSKERNELS_NOINLINE void multiply_turned_nibbles(const int8_t* x, int64_t dwords, const int32_t* x_sums,
                                                const PanelBlock* blocks, VecF* sums) {
  const VecI* turned[panels];
  DSKERNELS_UNROLL
  for (int p = 0; p < panels; ++p) turned[p] = blocks[p].turned;
  VecI part[2 * panels * rows];
  sum_nibble_products<rows, 2 * panels>(
      x, 2 * dwords,
      [&](int64_t step, int j) {
        const Bytes codes = reinterpret_cast<Bytes>(turned[j / 2][step / 2 * 2 + j % 2]);
        return step % 2 == 0 ? low_nibbles(codes) : high_nibbles(codes);
      },
      part);
  scale_nibble_products<rows, panels>(part, x_sums, blocks, sums);
}

}  // namespace
}  // namespace dskernels
