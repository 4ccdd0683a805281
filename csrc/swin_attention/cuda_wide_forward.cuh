// Forward of heads that are too wide for cuda_forward.cuh.
#pragma once

#include "swin_attention/cuda_forward.cuh"
#include "swin_attention/cuda_wide_rows.cuh"

namespace dskernels {
namespace {

// `out` of 32 queries of one head of one cell. Grid: tiles of a window x heads x cells. Bound by shared memory, through
// which its scores go.
template <class T>
__global__ void __launch_bounds__(kThreads, 5) swin_attention_wide_forward(const __grid_constant__ Forward call) {
  const SwinAttentionArgs& args = call.args;
  const int tokens = Bias::tokens_of_window(args), columns = score_columns(tokens);
  const int heads = static_cast<int>(args.heads), tiles = (tokens + kWideRows - 1) / kWideRows;
  const Work work(call.grid, tiles, heads, 1);
  const int first_row = work.tile * kWideRows;
  const Embedding embedding(args, work.head);
  const Bias bias(args, work.head);
  const Image<T> result(args.out, work.head * args.dim);
  SharedCarver carver;
  int* places = carver.take<int>(columns);
  T* rows_tile = carver.take<T>(kWideRows * kChunkStride<T>);
  T* columns_tile = carver.take<T>(kWideColumns * kChunkStride<T>);
  float* scores = carver.take<float>(kWideRows * score_stride(columns));
  float* q_norms = carver.take<float>(columns);
  float* k_norms = carver.take<float>(columns);
  float* inverse = carver.take<float>(kWideRows);
  const Cell cell(args, call.grid, work.first_cell);
  const Wide<T> wide{args,   call.grid, embedding,   cell, tokens, columns, static_cast<int>(args.dim),
                     places, rows_tile, columns_tile};
  const auto operand = [&](int part, const float* norms) {
    const Image<const T> image(args.qkv, (part * args.heads + work.head) * args.dim);
    return Operand<T>{image, call.reads_by_16, part < 2, norms, nullptr};
  };
  const Operand<T> q = operand(0, q_norms), k = operand(1, k_norms), v = operand(2, nullptr);
  list_places(args, columns, places);
  __syncthreads();
  if (embedding.is_cosine) {
    wide.find_norms(q_norms, q.image, first_row, kWideRows);
    wide.find_norms(k_norms, k.image, 0, columns);
  }
  wide.multiply_rows(scores, q, first_row, k);
  __syncthreads();
#pragma unroll 1
  for (int row = warp_index(); row < kWideRows; row += kWarps) {
    float x[kRowParts];
    float* weights = scores + row * score_stride(columns);
    row_of_scores(x, wide, bias, weights, first_row + row);
    const float sum = exponentiate_row(x, shift_of(largest_of_row(x)));
#pragma unroll
    for (int i = 0; i < kRowParts; ++i) {
      if (lane_index() + kWarp * i < columns) weights[lane_index() + kWarp * i] = x[i];
    }
    if (lane_index() == 0) inverse[row] = sum == 0.0f ? 0.0f : 1.0f / sum;
  }
  const int64_t origin = result.origin(args, call.grid, cell);
  for (int chunk = 0; chunk < wide.dim; chunk += kChunk<T>) {
    float c[kChunkBlocks<T>][4];
    wide.multiply_weights(c, scores, v, chunk, false);
    wide.for_each_of_chunk(c, c, first_row, chunk, [&](int row, int d, float value, float) {
      // A row that sees nothing met the values of the others with weights of 0, and they may be NaN.
      const float out = inverse[row] == 0.0f ? 0.0f : value * inverse[row];
      result.data[origin + result.offset(places[first_row + row]) + d] = from_float<T>(out);
    });
  }
}

template <class T>
void launch_wide_forward(const SwinAttentionArgs& args, void* stream) {
  const CellGrid grid(args);
  const int tokens = tokens_of(args), columns = score_columns(tokens);
  const int64_t blocks = grid.cells * args.heads * ceil_div(tokens, kWideRows);
  const Forward call{args, grid, 1, moves_by_16<T>(args.qkv, args.dim), true};
  const int bytes = shared_bytes<int>(columns) + shared_bytes<T>(kWideRows * kChunkStride<T>) +
                    shared_bytes<T>(kWideColumns * kChunkStride<T>) +
                    shared_bytes<float>(kWideRows * score_stride(columns)) + 2 * shared_bytes<float>(columns) +
                    shared_bytes<float>(kWideRows);
  launch(swin_attention_wide_forward<T>, grid_of(blocks), kThreads, bytes, stream, call);
}

}  // namespace
}  // namespace dskernels
