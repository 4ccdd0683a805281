// Tables of a head over the pairs of a kind of cell, laid out as the scores are: [tile of queries][key][query].
#pragma once

#include "swin_attention/cpu_tile.h"

namespace dskernels {
namespace {

inline int64_t tiles_of(int64_t tokens) { return (tokens + kTile - 1) / kTile; }

// Floats of a table over all pairs of a window.
inline int64_t table_floats(const SwinAttentionArgs& args) {
  const int64_t tokens = args.window_height * args.window_width;
  return tiles_of(tokens) * tokens * kTile;
}

// Brings the biases of head h into a table. `scratch` holds a tile's rows.
inline void load_bias(const SwinAttentionArgs& args, const Places& places, int64_t h, float* scratch, float* table) {
  const float* bias = args.bias + h * args.bias_stride_head;
  const float* rows[kTile];
  for (int64_t begin = 0; begin < places.count; begin += kTile, table += places.count * kTile) {
    const int64_t count = min_of(int64_t{kTile}, places.count - begin);
    for (int64_t r = 0; r < count; ++r) {
      rows[r] = bias + places.place[begin + r] * args.bias_stride_query;
      if (places.whole(args)) continue;
      float* row = scratch + r * places.count;
      for (int64_t j = 0; j < places.count; ++j) row[j] = rows[r][places.place[j]];
      rows[r] = row;
    }
    transpose_rows(rows, count, places.count, 1.0f, table);
  }
}

// Adds a table of gradients into `grad`, [query][key] over all tokens of a window. `scratch` holds kTile floats a row.
inline void flush_grad_bias(const SwinAttentionArgs& args, const Places& places, const float* table, float* scratch,
                            float* grad) {
  const int64_t tokens = args.window_height * args.window_width, count = places.count;
  for (int64_t begin = 0; begin < count; begin += kTile, table += count * kTile) {
    const int64_t queries = min_of(int64_t{kTile}, count - begin);
    for (int64_t first = 0; first < count; first += kTile) {
      const int64_t keys = min_of(int64_t{kTile}, count - first);
      const float* rows[kTile];
      for (int64_t j = 0; j < keys; ++j) rows[j] = table + (first + j) * kTile;
      transpose_rows(rows, keys, queries, 1.0f, scratch);
      for (int64_t r = 0; r < queries; ++r) {
        float* target = grad + places.place[begin + r] * tokens;
        const float* source = scratch + r * kTile;
        if (places.whole(args)) {
          for (int64_t j = 0; j < keys; ++j) target[first + j] += source[j];
        } else {
          for (int64_t j = 0; j < keys; ++j) target[places.place[first + j]] += source[j];
        }
      }
    }
  }
}

}  // namespace
}  // namespace dskernels
