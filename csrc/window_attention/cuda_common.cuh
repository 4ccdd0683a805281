// What the kernels of window attention share: which rows a block works on, whom they see, and how rows come into shared
// memory.
//
// The heads of a group, which share their keys, are packed: row r of a sequence is query r / group, head r % group of
// the group, so that a tile of keys is read once for all of them.
#pragma once

#include "common/copy.cuh"
#include "window_attention/cuda.h"

namespace dskernels {

__host__ __device__ inline int64_t clamp_to(int64_t x, int64_t low, int64_t high) { return min(max(x, low), high); }

__host__ __device__ inline int group_of(const WindowAttentionArgs& args) {
  return static_cast<int>(args.heads_q / args.heads_kv);
}

// Two numbers begin <= i < end; nothing where end <= begin.
struct Span {
  int begin, end;
  __host__ __device__ bool is_empty() const { return end <= begin; }
};

// A sequence of the batch, or a packed one, and its window: query i sees key j iff start <= j - i < stop.
struct Sequence {
  int64_t q_begin, k_begin;  // its first token among those of q, out and lse, and among those of k and v
  int len_q, len_k;
  int start, stop;
  int64_t query_offset;  // query i stands at position i + query_offset, key j at j
  bool past_end;         // the tokens past the last offset, which see nothing, not even the sink

  // All keys that one of the queries first to last sees. Windows of neighbours overlap or touch: each key of the span
  // is seen by one of the queries at least.
  __host__ __device__ Span keys_seen(int first, int last) const {
    const int low = max(first + start, 0);
    return {low, start < stop ? min(last + stop, len_k) : low};
  }

