// Window attention of the next tokens over a cache: parts of the keys a block, and a second kernel that joins them
// (Dao et al., "Flash-Decoding", 2023).
#include "window_attention/cuda_decode_join.cuh"
#include "window_attention/cuda_decode_rows.cuh"

namespace dskernels {
namespace {

// Blocks that a multiprocessor is given where there are keys for as many: more than it may run at a time, for lengths
// differ, and so do the parts of tiles.
constexpr int kBlocksWanted = 4;
// Keys below which a part of its own costs more than it saves.
constexpr int kKeysOfPart = 256;

// Writes the queries of the tile, turned to their positions and rounded to T; 0 where there is none.
template <class T, int kWidth>
__device__ void load_queries(T* queries, const WindowAttentionCudaDecode& args, const DecodePart& part) {
  const WindowAttentionArgs& call = args.call;
  const int group = group_of(call), columns = static_cast<int>(call.dim_qk);
  const Rotation rotation = rotation_from(args, part.first_position, true);
  for (int i = threadIdx.x; i < kDecodeRows * kWidth; i += DecodeShape<T, kWidth>::kThreads) {
    const int r = i / kWidth, column = i % kWidth, row = part.first_row + r, query = row / group;
    float x = 0.0f;
    if (row < part.rows && column < columns && part.first_position + query >= 0) {
      const int64_t head = int64_t{part.head_kv} * group + row % group;
      const int64_t at = part.batch * call.q.stride[0] + head * call.q.stride[1] + query * call.q.stride[2];
      const auto load = [&](int c) { return load_element(call.q.data, call.q.element, at + c * call.q.stride[3]); };
      x = load(column);
      if (column < 2 * rotation.half) {
        const int pair = rotation.interleaved ? column / 2 : column % rotation.half;
        const bool is_first = column == rotation.first(pair);
        const float other = load(is_first ? rotation.second(pair) : rotation.first(pair));
        const float2 both =
            turned(is_first ? x : other, is_first ? other : x, angle_of(rotation, rotation.table_row(query), pair));
        x = is_first ? both.x : both.y;
      }
    }
    queries[r * DecodeShape<T, kWidth>::kStride + column] = from_float<T>(x);
  }
}

// Loads the queries, then brings together what a warp has of the part: its keys are every kWarps-th tile of 16. Keys
// and values take turns in the slots of its ring. All threads of the block call it.
template <class T, int kWidth>
__device__ void add_part(DecodeRows<kWidth>& rows, const WindowAttentionCudaDecode& args, const DecodePart& part,
                         T* queries, T* ring) {
  using Shape = DecodeShape<T, kWidth>;
  const WindowAttentionArgs& call = args.call;
  const Rotation rotation = rotation_from(args, part.begin, !args.keys_turned);
  const int row = lane_index() / 4, tiles = (part.count + kDecodeKeys - 1) / kDecodeKeys;
  const Span seen[2] = {keys_of_row(args, part, row), keys_of_row(args, part, row + 8)};
  const auto key_of = [](int i) { return (warp_index() + i * Shape::kWarps) * kDecodeKeys; };
  const int loads = 2 * max((tiles - warp_index() + Shape::kWarps - 1) / Shape::kWarps, 0);
  float scores[2][4], rescale[2];
  for (int load = 1 - Shape::kSlots;; ++load) {
    if (load == 0) {
      // While the first copies are under way.
      load_queries<T, kWidth>(queries, args, part);
      __syncthreads();
    }
    if (load >= loads) break;
    if (load >= 0) {
      // kSlots - 2 other groups have followed. Then all lanes are done with the slot before, which the next one takes.
      ptx::cp_async_wait<Shape::kSlots - 2>();
      __syncwarp();
    }
    const int next = load + Shape::kSlots - 1;
    if (next < loads) {
      T* slot = ring + next % Shape::kSlots * Shape::kSlot;
      copy_keys<T, kWidth>(slot, cache_head(args, part, next % 2 == 1), part, key_of(next / 2));
    }
    // A group without copies keeps the count of groups that is waited for.
    ptx::cp_async_commit();
    if (load < 0) continue;
    T* slot = ring + load % Shape::kSlots * Shape::kSlot;
    if (load % 2 == 0) {
      turn_slot<T, kWidth>(slot, rotation, key_of(load / 2));
      multiply_keys<T, kWidth>(scores, queries, slot, static_cast<int>(call.dim_qk));
      weigh(scores, rescale, rows, seen, key_of(load / 2), call.scale, call.softcap);
    } else {
      add_values<T, kWidth>(rows.sums, scores, rescale, slot, static_cast<int>(call.dim_v));
    }
  }
  ptx::cp_async_wait<0>();
}

// Joins what the warps have of the tile's rows and writes it: to `partial` or, where the part is the only one, to out
// and lse. The sums of a warp take the place of its ring.
template <class T, int kWidth>
__device__ void finish_part(const DecodeRows<kWidth>& rows, const WindowAttentionCudaDecode& args,
                            const DecodePart& part, T* rings) {
  using Shape = DecodeShape<T, kWidth>;
  SIMT_SHARED(largest, float[Shape::kWarps][kDecodeRows]);
  SIMT_SHARED(total, float[Shape::kWarps][kDecodeRows]);
  const auto sums_of = [&](int warp) { return reinterpret_cast<float*>(rings + warp * Shape::kSlots * Shape::kSlot); };
  const int columns = static_cast<int>(args.call.dim_v), warp = warp_index(), t = lane_index() % 4;
  // All lanes are done with the ring.
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane_index() / 4 + 8 * h;
    const float sum = sum_of_lanes(rows.total[h], 4);
    if (t == 0) {
      largest[warp][row] = rows.largest[h];
      total[warp][row] = sum;
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      *reinterpret_cast<float2*>(sums_of(warp) + row * Shape::kSumStride + 8 * n + 2 * t) =
          make_float2(rows.sums[n][2 * h], rows.sums[n][2 * h + 1]);
    }
  }
  __syncthreads();
  for (int r = warp; r < kDecodeRows && part.first_row + r < part.rows; r += Shape::kWarps) {
    const auto of_warp = [&](int w) { return RowPart{largest[w][r], total[w][r], sums_of(w) + r * Shape::kSumStride}; };
    const JoinedRow row = join_parts(Shape::kWarps, of_warp, columns);
    if (args.splits == 1) {
      write_row(row, args, part.pair, part.first_row + r);
    } else {
      const Partials partials = partials_of(args);
      write_partial(row, partials, partials.at(part.pair, part.split, part.first_row + r));
    }
  }
}

// One split of the keys of one tile of rows a block. Bound by the reading of the cache.
template <class T, int kWidth>
__global__ void __launch_bounds__(DecodeShape<T, kWidth>::kThreads, DecodeShape<T, kWidth>::kBlocks)
    decode_kernel(const __grid_constant__ WindowAttentionCudaDecode args) {
  using Shape = DecodeShape<T, kWidth>;
  SharedCarver carver;
  T* queries = carver.take<T>(kDecodeRows * Shape::kStride);
  T* rings = carver.take<T>(Shape::kWarps * Shape::kSlots * Shape::kSlot);
  const DecodePart part = part_of_block(args);
  DecodeRows<kWidth> rows;
  if (part.count > 0) {
    add_part<T, kWidth>(rows, args, part, queries, rings + warp_index() * Shape::kSlots * Shape::kSlot);
  }
  finish_part<T, kWidth>(rows, args, part, rings);
}

constexpr int kJoinWarps = 8;

// out and lse of one row a block, from its splits: each warp joins every eighth, the first joins the warps. Bound by
// latency.
__global__ void __launch_bounds__(kJoinWarps* kWarp)
    join_kernel(const __grid_constant__ WindowAttentionCudaDecode args) {
  SIMT_SHARED(largest, float[kJoinWarps]);
  SIMT_SHARED(total, float[kJoinWarps]);
  SIMT_SHARED(sums, float[kJoinWarps][kColumnsOfLane * kWarp]);
  const Partials partials = partials_of(args);
  const int warp = warp_index(), row = static_cast<int>(blockIdx.x % partials.rows);
  const int64_t pair = blockIdx.x / partials.rows;
  const auto of_split = [&](int i) { return partials.part(partials.at(pair, warp + i * kJoinWarps, row)); };
  const int count = max((args.splits - warp + kJoinWarps - 1) / kJoinWarps, 0);
  const int columns = static_cast<int>(partials.columns);
  const JoinedRow own = join_parts(count, of_split, columns);
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) sums[warp][lane_index() + c * kWarp] = own.sums[c];
  if (lane_index() == 0) {
    largest[warp] = own.largest;
    total[warp] = own.total;
  }
  __syncthreads();
  if (warp > 0) return;
  const auto of_warp = [&](int w) { return RowPart{largest[w], total[w], sums[w]}; };
  write_row(join_parts(kJoinWarps, of_warp, columns), args, pair, row);
}

