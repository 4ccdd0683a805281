// The sums of a task by panels: what is unpacked when, and which kernel meets which tile.
#pragma once

#include "quantized_matmul/cpu_multiply.h"

namespace dskernels {
namespace {

// Panels that are multiplied together: two for one row of x, whose sums with one are too few to keep the multipliers
// busy; but the cores must have enough to share, too.
inline int64_t panels_of(const QuantizedMatmulArgs& args) {
  const bool alone = args.rows > 1 || is_int8_by_int8(args.scheme);
  return alone || args.out_features < 16 * kPanelColumns ? 1 : 2;
}

constexpr int kMostPanels = 2;

// Of each panel: a block, turned; the scales and zero points of all groups. Once: a block, unpacked.
struct PanelScratch {
  int64_t turned_bytes, scale_bytes, panel_bytes;

  explicit DSKERNELS_INLINE PanelScratch(const QuantizedMatmulArgs& args)
      : turned_bytes(kMostDwords * 2 * kVectorBytes),
        scale_bytes(max_of<int64_t>(args.groups, 1) * 2 * kVectorBytes),
        panel_bytes(turned_bytes + 2 * scale_bytes) {}

  DSKERNELS_INLINE int64_t bytes(int64_t panels) const { return panels * panel_bytes + kBlock * 2 * kVectorBytes; }
  DSKERNELS_INLINE VecI* turned(char* scratch, int64_t panel) const {
    return reinterpret_cast<VecI*>(scratch + panel * panel_bytes);
  }
  DSKERNELS_INLINE VecF* scale(char* scratch, int64_t panel) const {
    return reinterpret_cast<VecF*>(scratch + panel * panel_bytes + turned_bytes);
  }
  DSKERNELS_INLINE VecF* zero(char* scratch, int64_t panel) const {
    return reinterpret_cast<VecF*>(scratch + panel * panel_bytes + turned_bytes + scale_bytes);
  }
  DSKERNELS_INLINE void* unpacked(char* scratch, int64_t panels) const { return scratch + panels * panel_bytes; }
};

// Scales of all groups of a panel, as the kernels apply them: those of int8 are left to the end.
inline void load_scales(const QuantizedMatmulArgs& args, const PanelRows& rows, VecF* scale, VecF* zero) {
  if (is_int4(args.scheme)) {
    turn_groups(args.scale, args.groups, rows, scale);
    if (args.zero_point != nullptr) turn_groups(args.zero_point, args.groups, rows, zero);
    return;
  }
  const bool is_fp8 = args.scheme == Scheme::kFp8Block;
  for (int64_t group = 0; group < max_of<int64_t>(args.groups, 1); ++group) {
    // All rows of a panel are of the same block of 128.
    const float value = is_fp8 ? args.scale[rows.rows[0] / 128 * args.groups + group] : 1.0f;
    scale[2 * group] = scale[2 * group + 1] = broadcast(value);
  }
}

// One block of columns of a task.
struct BlockOfTask {
  Columns columns;
  int64_t number;
  int64_t panels;
  PanelBlock panel[kMostPanels];
};

template <class Codes>
inline void multiply_fused_floats(int rows, const float* x, const BlockOfTask& block, VecF* sums) {
  const int64_t columns = block.columns.end - block.columns.first;
  if (block.panels == 2) return multiply_coded_floats<Codes, 1, 2>(x, columns, block.panel, sums);
  switch (rows) {
    case 1: return multiply_coded_floats<Codes, 1, 1>(x, columns, block.panel, sums);
    case 2: return multiply_coded_floats<Codes, 2, 1>(x, columns, block.panel, sums);
    default: return multiply_coded_floats<Codes, 4, 1>(x, columns, block.panel, sums);
  }
}

// A tile of so few rows that codes are decoded for it alone.
inline void multiply_fused(const QuantizedMatmulArgs& args, int rows, const uint8_t* x, const int32_t* x_sums,
                           const BlockOfTask& block, VecF* sums) {
  const float* floats = reinterpret_cast<const float*>(x) + block.columns.first * rows;
  switch (args.scheme) {
    case Scheme::kInt8WeightOnly: return multiply_fused_floats<Int8Codes>(rows, floats, block, sums);
    case Scheme::kFp8Block: return multiply_fused_floats<Fp8Codes>(rows, floats, block, sums);
    case Scheme::kInt4WeightOnly:
      return args.zero_point == nullptr ? multiply_fused_floats<Int4Codes<false>>(rows, floats, block, sums)
                                        : multiply_fused_floats<Int4Codes<true>>(rows, floats, block, sums);
    default: break;
  }
  const int8_t* codes = reinterpret_cast<const int8_t*>(x) + block.columns.first * rows;
  const int64_t dwords = (block.columns.end - block.columns.first + 7) / 8;
  if (block.panels == 2) return multiply_turned_nibbles<1, 2>(codes, dwords, x_sums, block.panel, sums);
  switch (rows) {
    case 1: return multiply_turned_nibbles<1, 1>(codes, dwords, x_sums, block.panel, sums);
    case 2: return multiply_turned_nibbles<2, 1>(codes, dwords, x_sums, block.panel, sums);
    default: return multiply_turned_nibbles<4, 1>(codes, dwords, x_sums, block.panel, sums);
  }
}

// Codes of the first panel, for many rows.
inline void unpack(const QuantizedMatmulArgs& args, const BlockOfTask& block, void* to) {
  const PanelBlock& panel = block.panel[0];
  const int64_t columns = block.columns.end - block.columns.first;
  VecF* floats = static_cast<VecF*>(to);
  switch (args.scheme) {
    case Scheme::kInt4Dynamic: return unpack_nibbles(panel.turned, (columns + 7) / 8, static_cast<Bytes*>(to));
    case Scheme::kInt8WeightOnly: return unpack_floats<Int8Codes>(panel.turned, columns, panel.zero, floats);
    case Scheme::kFp8Block: return unpack_floats<Fp8Codes>(panel.turned, columns, panel.zero, floats);
    case Scheme::kInt4WeightOnly:
      return panel.zero == nullptr ? unpack_floats<Int4Codes<false>>(panel.turned, columns, panel.zero, floats)
                                   : unpack_floats<Int4Codes<true>>(panel.turned, columns, panel.zero, floats);
    default: return;  // int8 codes by int8 codes need no unpacking
  }
}

template <int rows>
inline void multiply_unpacked(const QuantizedMatmulArgs& args, const uint8_t* x, const int32_t* x_sums,
                              const BlockOfTask& block, void* sums) {
  const int64_t first = block.columns.first, columns = block.columns.end - first;
  const int8_t* codes = reinterpret_cast<const int8_t*>(x) + first * rows;
  if (is_int8_by_int8(args.scheme)) {
    multiply_codes<rows>(codes, (columns + 3) / 4, block.panel[0], static_cast<VecI*>(sums));
  } else if (args.scheme == Scheme::kInt4Dynamic) {
    multiply_nibbles<rows>(codes, (columns + 7) / 8, x_sums, block.panel[0], static_cast<VecF*>(sums));
  } else {
    const float* floats = reinterpret_cast<const float*>(x) + first * rows;
    multiply_floats<rows>(floats, columns, block.panel[0], static_cast<VecF*>(sums));
  }
}

inline void multiply_unpacked(const QuantizedMatmulArgs& args, int rows, const uint8_t* x, const int32_t* x_sums,
                              const BlockOfTask& block, void* sums) {
  switch (rows) {
    case 1: return multiply_unpacked<1>(args, x, x_sums, block, sums);
    case 2: return multiply_unpacked<2>(args, x, x_sums, block, sums);
    case 4: return multiply_unpacked<4>(args, x, x_sums, block, sums);
  }
  if constexpr (kTileRows == 6) multiply_unpacked<6>(args, x, x_sums, block, sums);
  if constexpr (kTileRows == 12) {
    rows == 8 ? multiply_unpacked<8>(args, x, x_sums, block, sums)
              : multiply_unpacked<12>(args, x, x_sums, block, sums);
  }
}

// Prepared tiles of a task, and its sums, [rows][panels][half].
struct PanelTask {
  const uint8_t* tiles;
  int64_t tile_bytes, rows, first_column;
  void* sums;
  char* scratch;
};

// Adds the products of columns [begin, end) to the sums of a task.
inline void add_panels(const QuantizedMatmulArgs& args, const PanelTask& task, int64_t begin, int64_t end) {
  const PanelScratch at(args);
  const int64_t panels = panels_of(args), padded = padded_columns(args);
  const bool codes_only = is_int8_by_int8(args.scheme), fused = task.rows <= kFusedRows && !codes_only;
  PanelRows rows[kMostPanels];
  for (int64_t p = 0; p < panels; ++p) {
    rows[p] = panel_rows(args, task.first_column + p * kPanelColumns);
    load_scales(args, rows[p], at.scale(task.scratch, p), at.zero(task.scratch, p));
  }
  BlockOfTask block{block_at(args, begin), count_blocks_before(args, begin), panels, {}};
  for (; block.columns.first < end; ++block.number) {
    const Columns columns = block.columns;
    for (int64_t p = 0; p < panels; ++p) {
      VecI* turned = at.turned(task.scratch, p);
      if (is_int4(args.scheme)) {
        turn_block<8>(args, rows[p], columns.first, columns.end, turned);
      } else if (codes_only) {
        turn_block<4, true>(args, rows[p], columns.first, columns.end, turned);
      } else {
        turn_block<4>(args, rows[p], columns.first, columns.end, turned);
      }
      const VecF* zero = args.zero_point == nullptr ? nullptr : at.zero(task.scratch, p) + 2 * columns.group;
      block.panel[p] = {turned, at.unpacked(task.scratch, panels), at.scale(task.scratch, p) + 2 * columns.group, zero};
    }
    if (!fused && !codes_only) unpack(args, block, at.unpacked(task.scratch, panels));
    for (int64_t row = 0; row < task.rows; row += kTileRows) {
      const int height = tile_height(min_of<int64_t>(kTileRows, task.rows - row));
      const uint8_t* x = task.tiles + row / kTileRows * task.tile_bytes + kHeadBytes;
      const int32_t* x_sums = reinterpret_cast<const int32_t*>(x + padded * height) + block.number * height;
      VecF* sums = static_cast<VecF*>(task.sums) + row * 2 * panels;
      fused ? multiply_fused(args, height, x, x_sums, block, sums)
            : multiply_unpacked(args, height, x, x_sums, block, sums);
    }
    if (columns.end < end)
      block.columns = block_at(args, columns.end);
    else
      break;
  }
}

}  // namespace
}  // namespace dskernels
