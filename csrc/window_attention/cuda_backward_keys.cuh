// The gradients of keys and values. Scores lie as [key][query], so that weights and their gradients are, as they leave
// the products, what the next ones take.
#pragma once

#include "window_attention/cuda_backward_rows.cuh"

namespace dskernels {
namespace {

// A tile of keys of one head and the queries that pass by: those that see one of the keys, of each head of the group.
template <class Tile>
struct KeyTile {
  using T = typename Tile::Type;
  const WindowAttentionCudaBackward& args;
  const WindowAttentionArgs& call;
  BlockTile block;
  int group, first, count;  // keys of the tile
  Span seeing;              // queries
  int tiles;                // of queries, a head

  __device__ KeyTile(const WindowAttentionCudaBackward& given, int block_tiles)
      : args(given),
        call(given.forward.call),
        block(tile_of_block(given.forward, blockIdx.x, block_tiles, true, 1, Tile::kRows)),
        group(group_of(call)),
        first(block.index * Tile::kRows),
        count(min(block.sequence.len_k - first, Tile::kRows)),
        seeing(block.sequence.queries_seeing(first, first + count - 1)),
        tiles(static_cast<int>(ceil_div(max(seeing.end - seeing.begin, 0), Tile::kOther))) {}

  __device__ int head(int i) const { return block.head_kv * group + i / tiles; }
  __device__ int first_query(int i) const { return seeing.begin + i % tiles * Tile::kOther; }

  // Turned keys that nobody sees have no memory: another key takes their place, for what is hidden anyway.
  __device__ void load_own(const BackwardShared<Tile>& shared) const {
    const Span seen = block.sequence.keys_seen(0, block.sequence.len_q - 1);
    if (tiles == 0) return;
    load(shared.own_operand(0), call.k, call.dim_qk, seen);
    load(shared.own_operand(1), call.v, call.dim_v, seen);
  }

  // Tile i of queries. A query without a softmax, or that is not there, has an lse of -inf.
  __device__ void load_other(const BackwardShared<Tile>& shared, int i, int stage) const {
    const int query = first_query(i), rows = min(seeing.end - query, Tile::kOther);
    load(shared.other_operand(stage, 0), call.q, call.dim_qk, head(i), query, rows);
    load(shared.other_operand(stage, 1), args.grad_out, call.dim_v, head(i), query, rows);
    const int64_t at = block.batch * call.lse_stride_batch + head(i) * call.lse_stride_head + block.sequence.q_begin;
    for (int r = threadIdx.x; r < Tile::kOther; r += Tile::kThreads) {
      shared.lse(stage)[r] = r < rows ? call.lse[at + query + r] : -INFINITY;
      shared.delta(stage)[r] = r < rows ? args.delta[at + query + r] : 0.0f;
    }
  }

  __device__ bool is_seen(int row) const {
    const Span span = block.sequence.queries_seeing(first + row, first + row);
    return !span.is_empty();
  }

 private:
  __device__ void load(T* shared, const View4& view, int64_t columns, const Span& seen) const {
    const Rows<const T> from = rows_of<const T>(view, block.batch, block.head_kv, block.sequence.k_begin, 1);
    copy_tile<T, Tile::kThreads, Tile::kRows, Tile::kDim, Tile::kStride>(
        shared, [&](int r) { return from.at(min(max(first + r, seen.begin), seen.end - 1)); }, count,
        static_cast<int>(columns), from.column_stride, from.by_16());
  }

