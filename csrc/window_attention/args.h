// What the window attention kernels take: plain data, so that a caller needs no torch.
#pragma once

#include <cstdint>

#include "common/elements.h"

namespace dskernels {

// Stands for "no bound"; half of the type's range, so that sums with positions cannot overflow.
constexpr int64_t kUnbounded = int64_t{1} << 61;

struct WindowAttentionArgs {
  int64_t batch, heads_q, heads_kv, len_q, len_k, dim_qk, dim_v;
  // Query i stands at position p = i + query_offset and sees key j iff -left <= j - p <= right.
  int64_t left, right, query_offset;
  float scale;
  // Tables [positions, rotary_dim / 2]; rotary_dim is 0 without rotary embedding.
  const float* cos;
  const float* sin;
  int64_t rotary_dim;
  bool interleaved;
  // [batch, len_k], the table's row for each key and for the query at its position; or null: row p for position p.
  const int64_t* positions;
  // scores -> softcap * tanh(scores / softcap); 0 is no cap.
  float softcap;
  // [heads_q] logits that join the softmax and attend nothing, or null.
  const float* sink;
  View4 q, k, v, out;
  // [batch, heads_q, len_q, len_k], added after the cap; data is null without it.
  View4 bias;
  // [batch, heads_q, len_q], rows dense, natural logarithm; the strides hold for grad_lse too.
  float* lse;
  int64_t lse_stride_batch, lse_stride_head;
};

struct WindowAttentionBackwardArgs {
  WindowAttentionArgs forward;  // out and lse hold the forward's results
  View4 grad_out, grad_q, grad_k, grad_v;
  const float* grad_lse;  // [batch, heads_q, len_q], strided as lse is, or null
  float* grad_bias;       // [batch, heads_q, len_q, len_k], contiguous, written where a key is seen; or null
  float* shared;          // `shared_bytes` of the plan: gradients of keys that two chunks see
};

// Key and value caches are forward.k and forward.v, whose len_k slots hold position p in slot p mod len_k. Queries are
// the last len_q tokens of their sequence; positions, bias and query_offset are not used.
struct WindowAttentionDecodeArgs {
  WindowAttentionArgs forward;
  const int64_t* lengths;  // [batch], tokens of each sequence
  bool keys_rotated;       // keys were turned to their positions when they were stored
  float* partial;          // `shared_bytes` of the plan
};

// How a call divides into independent tasks. It depends on shapes alone, never on the number of threads, so neither
// do the results.
struct WindowAttentionPlan {
  int64_t tasks;
  int64_t scratch_bytes;  // for each task that runs, 64-byte aligned
  int64_t merge_tasks;    // backward and decode: run after all tasks
  int64_t shared_bytes;   // backward and decode: of one buffer for all tasks
};

struct WindowAttentionKernels {
  WindowAttentionPlan (*plan)(const WindowAttentionArgs&);
  void (*run)(const WindowAttentionArgs&, int64_t task, void* scratch);
  WindowAttentionPlan (*plan_backward)(const WindowAttentionArgs&);
  void (*run_backward)(const WindowAttentionBackwardArgs&, int64_t task, void* scratch);
  void (*merge_backward)(const WindowAttentionBackwardArgs&, int64_t task, void* scratch);
  WindowAttentionPlan (*plan_decode)(const WindowAttentionArgs&);
  void (*run_decode)(const WindowAttentionDecodeArgs&, int64_t task, void* scratch);
  void (*merge_decode)(const WindowAttentionDecodeArgs&, int64_t task, void* scratch);
};

}  // namespace dskernels
