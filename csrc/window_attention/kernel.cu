// Window attention, forward: the kernels and their launches.
#include "window_attention/cuda_forward.cuh"

namespace dskernels {
namespace {

// The logit of each of a thread's rows that joins the softmax without a value, or -inf.
__device__ inline void sinks_of(const WindowAttentionArgs& args, const BlockTile& tile, const RowPair& rows, int group,
                                float (&sink)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool has_sink = args.sink != nullptr && !tile.sequence.past_end;
    sink[i] = has_sink ? args.sink[tile.head_kv * group + rows.row[i] % group] : -INFINITY;
  }
}

template <class T>
__device__ inline KeySource<T> keys_of(const WindowAttentionCuda& args, const BlockTile& tile) {
  const WindowAttentionArgs& call = args.call;
  Rotation rotation = rotation_of(args, tile, true);
  if (args.keys_turned) rotation.half = 0;
  return {rows_of<const T>(call.k, tile.batch, tile.head_kv, tile.sequence.k_begin, 1),
          rows_of<const T>(call.v, tile.batch, tile.head_kv, tile.sequence.k_begin, 1), static_cast<int>(call.dim_qk),
          static_cast<int>(call.dim_v), rotation};
}

// The rows of a warp among those of its block's tile: from `first` on and below `end`, at most 16.
struct WarpRows {
  BlockTile tile;
  int group, begin, first, end;  // the block's begin at `begin`
};

template <class Shape>
__device__ inline WarpRows rows_of_warp(const WindowAttentionCuda& args, int tiles) {
  const int group = group_of(args.call);
  const BlockTile tile = tile_of_block(args, blockIdx.x, tiles, false, group, Shape::kRows);
  const int begin = tile.index * Shape::kRows, end = min(begin + Shape::kRows, tile.sequence.len_q * group);
  return {tile, group, begin, begin + 16 * warp_index(), end};
}

// Adds up what the warp's rows see. All warps of the block call it together.
template <class Shape>
__device__ inline void attend(const WindowAttentionCuda& args, const WarpRows& x, const ForwardTiles<Shape>& shared,
                              ForwardWarp<Shape>& warp) {
  using T = typename Shape::Element;
  const WindowAttentionArgs& call = args.call;
  const Sequence& sequence = x.tile.sequence;
  const RowPair rows = row_pair(sequence, x.first, x.end, x.group);
  const Scoring scoring = scoring_of(call, x.tile, rows, x.group);
  float sink[2];
  sinks_of(call, x.tile, rows, x.group, sink);
  warp.begin(sink);
  const Span seen = sequence.keys_seen(x.begin / x.group, (x.end - 1) / x.group);
  if (seen.is_empty()) return;

  const KeySource<T> source = keys_of<T>(args, x.tile);
  const WarpSpan span = warp_span(sequence, x.first, x.end, x.group);
  const T* q_tile = shared.q + 16 * warp_index() * Shape::kStride;
  const auto queries = rows_of<const T>(call.q, x.tile.batch, x.tile.head_kv * x.group, sequence.q_begin, x.group);
  load_rows<T, Shape::kThreads, Shape::kRows, Shape::kColumns, Shape::kStride>(
      shared.q, TurnedRows<T>{queries, x.begin, x.end - x.begin, static_cast<int>(call.dim_qk),
                              rotation_of(args, x.tile, false)});
  load_keys<Shape>(shared, 0, source, seen.begin, seen.end);
  if constexpr (Shape::kHoldsQueries) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    warp.hold_queries(q_tile);
  }
  int stage = 0;
  for (int key = seen.begin; key < seen.end; key += Shape::kKeys) {
    ptx::cp_async_wait<0>();
    // The tile is there, and nobody is at the one before any more.
    __syncthreads();
    const int next = key + Shape::kKeys;
    if (Shape::kStages == 2 && next < seen.end) load_keys<Shape>(shared, 1 - stage, source, next, seen.end);
    if (span.sees(key, next)) {
      float s[Shape::kKeys / 8][4] = {};
      warp.multiply_keys(s, q_tile, shared.k + stage * Shape::kTile);
      score(s, scoring, rows, key, span.needs_mask(key, next));
      warp.soften(s);
      warp.add_values(s, shared.v + stage * Shape::kTile);
    }
    if constexpr (Shape::kStages == 2) {
      stage = 1 - stage;
    } else if (next < seen.end) {
      __syncthreads();
      load_keys<Shape>(shared, 0, source, next, seen.end);
    }
  }
}

// Writes the warp's rows of out and lse, by way of shared memory that nobody else uses any more.
template <class Shape>
__device__ inline void store_results(const WindowAttentionArgs& args, const WarpRows& x,
                                     const ForwardTiles<Shape>& shared, ForwardWarp<Shape>& warp) {
  using T = typename Shape::Element;
  const Sequence& sequence = x.tile.sequence;
  float lse[2];
  warp.finish(row_pair(sequence, x.first, x.end, x.group), lse);
  const int head = x.tile.head_kv * x.group;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = x.first + lane_index() / 4 + 8 * i;
    if (row >= x.end || lane_index() % 4 != 0) continue;
    float* const to = args.lse + x.tile.batch * args.lse_stride_batch + (head + row % x.group) * args.lse_stride_head;
    to[sequence.q_begin + row / x.group] = lse[i];
  }
  const auto out = rows_of<T>(args.out, x.tile.batch, head, sequence.q_begin, x.group);
  store_rows<Shape>(warp, shared.q + 16 * warp_index() * Shape::kStride, out, x.first, x.end,
                    static_cast<int>(args.dim_v));
}

