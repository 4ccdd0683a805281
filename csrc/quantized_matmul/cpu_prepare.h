// Activations as the kernels read them: one row at a time, zeros behind its end.
//
// A prepared row starts with a RowHead. Then follow, by scheme:
//   int8, integer:  codes
//   int4, integer:  for each block of weights, codes (even ones of a vector of nibbles, then odd ones), then for each
//                   block the sums of the codes of each lane (LaneSums)
//   the others:     floats; for int4 in the order in which nibbles leave a vector: component j of lane l is 8 * l + j
#pragma once

#include "common/rows.h"
#include "quantized_matmul/args.h"
#include "quantized_matmul/cpu_dot.h"

namespace dskernels {
namespace {

struct RowHead {
  float scale;   // step of the codes; NaN where the row is not finite
  float unlift;  // a power of two that the result is multiplied by
  int32_t sum;   // of the codes, modulo 2^32
};
constexpr int64_t kHeadBytes = 64;

// Weights in a vector of nibbles, and in a vector of floats' worth of eight.
constexpr int64_t kNibbles = 2 * kVectorBytes;
constexpr int64_t kBlockFloats = 8 * kLanes;
static_assert(kNibbles == kBlockFloats);
// Weights whose integer products are summed before a scale is applied, where all of them share it.
constexpr int64_t kWholeBlock = 128;

DSKERNELS_INLINE bool is_int4(Scheme scheme) {
  return scheme == Scheme::kInt4Dynamic || scheme == Scheme::kInt4WeightOnly;
}

DSKERNELS_INLINE bool has_codes(Scheme scheme) {
  return scheme == Scheme::kInt8Dynamic || scheme == Scheme::kInt8Static || scheme == Scheme::kInt4Dynamic;
}

// Whether blocks of kWholeBlock weights have one scale each. Else groups are told apart lane by lane.
DSKERNELS_INLINE bool has_whole_groups(const QuantizedMatmulArgs& args) {
  return args.groups <= 1 || args.group_size % kWholeBlock == 0;
}

DSKERNELS_INLINE int64_t integer_block(const QuantizedMatmulArgs& args) {
  return has_whole_groups(args) ? kWholeBlock : kNibbles;
}

// Columns of a prepared row, a whole number of blocks.
DSKERNELS_INLINE int64_t padded_columns(const QuantizedMatmulArgs& args) {
  if (!has_codes(args.scheme)) return round_up(args.in_features, kBlockFloats);
  return round_up(args.in_features, is_int4(args.scheme) ? integer_block(args) : kVectorBytes);
}

DSKERNELS_INLINE int64_t prepared_bytes(const QuantizedMatmulArgs& args) {
  const int64_t columns = padded_columns(args);
  if (!has_codes(args.scheme)) return kHeadBytes + columns * int64_t{sizeof(float)};
  if (!is_int4(args.scheme)) return kHeadBytes + columns;
  return kHeadBytes + columns + columns / integer_block(args) * kVectorBytes;
}

// The row as floats, in the order of the weight's columns, followed by zeros; `spare` has room for a row.
inline void load_activations(const QuantizedMatmulArgs& args, int64_t row, int64_t padded, float* to, float* spare) {
  const char* from = static_cast<const char*>(args.x) + row * args.x_stride_row * size_of(args.element);
  float* target = args.input_order == nullptr ? to : spare;
  load_row(args.element, from, args.x_stride_column, args.in_features, target);
  if (args.input_order != nullptr) {
    for (int64_t k = 0; k < args.in_features; ++k) to[k] = spare[args.input_order[k]];
  }
  for (int64_t k = args.in_features; k < padded; ++k) to[k] = 0.0f;
}

// The bits of the largest magnitude; those of a NaN are larger than any number's.
DSKERNELS_INLINE int32_t largest_bits(const float* x, int64_t count) {
  VecI largest{};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    const VecI bits = reinterpret_cast<VecI>(load(x + k)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t result = 0;
  for (int i = 0; i < kLanes; ++i) result = max_of(result, static_cast<int32_t>(largest[i]));
  for (; k < count; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, sizeof(bits));
    result = max_of(result, bits & 0x7fffffff);
  }
  return result;
}

constexpr int32_t kInfinityBits = 0x7f800000;

DSKERNELS_INLINE float from_bits(int32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// codes[k] = clamp(round(x[k] * lift * inverse), -127, 127), ties to even; `count` is a multiple of kLanes. All are 0
// where x is not finite, since nothing will be made of them.
inline void round_to_codes(const float* x, int64_t count, float lift, float inverse, int8_t* codes) {
  typedef int8_t Few __attribute__((vector_size(kLanes), aligned(1), may_alias));
  for (int64_t k = 0; k < count; k += kLanes) {
    VecF scaled = load(x + k) * lift * inverse;
    scaled = scaled > 127.0f ? broadcast(127.0f) : scaled;
    scaled = scaled < -127.0f ? broadcast(-127.0f) : scaled;
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
    const VecI bits = reinterpret_cast<VecI>(scaled + 12582912.0f);
    *reinterpret_cast<Few*>(codes + k) = __builtin_convertvector(bits, Few);
  }
}

// How the codes of a row follow from it: see quantize_rows and quantize_rows_by in dskernels/quantized_matmul.
inline void quantize_row(const QuantizedMatmulArgs& args, const float* x, int64_t padded, int8_t* codes,
                         RowHead* head) {
  const int32_t bits = largest_bits(x, args.in_features);
  const float nan = from_bits(0x7fc00000);
  float largest = from_bits(bits), lift = 1.0f, inverse = 0.0f;
  head->unlift = 1.0f;
  head->scale = nan;
  if (args.scheme == Scheme::kInt8Static) {
    if (bits < kInfinityBits) {
      inverse = 1.0f / *args.input_scale;
      head->scale = *args.input_scale;
    }
  } else if (bits < kInfinityBits) {
    if (largest < 0x1p-60f || largest > 0x1p60f) {
      lift = largest < 1.0f ? 0x1p64f : 0x1p-64f;
      head->unlift = 1.0f / lift;
    }
    largest *= lift;
    if (largest > 0.0f) inverse = 127.0f / largest;
    head->scale = largest / 127.0f;
  }
  if (bits < kInfinityBits) {
    round_to_codes(x, padded, lift, inverse, codes);
  } else {
    std::memset(codes, 0, static_cast<size_t>(padded));
  }
}

DSKERNELS_INLINE Bytes ones() { return Bytes{} + int8_t{1}; }

// From codes in order to codes as nibbles meet them, and their sums.
inline void arrange_codes(const QuantizedMatmulArgs& args, const int8_t* codes, int64_t padded, int8_t* to) {
  typedef uint16_t Words __attribute__((vector_size(2 * kVectorBytes), aligned(1), may_alias));
  typedef int8_t Halves __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  const int64_t block = integer_block(args);
  for (int64_t k = 0; k < padded; k += kNibbles) {
    const Words words = *reinterpret_cast<const Words*>(codes + k);
    *reinterpret_cast<Halves*>(to + k) = __builtin_convertvector(words, Halves);
    *reinterpret_cast<Halves*>(to + k + kVectorBytes) = __builtin_convertvector(words >> 8, Halves);
  }
  char* sums = reinterpret_cast<char*>(to) + padded;
  for (int64_t k = 0; k < padded; k += block, sums += kVectorBytes) {
    VecI sum{};
    for (int64_t v = 0; v < block; v += kVectorBytes) sum = dot_codes(sum, ones(), load_bytes(to + k + v));
    // Where groups are symmetric, the code of 0 is 8: what is stored is what the products have too much.
    const VecF as_floats = __builtin_convertvector(sum, VecF);
    if (args.zero_point == nullptr) {
      sum *= -8;
      std::memcpy(sums, &sum, sizeof(sum));
    } else {
      std::memcpy(sums, &as_floats, sizeof(as_floats));
    }
  }
}

// The row rounded to e4m3 in blocks of 128, as floats: see quantize_blocks in dskernels/quantized_matmul/reference.py.
inline void round_blocks_to_fp8(float* x, int64_t padded) {
  for (int64_t first = 0; first < padded; first += 128) {
    const int64_t count = min_of<int64_t>(128, padded - first);
    const int32_t bits = largest_bits(x + first, count);
    const float scale = max_of(from_bits(bits) / 448.0f, 0x1p-126f);
    for (int64_t k = first; k < first + count; ++k) {
      const float quotient = x[k] / scale;
      // Three bits follow the leading one; below 2^-6 steps are 2^-9. Adding a number with the wanted last bit rounds.
      int32_t exponent;
      std::memcpy(&exponent, &quotient, sizeof(exponent));
      exponent = max_of(exponent & 0x7f800000, (127 - 6) << 23);
      const float shift = from_bits(exponent + (20 << 23)) * 1.5f;
      const float rounded = (quotient + shift) - shift;
      x[k] = (bits < kInfinityBits ? rounded : from_bits(0x7fc00000)) * scale;
    }
  }
}

// Floats of a block as nibbles meet them: to[j][l] = x[8 * l + j].
inline void arrange_floats(const float* x, int64_t padded, float* to) {
  for (int64_t first = 0; first < padded; first += kBlockFloats) {
    for (int j = 0; j < 8; ++j) {
      for (int l = 0; l < kLanes; ++l) to[first + j * kLanes + l] = x[first + 8 * l + j];
    }
  }
}

int64_t prepare_scratch_bytes(const QuantizedMatmulArgs& args) {
  // A row of floats twice, and one of codes.
  return round_up(args.in_features, 2 * kWholeBlock) * int64_t{2 * sizeof(float) + 1};
}

void prepare_row(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, int64_t row, void* scratch) {
  uint8_t* out = args.prepared + row * plan.prepared_stride;
  const int64_t padded = padded_columns(args), room = round_up(args.in_features, 2 * kWholeBlock);
  float* floats = static_cast<float*>(scratch);
  float* spare = floats + room;
  RowHead* head = reinterpret_cast<RowHead*>(out);
  float* target = reinterpret_cast<float*>(out + kHeadBytes);
  int8_t* codes = reinterpret_cast<int8_t*>(out + kHeadBytes);
  if (args.scheme == Scheme::kInt8WeightOnly) return load_activations(args, row, padded, target, spare);
  if (args.scheme == Scheme::kFp8Block) {
    load_activations(args, row, padded, target, spare);
    return round_blocks_to_fp8(target, padded);
  }
  load_activations(args, row, padded, floats, spare);
  if (args.scheme == Scheme::kInt4WeightOnly) return arrange_floats(floats, padded, target);
  if (args.scheme == Scheme::kInt4Dynamic) {
    int8_t* in_order = reinterpret_cast<int8_t*>(spare + room);
    quantize_row(args, floats, padded, in_order, head);
    return arrange_codes(args, in_order, padded, codes);
  }
  quantize_row(args, floats, padded, codes, head);
  // Wraps for rows of many millions only, for which it is not used.
  uint32_t sum = 0;
  for (int64_t k = 0; k < args.in_features; ++k) sum += static_cast<uint32_t>(int32_t{codes[k]});
  head->sum = static_cast<int32_t>(sum);
}

}  // namespace
}  // namespace dskernels