  // All queries that see one of the keys first to last.
  __host__ __device__ Span queries_seeing(int first, int last) const {
    const int low = max(first - stop + 1, 0);
    return {low, start < stop ? min(last - start + 1, len_q) : low};
  }
};

__host__ __device__ inline void set_window(Sequence& s, const WindowAttentionArgs& args, int64_t query_offset) {
  // Beyond these no query sees more, or fewer, of the keys there are. Bounds are at most kUnbounded: no sum overflows.
  s.start = static_cast<int>(clamp_to(query_offset - args.left, -s.len_q, s.len_k));
  s.stop = static_cast<int>(clamp_to(query_offset + args.right + 1, -s.len_q, s.len_k));
  s.query_offset = query_offset;
}

// A sequence that is not packed.
__host__ __device__ inline Sequence dense_sequence(const WindowAttentionArgs& args) {
  Sequence s{};
  s.len_q = static_cast<int>(args.len_q);
  s.len_k = static_cast<int>(args.len_k);
  set_window(s, args, args.query_offset);
  return s;
}

// What a block works on: tile `index` of `sequence`, whose tiles are of queries (packed by groups) or of keys.
struct BlockTile {
  int batch, head_kv, index;
  Sequence sequence;
};

// Tiles of `block_rows` rows that all tokens of a head of q (or of k, `of_keys`) are cut into, a token being
// `token_rows` rows: the grid is tile_count * batch * heads_kv blocks.
inline int64_t tile_count(const WindowAttentionCuda& args, bool of_keys, int token_rows, int block_rows) {
  const int64_t rows = (of_keys ? args.call.len_k : args.call.len_q) * token_rows;
  return args.offsets_q == nullptr ? ceil_div(rows, block_rows) : rows / block_rows + args.sequences + 1;
}

// Where packed sequence `s` begins; the last, past all offsets, ends with the tokens.
__device__ inline int64_t offset_at(const void* offsets, bool wide, int s, int sequences, int64_t tokens) {
  if (s > sequences) return tokens;
  const int64_t at = wide ? static_cast<const int64_t*>(offsets)[s] : static_cast<const int32_t*>(offsets)[s];
  return clamp_to(at, 0, tokens);
}

// Sequence s has the tiles from offsets[s] * token_rows / block_rows + s on, which are enough for it and at most one
// too many. So the number of all tiles follows from the shapes, nobody waits for the lengths, and a short sequence
// costs no more tiles than it has. Tokens past the last offset are one more sequence, without partners.
__device__ inline BlockTile packed_tile(const WindowAttentionCuda& args, int tile, bool of_keys, int token_rows,
                                        int block_rows) {
  const WindowAttentionArgs& call = args.call;
  const auto offset_q = [&](int s) {
    return offset_at(args.offsets_q, args.wide_offsets_q, s, args.sequences, call.len_q);
  };
  const auto offset_k = [&](int s) {
    return offset_at(args.offsets_k, args.wide_offsets_k, s, args.sequences, call.len_k);
  };
  const auto first_tile = [&](int s) {
    return static_cast<int>((of_keys ? offset_k(s) : offset_q(s)) * token_rows / block_rows) + s;
  };
  // The last sequence that begins at this tile or before, by a search in which each lane of the warp tries one place.
  int found = 0;
  for (int count = args.sequences + 1; count > 1;) {
    const int step = (count + kWarp - 1) / kWarp, mine = lane_index() * step;
    const unsigned reached = __ballot_sync(kAllLanes, mine < count && first_tile(found + mine) <= tile);
    const int passed = max(__popc(reached) - 1, 0) * step;
    found += passed;
    count = min(step, count - passed);
  }
  BlockTile result{};
  Sequence& s = result.sequence;
  s.past_end = found == args.sequences;
  s.q_begin = offset_q(found);
  s.k_begin = offset_k(found);
  s.len_q = static_cast<int>(max(offset_q(found + 1) - s.q_begin, int64_t{0}));
  s.len_k = static_cast<int>(max(offset_k(found + 1) - s.k_begin, int64_t{0}));
  result.index = max(tile - first_tile(found), 0);
  if (s.past_end) (of_keys ? s.len_q : s.len_k) = 0;
  set_window(s, call, s.len_k - s.len_q);
  return result;
}

// What block number `block` of tile_count(...) * batch * heads_kv works on. Blocks of one head follow each other, so
// that they find its keys in the L2 cache; the last tile, which sees most where a window has no left bound, first. A
// tile may have no row: index * block_rows >= len * token_rows. All lanes of a warp call it.
__device__ inline BlockTile tile_of_block(const WindowAttentionCuda& args, int block, int tiles, bool of_keys,
                                          int token_rows, int block_rows) {
  const WindowAttentionArgs& call = args.call;
  const int tile = tiles - 1 - block % tiles, pair = block / tiles, heads = static_cast<int>(call.heads_kv);
  BlockTile result{};
  if (args.offsets_q != nullptr) {
    result = packed_tile(args, tile, of_keys, token_rows, block_rows);
  } else {
    result.index = tile;
    result.sequence = dense_sequence(call);
  }
  result.batch = pair / heads;
  result.head_kv = pair % heads;
  return result;
}

// Rows of a head, or of the packed heads of a group.
template <class T>
struct Rows {
  T* data;  // row 0
  int64_t token_stride, head_stride, column_stride;
  int group;

  __device__ T* at(int row) const {
    if (group == 1) return data + row * token_stride;
    return data + row / group * token_stride + row % group * head_stride;
  }

  __device__ int token(int row) const { return group == 1 ? row : row / group; }

  // Whether they can be read and written 16 bytes at a time.
  __device__ bool by_16() const {
    return copies_by_16<T>(data, token_stride, column_stride) &&
           (group == 1 || head_stride * static_cast<int64_t>(sizeof(T)) % 16 == 0);
  }
};

// Those of `group` heads from `head` on, from token `begin` on.
template <class T>
__device__ inline Rows<T> rows_of(const View4& view, int64_t batch, int64_t head, int64_t begin, int group) {
  T* data = static_cast<T*>(view.data) + (batch * view.stride[0] + head * view.stride[1] + begin * view.stride[2]);
  return {data, view.stride[2], view.stride[1], view.stride[3], group};
}

}  // namespace dskernels
