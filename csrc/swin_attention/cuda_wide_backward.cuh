// Backward of what is too large for cuda_backward.cuh: a kernel for the gradients of queries, which also leaves the
// sums of the softmax, and one for those of keys and values, which takes them. Equations as there.
#pragma once

#include "swin_attention/cuda_backward_kernel.cuh"
#include "swin_attention/cuda_wide_rows.cuh"

namespace dskernels {
namespace {

// Shared memory of a block.
template <class T>
struct WideTiles {
  int* places;
  T *rows, *columns;
  float *scores, *grads;     // 32 rows of scores and of their gradients
  float *q_norms, *k_norms;  // of the window's tokens
  float* along;              // of 32 rows: sums of the products of gradients and rows
  float* stats[3];           // of the window's queries: largest, 1 / sum, delta

  __device__ explicit WideTiles(int columns_count) {
    SharedCarver carver;
    places = carver.take<int>(columns_count);
    rows = carver.take<T>(kWideRows * kChunkStride<T>);
    columns = carver.take<T>(kWideColumns * kChunkStride<T>);
    scores = carver.take<float>(kWideRows * score_stride(columns_count));
    grads = carver.take<float>(kWideRows * score_stride(columns_count));
    q_norms = carver.take<float>(columns_count);
    k_norms = carver.take<float>(columns_count);
    along = carver.take<float>(kWideRows);
    for (float*& x : stats) x = carver.take<float>(columns_count);
  }

  static int bytes(int columns_count) {
    return shared_bytes<int>(columns_count) + shared_bytes<T>(kWideRows * kChunkStride<T>) +
           shared_bytes<T>(kWideColumns * kChunkStride<T>) +
           2 * shared_bytes<float>(kWideRows * score_stride(columns_count)) + 5 * shared_bytes<float>(columns_count) +
           shared_bytes<float>(kWideRows);
  }
};

// One head of the four images of a call.
template <class T>
struct Operands {
  Operand<T> q, k, v, grad_out;

  __device__ Operands(const Backward& call, int head, const WideTiles<T>& shared, const float* seen)
      : q(of_qkv(call, head, 0, shared.q_norms)),
        k(of_qkv(call, head, 1, shared.k_norms)),
        v(of_qkv(call, head, 2, nullptr)),
        grad_out{Image<const T>(call.args.grad_out, head * call.args.forward.dim), call.reads_grad_by_16, false,
                 nullptr, seen} {}

  __device__ static Operand<T> of_qkv(const Backward& call, int head, int part, const float* norms) {
    const SwinAttentionArgs& args = call.args.forward;
    const Image<const T> image(args.qkv, (part * args.heads + head) * args.dim);
    return {image, call.reads_by_16, part < 2, norms, nullptr};
  }
};

// Writes the gradients of 32 rows of queries or keys `x`, weights * other: turned back and taken through the division
// by the norm. `part` of qkv.
template <class T>
__device__ inline void write_embedded(const Backward& call, const Wide<T>& wide, const WideTiles<T>& shared,
                                      const Operand<T>& x, const Operand<T>& other, int head, int part, int first_row) {
  const SwinAttentionArgs& args = call.args.forward;
  const Embedding& embedding = wide.embedding;
  const Image<T> result(call.args.grad_qkv, (part * args.heads + head) * args.dim);
  const int64_t origin = result.origin(args, call.grid, wide.cell), from = x.image.origin(args, call.grid, wide.cell);
  for (int chunk = 0; chunk < wide.dim; chunk += kChunk<T>) {
    float c[kChunkBlocks<T>][4], swapped[kChunkBlocks<T>][4] = {};
    wide.multiply_weights(c, shared.grads, other, chunk, false);
    // A second product spares a swap of components, which may be in another chunk.
    if (embedding.half > 0) wide.multiply_weights(swapped, shared.grads, other, chunk, true);
    wide.for_each_of_chunk(c, swapped, first_row, chunk, [&](int row, int d, float grad, float partner) {
      const int token = first_row + row;
      if (d < 2 * embedding.half) grad = embedding.turned(token, d, grad, partner, true);
      if (embedding.is_cosine) {
        const float inverse = x.inverse_norms[token];
        const float unit =
            to_float(x.image.data[from + x.image.offset(shared.places[token]) + d * x.image.stride[3]]) * inverse;
        // At the smallest norm the divisor is a constant.
        const float along = inverse < 1.0f / kSmallestNorm ? shared.along[row] : 0.0f;
        grad = (grad - along * unit) * inverse;
      }
      result.data[origin + result.offset(shared.places[token]) + d] = from_float<T>(grad * embedding.factor);
    });
  }
}

// P and dS of a row of scores, and what depends on them, for a query: as `softmax_backward` has them.
template <class T>
__device__ inline void query_row(const Wide<T>& wide, const WideTiles<T>& shared, const Bias& bias, int row,
                                 int first_row, float* stats, int64_t stats_stride, float* bias_part, bool adds) {
  const int query = first_row + row, lane = lane_index();
  const bool is_there = wide.cell.has(wide.places[query]);
  const float* products = shared.scores + row * score_stride(wide.columns);
  float* grads = shared.grads + row * score_stride(wide.columns);
  float p[kRowParts], delta = 0.0f, along = 0.0f;
  row_of_scores(p, wide, bias, products, query);
  const float largest = shift_of(largest_of_row(p)), sum = exponentiate_row(p, largest);
  const bool counts = is_there && sum != 0.0f;
  const float inverse = counts ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
    const int key = lane + kWarp * i;
    p[i] = counts && p[i] != 0.0f ? p[i] * inverse : 0.0f;
    delta += p[i] != 0.0f ? p[i] * grads[key] : 0.0f;
  }
  delta = sum_of_lanes(delta, kWarp);
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
    const int key = lane + kWarp * i;
    if (key >= wide.columns) continue;
    const float ds = p[i] != 0.0f ? p[i] * (grads[key] - delta) : 0.0f;
    grads[key] = ds;
    along += p[i] != 0.0f ? ds * products[key] : 0.0f;
    if (bias_part == nullptr || key >= wide.tokens || query >= wide.tokens) continue;
    float& to = bias_part[static_cast<int64_t>(query) * wide.tokens + key];
    to = adds ? to + ds : ds;
  }
  along = sum_of_lanes(along, kWarp);
  if (lane != 0) return;
  shared.along[row] = along;
  if (!is_there) return;
  stats[query] = largest;
  stats[stats_stride + query] = inverse;
  stats[2 * stats_stride + query] = delta;
}

