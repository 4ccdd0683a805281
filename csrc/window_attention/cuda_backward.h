// What the CUDA kernels of window attention's backward pass take, and how the binding launches them.
#pragma once

#include "window_attention/cuda.h"

namespace dskernels {

struct WindowAttentionCudaBackward {
  // `out` and `lse` hold the forward's results. With a table, q and k hold what has been turned already.
  WindowAttentionCuda forward;
  View4 grad_out, grad_q, grad_k, grad_v;
  const float* grad_lse;  // strided as lse is, or null
  float* grad_bias;       // [batch, heads_q, len_q, len_k], contiguous, written where a key is seen; or null
  float* delta;           // strided as lse is: scratch
};

// Writes the queries, turned to their positions, into `to`: [batch, heads_q, len_q, width], `width` being dim_qk in
// whole 16 bytes; rows are dense and 16-byte aligned, with zeros behind dim_qk.
void window_attention_turn_queries_cuda(const WindowAttentionCuda& args, const View4& to, int width, void* stream);

// Writes all of grad_q, grad_k and grad_v.
void window_attention_backward_cuda(const WindowAttentionCudaBackward& args, void* stream);

}  // namespace dskernels
