// The gradients of queries and of the bias.
#pragma once

#include "window_attention/cuda_backward_rows.cuh"

namespace dskernels {
namespace {

// A query of a head, as a thread needs it that has a row of its scores: the keys that it sees, and what is added to and
// taken of its scores.
struct QueryRow {
  int low = 0;
  unsigned width = 0;  // keys low to low + width - 1 are seen
  float lse = 0.0f, delta = 0.0f;
  const float* bias = nullptr;  // of key 0, or null
  float* grad_bias = nullptr;
};

// A tile of the packed queries of a group and the keys that pass by: all that one of the queries sees.
template <class Tile>
struct QueryTile {
  using T = typename Tile::Type;
  const WindowAttentionCudaBackward& args;
  const WindowAttentionArgs& call;
  BlockTile block;
  int group, first, count;  // rows of the tile
  Span seen;                // keys
  int tiles;

  __device__ QueryTile(const WindowAttentionCudaBackward& given, int block_tiles)
      : args(given),
        call(given.forward.call),
        block(tile_of_block(given.forward, blockIdx.x, block_tiles, false, group_of(call), Tile::kRows)),
        group(group_of(call)),
        first(block.index * Tile::kRows),
        count(min(block.sequence.len_q * group - first, Tile::kRows)),
        seen(block.sequence.keys_seen(first / group, (first + count - 1) / group)),
        tiles(static_cast<int>(ceil_div(max(seen.end - seen.begin, 0), Tile::kOther))) {}

  __device__ int head(int row) const { return block.head_kv * group + (first + row) % group; }
  __device__ int query(int row) const { return (first + row) / group; }
  __device__ int first_key(int i) const { return seen.begin + i * Tile::kOther; }

  // Of lse and delta.
  __device__ int64_t at(int row) const {
    return block.batch * call.lse_stride_batch + head(row) * call.lse_stride_head + block.sequence.q_begin + query(row);
  }

  __device__ void load_own(const BackwardShared<Tile>& shared) const {
    load_own(shared.own_operand(0), call.q, call.dim_qk);
    load_own(shared.own_operand(1), args.grad_out, call.dim_v);
  }

  __device__ void load_other(const BackwardShared<Tile>& shared, int i, int stage) const {
    load_other(shared.other_operand(stage, 0), call.k, call.dim_qk, first_key(i));
    load_other(shared.other_operand(stage, 1), call.v, call.dim_v, first_key(i));
  }

  // Whether a row has a softmax over keys.
  __device__ bool is_live(int row) const {
    return !block.sequence.keys_seen(query(row), query(row)).is_empty() && call.lse[at(row)] != -INFINITY;
  }

  // Of the warps that share a row, the first slice's stores the gradient of its bias.
  __device__ QueryRow row(int row, int slice) const {
    QueryRow result;
    if (row >= count || !is_live(row)) return result;
    const Span span = block.sequence.keys_seen(query(row), query(row));
    result.low = span.begin;
    result.width = span.end - span.begin;
    result.lse = call.lse[at(row)];
    result.delta = args.delta[at(row)];
    const View4& bias = call.bias;
    if (bias.data != nullptr) {
      result.bias = static_cast<const float*>(bias.data) + block.batch * bias.stride[0] + head(row) * bias.stride[1] +
                    query(row) * bias.stride[2];
    }
    if (args.grad_bias != nullptr && slice == 0) {
      result.grad_bias =
          args.grad_bias + ((block.batch * call.heads_q + head(row)) * call.len_q + query(row)) * call.len_k;
    }
    return result;
  }

 private:
  __device__ void load_own(T* shared, const View4& view, int64_t columns) const {
    const int64_t head_q = block.head_kv * group;
    const Rows<const T> from = rows_of<const T>(view, block.batch, head_q, block.sequence.q_begin, group);
    copy_tile<T, Tile::kThreads, Tile::kRows, Tile::kDim, Tile::kStride>(
        shared, [&](int r) { return from.at(first + r); }, count, static_cast<int>(columns), from.column_stride,
        from.by_16());
  }