int64_t row_tiles(const WindowAttentionArgs& call) {
  return ceil_div(call.heads_q / call.heads_kv * call.len_q, kDecodeRows);
}

template <class T, int kWidth>
void launch_decode(const WindowAttentionCudaDecode& args, void* stream) {
  using Shape = DecodeShape<T, kWidth>;
  const int64_t blocks = args.call.batch * args.call.heads_kv * row_tiles(args.call) * args.splits;
  launch(decode_kernel<T, kWidth>, grid_of(blocks), Shape::kThreads, Shape::kSharedBytes, stream, args);
}

template <class T>
void launch_decode(const WindowAttentionCudaDecode& args, void* stream) {
  const int64_t width = max(args.call.dim_qk, args.call.dim_v);
  if (width <= 64) return launch_decode<T, 64>(args, stream);
  if (width <= 128) return launch_decode<T, 128>(args, stream);
  launch_decode<T, 256>(args, stream);
}

}  // namespace

int window_attention_splits_cuda(const WindowAttentionArgs& call) {
  // Those that the window may have, of the slots there are.
  const int64_t keys = min(call.len_k, max(call.left + call.len_q, int64_t{0}));
  const int64_t tiles = max(call.batch * call.heads_kv * row_tiles(call), int64_t{1});
  const int64_t wanted = ceil_div(int64_t{kBlocksWanted} * multiprocessors(), tiles);
  return static_cast<int>(max(min(ceil_div(keys, kKeysOfPart), wanted), int64_t{1}));
}

int64_t window_attention_partial_cuda(const WindowAttentionCudaDecode& args) {
  return args.splits == 1 ? 0 : partial_rows(args) * (args.call.dim_v + 2);
}

void window_attention_decode_cuda(const WindowAttentionCudaDecode& args, void* stream) {
  // The tensor cores take operands of one type; where those of queries and cache differ, both become float32.
  const Element element = args.call.q.element == args.call.k.element ? args.call.q.element : Element::kFloat32;
  switch (element) {
    case Element::kFloat32: launch_decode<float>(args, stream); break;
    case Element::kFloat16: launch_decode<__half>(args, stream); break;
    case Element::kBFloat16: launch_decode<__nv_bfloat16>(args, stream); break;
  }
  if (args.splits == 1) return;
  const int64_t rows = args.call.batch * args.call.heads_q * args.call.len_q;
  launch(join_kernel, grid_of(rows), kJoinWarps * kWarp, 0, stream, args);
}

}  // namespace dskernels
