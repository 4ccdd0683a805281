// Decode: the last few queries of each sequence against a cache of its keys and values, which is read once.
//
// A task owns one key-value head of one sequence, or a part of its keys where there are few heads. The query heads of
// the group are rows of one small matrix, so that a block of keys in cache serves them all. Components lie along the
// vector lanes: with so few rows, lanes of queries would mostly stand empty.
#pragma once

#include "window_attention/cpu_scores.h"

namespace dskernels {
namespace {

// Slots that are read at a time: their keys, then their values. Few enough to stay in cache for all rows.
constexpr int64_t kDecodeBlock = 128;
// Values that are summed between two steps of a Prefetcher.
constexpr int64_t kDecodeSumKeys = 8;
constexpr int64_t kDecodeTasksWanted = 16;
// A part shorter than this would not repay its share of the second pass.
constexpr int64_t kDecodePartKeys = 256;

template <int... kLane>
struct LaneList {};
template <int kCount, int... kLane>
struct MakeLaneList : MakeLaneList<kCount - 1, kCount - 1, kLane...> {};
template <int... kLane>
struct MakeLaneList<0, kLane...> {
  typedef LaneList<kLane...> Type;
};

// Lane i holds a[i] + a[i ^ kBit] where that bit of i is clear, and the same of b where it is set.
template <int kBit, int... kLane>
DSKERNELS_INLINE VecF add_across(VecF a, VecF b, LaneList<kLane...>) {
  return __builtin_shufflevector(a, b, (kLane & kBit ? kLanes + kLane : kLane)...) +
         __builtin_shufflevector(a, b, (kLane & kBit ? kLanes + (kLane ^ kBit) : kLane ^ kBit)...);
}

// Lane i of the result is the sum of the lanes of x[i].
template <int kCount>
DSKERNELS_INLINE VecF sums_of_lanes(const VecF (&x)[kCount]) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    VecF half[kCount / 2];
    DSKERNELS_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      half[i] = add_across<kCount / 2>(x[i], x[i + kCount / 2], typename MakeLaneList<kLanes>::Type());
    }
    return sums_of_lanes(half);
  }
}

template <int kBit, int... kLane>
DSKERNELS_INLINE VecF swap_lanes(VecF x, LaneList<kLane...>) {
  return __builtin_shufflevector(x, x, (kLane ^ kBit)...);
}

// combine(...) of all lanes, in every lane.
template <int kBit = kLanes / 2, class Combine>
DSKERNELS_INLINE VecF over_lanes(VecF x, const Combine& combine) {
  if constexpr (kBit == 0) {
    return x;
  } else {
    return over_lanes<kBit / 2>(combine(x, swap_lanes<kBit>(x, typename MakeLaneList<kLanes>::Type())), combine);
  }
}

// scores[r][j] = <queries[r], keys[j]> for kRows rows of `dim` floats and `count` keys, in rows of kDecodeBlock.
template <int kRows, class T>
DSKERNELS_NOINLINE void decode_scores(const float* queries, const T* keys, int64_t stride, int64_t dim, int64_t count,
                                      float* scores, Prefetcher& prefetcher) {
  constexpr int kKeys = kLanes / kRows;
  for (int64_t j = 0; j < count; j += kKeys) {
    prefetcher.step();
    const T* key[kKeys];
    // Past the end the last key is taken again; nobody looks at what comes of it.
    for (int m = 0; m < kKeys; ++m) key[m] = keys + min_of(j + m, count - 1) * stride;
    VecF sums[kLanes] = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
      VecF query[kRows];
      DSKERNELS_UNROLL
      for (int r = 0; r < kRows; ++r) query[r] = load(queries + r * dim + d);
      DSKERNELS_UNROLL
      for (int m = 0; m < kKeys; ++m) {
        const VecF components = load_vector(key[m] + d);
        DSKERNELS_UNROLL
        for (int r = 0; r < kRows; ++r) sums[r * kKeys + m] += query[r] * components;
      }
    }
    float lanes[kLanes];
    store(lanes, sums_of_lanes(sums));
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(scores + r * kDecodeBlock + j, lanes + r * kKeys, kKeys * sizeof(float));
    }
  }
}