// `out` and `lse` of 64 rows of one sequence and key head: 64 / group queries of the group's heads. Writes every row of
// the two exactly once. Grid: a block for each tile of each head of each batch, see tile_of_block. Bound by the tensor
// cores where windows are long, by the reading of keys and values where they are short.
template <class T, int kBucket>
__global__ void __launch_bounds__(ForwardShape<T, kBucket>::kThreads, ForwardShape<T, kBucket>::kBlocks)
    window_attention_fwd(const __grid_constant__ WindowAttentionCuda args, int tiles) {
  using Shape = ForwardShape<T, kBucket>;
  SharedCarver carver;
  const ForwardTiles<Shape> shared(carver);
  ForwardWarp<Shape> warp;
  {
    const WarpRows rows = rows_of_warp<Shape>(args, tiles);
    if (rows.begin >= rows.end) return;
    attend(args, rows, shared, warp);
  }
  __syncthreads();
  // Found anew: kept until here it would take registers from the products.
  store_results(args.call, rows_of_warp<Shape>(args, tiles), shared, warp);
}

constexpr int kTurnThreads = 128, kTurnRows = 64;
// Up to so many keys a tile of rows turns itself: then no key is turned more than a few times.
constexpr int64_t kTurnedByReaders = 128;

// As window_attention_turn_cuda says. Grid: a block for each tile of keys of each head. Bound by memory.
template <class T>
__global__ void __launch_bounds__(kTurnThreads)
    window_attention_turn(const __grid_constant__ WindowAttentionCuda args, View4 to, int width, int tiles) {
  const BlockTile tile = tile_of_block(args, blockIdx.x, tiles, true, 1, kTurnRows);
  const Sequence& sequence = tile.sequence;
  const Span seen = sequence.keys_seen(0, sequence.len_q - 1);
  const int begin = max(tile.index * kTurnRows, seen.begin);
  const int end = min(min((tile.index + 1) * kTurnRows, sequence.len_k), seen.end);
  if (begin >= end) return;
  const auto from = rows_of<const T>(args.call.k, tile.batch, tile.head_kv, sequence.k_begin, 1);
  const auto rows = rows_of<T>(to, tile.batch, tile.head_kv, sequence.k_begin, 1);
  load_turned<T, kTurnThreads>(
      [&](int r) { return rows.at(begin + r); }, end - begin, width,
      TurnedRows<T>{from, begin, end - begin, static_cast<int>(args.call.dim_qk), rotation_of(args, tile, true)});
}

dim3 grid_of_tiles(const WindowAttentionCuda& args, int64_t tiles) {
  return grid_of(tiles * args.call.batch * args.call.heads_kv);
}

template <class T, int kBucket>
void launch_forward(const WindowAttentionCuda& args, void* stream) {
  using Shape = ForwardShape<T, kBucket>;
  const int64_t tiles = tile_count(args, false, group_of(args.call), Shape::kRows);
  launch(window_attention_fwd<T, kBucket>, grid_of_tiles(args, tiles), Shape::kThreads, Shape::kSharedBytes, stream,
         args, static_cast<int>(tiles));
}

template <class T>
void launch_forward(const WindowAttentionCuda& args, void* stream) {
  const int64_t widest = max(args.call.dim_qk, args.call.dim_v);
  if (widest <= 64) return launch_forward<T, 64>(args, stream);
  widest <= 128 ? launch_forward<T, 128>(args, stream) : launch_forward<T, 256>(args, stream);
}

template <class T>
void launch_turn(const WindowAttentionCuda& args, const View4& to, void* stream) {
  const int64_t tiles = tile_count(args, true, 1, kTurnRows);
  launch(window_attention_turn<T>, grid_of_tiles(args, tiles), kTurnThreads, 0, stream, args, to,
         static_cast<int>(window_attention_keys_cuda(args).width), static_cast<int>(tiles));
}

}  // namespace

WindowAttentionKeys window_attention_keys_cuda(const WindowAttentionCuda& args) {
  const WindowAttentionArgs& call = args.call;
  const int64_t vector = 16 / size_of(call.k.element), width = ceil_div(call.dim_qk, vector) * vector;
  if (args.offsets_q != nullptr) return {0, call.len_k, width};
  const Sequence sequence = dense_sequence(call);
  const Span seen = sequence.keys_seen(0, sequence.len_q - 1);
  return seen.is_empty() ? WindowAttentionKeys{0, 0, width}
                         : WindowAttentionKeys{seen.begin, seen.end - seen.begin, width};
}

bool window_attention_turns_keys_cuda(const WindowAttentionCuda& args) {
  const WindowAttentionArgs& call = args.call;
  if (call.rotary_dim == 0) return false;
  constexpr int kRows = ForwardShape<float, 64>::kRows;
  const int group = group_of(call);
  if (tile_count(args, false, group, kRows) == 1) return false;
  const int64_t window = clamp_to(call.left + call.right + 1, 0, call.len_k);
  return min(window + (kRows - 1) / group, call.len_k) > kTurnedByReaders;
}

void window_attention_forward_cuda(const WindowAttentionCuda& args, void* stream) {
  switch (args.call.q.element) {
    case Element::kFloat32: return launch_forward<float>(args, stream);
    case Element::kBFloat16: return launch_forward<__nv_bfloat16>(args, stream);
    case Element::kFloat16: return launch_forward<__half>(args, stream);
  }
}

void window_attention_turn_cuda(const WindowAttentionCuda& args, const View4& to, void* stream) {
  switch (args.call.k.element) {
    case Element::kFloat32: return launch_turn<float>(args, to, stream);
    case Element::kBFloat16: return launch_turn<__nv_bfloat16>(args, to, stream);
    case Element::kFloat16: return launch_turn<__half>(args, to, stream);
  }
}

}  // namespace dskernels
