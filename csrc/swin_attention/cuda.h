// The CUDA kernels of Swin attention as their binding calls them: from tensors on the GPU (in the emulator, on the CPU)
// to work put on a stream.
#pragma once

#include "swin_attention/args.h"

namespace dskernels {

// Writes `out`, which is dense.
void run_swin_attention(const SwinAttentionArgs& args, void* stream);

// How many floats the backward needs at `shared`. Depends on the shapes and the current device alone.
int64_t swin_attention_backward_floats(const SwinAttentionBackwardArgs& args);

// Writes `grad_qkv`, which is dense, and those of `grad_bias` and `grad_logit_scale` that are not null. All images are
// of one dtype.
void run_swin_attention_backward(const SwinAttentionBackwardArgs& args, void* stream);

}  // namespace dskernels
