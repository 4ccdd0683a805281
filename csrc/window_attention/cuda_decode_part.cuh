// Which rows and keys a block of the decode kernel works on, and how rows of a cache come into shared memory.
//
// Rows are the heads of a group and the queries of the step: row r is query r / group, head r % group of the group. All
// heads of a query lie together, so a tile has few queries, and so few keys.
#pragma once

#include "common/mma.cuh"
#include "common/softmax.cuh"
#include "window_attention/cuda_decode.h"
#include "window_attention/cuda_rope.cuh"

namespace dskernels {

// Rows of a tile, and keys that a warp multiplies them by at a time: the least that the tensor cores take.
constexpr int kDecodeRows = 16, kDecodeKeys = 16;

// Sizes for elements T and head dims up to kWidth.
//
// The kernel is bound by the reading of the cache. To keep 4.8 TB/s (H200) busy through a latency of some 0.8 us takes
// 4.8e12 * 0.8e-6 = 3.8 MB under way, 29 KB for each of 132 multiprocessors; an A100 needs 14 KB. While a warp works on
// one slot of its ring, the copies to the other kSlots - 1 are under way: 24 KB a block for rows of 128 bytes, else
// 32 KB. Of blocks there are kBlocks in the 228 KB of shared memory, so 64 to 96 KB in all: twice what is needed and
// more, so that it holds for narrower heads, and while some of the warps begin or end.
template <class T, int kWidth>
struct DecodeShape {
  static constexpr int kRowBytes = kWidth * static_cast<int>(sizeof(T));
  static constexpr int kWarps = kRowBytes <= 512 ? 4 : 2;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kSlots = kRowBytes <= 128 ? 4 : kRowBytes <= 256 ? 3 : 2;
  // On a multiprocessor at a time, which registers have to allow.
  static constexpr int kBlocks = kRowBytes <= 128 ? 4 : kRowBytes <= 256 ? 3 : 2;
  static constexpr int kStride = kWidth + Mma<T>::kPad;
  static constexpr int kSlot = kDecodeKeys * kStride;
  // Of a warp's sums, which take the place of its ring. A multiple of 32 and 8 more: free of bank conflicts.
  static constexpr int kSumStride = kWidth + 8;
  static constexpr int kSharedBytes = shared_bytes<T>(kDecodeRows * kStride) + shared_bytes<T>(kWarps * kSlots * kSlot);
  static_assert(kDecodeRows * kSumStride * sizeof(float) <= kSlots * kSlot * sizeof(T));
  static_assert(kSharedBytes + 2 * kWarps * kDecodeRows * sizeof(float) <= kMaxSharedBytes);
};

// One split of the keys of one tile of rows.
struct DecodePart {
  int pair, batch, head_kv;  // number of all key heads; of its sequence and in it
  int split;
  int first_row, rows;     // of the tile; of the sequence
  int64_t first_position;  // where query 0 stands; negative before the sequence
  // The keys: `count` of them from position `begin` on, all of which one of the rows sees at least. Key n lies in slot
  // first_slot + n, or, past the last, at the beginning again; no slot is that of two.
  int64_t begin;
  int count, first_slot;
};

__device__ inline int64_t length_of(const WindowAttentionCudaDecode& args, int batch) {
  const int64_t at = batch * args.length_stride;
  const int64_t length =
      args.wide_lengths ? static_cast<const int64_t*>(args.lengths)[at] : static_cast<const int32_t*>(args.lengths)[at];
  return clamp_to(length, 0, kUnbounded);
}

// Blocks of the tiles of a sequence's head follow each other, so that they find its keys in the L2 cache.
__device__ inline DecodePart part_of_block(const WindowAttentionCudaDecode& args) {
  const WindowAttentionArgs& call = args.call;
  const int group = group_of(call), heads = static_cast<int>(call.heads_kv), len_q = static_cast<int>(call.len_q);
  DecodePart part{};
  part.rows = group * len_q;
  const int tiles = static_cast<int>(ceil_div(part.rows, kDecodeRows)), block = static_cast<int>(blockIdx.x);
  part.first_row = block % tiles * kDecodeRows;
  part.split = block / tiles % args.splits;
  part.pair = block / tiles / args.splits;
  part.batch = part.pair / heads;
  part.head_kv = part.pair % heads;

  const int64_t length = length_of(args, part.batch);
  part.first_position = length - len_q;
  const int last_row = min(part.first_row + kDecodeRows, part.rows) - 1;
  const int64_t first = max(part.first_position + part.first_row / group, int64_t{0});
  const int64_t last = part.first_position + last_row / group;
  const int64_t low = max(max(first - call.left, length - call.len_k), int64_t{0});
  const int64_t high = min(last + call.right + 1, length);
  // An empty window, or no query in the sequence, sees nothing, whatever the bounds say.
  const bool is_blind = call.left + call.right < 0 || last < first;
  const int keys = is_blind ? 0 : static_cast<int>(max(high - low, int64_t{0}));
  const int tiles_of_split = (keys + args.splits * kDecodeKeys - 1) / (args.splits * kDecodeKeys);
  const int offset = min(part.split * tiles_of_split * kDecodeKeys, keys);
  part.begin = low + offset;
  part.count = min(keys - offset, tiles_of_split * kDecodeKeys);
  if (part.count > 0) part.first_slot = static_cast<int>(part.begin % call.len_k);
  return part;
}

// Which keys of the part row r of the tile sees; nothing before the sequence and past the rows.
__device__ inline Span keys_of_row(const WindowAttentionCudaDecode& args, const DecodePart& part, int r) {
  const int row = part.first_row + r;
  const int64_t position = part.first_position + row / group_of(args.call);
  if (row >= part.rows || position < 0) return {0, 0};
  return {static_cast<int>(clamp_to(position - args.call.left - part.begin, 0, part.count)),
          static_cast<int>(clamp_to(position + args.call.right + 1 - part.begin, 0, part.count))};
}

// Of tokens of which the first stands at `first`. Without `turns`, or without a table, no pair turns.
__device__ inline Rotation rotation_from(const WindowAttentionCudaDecode& args, int64_t first, bool turns) {
  Rotation rotation{};
  rotation.cos = args.call.cos;
  rotation.sin = args.call.sin;
  rotation.table_rows = args.table_rows;
  rotation.offset = first;
  rotation.half = turns ? static_cast<int>(args.call.rotary_dim / 2) : 0;
  rotation.interleaved = args.call.interleaved;
  return rotation;
}

template <class T>
constexpr Element kElementOf = std::is_same_v<T, float>    ? Element::kFloat32
                               : std::is_same_v<T, __half> ? Element::kFloat16
                                                           : Element::kBFloat16;

// The slots of one head of a cache.
struct CacheHead {
  const void* data;
  Element element;
  int64_t slot_stride, column_stride;
  int slots, columns;
  bool by_16;
};

// Of the values or of the keys. To find it again for every tile costs less than the registers to keep both.
__device__ inline CacheHead cache_head(const WindowAttentionCudaDecode& args, const DecodePart& part, bool of_values) {
  const View4 &k = args.call.k, &v = args.call.v;
  CacheHead head;
  head.element = k.element;
  head.slot_stride = of_values ? v.stride[2] : k.stride[2];
  head.column_stride = of_values ? v.stride[3] : k.stride[3];
  head.slots = static_cast<int>(args.call.len_k);
  head.columns = static_cast<int>(of_values ? args.call.dim_v : args.call.dim_qk);
  const bool is_wide = head.element == Element::kFloat32;
  const int64_t offset =
      part.batch * (of_values ? v.stride[0] : k.stride[0]) + part.head_kv * (of_values ? v.stride[1] : k.stride[1]);
  head.data = static_cast<const char*>(of_values ? v.data : k.data) + offset * (is_wide ? 4 : 2);
  head.by_16 = is_wide ? copies_by_16<float>(head.data, head.slot_stride, head.column_stride)
                       : copies_by_16<__half>(head.data, head.slot_stride, head.column_stride);
  return head;
}

// Of the element at column 0.
__device__ inline int64_t offset_of_key(const CacheHead& cache, const DecodePart& part, int n) {
  // Both are below 2^30.
  const int slot = part.first_slot + n;
  return (slot < cache.slots ? slot : slot - cache.slots) * cache.slot_stride;
}

// Writes slot[j] for j < 16: key n + j of the part as T, where there is one, else 0; columns up to the next multiple of
// 16 are 0. Where the cache is of T and aligned it is asynchronous, a part of the caller's cp.async group, else done
// when the call returns. All lanes of a warp call it.
template <class T, int kWidth>
__device__ inline void copy_keys(T* slot, const CacheHead& cache, const DecodePart& part, int n) {
  constexpr int kStride = DecodeShape<T, kWidth>::kStride;
  const int filled = (cache.columns + 15) / 16 * 16;
  if (cache.element == kElementOf<T> && cache.by_16) {
    constexpr int kVector = 16 / sizeof(T), kVectors = kWidth / kVector;
#pragma unroll 4
    for (int i = lane_index(); i < kDecodeKeys * kVectors; i += kWarp) {
      const int j = i / kVectors, column = i % kVectors * kVector;
      if (column >= filled) continue;
      const int count = n + j < part.count ? min(max(cache.columns - column, 0), kVector) : 0;
      // Without anything to read the address is not used, but has to be one.
      const T* from = static_cast<const T*>(cache.data) + (count > 0 ? offset_of_key(cache, part, n + j) + column : 0);
      ptx::cp_async_16(slot + j * kStride + column, from, count * static_cast<int>(sizeof(T)));
    }
    return;
  }
  if constexpr (std::is_same_v<T, float>) {
    if (cache.element != Element::kFloat32 && cache.by_16 && cache.columns % 8 == 0) {
      constexpr int kVectors = kWidth / 8;
#pragma unroll 2
      for (int i = lane_index(); i < kDecodeKeys * kVectors; i += kWarp) {
        const int j = i / kVectors, column = i % kVectors * 8;
        if (column >= filled) continue;
        float x[8] = {};
        if (n + j < part.count && column < cache.columns) {
          const int64_t at = offset_of_key(cache, part, n + j) + column;
          if (cache.element == Element::kFloat16) {
            load_vector(static_cast<const __half*>(cache.data) + at, x);
          } else {
            load_vector(static_cast<const __nv_bfloat16*>(cache.data) + at, x);
          }
        }
        float4* to = reinterpret_cast<float4*>(slot + j * kStride + column);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
      }
      return;
    }
  }
  // Several loads under way before the first is used.
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int begin = lane_index(); begin < kDecodeKeys * kWidth; begin += kBatch * kWarp) {
    float x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int j = (begin + i * kWarp) / kWidth, column = (begin + i * kWarp) % kWidth;
      const bool is_there = n + j < part.count && column < cache.columns;
      const int64_t at = is_there ? offset_of_key(cache, part, n + j) + column * cache.column_stride : 0;
      x[i] = is_there ? load_element(cache.data, cache.element, at) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = begin + i * kWarp;
      slot[at / kWidth * kStride + at % kWidth] = from_float<T>(x[i]);
    }
  }
}

}  // namespace dskernels
