// How what several have of one row becomes one: the warps of a block, and the splits of a tile.
#pragma once

#include "window_attention/cuda_decode_part.cuh"

namespace dskernels {

constexpr float kLn2 = 0.6931471805599453f;
// Of out's columns a lane has those of its number, and every 32nd from there on.
constexpr int kColumnsOfLane = 256 / kWarp;

// The largest score (base 2), the sum of the weights relative to it, and the weighted sum of values.
struct RowPart {
  float largest, total;
  const float* sums;
};

struct JoinedRow {
  float largest = -INFINITY, total = 0.0f;
  float sums[kColumnsOfLane] = {};
};

// Joins the parts at(0) to at(count - 1), in this order. All lanes of a warp call it and have largest and total.
template <class PartAt>
__device__ inline JoinedRow join_parts(int count, const PartAt& at, int columns) {
  JoinedRow row;
  for (int i = lane_index(); i < count; i += kWarp) row.largest = fmaxf(row.largest, at(i).largest);
  row.largest = largest_of_lanes(row.largest, kWarp);
  const float shift = shift_of(row.largest);
  // Several loads under way: what a long window costs here is their latency.
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const RowPart part = at(i);
    const float weight = ptx::exp2_approximate(part.largest - shift);
    row.total += weight * part.total;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const int column = lane_index() + c * kWarp;
      const float sum = column < columns ? part.sums[column] : 0.0f;
      // Where the row has seen nothing there may be NaN: of its neighbours' values, with weights of 0.
      row.sums[c] += part.total == 0.0f ? 0.0f : weight * sum;
    }
  }
  return row;
}

// Of `partial`: the three for each pair of a sequence and a key head, split and row.
struct Partials {
  float *largest, *total, *sums;
  int64_t rows, columns;
  int splits;

  __device__ int64_t at(int64_t pair, int split, int64_t row) const { return (pair * splits + split) * rows + row; }
  __device__ RowPart part(int64_t i) const { return {largest[i], total[i], sums + i * columns}; }
};

__host__ __device__ inline int64_t partial_rows(const WindowAttentionCudaDecode& args) {
  return args.call.batch * args.call.heads_q * args.call.len_q * args.splits;
}

__device__ inline Partials partials_of(const WindowAttentionCudaDecode& args) {
  const int64_t count = partial_rows(args);
  return {args.partial,
          args.partial + count,
          args.partial + 2 * count,
          args.call.heads_q / args.call.heads_kv * args.call.len_q,
          args.call.dim_v,
          args.splits};
}

// Writes what a split has of a row. All lanes of a warp call it.
__device__ inline void write_partial(const JoinedRow& row, const Partials& partials, int64_t at) {
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) {
    const int column = lane_index() + c * kWarp;
    if (column < partials.columns) partials.sums[at * partials.columns + column] = row.sums[c];
  }
  if (lane_index() != 0) return;
  partials.largest[at] = row.largest;
  partials.total[at] = row.total;
}

// Writes out and lse of a row that is complete but for the sink. All lanes of a warp call it.
__device__ inline void write_row(const JoinedRow& row, const WindowAttentionCudaDecode& args, int64_t pair, int index) {
  const WindowAttentionArgs& call = args.call;
  const int group = group_of(call), query = index / group;
  const int64_t batch = pair / call.heads_kv, head = pair % call.heads_kv * group + index % group;
  const float sink = call.sink == nullptr ? -INFINITY : call.sink[head] * kLog2E;
  const float largest = fmaxf(row.largest, sink), shift = shift_of(largest);
  const float weight = ptx::exp2_approximate(row.largest - shift);
  const float total = weight * row.total + ptx::exp2_approximate(sink - shift);
  const bool sees_nothing = total == 0.0f;
  const float factor = sees_nothing ? 0.0f : weight / total;
  const int64_t at = batch * call.out.stride[0] + head * call.out.stride[1] + query * call.out.stride[2];
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) {
    const int column = lane_index() + c * kWarp;
    if (column >= call.dim_v) continue;
    store_element(call.out.data, call.out.element, at + column * call.out.stride[3], factor * row.sums[c]);
  }
  if (lane_index() != 0) return;
  call.lse[batch * call.lse_stride_batch + head * call.lse_stride_head + query] =
      sees_nothing ? -INFINITY : largest * kLn2 + logf(total);
}

}  // namespace dskernels
