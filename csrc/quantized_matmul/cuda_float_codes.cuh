// Codes of a weight as operands of tensor cores, where activations are floats.
//
// Weights are read as they lie, [out_features, in_features] of codes. Kernels of this kind usually want a second copy
// that was permuted offline, so that 16 bytes of it hold what a lane needs. None is needed, since the order of k in a
// sum is free. 16 bytes of a row, a unit, hold 32 codes of int4 or 16 of 8 bits; ldmatrix hands lane (g, t) word t of
// row g, codes kLane * t to kLane * t + kLane - 1 of the unit. The lane uses these very codes as its parts of B, four a
// step of 16 columns, in the order in which they unpack; and as its parts of A the activations of the same k's, which
// lie side by side in shared memory. What an offline permutation buys, one load for all codes of a lane and coalesced
// reads of global memory, is had without it; what it costs, a second copy and its upkeep, is not.
//
// Codes become floats by their bits: or'ed into the mantissa of a power of two, less that power. They are exact, and so
// is their product with an activation. bfloat16 and float32 reach to the end of float32's range, where a sum of codes
// times activations would leave it though the result does not: there codes count a power of two less, which is free,
// since only the constants change, and scales make up for it.
#pragma once

#include "common/mma.cuh"

namespace dskernels {
namespace {

enum class Codes { kInt4, kInt8, kFp8 };

// kLane codes of a lane in a unit are kSteps operands of B of 16 rows. What a code counts is 1 / kUnitValue.
template <class T, Codes kCodes>
struct Format {
  static constexpr int kUnitBytes = 16;
  static constexpr int kLane = kCodes == Codes::kInt4 ? 8 : 4;
  static constexpr int kUnit = 4 * kLane;
  static constexpr int kSteps = kLane / 4;
  static constexpr bool kIsWide = !std::is_same_v<T, __half>;
  // Enough for rows near the largest float, and little enough for rows near the smallest. fp8 has blocks of activations
  // with scales of their own, and its decoding leaves away float16's other exponent.
  static constexpr float kUnitValue = kCodes == Codes::kFp8    ? 256.0f
                                      : !kIsWide               ? 1.0f
                                      : kCodes == Codes::kInt4 ? 256.0f
                                                               : 4096.0f;
};

// B of one step: as many products of depth Mma<T>::kDepth as 16 rows take.
template <class T>
struct Weights {
  uint32_t r[16 / Mma<T>::kDepth][2];
};

// A of one step. A float is high + low / kLow, so that the low parts of tiny ones are no less precise in TF32.
template <class T>
struct Activations {
  typename Mma<T>::A part[16 / Mma<T>::kDepth];
};

constexpr float kLow = 0x1p11f;

__device__ inline void set_parts(Mma<float>::A& a, float x0, float x1, float x2, float x3) {
  const float x[4] = {x0, x1, x2, x3};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a.high[i] = ptx::to_tf32(x[i]);
    a.low[i] = ptx::to_tf32((x[i] - __uint_as_float(a.high[i])) * kLow);
  }
}

// c += a * b, exact products added up in float32. Codes are exact in TF32, so that two products serve for float.
template <class T>
__device__ inline void multiply_step(float (&c)[4], const Activations<T>& a, const Weights<T>& b) {
  if constexpr (sizeof(T) == 2) {
    ptx::mma_m16n8k16<T>(c, a.part[0].r, b.r[0]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low[2] = {__float_as_uint(__uint_as_float(b.r[i][0]) / kLow),
                               __float_as_uint(__uint_as_float(b.r[i][1]) / kLow)};
      ptx::mma_m16n8k8_tf32(c, a.part[i].low, low);
      ptx::mma_m16n8k8_tf32(c, a.part[i].high, b.r[i]);
    }
  }
}

template <class To, class From>
__device__ inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// a - b of pairs of T.
template <class T>
__device__ inline uint32_t subtract_pair(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  return bits_of<uint32_t>(__hsub2(bits_of<Pair>(a), bits_of<Pair>(b)));
}

// The code of 0 of a group of int4 as decoding takes it away, for any byte.
template <class T>
struct Zero;

template <>
struct Zero<__half> {
  uint32_t plain, shifted;  // 1024 + zero; -(64 + zero)
};

template <>
struct Zero<__nv_bfloat16> {
  // (128 + zero) / 256 up to 127; beyond, bfloat16 does not hold every such sum, and there is a rest.
  uint32_t most, rest;
};

template <>
struct Zero<float> {
  float value;  // 2 ** 15 + zero / 256
};

template <class T>
__device__ inline Zero<T> zero_of(int code) {
  const auto pair = [](float x) { return pack_pair<std::conditional_t<sizeof(T) == 2, T, __half>>(x, x); };
  if constexpr (std::is_same_v<T, __half>) {
    return {pair(1024.0f + static_cast<float>(code)), pair(-64.0f - static_cast<float>(code))};
  } else if constexpr (sizeof(T) == 2) {
    const int most = min(code, 127);
    return {pair(static_cast<float>(128 + most) / 256.0f), pair(static_cast<float>(code - most) / 256.0f)};
  } else {
    return {32768.0f + static_cast<float>(code) / 256.0f};
  }
}

// (a & b) | c.
__device__ inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) { return ptx::lop3<0xea>(a, b, c); }