// grad_q of 32 queries of one head in a run of cells, and the run's parts of the gradients of bias and logit_scale. Of
// the bias's, each is added to by one thread, where it lies. Grid: tiles of a window x heads x runs.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    swin_attention_wide_backward_queries(const __grid_constant__ Backward call) {
  const SwinAttentionArgs& args = call.args.forward;
  const int tokens = Bias::tokens_of_window(args), columns = score_columns(tokens);
  const int heads = static_cast<int>(args.heads), tiles = (tokens + kWideRows - 1) / kWideRows;
  const Work work(call.grid, tiles, heads, call.run);
  const int first_row = work.tile * kWideRows;
  const Embedding embedding(args, work.head);
  const Bias bias(args, work.head);
  const WideTiles<T> shared(columns);
  const Operands<T> x(call, work.head, shared, nullptr);
  const int64_t run = static_cast<int64_t>(blockIdx.x) / tiles / heads;
  float* bias_part =
      call.bias_parts == nullptr ? nullptr : call.bias_parts + (run * heads + work.head) * tokens * tokens;
  float logit_scale_sum = 0.0f;
  list_places(args, columns, shared.places);
  Cell cell(args, call.grid, work.first_cell);
  for (int i = 0; i < work.cells; ++i, cell.advance(args, call.grid)) {
    const Wide<T> wide{args,          call.grid,   embedding,     cell, tokens, columns, static_cast<int>(args.dim),
                       shared.places, shared.rows, shared.columns};
    __syncthreads();
    if (embedding.is_cosine) {
      wide.find_norms(shared.q_norms, x.q.image, first_row, kWideRows);
      wide.find_norms(shared.k_norms, x.k.image, 0, columns);
    }
    wide.multiply_rows(shared.scores, x.q, first_row, x.k);
    wide.multiply_rows(shared.grads, x.grad_out, first_row, x.v);
    __syncthreads();
    float* stats = call.stats + ((work.first_cell + i) * heads + work.head) * tokens;
#pragma unroll 1
    for (int row = warp_index(); row < kWideRows; row += kWarps) {
      query_row(wide, shared, bias, row, first_row, stats, call.grid.cells * heads * tokens, bias_part, i > 0);
    }
    __syncthreads();
    if (threadIdx.x < kWideRows) logit_scale_sum += shared.along[threadIdx.x];
    write_embedded(call, wide, shared, x.q, x.k, work.head, 0, first_row);
  }
  if (call.logit_scale_parts == nullptr) return;
  write_block_sum(logit_scale_sum, call.logit_scale_parts + (run * tiles + work.tile) * heads + work.head);
}

