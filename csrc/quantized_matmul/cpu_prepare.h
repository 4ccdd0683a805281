// Activations as the kernels read them, tile by tile. A tile starts with a RowHead for each row, at kHeadBytes follow:
//
//   for add_dots:    the codes of its one row, and zeros
//   add_nibble_rows: the codes of its one row, in each block of 128 the even ones before the odd ones, and zeros; then
//                    the sum of each block, as below
//   integer panels:  for every four columns the codes of each row; for int4 by eight columns, those of the even ones
//                    before those of the odd ones, as nibbles lie; then for each block and row the sum of the codes, as
//                    int32 times -8 where 8 is the code of 0, as float where zero points differ
//   float panels:    for every column the values of each row
//
// Rows that a tile has too many are zeros.
#pragma once

#include "common/rows.h"
#include "quantized_matmul/cpu_blocks.h"

namespace dskernels {
namespace {

struct RowHead {
  float scale;   // step of the codes, NaN where the row is not finite; 1 for floats
  float unlift;  // a power of two that the result is multiplied by
  int32_t sum;   // of the codes, modulo 2^32
};
constexpr int64_t kHeadBytes = 192;
static_assert(kTileRows * sizeof(RowHead) <= kHeadBytes);

DSKERNELS_INLINE int64_t padded_columns(const QuantizedMatmulArgs& args) {
  if (!has_codes(args.scheme)) return args.in_features;
  if (uses_nibble_rows(args)) return round_up(args.in_features, kBlock);
  return round_up(args.in_features, uses_dots(args) ? kVectorBytes : 8);
}

DSKERNELS_INLINE int64_t tile_bytes(const QuantizedMatmulArgs& args) {
  const int64_t rows = has_single_rows(args) ? 1 : tile_height(min_of<int64_t>(args.rows, kTileRows));
  int64_t column_bytes = padded_columns(args) * (has_codes(args.scheme) ? 1 : int64_t{sizeof(float)});
  // Room for a vector of sums behind the last one.
  if (args.scheme == Scheme::kInt4Dynamic) column_bytes += count_blocks_before(args, args.in_features) * 4 + 64;
  return round_up(kHeadBytes + rows * column_bytes, 64);
}

// A row as floats in the order of the weight's columns, zeros up to `padded`; `spare` has room for a row.
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
inline int32_t largest_bits(const float* x, int64_t count) {
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

constexpr int32_t kInfinityBits = 0x7f800000, kNanBits = 0x7fc00000;

DSKERNELS_INLINE float from_bits(int32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// codes[k] = clamp(round(x[k] * lift * inverse), -127, 127), ties to even; room for a whole number of vectors.
inline void round_to_codes(const float* x, int64_t count, float lift, float inverse, int8_t* codes) {
  for (int64_t k = 0; k < count; k += kLanes) {
    VecF scaled = load(x + k) * lift * inverse;
    scaled = scaled > 127.0f ? broadcast(127.0f) : scaled;
    scaled = scaled < -127.0f ? broadcast(-127.0f) : scaled;
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
    store_as_bytes(reinterpret_cast<VecI>(scaled + 12582912.0f) - 0x4b400000, codes + k);
  }
}

// How codes follow from a row: see quantize_rows and quantize_rows_by in dskernels/quantized_matmul/activations.py.
// They are 0 where the row is not finite, since nothing will be made of them.
inline RowHead quantize_row(const QuantizedMatmulArgs& args, const float* x, int64_t padded, int8_t* codes) {
  const int32_t bits = largest_bits(x, args.in_features);
  RowHead head{from_bits(kNanBits), 1.0f, 0};
  if (bits >= kInfinityBits) {
    std::memset(codes, 0, static_cast<size_t>(padded));
    return head;
  }
  float lift = 1.0f, inverse = 0.0f;
  if (args.scheme == Scheme::kInt8Static) {
    head.scale = *args.input_scale;
    inverse = 1.0f / head.scale;
  } else {
    float largest = from_bits(bits);
    if (largest < 0x1p-60f || largest > 0x1p60f) {
      lift = largest < 1.0f ? 0x1p64f : 0x1p-64f;
      head.unlift = 1.0f / lift;
      largest *= lift;
    }
    if (largest > 0.0f) inverse = 127.0f / largest;
    head.scale = largest / 127.0f;
  }
  round_to_codes(x, padded, lift, inverse, codes);
  // Wraps for rows of many millions only, for which it is not used.
  uint32_t sum = 0;
  for (int64_t k = 0; k < padded; ++k) sum += static_cast<uint32_t>(int32_t{codes[k]});
  head.sum = static_cast<int32_t>(sum);
  return head;
}

// Of each block of 128 codes the even ones first, then the odd ones.
inline void split_blocks(int8_t* codes, int64_t count) {
  for (int64_t first = 0; first < count; first += kBlock) {
    int8_t block[kBlock];
    for (int i = 0; i < kBlock / 2; ++i) {
      block[i] = codes[first + 2 * i];
      block[kBlock / 2 + i] = codes[first + 2 * i + 1];
    }
    std::memcpy(codes + first, block, sizeof(block));
  }
}

// Of each eight codes the even ones first, then the odd ones.
inline void split_even_and_odd(int8_t* codes, int64_t count) {
  typedef int8_t Sixteen __attribute__((vector_size(16), aligned(1), may_alias));
  const Sixteen order = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  for (int64_t k = 0; k < count; k += 16) {
    Sixteen* at = reinterpret_cast<Sixteen*>(codes + k);
    *at = __builtin_shuffle(*at, order);
  }
}

// The sums of the codes of each block, `stride` words apart.
inline void store_block_sums(const QuantizedMatmulArgs& args, const int8_t* codes, int64_t stride, int32_t* to) {
  for (int64_t k = 0; k < args.in_features; to += stride) {
    const int64_t end = block_at(args, k).end;
    int32_t sum = 0;
    for (; k < end; ++k) sum += codes[k];
    const float as_float = static_cast<float>(sum);
    sum *= -8;
    std::memcpy(to, args.zero_point == nullptr ? static_cast<const void*>(&sum) : &as_float, sizeof(sum));
  }
}

// Brings a row of huge floats down by 2^64, so that no sum of them overflows whose scaled value does not.
inline RowHead lift_row(const QuantizedMatmulArgs& args, float* x) {
  const int32_t bits = largest_bits(x, args.in_features);
  if (bits >= kInfinityBits || from_bits(bits) <= 0x1p60f) return {1.0f, 1.0f, 0};
  for (int64_t k = 0; k < args.in_features; ++k) x[k] *= 0x1p-64f;
  return {1.0f, 0x1p64f, 0};
}

// The row rounded to e4m3 in blocks of 128, as floats: see quantize_blocks in
// dskernels/quantized_matmul/activations.py.
inline void round_blocks_to_fp8(float* x, int64_t columns) {
  for (int64_t first = 0; first < columns; first += 128) {
    const int64_t count = min_of<int64_t>(128, columns - first);
    const int32_t bits = largest_bits(x + first, count);
    if (bits >= kInfinityBits) {
      for (int64_t k = first; k < first + count; ++k) x[k] = from_bits(kNanBits);
      continue;
    }
    const float scale = max_of(from_bits(bits) / 448.0f, 0x1p-126f);
    for (int64_t k = first; k < first + count; ++k) {
      const float quotient = x[k] / scale;
      // Three bits follow the leading one; below 2^-6 steps are 2^-9. Adding a number with that last bit rounds to it.
      int32_t exponent;
      std::memcpy(&exponent, &quotient, sizeof(exponent));
      exponent = max_of(exponent & kInfinityBits, (127 - 6) << 23);
      const float shift = from_bits(exponent + (20 << 23)) * 1.5f;
      x[k] = ((quotient + shift) - shift) * scale;
    }
  }
}

// to[k][i] = rows[i][k], in words: floats, or four codes.
template <int height>
DSKERNELS_NOINLINE void interleave(const int32_t* rows, int64_t stride, int64_t words, int32_t* to) {
  for (int64_t k = 0; k < words; ++k) {
    DSKERNELS_UNROLL
    for (int i = 0; i < height; ++i) to[k * height + i] = rows[i * stride + k];
  }
}

inline void interleave(int height, const int32_t* rows, int64_t stride, int64_t words, int32_t* to) {
  switch (height) {
    case 1: std::memcpy(to, rows, static_cast<size_t>(words) * sizeof(int32_t)); return;
    case 2: return interleave<2>(rows, stride, words, to);
    case 4: return interleave<4>(rows, stride, words, to);
  }
  if constexpr (kTileRows == 6) interleave<6>(rows, stride, words, to);
  if constexpr (kTileRows == 12) {
    height == 8 ? interleave<8>(rows, stride, words, to) : interleave<12>(rows, stride, words, to);
  }
}

// Floats of a row with room for whole vectors, whatever splits them.
DSKERNELS_INLINE int64_t row_room(const QuantizedMatmulArgs& args) {
  return round_up(args.in_features, max_of<int64_t>(kVectorBytes, kBlock));
}

// Rows of floats, or of codes, of a tile, and two rows of floats.
inline int64_t prepare_scratch_bytes(const QuantizedMatmulArgs& args) {
  return row_room(args) * (kTileRows * int64_t{has_codes(args.scheme) ? 1 : 4} + 2 * 4);
}

void prepare_tile(const QuantizedMatmulArgs& args, const QuantizedMatmulPlan& plan, int64_t tile, void* scratch) {
  uint8_t* out = args.prepared + tile * plan.tile_bytes;
  const int64_t first = tile * plan.tile_rows, rows = min_of(plan.tile_rows, args.rows - first);
  const int64_t room = row_room(args), padded = padded_columns(args);
  const int height = tile_height(rows);
  const bool codes = has_codes(args.scheme);
  const int64_t row_bytes = room * (codes ? 1 : 4);
  char* ready = static_cast<char*>(scratch);
  float* floats = reinterpret_cast<float*>(ready + kTileRows * row_bytes);
  if (height > rows) std::memset(ready + rows * row_bytes, 0, static_cast<size_t>((height - rows) * row_bytes));
  int32_t* sums = reinterpret_cast<int32_t*>(out + kHeadBytes + padded * height);
  for (int64_t i = 0; i < rows; ++i) {
    char* row = ready + i * row_bytes;
    float* values = codes ? floats : reinterpret_cast<float*>(row);
    load_activations(args, first + i, room, values, floats + room);
    RowHead& head = reinterpret_cast<RowHead*>(out)[i];
    if (!codes) {
      head = lift_row(args, values);
      if (args.scheme == Scheme::kFp8Block) round_blocks_to_fp8(values, args.in_features);
      continue;
    }
    int8_t* row_codes = reinterpret_cast<int8_t*>(row);
    head = quantize_row(args, values, room, row_codes);
    if (args.scheme == Scheme::kInt4Dynamic) {
      store_block_sums(args, row_codes, height, sums + i);
      uses_nibble_rows(args) ? split_blocks(row_codes, padded) : split_even_and_odd(row_codes, room);
    }
  }
  interleave(height, reinterpret_cast<const int32_t*>(ready), row_bytes / 4, codes ? padded / 4 : padded,
             reinterpret_cast<int32_t*>(out + kHeadBytes));
}

}  // namespace
}  // namespace dskernels
