// Rows of q and k as the kernels multiply them: rotated on their way into shared memory (RoFormer, arXiv 2104.09864,
// equation 34), in float32, then rounded to their type, as the tensor cores take them.
#pragma once

#include "common/elements.cuh"
#include "window_attention/cuda_common.cuh"

namespace dskernels {

// By which angles the rows of a tensor turn. Without a table, half is 0.
struct Rotation {
  const float *cos, *sin;      // [table_rows, half]
  const int64_t* positions;    // the table's row for each place, or null: the place itself
  int64_t table_rows, offset;  // token t stands at place t + offset
  int half;
  bool interleaved;

  // The table's row of a token, or -1 where the table has none.
  __device__ int64_t table_row(int token) const {
    const int64_t place = token + offset, row = positions == nullptr ? place : positions[place];
    return row >= 0 && row < table_rows ? row : -1;
  }

  // Of the elements of pair i.
  __device__ int first(int i) const { return interleaved ? 2 * i : i; }
  __device__ int second(int i) const { return interleaved ? 2 * i + 1 : i + half; }
};

// Of the queries of a sequence, or of its keys.
__device__ inline Rotation rotation_of(const WindowAttentionCuda& args, const BlockTile& tile, bool of_keys) {
  const WindowAttentionArgs& call = args.call;
  const int64_t* positions = call.positions == nullptr ? nullptr : call.positions + tile.batch * call.len_k;
  return {call.cos,
          call.sin,
          positions,
          args.table_rows,
          of_keys ? 0 : tile.sequence.query_offset,
          static_cast<int>(call.rotary_dim / 2),
          call.interleaved};
}

// Cosine and sine of pair i for a row of the table; NaN where the table has none.
__device__ inline float2 angle_of(const Rotation& rotation, int64_t table_row, int i) {
  if (table_row < 0) return make_float2(NAN, NAN);
  const int64_t at = table_row * rotation.half + i;
  return make_float2(rotation.cos[at], rotation.sin[at]);
}

// (x, y) turned by an angle; with its sine negated, back. Contracted by hand: the same bits wherever it is inlined.
__device__ inline float2 turned(float x, float y, float2 angle) {
  return make_float2(fmaf(x, angle.x, -(y * angle.y)), fmaf(y, angle.x, x * angle.y));
}

// Turns kPairs pairs from pair `first` on: (x[i], x[kPairs + i]), or (x[2i], x[2i + 1]) where interleaved.
template <int kPairs>
__device__ inline void turn_pairs(float (&x)[2 * kPairs], const Rotation& rotation, int64_t table_row, int first) {
  float cos[kPairs], sin[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; i += 4) {
    const int64_t at = table_row * rotation.half + first + i;
    const float4 unknown = make_float4(NAN, NAN, NAN, NAN);
    const float4 c = table_row < 0 ? unknown : *reinterpret_cast<const float4*>(rotation.cos + at);
    const float4 s = table_row < 0 ? unknown : *reinterpret_cast<const float4*>(rotation.sin + at);
    memcpy(cos + i, &c, sizeof(c));
    memcpy(sin + i, &s, sizeof(s));
  }
  // Selected, not indexed: an index that the compiler does not know would put x in memory.
  float u[kPairs], w[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 pair = turned(rotation.interleaved ? x[2 * i] : x[i],
                               rotation.interleaved ? x[2 * i + 1] : x[kPairs + i], make_float2(cos[i], sin[i]));
    u[i] = pair.x;
    w[i] = pair.y;
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    x[i] = rotation.interleaved ? (i % 2 == 0 ? u[i / 2] : w[i / 2]) : u[i];
    const int j = kPairs + i;
    x[j] = rotation.interleaved ? (j % 2 == 0 ? u[j / 2] : w[j / 2]) : w[i];
  }
}

// What load_turned brings in, and in which steps.
template <class T>
struct TurnedRows {
  static constexpr int kVector = 16 / sizeof(T);
  Rows<const T> from;
  int first, count, columns;
  Rotation rotation;

  __device__ bool by_16() const {
    const uintptr_t tables = reinterpret_cast<uintptr_t>(rotation.cos) | reinterpret_cast<uintptr_t>(rotation.sin);
    return from.by_16() && columns % kVector == 0 && rotation.half % kVector == 0 && tables % 16 == 0;
  }

  // kVector pairs of row r from pair i on, or the kVector elements from column c on; `to` is the row that is written.
  __device__ void turn_vectors(T* to, int r, int i) const {
    const int low = rotation.first(i), high = rotation.interleaved ? low + kVector : rotation.second(i);
    float x[2 * kVector] = {};
    if (r < count) {
      load_vector(from.at(first + r) + low, x);
      load_vector(from.at(first + r) + high, x + kVector);
      turn_pairs<kVector>(x, rotation, rotation.table_row(from.token(first + r)), i);
    }
    store_vector(to + low, x);
    store_vector(to + high, x + kVector);
  }

