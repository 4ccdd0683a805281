// What the backward pass needs before its two large kernels: queries turned, and delta.
#pragma once

#include "window_attention/cuda_backward.h"
#include "window_attention/cuda_rope.cuh"

namespace dskernels {
namespace {

constexpr int kPrepareThreads = 256;
constexpr int kTurnedTile = 64;
// A row of delta is summed by so many lanes.
constexpr int kRowLanes = 8;
constexpr int kDeltaTile = kPrepareThreads / kRowLanes;

// As window_attention_turn_queries_cuda says. A tile of packed queries a block; grid: tile_count * batch * heads_kv.
// Bound by memory: a read and a write.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads)
    window_attention_turn_queries(const __grid_constant__ WindowAttentionCuda args, View4 to, int width, int tiles) {
  const int group = group_of(args.call);
  const BlockTile tile = tile_of_block(args, blockIdx.x, tiles, false, group, kTurnedTile);
  const int first = tile.index * kTurnedTile, count = min(tile.sequence.len_q * group - first, kTurnedTile);
  if (count <= 0) return;
  const int64_t head = static_cast<int64_t>(tile.head_kv) * group;
  const auto from = rows_of<const T>(args.call.q, tile.batch, head, tile.sequence.q_begin, group);
  const auto rows = rows_of<T>(to, tile.batch, head, tile.sequence.q_begin, group);
  load_turned<T, kPrepareThreads>(
      [&](int r) { return rows.at(first + r); }, count, width,
      TurnedRows<T>{from, first, count, static_cast<int>(args.call.dim_qk), rotation_of(args, tile, false)});
}

// The sum over columns of a row of grad_out times out, by kRowLanes lanes; the same in each of them.
template <class T>
__device__ inline float dot_rows(const T* x, int64_t x_stride, const T* y, int64_t y_stride, int columns, bool by_16) {
  constexpr int kVector = 16 / sizeof(T);
  const int lane = lane_index() % kRowLanes;
  float sum = 0.0f;
  int done = 0;
  if (by_16) {
    done = columns / kVector * kVector;
    for (int c = lane * kVector; c < done; c += kRowLanes * kVector) {
      float a[kVector], b[kVector];
      load_vector(x + c, a);
      load_vector(y + c, b);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum += a[i] * b[i];
    }
  }
  for (int c = done + lane; c < columns; c += kRowLanes) sum += to_float(x[c * x_stride]) * to_float(y[c * y_stride]);
  return sum_of_lanes(sum, kRowLanes);
}

// delta = rowsum(grad_out * out) - grad_lse, of kDeltaTile queries of a head a block; grid: `tiles` * batch * heads_q.
// Where a row has no softmax it is of no use, and may be NaN. Bound by memory: grad_out and out are read once.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads)
    window_attention_delta(const __grid_constant__ WindowAttentionCudaBackward args, int tiles) {
  const WindowAttentionArgs& call = args.forward.call;
  const int pair = blockIdx.x / tiles, heads = static_cast<int>(call.heads_q);
  const int batch = pair / heads, head = pair % heads;
  const int query = static_cast<int>(blockIdx.x) % tiles * kDeltaTile + static_cast<int>(threadIdx.x) / kRowLanes;
  const bool exists = query < call.len_q;
  const Rows<const T> grads = rows_of<const T>(args.grad_out, batch, head, 0, 1);
  const Rows<const T> outs = rows_of<const T>(call.out, batch, head, 0, 1);
  const float sum = dot_rows(grads.at(query), grads.column_stride, outs.at(query), outs.column_stride,
                             exists ? static_cast<int>(call.dim_v) : 0, grads.by_16() && outs.by_16());
  if (!exists || lane_index() % kRowLanes != 0) return;
  const int64_t at = batch * call.lse_stride_batch + head * call.lse_stride_head + query;
  args.delta[at] = args.grad_lse == nullptr ? sum : sum - args.grad_lse[at];
}

}  // namespace
}  // namespace dskernels