// The same for a key: P and dS of all queries, from what `query_row` has left.
template <class T>
__device__ inline void key_row(const Wide<T>& wide, const WideTiles<T>& shared, const Bias& bias, int row,
                               int first_row) {
  const int key = first_row + row;
  const bool is_there = wide.cell.has(wide.places[key]);
  float* weights = shared.scores + row * score_stride(wide.columns);
  float* grads = shared.grads + row * score_stride(wide.columns);
  float along = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
    const int query = lane_index() + kWarp * i;
    if (query >= wide.columns) continue;
    const bool is_pair = is_there && wide.cell.has(wide.places[query]) && shared.stats[1][query] != 0.0f;
    float p = 0.0f, ds = 0.0f;
    if (is_pair) {
      const float product = weights[query];
      const float score = product * wide.embedding.factor + (bias.data == nullptr ? 0.0f : bias.at(query, key));
      p = weight_of(score - shared.stats[0][query]) * shared.stats[1][query];
      ds = p != 0.0f ? p * (grads[query] - shared.stats[2][query]) : 0.0f;
      along += p != 0.0f ? ds * product : 0.0f;
    }
    weights[query] = p;
    grads[query] = ds;
  }
  along = sum_of_lanes(along, kWarp);
  if (lane_index() == 0) shared.along[row] = along;
}

// grad_k and grad_v of 32 keys of one head of a cell. Grid: tiles of a window x heads x cells.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    swin_attention_wide_backward_keys(const __grid_constant__ Backward call) {
  const SwinAttentionArgs& args = call.args.forward;
  const int tokens = Bias::tokens_of_window(args), columns = score_columns(tokens);
  const int heads = static_cast<int>(args.heads), tiles = (tokens + kWideRows - 1) / kWideRows;
  const Work work(call.grid, tiles, heads, 1);
  const int first_row = work.tile * kWideRows;
  const Embedding embedding(args, work.head);
  const Bias bias(args, work.head);
  const WideTiles<T> shared(columns);
  const Operands<T> x(call, work.head, shared, shared.stats[1]);
  const Cell cell(args, call.grid, work.first_cell);
  const Wide<T> wide{args,          call.grid,   embedding,     cell, tokens, columns, static_cast<int>(args.dim),
                     shared.places, shared.rows, shared.columns};
  list_places(args, columns, shared.places);
  __syncthreads();
  const int64_t at = (work.first_cell * heads + work.head) * tokens, stride = call.grid.cells * heads * tokens;
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    const bool is_there = cell.has(shared.places[i]);
    for (int s = 0; s < 3; ++s) shared.stats[s][i] = is_there ? call.stats[s * stride + at + i] : 0.0f;
  }
  if (embedding.is_cosine) {
    wide.find_norms(shared.q_norms, x.q.image, 0, columns);
    wide.find_norms(shared.k_norms, x.k.image, first_row, kWideRows);
  }
  wide.multiply_rows(shared.scores, x.k, first_row, x.q);
  wide.multiply_rows(shared.grads, x.v, first_row, x.grad_out);
  __syncthreads();
#pragma unroll 1
  for (int row = warp_index(); row < kWideRows; row += kWarps) key_row(wide, shared, bias, row, first_row);
  const Image<T> result(call.args.grad_qkv, (2 * args.heads + work.head) * args.dim);
  const int64_t origin = result.origin(args, call.grid, cell);
  for (int chunk = 0; chunk < wide.dim; chunk += kChunk<T>) {
    float c[kChunkBlocks<T>][4];
    wide.multiply_weights(c, shared.scores, x.grad_out, chunk, false);
    wide.for_each_of_chunk(c, c, first_row, chunk, [&](int row, int d, float value, float) {
      result.data[origin + result.offset(shared.places[first_row + row]) + d] = from_float<T>(value);
    });
  }
  write_embedded(call, wide, shared, x.k, x.q, work.head, 1, first_row);
}

template <class T>
void launch_wide_backward(const Backward& call, void* stream) {
  const SwinAttentionArgs& args = call.args.forward;
  const int64_t tiles = ceil_div(tokens_of(args), kWideRows) * args.heads;
  const int bytes = WideTiles<T>::bytes(score_columns(tokens_of(args)));
  const dim3 runs = grid_of(ceil_div(call.grid.cells, call.run) * tiles);
  launch(swin_attention_wide_backward_queries<T>, runs, kThreads, bytes, stream, call);
  launch(swin_attention_wide_backward_keys<T>, grid_of(call.grid.cells * tiles), kThreads, bytes, stream, call);
}

}  // namespace
}  // namespace dskernels
