// What the Swin attention kernels take: plain data, so that a caller needs no torch.
#pragma once

#include <cstdint>

#include "common/elements.h"

namespace dskernels {

struct SwinAttentionArgs {
  int64_t batch, height, width, heads, dim;
  int64_t window_height, window_width;
  int64_t shift_height, shift_width;  // where the grid of windows starts in the image
  float scale;
  const float* logit_scale;  // [heads], or null: with it, cosine attention, and scale is not used
  // Tables [tokens of a window, rotary_dim / 2], for head h at h * table_stride; rotary_dim is 0 without rotation.
  const float* cos;
  const float* sin;
  int64_t table_stride, rotary_dim;
  bool interleaved;
  // [heads, query, key] for the tokens of a window, rows dense; or null.
  const float* bias;
  int64_t bias_stride_head, bias_stride_query;
  View4 qkv;  // [batch, height, width, 3 * heads * dim]: queries, keys, values
  View4 out;  // [batch, height, width, heads * dim]; not used by the backward
};

struct SwinAttentionBackwardArgs {
  SwinAttentionArgs forward;
  View4 grad_out;           // as out
  View4 grad_qkv;           // as qkv
  float* grad_bias;         // [heads, query, key], contiguous, or null
  float* grad_logit_scale;  // [heads], or null
  float* shared;            // `shared_floats` of the plan: each task's part of the two
};

// How a call divides into independent tasks. It depends on shapes alone, never on the number of threads, so neither
// do the results.
struct SwinAttentionPlan {
  int64_t tasks;
  int64_t scratch_bytes;  // for each task that runs, 64-byte aligned
  int64_t shared_floats;  // backward: of one buffer for all tasks; without a bias and a logit_scale to differentiate, 0
  int64_t merge_tasks;    // backward: run after all tasks
};

struct SwinAttentionKernels {
  SwinAttentionPlan (*plan)(const SwinAttentionArgs&);
  void (*run)(const SwinAttentionArgs&, int64_t task, void* scratch);
  SwinAttentionPlan (*plan_backward)(const SwinAttentionBackwardArgs&);
  void (*run_backward)(const SwinAttentionBackwardArgs&, int64_t task, void* scratch);
  void (*merge_backward)(const SwinAttentionBackwardArgs&, int64_t task);
};

}  // namespace dskernels