// out[r] = out[r] * rescale[r] + sum over j of weights[r][j] * values[j], for kVectors vectors of columns.
template <int kRows, int kVectors, class T>
DSKERNELS_INLINE void decode_sum_columns(const float* weights, const T* values, int64_t stride, int64_t count,
                                         const float* rescale, float* out, int64_t out_stride, Prefetcher& prefetcher) {
  // From 0, not from what is there: sums of sums lose less than one long sum.
  VecF sums[kRows][kVectors] = {};
  for (int64_t j = 0; j < count; ++j) {
    if (j % kDecodeSumKeys == 0) prefetcher.step();
    VecF columns[kVectors];
    DSKERNELS_UNROLL
    for (int n = 0; n < kVectors; ++n) columns[n] = load_vector(values + j * stride + n * kLanes);
    DSKERNELS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      DSKERNELS_UNROLL
      for (int n = 0; n < kVectors; ++n) sums[r][n] += weights[r * kDecodeBlock + j] * columns[n];
    }
  }
  DSKERNELS_UNROLL
  for (int r = 0; r < kRows; ++r) {
    DSKERNELS_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      float* place = out + r * out_stride + n * kLanes;
      store(place, rescale[r] * load(place) + sums[r][n]);
    }
  }
}

template <int kRows, class T>
DSKERNELS_NOINLINE void decode_sum(const float* weights, const T* values, int64_t stride, int64_t dim, int64_t count,
                                   const float* rescale, float* out, int64_t out_stride, Prefetcher& prefetcher) {
  constexpr int kAccumulators = kWide ? 16 : 8, kVectors = kAccumulators / kRows < 8 ? kAccumulators / kRows : 8;
  int64_t d = 0;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    decode_sum_columns<kRows, kVectors>(weights, values + d, stride, count, rescale, out + d, out_stride, prefetcher);
  }
  for (; d < dim; d += kLanes) {
    decode_sum_columns<kRows, 1>(weights, values + d, stride, count, rescale, out + d, out_stride, prefetcher);
  }
}

// f.operator()<kRows>(first) for `rows` rows in groups of 4, 2 and 1.
template <class F>
inline void for_row_groups(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) f.template operator()<4>(r);
  for (; r + 2 <= rows; r += 2) f.template operator()<2>(r);
  for (; r < rows; ++r) f.template operator()<1>(r);
}

// What a part has of one row: the softmax's maximum (base 2), its sum, and the weighted sum of values.
struct DecodeRow {
  float* data;
  float& maximum() const { return data[0]; }
  float& sum() const { return data[1]; }
  float* out() const { return data + kLanes; }
};

// Rows are ordered by query, then by head of the group.
struct DecodeShape {
  int64_t group, rows, key_floats, value_floats, parts;

  explicit DecodeShape(const WindowAttentionArgs& args)
      : group(args.heads_q / args.heads_kv),
        rows(group * args.len_q),
        key_floats(round_up(args.dim_qk, kLanes)),
        value_floats(round_up(args.dim_v, kLanes)) {
    const int64_t heads = max_of(args.batch * args.heads_kv, int64_t{1});
    const int64_t keys = min_of(args.len_k, max_of(args.left, int64_t{0}) + args.len_q);
    parts = min_of((kDecodeTasksWanted + heads - 1) / heads, max_of(keys / kDecodePartKeys, int64_t{1}));
  }

  // Steps of decode_scores over `keys` keys for the first group of rows.
  int64_t score_steps(int64_t keys) const { return keys * (group >= 4 ? 4 : group >= 2 ? 2 : 1) / kLanes; }

  int64_t row_floats() const { return kLanes + value_floats; }

  DecodeRow row(float* partial, int64_t head, int64_t part, int64_t r) const {
    return {partial + ((head * parts + part) * rows + r) * row_floats()};
  }
};

struct DecodeScratch {
  float *queries, *scores, *rescale, *block;

  DecodeScratch(const DecodeShape& shape, Carver& carver) {
    queries = carver.floats(shape.rows * shape.key_floats);
    scores = carver.floats(shape.rows * kDecodeBlock);
    rescale = carver.floats(shape.rows);
    block = carver.floats(kDecodeBlock * max_of(shape.key_floats, shape.value_floats));
  }
};

// Calls f(rows, stride) with `count` rows of a cache from `position` on, which do not pass the last slot: where they
// lie and as what they are if they are dense and of whole vectors, else brought into `scratch` as fp32.
template <class F>
inline void with_cache_rows(const WindowAttentionArgs& args, const View4& view, int64_t dim, bool rotated, int64_t b,
                            int64_t h, int64_t position, int64_t count, float* scratch, const F& f) {
  const int64_t slot = position % args.len_k, stride = round_up(dim, kLanes);
  const void* in_place = row_address(view, b, h, slot);
  const bool dense = view.stride[3] == 1 && dim == stride && !rotated;
  if (dense && view.element == Element::kFloat32) return f(static_cast<const float*>(in_place), view.stride[2]);
  if (dense && view.element == Element::kBFloat16) return f(static_cast<const BFloat16*>(in_place), view.stride[2]);
  if constexpr (kLoadsVectors<Float16>) {
    if (dense && view.element == Element::kFloat16) return f(static_cast<const Float16*>(in_place), view.stride[2]);
  }
  for (int64_t j = 0; j < count; ++j) {
    load_rotated(args, view, dim, b, h, slot + j, rotated ? position + j : -1, scratch + j * stride);
  }
  f(static_cast<const float*>(scratch), stride);
}

