// The product of float activations and the codes of a weight.
#pragma once

#include "common/copy.cuh"
#include "quantized_matmul/cuda_float_codes.cuh"
#include "quantized_matmul/cuda_values.cuh"

namespace dskernels {
namespace {

// A call as the kernels see it.
struct FloatProduct {
  // x is aligned to 16 bytes, and so are its rows, of column stride 1.
  QuantizedMatmulArgs args;
  const float* x_scale;  // [rows, groups], of fp8 alone
  float* parts;          // [splits, rows, out_features], where sums are split
  int64_t row_tiles;
  int stages, stages_of_split, splits;
  bool weight_by_16;
  float unit_value;
};

// Warps of a block stand side by side: each has all rows of the tile and kWarpColumns columns, so that sums are in the
// order of k whatever the tile.
constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kWarpColumns = 32, kColumnTiles = kWarpColumns / 8;
constexpr int kTileColumns = kWarps * kWarpColumns;
// A stage of copies is kStageUnits units of each row of the weight; a pad of 16 bytes keeps ldmatrix free of conflicts.
constexpr int kStageUnits = 4;
constexpr int kStageBytes = 16 * kStageUnits, kWeightStride = kStageBytes + 16;
constexpr int kMostStages = 4;
// Blocks of few rows that a multiprocessor of 164 KiB of shared memory has at a time, for which there are registers.
constexpr int kBlocks = 2;

template <class T, Codes kCodes, int kRowTiles>
struct Tile {
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kDepth = kStageUnits * Format<T, kCodes>::kUnit;
  // A lane reads kLane activations of row g, 16 bytes at a time or all 8 of them. Rows are kDepth * sizeof(T) bytes, a
  // multiple of 128; so much more sends the rows that are read at once to different banks.
  static constexpr int kLaneBytes = Format<T, kCodes>::kLane * static_cast<int>(sizeof(T));
  static constexpr int kPad = (kLaneBytes == 32 ? 16 : 4 * kLaneBytes) / static_cast<int>(sizeof(T));
  static constexpr int kStride = kDepth + kPad;
  static constexpr int kActivations = kRows * kStride, kWeights = kTileColumns * kWeightStride;
  static constexpr int kSharedOfStage = shared_bytes<T>(kActivations) + shared_bytes<uint8_t>(kWeights);
  static constexpr int kFitting = kMaxSharedBytes / kSharedOfStage;
  static constexpr int kStages = kFitting < kMostStages ? kFitting : kMostStages;
  static_assert(kStages >= 2);
};

// The group of columns that a warp is in: what its codes and its sums are taken with.
template <class T, int kRowTiles>
struct Group {
  int index = 0, end = 0;            // the first column behind it
  float scale[kColumnTiles][2];      // of the lane's columns 8j + 2t and 8j + 2t + 1
  float row_scale[kRowTiles][2];     // fp8: of its rows 16i + g and 16i + g + 8
  Zero<T> zero[kColumnTiles];        // int4: of column 8j + g
  uint32_t next_zero = 0x08080808u;  // of the next group, a byte each
};

template <int kRowTiles>
using Sums = float[kRowTiles][kColumnTiles][4];

// The codes of 0 of a group for columns first + 8j, j = 0 to 3.
__device__ inline uint32_t load_zeros(const QuantizedMatmulArgs& args, int64_t first, int group) {
  if (args.zero_point == nullptr) return 0x08080808u;
  uint32_t zeros = 0;
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
    const int64_t column = first + 8 * j;
    if (column >= args.out_features || group >= args.groups) continue;
    zeros |= static_cast<uint32_t>(args.zero_point[column * args.groups + group]) << 8 * j;
  }
  return zeros;
}

// Enters group.index. Scales are not used before the group ends; zero points are, so those were loaded with the group
// before.
template <class T, Codes kCodes, int kRowTiles>
__device__ inline void enter_group(Group<T, kRowTiles>& group, const FloatProduct& p, int64_t row, int64_t column) {
  const QuantizedMatmulArgs& args = p.args;
  const int g = lane_index() / 4, t = lane_index() % 4;
  group.end = static_cast<int>(min((group.index + 1) * args.group_size, args.in_features));
  const bool is_there = group.index < args.groups;
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t at = column + 8 * j + 2 * t + i;
      if constexpr (kCodes == Codes::kFp8) {
        // All columns of a tile are of one block.
        group.scale[j][i] = is_there ? args.scale[column / kScaleBlock * args.groups + group.index] : 0.0f;
      } else {
        group.scale[j][i] = is_there && at < args.out_features ? args.scale[at * args.groups + group.index] : 0.0f;
      }
    }
  }
  if constexpr (kCodes == Codes::kFp8) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int64_t at = row + 8 * i + g;
      group.row_scale[i / 2][i % 2] = is_there && at < args.rows ? p.x_scale[at * args.groups + group.index] : 0.0f;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) group.zero[j] = zero_of<T>(group.next_zero >> 8 * j & 0xff);
    group.next_zero = load_zeros(args, column + g, group.index + 1);
  }
}