  __device__ void load(T* shared, const View4& view, int64_t columns, int head_q, int query, int rows) const {
    const Rows<const T> from = rows_of<const T>(view, block.batch, head_q, block.sequence.q_begin, 1);
    copy_tile<T, Tile::kThreads, Tile::kOther, Tile::kDim, Tile::kStride>(
        shared, [&](int r) { return from.at(query + r); }, rows, static_cast<int>(columns), from.column_stride,
        from.by_16());
  }
};

// Zeros in the rows of queries without a softmax: their gradients may be NaN, which a weight of 0 does not hide. Only a
// bias makes such queries among those that see a key.
template <class Tile>
__device__ inline void clear_blind(const BackwardShared<Tile>& shared, int stage) {
  using T = typename Tile::Type;
  for (int i = threadIdx.x; i < Tile::kOther * Tile::kDim; i += Tile::kThreads) {
    const int row = i / Tile::kDim, at = row * Tile::kStride + i % Tile::kDim;
    if (shared.lse(stage)[row] != -INFINITY) continue;
    shared.other_operand(stage, 0)[at] = from_float<T>(0.0f);
    shared.other_operand(stage, 1)[at] = from_float<T>(0.0f);
  }
}

// `weigh` for the products of the warp's keys with tile i of queries.
template <bool kPlain, class Tile>
__device__ inline void weigh_queries(Products<Tile>& scores, Products<Tile>& grads, const KeyTile<Tile>& tile,
                                     const BackwardShared<Tile>& shared, int i, int stage, const Place<Tile>& place,
                                     const Weighing& weighing) {
  const Sequence& sequence = tile.block.sequence;
  const View4& bias = tile.call.bias;
  const int key = tile.first + place.row, query = tile.first_query(i) + place.column;
  const unsigned width = sequence.stop - sequence.start;
  const float* bias_at = nullptr;
  if constexpr (!kPlain) {
    if (bias.data != nullptr) {
      bias_at = static_cast<const float*>(bias.data) + tile.block.batch * bias.stride[0] +
                tile.head(i) * bias.stride[1] + query * bias.stride[2] + key * bias.stride[3];
    }
  }
#pragma unroll
  for (int n = 0; n < Tile::kOther / 8; ++n) {
    const float2 lse = *reinterpret_cast<const float2*>(shared.lse(stage) + place.column + 8 * n);
    const float2 delta = *reinterpret_cast<const float2*>(shared.delta(stage) + place.column + 8 * n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 8 * (e / 2), column = 8 * n + e % 2;
      const float row_lse = e % 2 == 0 ? lse.x : lse.y;
      const unsigned ahead = key + row - (query + column) - sequence.start;
      const bool seen = ahead < width && row_lse != -INFINITY;
      float added = 0.0f;
      if constexpr (!kPlain) {
        if (bias_at != nullptr && seen && place.row + row < tile.count) {
          added = bias_at[column * bias.stride[2] + row * bias.stride[3]];
        }
      }
      weigh<kPlain>(scores[n][e], grads[n][e], seen, added, row_lse, e % 2 == 0 ? delta.x : delta.y, weighing);
    }
  }
}

// grad_v = P^T grad_out and grad_k = scale * dS^T q, turned back, of a tile of kRows keys of a head a block, over all
// queries that see them; grid: tile_count(of keys) * batch * heads_kv. `delta` has to be there. Writes every row of
// both gradients. Bound by the tensor cores: 4 products of kRows * kDim a query, for 2 rows of kDim read, most of them
// from L2.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, kBlocksWanted)
    window_attention_grad_keys(const __grid_constant__ WindowAttentionCudaBackward args, int tiles) {
  const KeyTile<Tile> tile(args, tiles);
  if (tile.count <= 0) return;
  const BackwardShared<Tile> shared;
  const Place<Tile> place;
  const Weighing weighing(tile.call);
  Gradients<Tile> grad_k = {}, grad_v = {};

  tile.load_own(shared);
  pass_by<Tile>(
      tile.tiles * tile.group, [&](int i, int stage) { tile.load_other(shared, i, stage); },
      [&](int i, int stage) {
        if (tile.call.bias.data != nullptr) {
          clear_blind<Tile>(shared, stage);
          __syncthreads();
        }
        Products<Tile> weights, grads;
        multiply_both<Tile>(weights, grads, shared, stage, place);
        if (weighing.is_plain) {
          weigh_queries<true, Tile>(weights, grads, tile, shared, i, stage, place, weighing);
        } else {
          weigh_queries<false, Tile>(weights, grads, tile, shared, i, stage, place, weighing);
        }
        accumulate<Tile>(grad_v, weights, shared.other_operand(stage, 1), place);
        accumulate<Tile>(grad_k, grads, shared.other_operand(stage, 0), place);
      });

  using T = typename Tile::Type;
  const auto is_seen = [&](int row) { return tile.is_seen(row); };
  const auto rows = [&](const View4& view, int64_t columns, const Rotation& rotation) {
    return GradientRows<T>{rows_of<T>(view, tile.block.batch, tile.block.head_kv, tile.block.sequence.k_begin, 1),
                           tile.first, tile.count, static_cast<int>(columns), rotation};
  };
  float* staged = reinterpret_cast<float*>(shared.own);
  store_gradients<Tile>(staged, grad_k, weighing.scale,
                        rows(args.grad_k, tile.call.dim_qk, rotation_of(args.forward, tile.block, true)), place,
                        is_seen);
  store_gradients<Tile>(staged, grad_v, 1.0f, rows(args.grad_v, tile.call.dim_v, Rotation{}), place, is_seen);
}

}  // namespace
}  // namespace dskernels
