// Sums of products of int8 and int4 whose scales differ from group to group.
//
// A run of columns is what lies in one group, in one segment and between two multiples of 256 columns. The sum of its
// products is exact; runs are added in float32 in their order, each with its scale, and segments in theirs. Both follow
// from the shape of the weight alone: a row of x has the same bits in every batch.
#pragma once

#include "quantized_matmul/cuda_product.cuh"

namespace dskernels {
namespace {

// Positions among columns count units of this: groups are multiples of it.
constexpr int kColumnsOfUnit = 16;
// At most so many columns: 127 * 128 of each are less than 2^22, so that a sum which starts at the bits of 1.5 * 2^23
// is, as bits, the float that is larger by it. Conversions of integers are four times slower than additions.
constexpr int kRunUnits = 256 / kColumnsOfUnit;
constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kMagic = 0x1.8p23f;

template <class Tile>
struct Int4Sums {
  // Of a run: 16 times its products, as a nibble is multiplied in the upper half of its byte.
  int32_t products[Tile::kMTiles][Tile::kNTiles][4];
  // Of the codes of x in a run, for zero points that are not 8.
  int32_t codes[Tile::kMTiles][4];
  float sums[Tile::kMTiles][Tile::kNTiles][4] = {};
  float scale[Tile::kNTiles][2], shift[Tile::kNTiles][2];
  // Where the scales of the lane's first column are, and how many columns there are from that one on.
  int64_t first_scale;
  int columns_left;
  int group, group_units, group_end, run_end;
  bool is_open = false;

  // Takes up the columns of the weight from `column` on, at column `k` of x.
  __device__ void begin(const ProductArgs& args, int64_t column, int64_t k) {
    const int first = 2 * (lane_index() % 4);
    first_scale = (column + first) * args.groups;
    columns_left = static_cast<int>(min(args.columns - column, int64_t{8 * Tile::kNTiles})) - first;
    group = static_cast<int>(k / args.group_size);
    // A group that is no multiple is all of a row.
    group_units = static_cast<int>(ceil_div(args.group_size, kColumnsOfUnit));
    group_end = (group + 1) * group_units;
    load_scales(args);
    begin_run(static_cast<int>(k / kColumnsOfUnit));
  }

  // Begins another segment; the runs of the last one have ended.
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 4 * Tile::kMTiles * Tile::kNTiles; ++i) {
      sums[i / (4 * Tile::kNTiles)][i / 4 % Tile::kNTiles][i % 4] = 0.0f;
    }
  }

  __device__ void load_scales(const ProductArgs& args) {
    // Addresses are added up, not multiplied out: the compiler would keep all of them.
    int64_t at = first_scale + group;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kNTiles; ++i) {
      // Without columns of x there is no group either.
      const bool is_inside = i / 2 * 8 + i % 2 < columns_left && group < args.groups;
      scale[i / 2][i % 2] = is_inside ? args.scale[at] : 0.0f;
      if (args.zero_point != nullptr) {
        shift[i / 2][i % 2] = is_inside ? 8.0f - static_cast<float>(args.zero_point[at]) : 0.0f;
      }
      at += i % 2 == 0 ? args.groups : 7 * args.groups;
    }
  }

  __device__ void begin_run(int unit) {
    run_end = min((unit / kRunUnits + 1) * kRunUnits, group_end);
    is_open = false;
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[m][i] = kMagicBits;
#pragma unroll
        for (int n = 0; n < Tile::kNTiles; ++n) products[m][n][i] = kMagicBits;
      }
    }
  }

  // sums += scale * (the products of the run, less those of codes and zero points).
  __device__ void add_run(const ProductArgs& args) {
    const bool has_shift = args.zero_point != nullptr;
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m) {
      // Columns of the product with ones are all alike.
      const float low = __int_as_float(codes[m][0]) - kMagic, high = __int_as_float(codes[m][2]) - kMagic;
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Integers below 2^24: exact.
          float product = fmaf(__int_as_float(products[m][n][i]), 0.0625f, -0.0625f * kMagic);
          if (has_shift) product = fmaf(shift[n][i % 2], i < 2 ? low : high, product);
          sums[m][n][i] = fmaf(product, scale[n][i % 2], sums[m][n][i]);
        }
      }
    }
  }

  // Ends the run before `unit`, where another one begins unless that is the `end`.
  __device__ void next_run(const ProductArgs& args, int unit, int end) {
    add_run(args);
    if (unit == group_end && unit < end) {
      ++group;
      group_end += group_units;
      load_scales(args);
    }
    begin_run(unit);
  }

  // Adds 32 columns, or with `keep` those of half the lanes: what the others hold counts as zeros.
  __device__ void add_columns(const ProductArgs& args, const uint32_t (&a)[Tile::kMTiles][4],
                              const uint32_t (&words)[Tile::kNTiles][2], int half, uint32_t keep) {
    is_open = true;
#pragma unroll
    for (int n = 0; n < Tile::kNTiles; ++n) {
      const uint32_t word = half == 0 ? words[n][0] : words[n][1];
      // (nibble ^ 8) << 4 is 16 * (code - 8) as int8.
      const uint32_t b[2] = {((word << 4 ^ 0x80808080u) & 0xf0f0f0f0u) & keep,
                             ((word ^ 0x80808080u) & 0xf0f0f0f0u) & keep};
#pragma unroll
      for (int m = 0; m < Tile::kMTiles; ++m) ptx::mma_m16n8k32_s8(products[m][n], a[m], b);
    }
    if (args.zero_point == nullptr) return;
    const uint32_t ones[2] = {0x01010101u & keep, 0x01010101u & keep};
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m) ptx::mma_m16n8k32_s8(codes[m], a[m], ones);
  }

  // Of a step that begins at column `k` and ends for good at column `end`.
  __device__ void add_step(const ProductArgs& args, const uint8_t* stage, int row, int column, int64_t k, int64_t end) {
    const uint8_t* weights = stage + Tile::kRows * Tile::kDepth;
    const int first = static_cast<int>(k / kColumnsOfUnit), last = static_cast<int>(ceil_div(end, kColumnsOfUnit));
#pragma unroll 1
    for (int piece = 0; piece < Tile::kWeightBytes / 32; ++piece) {
      if (first + 4 * piece >= last) break;
      uint32_t words[Tile::kNTiles][2];
      load_weights<Tile>(words, weights, column, piece);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int unit = first + 4 * piece + 2 * half;
        if (unit >= last) break;
        uint32_t a[Tile::kMTiles][4];
        load_codes<Tile>(a, stage, row, 2 * piece + half);
        uint32_t keep = ~0u;
        if (run_end == unit + 1) {
          // A group ends in the middle, with lane 1.
          const bool is_low = lane_index() % 4 < 2;
          add_columns(args, a, words, half, is_low ? keep : 0u);
          next_run(args, unit + 1, last);
          if (unit + 1 >= last) break;
          keep = is_low ? 0u : keep;
        }
        add_columns(args, a, words, half, keep);
        if (run_end == unit + 2) next_run(args, unit + 2, last);
      }
    }
  }

  // Ends the last run, which the end of a row may have cut short.
  __device__ void finish(const ProductArgs& args) {
    if (is_open) add_run(args);
  }
};

}  // namespace
}  // namespace dskernels
