// The CUDA kernels of quantized_matmul as the binding calls them. All pointers are of the current device, `stream` is a
// cudaStream_t of it; nothing waits for the device.
//
// `prepared` has as many bytes as `..._scratch_bytes` says, 64-byte aligned and full of anything. Unlike on the CPU
// nobody has looked at the values of `input_order`: the kernels read and write nothing outside of a row whatever they
// are. An activation that a wrong one names is NaN.
#pragma once

#include "quantized_matmul/args.h"

namespace dskernels {

// Blocks that fill a GPU: two for each multiprocessor of a large one. A number and not the device's own, since sums of
// split products follow the splits, and bits should not change with the machine.
constexpr int64_t kEnoughBlocks = 264;

// out = x @ W^T + bias for kInt8Dynamic, kInt8Static and kInt4Dynamic.
int64_t quantized_matmul_integer_scratch_bytes(const QuantizedMatmulArgs& args);
void quantized_matmul_integer_cuda(const QuantizedMatmulArgs& args, void* stream);

// The same for kInt8WeightOnly, kInt4WeightOnly and kFp8Block.
int64_t quantized_matmul_float_scratch_bytes(const QuantizedMatmulArgs& args);
void quantized_matmul_float_cuda(const QuantizedMatmulArgs& args, void* stream);

// Whether so many rows are better served by `dequantize_cuda` and torch's own product. Of the float schemes alone.
bool quantized_matmul_wants_dense_weight(const QuantizedMatmulArgs& args);

// Writes the weight that the codes stand for, for every scheme: dense [out_features, in_features] in the order of the
// input features, each computed in float32 and rounded to `element`. Of args it reads the fields of the weight,
// input_order and element.
void dequantize_cuda(const QuantizedMatmulArgs& args, void* weight, void* stream);

}  // namespace dskernels