  __device__ void copy_vector(T* to, int r, int c) const {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (r < count && c < columns) bits = *reinterpret_cast<const uint4*>(from.at(first + r) + c);
    *reinterpret_cast<uint4*>(to + c) = bits;
  }

  // One pair, one element.
  __device__ void turn_pair(T* to, int r, int i) const {
    const int low = rotation.first(i), high = rotation.second(i);
    float2 pair = make_float2(0.0f, 0.0f);
    if (r < count) {
      const T* row = from.at(first + r);
      const float2 angle = angle_of(rotation, rotation.table_row(from.token(first + r)), i);
      pair = turned(to_float(row[low * from.column_stride]), to_float(row[high * from.column_stride]), angle);
    }
    to[low] = from_float<T>(pair.x);
    to[high] = from_float<T>(pair.y);
  }

  __device__ void copy_element(T* to, int r, int c) const {
    const bool is_inside = r < count && c < columns;
    to[c] = is_inside ? from.at(first + r)[c * from.column_stride] : from_float<T>(0.0f);
  }
};

// Writes row first + r of `from`, turned, to to_row(r), 16-byte aligned, for r < count, and zeros for count <= r <
// rows; so are the elements from `columns` to `width`, a multiple of 16 bytes. Done when the call returns, for other
// threads after a barrier. All kThreads threads of the block call it.
template <class T, int kThreads, class ToRow>
__device__ inline void load_turned(const ToRow& to_row, int rows, int width, const TurnedRows<T>& x) {
  const bool by_16 = x.by_16();
  const int step = by_16 ? TurnedRows<T>::kVector : 1, half = x.rotation.half;
  // The steps of a row: first its pairs, then the elements behind them.
  const int steps = (width - half) / step;
  for (int item = threadIdx.x; item < rows * steps; item += kThreads) {
    const int r = item / steps, i = item % steps * step;
    if (i < half) {
      by_16 ? x.turn_vectors(to_row(r), r, i) : x.turn_pair(to_row(r), r, i);
    } else {
      by_16 ? x.copy_vector(to_row(r), r, i + half) : x.copy_element(to_row(r), r, i + half);
    }
  }
}

// copy_tile for count rows of one head from row `first` on. By 16 bytes a thread goes down a column of the tile: one
// address that moves on takes fewer registers than one for each row.
template <class T, int kThreads, int kRows, int kColumns, int kStride>
__device__ inline void copy_rows(T* shared, const Rows<const T>& from, int first, int count, int columns) {
  constexpr int kVector = 16 / sizeof(T), kVectors = kColumns / kVector, kRowsAtOnce = kThreads / kVectors;
  static_assert(kThreads % kVectors == 0 && kRows % kRowsAtOnce == 0);
  if (!from.by_16()) {
    copy_tile<T, kThreads, kRows, kColumns, kStride>(
        shared, [&](int r) { return from.at(first + r); }, count, columns, from.column_stride, false);
    return;
  }
  const int begin = threadIdx.x / kVectors, column = threadIdx.x % kVectors * kVector;
  const int bytes = min(max(columns - column, 0), kVector) * static_cast<int>(sizeof(T));
  const T* source = from.at(first + begin) + column;
  T* target = shared + begin * kStride + column;
#pragma unroll 1
  for (int row = begin; row < kRows; row += kRowsAtOnce) {
    const bool reads = row < count && bytes > 0;
    // Without anything to read the address is not used, but has to be one.
    ptx::cp_async_16(target, reads ? source : from.data, reads ? bytes : 0);
    source += kRowsAtOnce * from.token_stride;
    target += kRowsAtOnce * kStride;
  }
}

// Brings rows [first, first + count) of q or k into shared[kRows][kStride], turned where there is a table, and zeros
// into the rest of the kColumns columns. Without a table it may be asynchronous, a part of the caller's cp.async group.
template <class T, int kThreads, int kRows, int kColumns, int kStride>
__device__ inline void load_rows(T* shared, const TurnedRows<T>& x) {
  if (x.rotation.half > 0) {
    load_turned<T, kThreads>([&](int r) { return shared + r * kStride; }, kRows, kColumns, x);
    return;
  }
  if (x.from.group == 1) {
    copy_rows<T, kThreads, kRows, kColumns, kStride>(shared, x.from, x.first, x.count, x.columns);
    return;
  }
  copy_tile<T, kThreads, kRows, kColumns, kStride>(
      shared, [&](int r) { return x.from.at(x.first + r); }, x.count, x.columns, x.from.column_stride, x.from.by_16());
}

}  // namespace dskernels
