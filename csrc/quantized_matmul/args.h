// What the quantized matmul kernels take: plain data, so that a caller needs no torch.
#pragma once

#include <cstdint>

#include "common/elements.h"

namespace dskernels {

// In the order of SCHEMES in dskernels/quantized_matmul/weight.py, which says what the codes stand for.
enum class Scheme : int32_t { kInt8Dynamic, kInt8Static, kInt8WeightOnly, kInt4Dynamic, kInt4WeightOnly, kFp8Block };

struct QuantizedMatmulArgs {
  Scheme scheme;
  int64_t rows, in_features, out_features;
  // x: [rows, in_features]; strides count elements.
  const void* x;
  int64_t x_stride_row, x_stride_column;
  Element element;  // of x and out
  // [out_features, row_bytes], dense.
  const uint8_t* qweight;
  int64_t row_bytes;
  // int8: [out_features]; int4: [out_features, groups]; fp8: [blocks of 128 rows, groups], groups being blocks of 128.
  const float* scale;
  int64_t group_size, groups;
  const uint8_t* zero_point;   // as scale, or null: 8
  const float* input_scale;    // one value, for kInt8Static
  const int64_t* input_order;  // [in_features] indices that the binding has checked, or null
  const void* bias;            // [out_features], or null
  Element bias_element;
  int64_t bias_stride;
  void* out;  // [rows, out_features], dense
  // `tiles * tile_bytes` of the plan, 64-byte aligned: activations as the kernels read them.
  uint8_t* prepared;
};

// How a call divides into independent tasks. It depends on shapes and the tier alone, never on the number of threads.
struct QuantizedMatmulPlan {
  int64_t tiles, tile_rows, tile_bytes;  // of x, prepared tile by tile
  int64_t prepare_scratch;               // bytes, for each tile that is being prepared
  int64_t task_rows, task_columns;
  int64_t row_blocks, column_blocks;  // tasks, in rows and in columns
  int64_t scratch_bytes;              // for each task that runs, 64-byte aligned
  bool serial;                        // done by one thread before a second has woken up
};

struct QuantizedMatmulKernels {
  QuantizedMatmulPlan (*plan)(const QuantizedMatmulArgs&);
  // Writes one tile of `prepared`.
  void (*prepare)(const QuantizedMatmulArgs&, const QuantizedMatmulPlan&, int64_t tile, void* scratch);
  // Writes one block of `out`, from the prepared rows of the block. Task t is row block t / column_blocks.
  void (*run)(const QuantizedMatmulArgs&, const QuantizedMatmulPlan&, int64_t task, void* scratch);
};

}  // namespace dskernels