// Eight codes less their zero: step s has codes 2s, 2s+4 and 2s+1, 2s+5 as pairs, or 4s to 4s+3 as floats.
template <class T>
__device__ inline void decode_int4(Weights<T> (&b)[2], uint32_t word, const Zero<T>& zero) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if constexpr (std::is_same_v<T, __half>) {
      const uint32_t codes = word >> 8 * s;
      b[s].r[0][0] = subtract_pair<T>(and_or(codes, 0x000f000fu, 0x64006400u), zero.plain);
      // 1024 + 16 * code.
      const auto high = bits_of<__half2>(and_or(codes, 0x00f000f0u, 0x64006400u));
      const auto sixteenth = bits_of<__half2>(0x2c002c00u);
      b[s].r[0][1] = bits_of<uint32_t>(__hfma2(high, sixteenth, bits_of<__half2>(zero.shifted)));
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // (128 + code) / 256.
        const uint32_t codes = and_or(word >> (8 * s + 4 * i), 0x000f000fu, 0x3f003f00u);
        b[s].r[0][i] = subtract_pair<T>(codes, zero.most);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // 2 ** 15 + code / 256.
        const uint32_t code = and_or(word >> (16 * s + 4 * i), 0xfu, 0x47000000u);
        b[s].r[i / 2][i % 2] = __float_as_uint(__uint_as_float(code) - zero.value);
      }
    }
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (zero.rest == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].r[0][i % 2] = subtract_pair<T>(b[i / 2].r[0][i % 2], zero.rest);
  }
}

// Four codes of int8, in their order.
template <class T>
__device__ inline void decode_int8(Weights<T>& b, uint32_t word) {
  const uint32_t lifted = word ^ 0x80808080u;  // code + 128
  if constexpr (std::is_same_v<T, __half>) {
    // 1024 + 128 + code.
    b.r[0][0] = subtract_pair<T>(__byte_perm(lifted, 0x64646464u, 0x4140), 0x64806480u);
    b.r[0][1] = subtract_pair<T>(__byte_perm(lifted, 0x64646464u, 0x4342), 0x64806480u);
  } else {
    uint32_t code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // 2 ** 11 + (128 + code) / 4096.
      const float sum = __uint_as_float(__byte_perm(lifted, 0x45000000u, 0x7440 + i));
      code[i] = __float_as_uint(sum - (2048.0f + 128.0f / 4096.0f));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (sizeof(T) == 2) {
        // Eight digits are all there is: the lower halves are 0.
        b.r[0][i] = __byte_perm(code[2 * i], code[2 * i + 1], 0x7632);
      } else {
        b.r[i][0] = code[2 * i];
        b.r[i][1] = code[2 * i + 1];
      }
    }
  }
}

// Four floats of e4m3, in their order, over 256: float16's exponents are 8 more. NaN stays NaN.
__device__ inline void decode_fp8(Weights<__half>& b, uint32_t word) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t high = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
    b.r[0][i] = and_or(high, 0x80008000u, (high & 0x7f007f00u) >> 1);
  }
  // Of seven bits only all ones carry into the eighth.
  const uint32_t nan = ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  if (nan == 0) return;
  // The other exponent makes it 0x7f80, float16's NaN.
  b.r[0][0] |= __byte_perm(nan, 0, 0x1404) >> 1;
  b.r[0][1] |= __byte_perm(nan, 0, 0x3424) >> 1;
}

template <class T, Codes kCodes>
__device__ inline void decode(Weights<T> (&b)[Format<T, kCodes>::kSteps], uint32_t word, const Zero<T>& zero) {
  if constexpr (kCodes == Codes::kInt4) {
    decode_int4<T>(b, word, zero);
  } else if constexpr (kCodes == Codes::kInt8) {
    decode_int8<T>(b[0], word);
  } else {
    decode_fp8(b[0], word);
  }
}

// A for the same k's as B has them: `row` points to the lane's kLane activations of row g, in shared memory, and
// `stride` elements further is the next row.
template <class T, Codes kCodes>
__device__ inline void load_activations(Activations<T> (&a)[Format<T, kCodes>::kSteps], const T* row, int stride) {
  using Vector = std::conditional_t<sizeof(T) == 4, float4, std::conditional_t<kCodes == Codes::kInt4, uint4, uint2>>;
  const Vector* const lows = reinterpret_cast<const Vector*>(row);
  const Vector* const highs = reinterpret_cast<const Vector*>(row + 8 * stride);
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int s = 0; s < Format<T, kCodes>::kSteps; ++s) {
      const Vector low = lows[s], high = highs[s];
      set_parts(a[s].part[0], low.x, high.x, low.y, high.y);
      set_parts(a[s].part[1], low.z, high.z, low.w, high.w);
    }
  } else {
    const Vector low = *lows, high = *highs;
    if constexpr (kCodes == Codes::kInt4) {
      constexpr int kFirsts = 0x5410, kSeconds = 0x7632;
      a[0].part[0] = {{__byte_perm(low.x, low.z, kFirsts), __byte_perm(high.x, high.z, kFirsts),
                       __byte_perm(low.x, low.z, kSeconds), __byte_perm(high.x, high.z, kSeconds)}};
      a[1].part[0] = {{__byte_perm(low.y, low.w, kFirsts), __byte_perm(high.y, high.w, kFirsts),
                       __byte_perm(low.y, low.w, kSeconds), __byte_perm(high.y, high.w, kSeconds)}};
    } else {
      a[0].part[0] = {{low.x, high.x, low.y, high.y}};
    }
  }
}

// Makes the activations of lanes that are not `in` zeros, and not finite ones too: they count for another group.
template <class T>
__device__ inline void keep_if(Activations<T>& a, bool in) {
#pragma unroll
  for (auto& part : a.part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 2) {
        part.r[i] = in ? part.r[i] : 0;
      } else {
        part.high[i] = in ? part.high[i] : 0;
        part.low[i] = in ? part.low[i] : 0;
      }
    }
  }
}

}  // namespace
}  // namespace dskernels