// Turns `count` scores of a row into weights and brings its maximum and sum up to date. Returns the factor for what
// was summed before.
inline float decode_softmax(float* scores, int64_t count, float cap, const DecodeRow& row) {
  const int64_t end = round_up(count, kLanes);
  if (cap != 0.0f) {
    for (int64_t j = 0; j < end; j += kLanes) store(scores + j, cap * vtanh(load(scores + j) / cap));
  }
  for (int64_t j = count; j < end; ++j) scores[j] = -kInfinity;
  VecF maxima = broadcast(row.maximum()), sums{};
  for (int64_t j = 0; j < end; j += kLanes) maxima = vmax(maxima, load(scores + j));
  // vmax keeps a NaN of its second operand only.
  const VecF maximum = over_lanes(maxima, [](VecF a, VecF b) { return a != a ? a : vmax(a, b); });
  // Where all scores are -inf, subtracting 0 instead keeps -inf - -inf = NaN out.
  const VecF subtracted = maximum == broadcast(-kInfinity) ? VecF{} : maximum;
  for (int64_t j = 0; j < end; j += kLanes) {
    const VecF weight = exp2_nonpositive(load(scores + j) - subtracted);
    store(scores + j, weight);
    sums += weight;
  }
  const float rescale = exp2_nonpositive(broadcast(row.maximum()) - subtracted)[0];
  row.maximum() = maximum[0];
  row.sum() = row.sum() * rescale + over_lanes(sums, [](VecF a, VecF b) { return a + b; })[0];
  return rescale;
}

// One head of one sequence. Query i stands at position `first_query + i`, before the sequence where that is negative.
struct DecodeHead {
  const WindowAttentionDecodeArgs& decode;
  const WindowAttentionArgs& args;
  DecodeShape shape;
  int64_t head, b, h, length, first_query;

  DecodeHead(const WindowAttentionDecodeArgs& decode_args, int64_t index)
      : decode(decode_args),
        args(decode_args.forward),
        shape(args),
        head(index),
        b(index / args.heads_kv),
        h(index % args.heads_kv),
        length(decode_args.lengths[b]),
        first_query(length - args.len_q) {}

  // Query i sees the positions [low(i), high(i)); none before the sequence.
  int64_t low(int64_t i) const { return max_of(first_query + i - args.left, int64_t{0}); }
  int64_t high(int64_t i) const {
    return first_query + i < 0 ? int64_t{0} : min_of(first_query + i + args.right + 1, length);
  }

  void prefetch(const View4& view, int64_t dim, int64_t begin, int64_t end, int64_t steps,
                Prefetcher& prefetcher) const {
    const int64_t slot = begin % args.len_k;
    prefetcher.add(view, dim, b, h, slot, slot + end - begin, max_of(steps, int64_t{1}), false);
  }

  void load_queries(float* to) const {
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t i = r / shape.group, position = first_query + i;
      float* row = to + r * shape.key_floats;
      load_rotated(args, args.q, args.dim_qk, b, h * shape.group + r % shape.group, i, position, row);
      for (int64_t d = 0; d < shape.key_floats; d += kLanes) store(row + d, args.scale * kLog2E * load(row + d));
    }
  }

  // Adds the positions [begin, end), which lie in consecutive slots, to a part's rows; [end, next_end) will follow.
  void add_block(int64_t part, int64_t begin, int64_t end, int64_t next_end, const DecodeScratch& scratch) const {
    const auto each_query = [&](const auto& f) __attribute__((always_inline)) {
      for (int64_t i = 0; i < args.len_q; ++i) {
        const int64_t first = max_of(low(i), begin), last = min_of(high(i), end);
        if (first < last) f(i * shape.group, first - begin, last - first);
      }
    };
    const bool rotated = !decode.keys_rotated && args.rotary_dim > 0;
    Prefetcher next_values, next_keys;
    prefetch(args.v, args.dim_v, begin, end, shape.score_steps(end - begin), next_values);
    prefetch(args.k, args.dim_qk, end, next_end, (end - begin) / kDecodeSumKeys, next_keys);
    const auto add_scores = [&](const auto* keys, int64_t stride) {
      each_query([&](int64_t row, int64_t offset, int64_t count) {
        for_row_groups(shape.group, [&]<int kRows>(int64_t r) {
          decode_scores<kRows>(scratch.queries + (row + r) * shape.key_floats, keys + offset * stride, stride,
                               shape.key_floats, count, scratch.scores + (row + r) * kDecodeBlock, next_values);
        });
        for (int64_t r = row; r < row + shape.group; ++r) {
          scratch.rescale[r] = decode_softmax(scratch.scores + r * kDecodeBlock, count, args.softcap * kLog2E,
                                              shape.row(decode.partial, head, part, r));
        }
      });
    };
    const auto add_values = [&](const auto* values, int64_t stride) {
      each_query([&](int64_t row, int64_t offset, int64_t count) {
        for_row_groups(shape.group, [&]<int kRows>(int64_t r) {
          decode_sum<kRows>(scratch.scores + (row + r) * kDecodeBlock, values + offset * stride, stride,
                            shape.value_floats, count, scratch.rescale + row + r,
                            shape.row(decode.partial, head, part, row + r).out(), shape.row_floats(), next_keys);
        });
      });
    };
    const int64_t count = end - begin;
    with_cache_rows(args, args.k, args.dim_qk, rotated, b, h, begin, count, scratch.block, add_scores);
    with_cache_rows(args, args.v, args.dim_v, false, b, h, begin, count, scratch.block, add_values);
  }
};

