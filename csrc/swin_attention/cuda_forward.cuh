// Forward of small heads: the scores of 64 queries over 64 keys are on chip, so a window of up to 64 tokens has its
// softmax at once, and a larger one a tile of keys after the other, as in Dao, "FlashAttention-2", 2023, section 2.3.
#pragma once

#include "swin_attention/cuda_tile.cuh"

namespace dskernels {
namespace {

struct Forward {
  SwinAttentionArgs args;
  CellGrid grid;
  int run;
  bool reads_by_16, writes_by_16;
};

constexpr int kStages = 2;
// A block loads a bias of 64 x 64 once a run. Beyond some cells there is nothing more to save, and below some blocks a
// GPU is not busy.
constexpr int kForwardBlocks = 16, kForwardRun = 16;

// What a block computes next: a tile of keys of a cell.
struct Step {
  Cell cell;
  int tile, cell_parity;

  __device__ void advance(const Forward& call, int tiles) {
    if (++tile < tiles) return;
    tile = 0;
    cell_parity ^= 1;
    cell.advance(call.args, call.grid);
  }
};

template <class T, int kDim>
struct ForwardTiles {
  T* q;   // [stage]
  T* kv;  // [stage][keys, values]
  int* places;
  float4* bias;

  __device__ ForwardTiles(bool keeps_bias, int places_count) {
    SharedCarver carver;
    q = carver.take<T>(kStages * kTileElements<T, kDim>);
    kv = carver.take<T>(kStages * 2 * kTileElements<T, kDim>);
    places = carver.take<int>(places_count);
    bias = carver.take<float4>(keeps_bias ? KeptBias::kElements : 0);
  }

  static int bytes(bool keeps_bias, int places_count) {
    return shared_bytes<T>(kStages * kTileElements<T, kDim>) + shared_bytes<T>(kStages * 2 * kTileElements<T, kDim>) +
           shared_bytes<int>(places_count) + shared_bytes<float4>(keeps_bias ? KeptBias::kElements : 0);
  }
};

// One row block's softmax over the tiles of keys so far: rows g and g + 8.
template <int kDim>
struct Running {
  float largest[2], sums[2];
  float out[kDim / 8][4];

  __device__ void clear() {
    largest[0] = largest[1] = -INFINITY;
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    }
  }

  // Takes finished scores and makes weights of them.
  __device__ void take(Scores& c) {
    const float before[2] = {largest[0], largest[1]};
    largest_of_rows(c, largest);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float shrink = weight_of(before[h] - shift_of(largest[h]));
      sums[h] *= shrink;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        out[n][2 * h] *= shrink;
        out[n][2 * h + 1] *= shrink;
      }
    }
    exponentiate(c, largest, sums);
  }

  // Leaves the result in 16 rows of shared memory.
  template <class T>
  __device__ void finish(T* rows) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_of_lanes(sums[h], 4);
      // A row that sees nothing met the values of the others with weights of 0, and they may be NaN.
      const bool is_blind = sum == 0.0f;
      const float inverse = is_blind ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float low = is_blind ? 0.0f : out[n][2 * h] * inverse;
        const float high = is_blind ? 0.0f : out[n][2 * h + 1] * inverse;
        store_pair<T>(rows + (g + 8 * h) * kTileStride<T, kDim> + 8 * n + 2 * t, low, high);
      }
    }
  }
};

// Copies 16 rows of a warp, once it has written them, from shared memory to where their tokens lie.
template <class T, int kDim>
__device__ inline void store_rows(const T* rows, const Image<T>& image, int64_t origin, const Cell& cell,
                                  const int* places, int dim, bool by_16) {
  constexpr int kVector = 16 / sizeof(T), kVectors = kDim / kVector;
  for (int i = lane_index(); i < kRowsOfWarp * kVectors; i += kWarp) {
    const int row = i / kVectors, column = i % kVectors * kVector, place = places[row];
    if (!cell.has(place) || column >= dim) continue;
    const T* from = rows + row * kTileStride<T, kDim> + column;
    T* to = image.data + origin + image.offset(place) + column;
    if (by_16) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      continue;
    }
    for (int d = 0; d < kVector && column + d < dim; ++d) to[d] = from[d];
  }
}

// Begins to copy a tile of keys and values to a stage, and before the first of a cell the queries.
template <class T, int kDim>
__device__ inline void copy_step(const Forward& call, const ForwardTiles<T, kDim>& shared, const Work& work,
                                 const Step& step, int stage) {
  constexpr int kElements = kTileElements<T, kDim>;
  const SwinAttentionArgs& args = call.args;
  const int dim = static_cast<int>(args.dim);
  const Image<const T> queries(args.qkv, work.head * args.dim), keys(args.qkv, (args.heads + work.head) * args.dim);
  const int64_t origin = queries.origin(args, call.grid, step.cell);
  if (step.tile == 0) {
    copy_tokens<T, kDim, 1>(shared.q + step.cell_parity * kElements, queries, 0, origin, step.cell,
                            shared.places + work.tile * kTileTokens, dim, call.reads_by_16);
  }
  const int64_t part = args.heads * args.dim * args.qkv.stride[3];
  copy_tokens<T, kDim, 2>(shared.kv + stage * 2 * kElements, keys, part, origin, step.cell,
                          shared.places + step.tile * kTileTokens, dim, call.reads_by_16);
  ptx::cp_async_commit();
}