  __device__ void load_other(T* shared, const View4& view, int64_t columns, int key) const {
    const Rows<const T> from = rows_of<const T>(view, block.batch, block.head_kv, block.sequence.k_begin, 1);
    copy_tile<T, Tile::kThreads, Tile::kOther, Tile::kDim, Tile::kStride>(
        shared, [&](int r) { return from.at(key + r); }, seen.end - key, static_cast<int>(columns), from.column_stride,
        from.by_16());
  }
};

// `weigh` for the products of the warp's queries with a tile of keys, the first of them `key`.
template <bool kPlain, class Tile>
__device__ inline void weigh_keys(Products<Tile>& scores, Products<Tile>& grads, const QueryRow (&rows)[2], int key,
                                  int64_t bias_stride, const Place<Tile>& place, const Weighing& weighing) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const QueryRow& row = rows[half];
#pragma unroll
    for (int n = 0; n < Tile::kOther / 8; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const int at = key + place.column + 8 * n + e % 2;
        const bool seen = static_cast<unsigned>(at - row.low) < row.width;
        float added = 0.0f;
        if constexpr (!kPlain) {
          if (row.bias != nullptr && seen) added = row.bias[at * bias_stride];
        }
        const float grad_score = weigh<kPlain>(scores[n][e], grads[n][e], seen, added, row.lse, row.delta, weighing);
        if constexpr (!kPlain) {
          if (row.grad_bias != nullptr && seen) row.grad_bias[at] = grad_score;
        }
      }
    }
  }
}

// grad_q = scale * dS k, turned back, of a tile of kRows packed queries of a group a block, over all keys that they
// see, and grad_bias = dS where a key is seen; grid: tile_count(of queries) * batch * heads_kv. `delta` has to be
// there. Writes every row of grad_q. Bound by the tensor cores: 3 products of kRows * kDim a key, for 2 rows of kDim
// read, most of them from L2.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, kBlocksWanted)
    window_attention_grad_queries(const __grid_constant__ WindowAttentionCudaBackward args, int tiles) {
  const QueryTile<Tile> tile(args, tiles);
  if (tile.count <= 0) return;
  const BackwardShared<Tile> shared;
  const Place<Tile> place;
  const Weighing weighing(tile.call);
  const QueryRow rows[2] = {tile.row(place.row, place.slice), tile.row(place.row + 8, place.slice)};
  Gradients<Tile> grad_q = {};

  tile.load_own(shared);
  pass_by<Tile>(
      tile.tiles, [&](int i, int stage) { tile.load_other(shared, i, stage); },
      [&](int i, int stage) {
        Products<Tile> weights, grads;
        multiply_both<Tile>(weights, grads, shared, stage, place);
        const int key = tile.first_key(i);
        if (weighing.is_plain) {
          weigh_keys<true, Tile>(weights, grads, rows, key, 0, place, weighing);
        } else {
          weigh_keys<false, Tile>(weights, grads, rows, key, tile.call.bias.stride[3], place, weighing);
        }
        accumulate<Tile>(grad_q, grads, shared.other_operand(stage, 0), place);
      });

  using T = typename Tile::Type;
  const int64_t head_q = tile.block.head_kv * tile.group;
  const GradientRows<T> to{rows_of<T>(args.grad_q, tile.block.batch, head_q, tile.block.sequence.q_begin, tile.group),
                           tile.first, tile.count, static_cast<int>(tile.call.dim_qk),
                           rotation_of(args.forward, tile.block, false)};
  store_gradients<Tile>(reinterpret_cast<float*>(shared.own), grad_q, weighing.scale, to, place,
                        [&](int row) { return tile.is_live(row); });
}

}  // namespace
}  // namespace dskernels