inline WindowAttentionPlan plan_decode(const WindowAttentionArgs& args) {
  const DecodeShape shape(args);
  Carver carver(nullptr);
  DecodeScratch scratch(shape, carver);
  const int64_t heads = args.batch * args.heads_kv;
  return {heads * shape.parts, carver.used(), heads,
          heads * shape.parts * shape.rows * shape.row_floats() * int64_t{sizeof(float)}};
}

inline void run_decode(const WindowAttentionDecodeArgs& decode, int64_t task, void* memory) {
  const int64_t parts = DecodeShape(decode.forward).parts, part = task % parts;
  const DecodeHead head(decode, task / parts);
  Carver carver(memory);
  const DecodeScratch scratch(head.shape, carver);
  for (int64_t r = 0; r < head.shape.rows; ++r) {
    const DecodeRow row = head.shape.row(decode.partial, head.head, part, r);
    for (int64_t d = 0; d < head.shape.row_floats(); ++d) row.data[d] = 0.0f;
    row.maximum() = -kInfinity;
  }
  // The queries before the sequence see nothing, the others see no less and no further than the first and the last.
  const int64_t len_q = decode.forward.len_q;
  const int64_t first = head.low(max_of(-head.first_query, int64_t{0})), last = head.high(len_q - 1);
  const int64_t part_keys = round_up((last - first + parts - 1) / parts, kLanes);
  const int64_t end = min_of(first + (part + 1) * part_keys, last), slots = decode.forward.len_k;
  if (first + part * part_keys >= end) return;
  head.load_queries(scratch.queries);
  // A block ends where the slots wrap.
  const auto block_end = [&](int64_t begin) {
    return min_of(end, min_of(begin + kDecodeBlock, begin - begin % slots + slots));
  };
  for (int64_t begin = first + part * part_keys; begin < end; begin = block_end(begin)) {
    const int64_t stop = block_end(begin);
    head.add_block(part, begin, stop, stop < end ? block_end(stop) : end, scratch);
  }
}

// Joins the parts of one head: the softmax over all of them, and the sink.
inline void merge_decode(const WindowAttentionDecodeArgs& decode, int64_t task, void*) {
  const DecodeHead head(decode, task);
  const DecodeShape& shape = head.shape;
  const WindowAttentionArgs& args = decode.forward;
  for (int64_t r = 0; r < shape.rows; ++r) {
    const int64_t i = r / shape.group, h = head.h * shape.group + r % shape.group;
    const float sink = args.sink == nullptr ? -kInfinity : args.sink[h] * kLog2E;
    float maximum = sink;
    for (int64_t part = 0; part < shape.parts; ++part) {
      const float other = shape.row(decode.partial, task, part, r).maximum();
      maximum = other <= maximum ? maximum : other;
    }
    const DecodeRow first = shape.row(decode.partial, task, 0, r);
    const auto weight_of = [&](float part_maximum) {
      return part_maximum == -kInfinity ? 0.0f : __builtin_exp2f(part_maximum - maximum);
    };
    float sum = weight_of(sink);
    for (int64_t part = 0; part < shape.parts; ++part) {
      const DecodeRow row = shape.row(decode.partial, task, part, r);
      const float weight = weight_of(row.maximum());
      sum += weight * row.sum();
      for (int64_t d = 0; d < shape.value_floats; ++d) {
        first.out()[d] = (part == 0 ? 0.0f : first.out()[d]) + weight * row.out()[d];
      }
    }
    const bool sees_nothing = sum == 0.0f;
    args.lse[head.b * args.lse_stride_batch + h * args.lse_stride_head + i] =
        sees_nothing ? -kInfinity : maximum * kLn2 + __builtin_logf(sum);
    store_row(args.out.element, first.out(), sees_nothing ? 0.0f : 1.0f / sum, args.dim_v,
              row_address(args.out, head.b, h, i), args.out.stride[3]);
  }
}

}  // namespace
}  // namespace dskernels