// `out` of a tile of queries of one head, in a run of cells. Grid: tiles of a window x heads x runs; heads next to each
// other read neighbouring bytes. Shared memory holds two stages, so that the next tile of keys (and, of the next cell,
// queries) is copied while this one is computed. Four warps share the keys of a window: a warp of its own for each
// window would need four times the shared memory for as many warps in flight. Bound by bytes for windows of up to 64
// tokens: each row of qkv is read once, each row of out written once.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 32 && sizeof(T) == 2 ? 4 : 3)
    swin_attention_forward(const __grid_constant__ Forward call) {
  constexpr int kElements = kTileElements<T, kDim>;
  const SwinAttentionArgs& args = call.args;
  const int tokens = Bias::tokens_of_window(args), tiles = (tokens + kTileTokens - 1) / kTileTokens;
  const int dim = static_cast<int>(args.dim), heads = static_cast<int>(args.heads);
  const Work work(call.grid, tiles, heads, call.run);
  const Image<T> result(args.out, work.head * args.dim);
  const Embedding embedding(args, work.head);
  const Bias bias(args, work.head);
  const bool keeps_bias = bias.data != nullptr && tiles == 1;
  const ForwardTiles<T, kDim> shared(keeps_bias, tiles * kTileTokens);
  const KeptBias kept(shared.bias);
  const int first_query = work.tile * kTileTokens, warp_query = first_query + kRowsOfWarp * warp_index();
  list_places(args, tiles * kTileTokens, shared.places);
  if (keeps_bias) kept.keep(bias, warp_query);
  __syncthreads();

  Step now{Cell(args, call.grid, work.first_cell), 0, 0}, next = now;
  copy_step<T, kDim>(call, shared, work, now, 0);
  Running<kDim> running;
  for (int i = 0; i < work.cells * tiles; ++i, now = next) {
    const int stage = i % kStages, first_key = now.tile * kTileTokens;
    T* q = shared.q + now.cell_parity * kElements;
    T* k = shared.kv + stage * 2 * kElements;
    ptx::cp_async_wait<0>();
    __syncthreads();
    next.advance(call, tiles);
    if (i + 1 < work.cells * tiles) copy_step<T, kDim>(call, shared, work, next, 1 - stage);
    if (!embedding.is_identity()) {
      if (now.tile == 0) embed_rows<T, kTileTokens, kTileStride<T, kDim>>(embedding, q, first_query, tokens, dim);
      embed_rows<T, kTileTokens, kTileStride<T, kDim>>(embedding, k, first_key, tokens, dim);
      __syncthreads();
    }
    if (warp_query >= tokens) continue;
    if (now.tile == 0) running.clear();
    T* rows = q + kRowsOfWarp * warp_index() * kTileStride<T, kDim>;
    const int pairs = min((tokens - first_key + 15) / 16, kTileTokens / 16);
    Scores scores;
    multiply_rows<T, kDim>(scores, rows, k, pairs);
    const auto bias_of = [&](int n) {
      if (keeps_bias) return kept.of_block(n);
      return bias.data == nullptr ? float4{0.0f, 0.0f, 0.0f, 0.0f} : bias.of_block(n, warp_query, first_key);
    };
    finish_scores(scores, embedding.factor, bias_of, tokens_there(now.cell, shared.places + first_key));
    running.take(scores);
    multiply_accumulators<T, kDim>(running.out, scores, k + kElements, pairs);
    if (now.tile + 1 < tiles) continue;
    // Its queries are the warp's alone, and done with.
    __syncwarp();
    running.finish(rows);
    __syncwarp();
    store_rows<T, kDim>(rows, result, result.origin(args, call.grid, now.cell), now.cell, shared.places + warp_query,
                        dim, call.writes_by_16);
  }
}

template <class T, int kDim>
void launch_forward(const SwinAttentionArgs& args, void* stream) {
  const CellGrid grid(args);
  const int tokens = tokens_of(args), tiles = (tokens + kTileTokens - 1) / kTileTokens;
  const int run = cells_of_run(grid.cells, args.heads * tiles, kForwardBlocks, kForwardRun);
  const int64_t blocks = ceil_div(grid.cells, run) * args.heads * tiles;
  const Forward call{args, grid, run, moves_by_16<T>(args.qkv, args.dim), moves_by_16<T>(args.out, args.dim)};
  const int bytes = ForwardTiles<T, kDim>::bytes(args.bias != nullptr && tiles == 1, tiles * kTileTokens);
  launch(swin_attention_forward<T, kDim>, grid_of(blocks), kThreads, bytes, stream, call);
}

}  // namespace
}  // namespace dskernels