// total += sums * scales; sums = 0.
template <class T, Codes kCodes, int kRowTiles>
__device__ inline void leave_group(Sums<kRowTiles>& total, Sums<kRowTiles>& sums, const Group<T, kRowTiles>& group,
                                   float unit_value) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = group.scale[j][i % 2];
        Scale factors;
        if constexpr (kCodes == Codes::kFp8) {
          // One after the other, for the product of two small ones may be nothing; the smaller where rows are huge.
          const float of_row = group.row_scale[r][i / 2];
          factors = of_row > 1.0f ? Scale{unit_value * scale, of_row} : Scale{unit_value * of_row, scale};
        } else {
          factors = split_scale(scale, unit_value);
        }
        total[r][j][i] = fmaf(sums[r][j][i] * factors.first, factors.second, total[r][j][i]);
        sums[r][j][i] = 0.0f;
      }
    }
  }
}

// sums += activations * codes for columns [begin, end) of a unit; `x` is row g of the tile at the lane's own columns of
// the unit, `words` its codes of column 8j + g.
template <class T, Codes kCodes, int kRowTiles>
__device__ inline void multiply_unit(Sums<kRowTiles>& sums, const T* x, const uint32_t (&words)[kColumnTiles],
                                     const Zero<T> (&zero)[kColumnTiles], int begin, int end) {
  using Form = Format<T, kCodes>;
  Weights<T> codes[kColumnTiles][Form::kSteps];
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) decode<T, kCodes>(codes[j], words[j], zero[j]);
  const int own = lane_index() % 4 * Form::kLane;
  const bool is_part = begin > 0 || end < Form::kUnit, is_mine = own >= begin && own < end;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    Activations<T> a[Form::kSteps];
    load_activations<T, kCodes>(a, x + 16 * r * Tile<T, kCodes, kRowTiles>::kStride,
                                Tile<T, kCodes, kRowTiles>::kStride);
#pragma unroll
    for (int s = 0; s < Form::kSteps; ++s) {
      if (is_part) keep_if(a[s], is_mine);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) multiply_step<T>(sums[r][j], a[s], codes[j][s]);
    }
  }
}

// What a block has of the weight and of x: its first row and column, its stages.
struct Place {
  int64_t row, column;
  int first_stage, stages;
};

// Begins to copy the first `rows` rows of `bytes` bytes, `stride` apart and aligned to 16, to a tile of kRows rows of
// kBytes, kStride apart; zeros elsewhere. Unlike copy_tile it goes from row to row by addition, which leaves registers
// to the sums.
template <int kRows, int kBytes, int kStride>
__device__ inline void copy_rows(void* tile, const void* from, int64_t stride, int rows, int bytes) {
  constexpr int kVectors = kBytes / 16, kRowsAtOnce = kThreads / kVectors;
  static_assert(kThreads % kVectors == 0 && kRows % kRowsAtOnce == 0);
  const int first = static_cast<int>(threadIdx.x) / kVectors, column = static_cast<int>(threadIdx.x) % kVectors * 16;
  const int count = min(max(bytes - column, 0), 16);
  uint8_t* to = static_cast<uint8_t*>(tile) + first * kStride + column;
  // Without anything to read the address is not used, but has to be one.
  const uint8_t* const start = static_cast<const uint8_t*>(from);
  const uint8_t* row = start + first * stride + column;
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    const bool reads = first + i < rows && count > 0;
    ptx::cp_async_16(to + i * kStride, reads ? row : start, reads ? count : 0);
    row += kRowsAtOnce * stride;
  }
}

