// Rotary embedding of one row (RoFormer, arXiv 2104.09864, equation 34).
#pragma once

#include "common/vec.h"

namespace dskernels {
namespace {

// Pair i of the first 2 * half elements turns by the angle whose cosine and sine are cos[i] and sin[i]. Half-split
// pairs are (i, i + half), interleaved ones (2i, 2i + 1). `sign` -1 turns back, which is what a gradient needs: the
// transpose of a rotation is its inverse. `to` may be `from`; elements past the pairs are left to the caller.
inline void rotate_row(const float* from, float* to, const float* cos, const float* sin, int64_t half, bool interleaved,
                       float sign) {
  if (!interleaved) {
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const VecF x = load(from + i), y = load(from + half + i), c = load(cos + i), s = sign * load(sin + i);
      store(to + i, x * c - y * s);
      store(to + half + i, y * c + x * s);
    }
    for (; i < half; ++i) {
      const float x = from[i], y = from[half + i], s = sign * sin[i];
      to[i] = x * cos[i] - y * s;
      to[half + i] = y * cos[i] + x * s;
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float x = from[2 * i], y = from[2 * i + 1], s = sign * sin[i];
    to[2 * i] = x * cos[i] - y * s;
    to[2 * i + 1] = y * cos[i] + x * s;
  }
}

}  // namespace
}  // namespace dskernels
