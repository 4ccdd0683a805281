// The kernel of cuda_backward.cuh, and the last sum over blocks.
#pragma once

#include "swin_attention/cuda_backward.cuh"

namespace dskernels {
namespace {

// Makes zeros of those of a warp's 16 rows that see nothing: what comes back to them counts for nothing, be it NaN.
template <class T, int kDim>
__device__ inline void hide_rows(T* rows, const Seeing& sees) {
  if (!__any_sync(kAllLanes, !sees.row[0] || !sees.row[1])) return;
  // Others have read what is written here.
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    T* row = rows + (lane_index() / 4 + 8 * h) * kTileStride<T, kDim>;
    for (int d = lane_index() % 4; d < kDim && !sees.row[h]; d += 4) row[d] = from_float<T>(0.0f);
  }
}

// Writes the sum over the block of `x`. Has a barrier.
__device__ inline void write_block_sum(float x, float* sum) {
  SIMT_SHARED(of_warps, float[kWarps]);
  x = sum_of_lanes(x, kWarp);
  if (lane_index() == 0) of_warps[warp_index()] = x;
  __syncthreads();
  if (threadIdx.x != 0) return;
  *sum = of_warps[0];
  for (int i = 1; i < kWarps; ++i) *sum += of_warps[i];
}

// Begins to copy the rows of a cell.
template <class T, int kDim>
__device__ inline void copy_cell(const Backward& call, const BackwardTiles<T, kDim>& shared, const Work& work,
                                 const Cell& cell) {
  const SwinAttentionArgs& args = call.args.forward;
  const int dim = static_cast<int>(args.dim);
  const Image<const T> qkv(args.qkv, work.head * args.dim), grads(call.args.grad_out, work.head * args.dim);
  const int64_t part = args.heads * args.dim * args.qkv.stride[3];
  copy_tokens<T, kDim, 3>(shared.qkv, qkv, part, qkv.origin(args, call.grid, cell), cell, shared.places, dim,
                          call.reads_by_16);
  copy_tokens<T, kDim, 1>(shared.grad_out, grads, 0, grads.origin(args, call.grid, cell), cell, shared.places, dim,
                          call.reads_grad_by_16);
  ptx::cp_async_commit();
}

// The part of a cell that is the warp's by its 16 queries: leaves P and dS in shared memory and adds up the gradients
// of the bias. grad_q, which is zeros before, is yet to be multiplied by the factor.
template <class T, int kDim, class BiasOf>
__device__ inline void take_queries(float (&grad_q)[kDim / 8][4], const BackwardTiles<T, kDim>& shared,
                                    const Cell& cell, float factor, const BiasOf& bias_of, bool grads_bias,
                                    int blocks) {
  constexpr int kElements = kTileElements<T, kDim>;
  const int row = kRowsOfWarp * warp_index();
  const T *k = shared.qkv + kElements, *v = k + kElements;
  T* grad_out = shared.grad_out + row * kTileStride<T, kDim>;
  T* weights = shared.weights + row * kWeightStride<T>;
  const int* own_places = shared.places + row + lane_index() / 4;
  const bool there[2] = {cell.has(own_places[0]), cell.has(own_places[8])};
  Scores p, ds;
  multiply_rows<T, kDim>(p, shared.qkv + row * kTileStride<T, kDim>, k, blocks);
  finish_scores(p, factor, bias_of, tokens_there(cell, shared.places));
  multiply_rows<T, kDim>(ds, grad_out, v, blocks);
  const Seeing sees = softmax_backward(p, ds, there);
  hide_rows<T, kDim>(grad_out, sees);
  if (grads_bias) BiasSums(shared.grad_bias).add(ds);
  store_weights<T>(weights, p);
  store_weights<T>(weights + kTileTokens * kWeightStride<T>, ds);
  multiply_accumulators<T, kDim>(grad_q, ds, k, blocks);
}

// grad_qkv of one head in a run of cells, and the run's parts of the other gradients. Grid: heads x runs. The four
// warps take 16 queries each for P, dS and grad_q, leave P and dS in shared memory, and take 16 keys each for grad_k
// and grad_v, so that nothing is multiplied twice. While results are turned back and stored, the next cell is copied.
// Bound by bytes: qkv and grad_out are read once, grad_qkv is written once.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 32 && sizeof(T) == 2 ? 3 : 2)
    swin_attention_backward(const __grid_constant__ Backward call) {
  const SwinAttentionArgs& args = call.args.forward;
  const int tokens = Bias::tokens_of_window(args), blocks = (tokens + 15) / 16;
  const int dim = static_cast<int>(args.dim), heads = static_cast<int>(args.heads);
  const Work work(call.grid, 1, heads, call.run);
  const int64_t channel = work.head * args.dim, channels = args.heads * args.dim;
  const Embedding embedding(args, work.head);
  const Bias bias(args, work.head);
  const bool keeps_bias = kKeepsBias<T> && bias.data != nullptr;
  const BackwardTiles<T, kDim> shared(keeps_bias, call.bias_parts != nullptr);
  const KeptBias kept(shared.bias);
  const BiasSums bias_sums(shared.grad_bias);
  const int warp_row = kRowsOfWarp * warp_index();
  const bool has_rows = warp_row < tokens;
  list_places(args, kTileTokens, shared.places);
  if (keeps_bias) kept.keep(bias, warp_row);
  if (call.bias_parts != nullptr) bias_sums.clear();
  __syncthreads();

  const auto bias_of = [&](int n) {
    if (keeps_bias) return kept.of_block(n);
    return bias.data == nullptr ? float4{0.0f, 0.0f, 0.0f, 0.0f} : bias.of_block(n, warp_row, 0);
  };
  Cell cell(args, call.grid, work.first_cell);
  float logit_scale_sum = 0.0f;
  copy_cell<T, kDim>(call, shared, work, cell);
  for (int left = work.cells; left > 0; --left, cell.advance(args, call.grid)) {
    float grad_q[kDim / 8][4] = {}, grad_k[kDim / 8][4], grad_v[kDim / 8][4];
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (!embedding.is_identity()) {
      embed_rows<T, kTileTokens, kTileStride<T, kDim>>(embedding, shared.qkv, 0, tokens, dim);
      embed_rows<T, kTileTokens, kTileStride<T, kDim>>(embedding, shared.qkv + kTileElements<T, kDim>, 0, tokens, dim);
      __syncthreads();
    }
    if (has_rows) {
      take_queries<T, kDim>(grad_q, shared, cell, embedding.factor, bias_of, call.bias_parts != nullptr, blocks);
    }
    __syncthreads();
    if (has_rows) {
      multiply_transposed<T, kDim>(grad_v, shared.weights, warp_row, shared.grad_out, blocks);
      multiply_transposed<T, kDim>(grad_k, shared.weights + kTileTokens * kWeightStride<T>, warp_row, shared.qkv,
                                   blocks);
    }
    __syncthreads();
    if (left > 1) {
      Cell next = cell;
      next.advance(args, call.grid);
      copy_cell<T, kDim>(call, shared, work, next);
    }
    if (!has_rows) continue;
    const Rows<T, kDim> rows{call,     embedding,
                             cell,     shared.places,
                             warp_row, shared.staging + warp_row * BackwardTiles<T, kDim>::kStagingStride};
    logit_scale_sum += rows.store_embedded(grad_q, channel);
    rows.store_embedded(grad_k, channels + channel);
    rows.store(grad_v, 2 * channels + channel);
  }
  const int64_t part = static_cast<int64_t>(blockIdx.x);
  if (call.bias_parts != nullptr) bias_sums.write(call.bias_parts + part * tokens * tokens, tokens, warp_row);
  if (call.logit_scale_parts != nullptr) write_block_sum(logit_scale_sum, call.logit_scale_parts + part);
}

constexpr int kSumThreads = 256, kSumSlices = kSumThreads / kWarp;

// sums[i] = the sum over `count` parts of parts[part][i], in a fixed order. Grid: 32 sums a block, each by eight
// threads that take every eighth part.
__global__ void __launch_bounds__(kSumThreads)
    swin_attention_sum_parts(const float* parts, int64_t count, int64_t elements, float* sums) {
  SIMT_SHARED(slices, float[kSumSlices][kWarp]);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarp + lane_index();
  float sum = 0.0f;
  if (i < elements) {
    for (int64_t part = warp_index(); part < count; part += kSumSlices) sum += parts[part * elements + i];
  }
  slices[warp_index()][lane_index()] = sum;
  __syncthreads();
  if (warp_index() != 0 || i >= elements) return;
  for (int slice = 1; slice < kSumSlices; ++slice) sum += slices[slice][lane_index()];
  sums[i] = sum;
}

inline void launch_sum_parts(const float* parts, int64_t count, int64_t elements, float* sums, void* stream) {
  launch(swin_attention_sum_parts, grid_of(ceil_div(elements, kWarp)), kSumThreads, 0, stream, parts, count, elements,
         sums);
}

template <class T, int kDim>
void launch_backward(const Backward& call, void* stream) {
  const SwinAttentionArgs& args = call.args.forward;
  const dim3 grid = grid_of(ceil_div(call.grid.cells, call.run) * args.heads);
  const int bytes = BackwardTiles<T, kDim>::bytes(kKeepsBias<T> && args.bias != nullptr, call.bias_parts != nullptr);
  launch(swin_attention_backward<T, kDim>, grid, kThreads, bytes, stream, call);
}

}  // namespace
}  // namespace dskernels
