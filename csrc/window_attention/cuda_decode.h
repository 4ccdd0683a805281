// What the CUDA kernel of window attention over a cache takes, and its launch: plain data, no torch.
#pragma once

#include "window_attention/cuda.h"

namespace dskernels {

// Caches are call.k and call.v, as in WindowAttentionDecodeArgs: len_k slots, whose dtype need not be that of q and
// out. The queries stand at the end of their sequence: query_offset, positions, bias and packed offsets are not used.
struct WindowAttentionCudaDecode : WindowAttentionCuda {
  // [batch], every length_stride elements, int64 or, where not wide, int32. Nobody has looked at them: one that does
  // not fit the cache sees what is left in it, and reads nothing outside.
  const void* lengths;
  int64_t length_stride;
  bool wide_lengths;
  // Parts that the keys of a tile of rows are divided into, and room for what comes of each; null for one part.
  int splits;
  float* partial;
};

// By shapes alone, on the current device.
int window_attention_splits_cuda(const WindowAttentionArgs& call);

// Floats of `partial`.
int64_t window_attention_partial_cuda(const WindowAttentionCudaDecode& args);

// Writes all of out and lse, which are not empty.
void window_attention_decode_cuda(const WindowAttentionCudaDecode& args, void* stream);

}  // namespace dskernels