// Begins to copy stage `stage` of the block's.
template <class T, Codes kCodes, int kRowTiles>
__device__ inline void copy_stage(T* x_tile, uint8_t* w_tile, const FloatProduct& p, const Place& place, int stage) {
  using Shape = Tile<T, kCodes, kRowTiles>;
  constexpr int kSize = static_cast<int>(sizeof(T));
  const QuantizedMatmulArgs& args = p.args;
  const int64_t stage_64 = place.first_stage + stage, k = stage_64 * Shape::kDepth, byte = stage_64 * kStageBytes;
  const int columns = static_cast<int>(min(args.in_features - k, int64_t{Shape::kDepth}));
  copy_rows<Shape::kRows, Shape::kDepth * kSize, Shape::kStride * kSize>(
      x_tile, static_cast<const T*>(args.x) + place.row * args.x_stride_row + k, args.x_stride_row * kSize,
      static_cast<int>(min(args.rows - place.row, int64_t{Shape::kRows})), columns * kSize);
  const uint8_t* weight = args.qweight + place.column * args.row_bytes + byte;
  const int rows = static_cast<int>(min(args.out_features - place.column, int64_t{kTileColumns}));
  const int bytes = static_cast<int>(min(args.row_bytes - byte, int64_t{kStageBytes}));
  if (p.weight_by_16) {
    copy_rows<kTileColumns, kStageBytes, kWeightStride>(w_tile, weight, args.row_bytes, rows, bytes);
  } else {
    const auto row_at = [&](int row) { return weight + row * args.row_bytes; };
    copy_tile<uint8_t, kThreads, kTileColumns, kStageBytes, kWeightStride>(w_tile, row_at, rows, bytes, 1, false);
  }
}

// sums (and total, where groups end) += the products of a stage. `k` is its first column.
template <class T, Codes kCodes, int kRowTiles>
__device__ inline void multiply_stage(Sums<kRowTiles>& total, Sums<kRowTiles>& sums, Group<T, kRowTiles>& group,
                                      const T* x_tile, const uint8_t* w_tile, const FloatProduct& p, const Place& place,
                                      int k) {
  using Form = Format<T, kCodes>;
  using Shape = Tile<T, kCodes, kRowTiles>;
  const int lane = lane_index(), first_column = warp_index() * kWarpColumns;
  const T* x = x_tile + lane / 4 * Shape::kStride + lane % 4 * Form::kLane;
  const uint8_t* w_row = w_tile + (first_column + lane) * kWeightStride;
#pragma unroll
  for (int unit = 0; unit < kStageUnits; ++unit) {
    if (k >= p.args.in_features) break;
    uint32_t words[kColumnTiles];
    ptx::ldmatrix_x4(words, w_row + Form::kUnitBytes * unit);
    if constexpr (kCodes == Codes::kInt8) {
      multiply_unit<T, kCodes, kRowTiles>(sums, x + Form::kUnit * unit, words, group.zero, 0, Form::kUnit);
    } else {
      // Once, but for groups that end amid a unit.
      for (int begin = 0; begin < Form::kUnit && k + begin < p.args.in_features;) {
        const int end = min(group.end - k, Form::kUnit);
        multiply_unit<T, kCodes, kRowTiles>(sums, x + Form::kUnit * unit, words, group.zero, begin, end);
        if (k + end == group.end) {
          leave_group<T, kCodes, kRowTiles>(total, sums, group, p.unit_value);
          ++group.index;
          enter_group<T, kCodes, kRowTiles>(group, p, place.row, place.column + first_column);
        }
        begin = end;
      }
    }
    k += Form::kUnit;
  }
}

// Writes the sums of a warp into out, or as they are into its split's part.
template <int kRowTiles>
__device__ inline void store_sums(const Sums<kRowTiles>& total, const FloatProduct& p, const Place& place) {
  const QuantizedMatmulArgs& args = p.args;
  const int g = lane_index() / 4, t = lane_index() % 4;
  const bool is_part = p.splits > 1, even = args.out_features % 2 == 0;
  void* const out = is_part ? p.parts + blockIdx.y * args.rows * args.out_features : args.out;
  const Element element = is_part ? Element::kFloat32 : args.element;
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
    const int64_t column = place.column + warp_index() * kWarpColumns + 8 * j + 2 * t;
    if (column >= args.out_features) continue;
    const bool both = column + 1 < args.out_features;
    Finish finish[2];
    if (!is_part) {
      finish[0] = finish_of(args, column, p.unit_value);
      finish[1] = finish_of(args, column + both, p.unit_value);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = place.row + 16 * r + 8 * half + g;
        if (row >= args.rows) continue;
        const float* pair = total[r][j] + 2 * half;
        store_two(out, element, row * args.out_features + column, finish[0](pair[0]), finish[1](pair[1]), both, even);
      }
    }
  }
}

// out = x @ W^T + bias, or with splits its sums over some of the columns into `parts`. Grid: tiles of out, those of the
// same columns one after the other; splits. Blocks of few rows wait for the weight, which each of them reads once, with
// kStages - 1 stages on the way; those of many wait for the tensor cores.
template <class T, Codes kCodes, int kRowTiles>
__global__ void __launch_bounds__(kThreads, kBlocks) float_product(const FloatProduct p) {
  using Shape = Tile<T, kCodes, kRowTiles>;
  constexpr int kStages = Shape::kStages;
  SharedCarver carver;
  T* x_tiles = carver.take<T>(kStages * Shape::kActivations);
  uint8_t* w_tiles = carver.take<uint8_t>(kStages * Shape::kWeights);
  const int first = static_cast<int>(blockIdx.y) * p.stages_of_split;
  const Place place{blockIdx.x % p.row_tiles * Shape::kRows, blockIdx.x / p.row_tiles * kTileColumns, first,
                    min(p.stages_of_split, p.stages - first)};
  const auto begin_copy = [&](int stage) {
    const int slot = stage % kStages;
    if (stage < place.stages) {
      copy_stage<T, kCodes, kRowTiles>(x_tiles + slot * Shape::kActivations, w_tiles + slot * Shape::kWeights, p, place,
                                       stage);
    }
    ptx::cp_async_commit();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) begin_copy(stage);

  Sums<kRowTiles> total = {}, sums = {};
  Group<T, kRowTiles> group;
  const int64_t column = place.column + warp_index() * kWarpColumns;
  if constexpr (kCodes != Codes::kInt8) {
    group.index = p.args.group_size > 0 ? static_cast<int>(int64_t{first} * Shape::kDepth / p.args.group_size) : 0;
    group.next_zero = load_zeros(p.args, column + lane_index() / 4, group.index);
    enter_group<T, kCodes, kRowTiles>(group, p, place.row, column);
  }
  for (int stage = 0; stage < place.stages; ++stage) {
    // All threads are done with the slot of the stage before, which the next copy takes.
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    begin_copy(stage + kStages - 1);
    const int slot = stage % kStages;
    multiply_stage<T, kCodes, kRowTiles>(total, sums, group, x_tiles + slot * Shape::kActivations,
                                         w_tiles + slot * Shape::kWeights, p, place, (first + stage) * Shape::kDepth);
  }
  ptx::cp_async_wait<0>();
  if constexpr (kCodes == Codes::kInt8) {
    store_sums<kRowTiles>(sums, p, place);
  } else {
    // The end of a split need not be that of a group.
    leave_group<T, kCodes, kRowTiles>(total, sums, group, p.unit_value);
    store_sums<kRowTiles>(total, p, place);
  }
}

constexpr int kJoinThreads = 256;

// out from the sums of all splits, in their order. Grid: blocks of kJoinThreads elements of out. It waits for memory.
__global__ void __launch_bounds__(kJoinThreads) join_parts(const FloatProduct p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kJoinThreads + threadIdx.x;
  const int64_t count = p.args.rows * p.args.out_features;
  if (at >= count) return;
  float total = 0.0f;
  for (int split = 0; split < p.splits; ++split) total += p.parts[split * count + at];
  const Finish finish = finish_of(p.args, at % p.args.out_features, p.unit_value);
  store_element(p.args.out, p.args.element, at, finish(total));
}

}  // namespace
}  // namespace dskernels
