// Scales and zero points of int4 groups, lane by lane: a lane of a vector of nibbles holds eight columns.
#pragma once

#include "common/rows.h"
#include "quantized_matmul/args.h"

namespace dskernels {
namespace {

// The groups of one row of an int4 weight.
struct GroupRow {
  const float* scale;
  const uint8_t* zero_point;  // or null
};

DSKERNELS_INLINE GroupRow group_row(const QuantizedMatmulArgs& args, int64_t row) {
  const int64_t first = row * args.groups;
  return {args.scale + first, args.zero_point == nullptr ? nullptr : args.zero_point + first};
}

// How lanes map to groups. Where a vector of nibbles holds whole groups, lane l of it belongs to group l / lanes.
struct LaneGroups {
  int64_t group_size, groups;
  int64_t in_vector;  // groups that a vector of nibbles holds, or 0 where they do not fit in evenly
  VecI pick;          // for each lane, which of them

  explicit DSKERNELS_INLINE LaneGroups(const QuantizedMatmulArgs& args)
      : group_size(args.group_size), groups(args.groups), in_vector(0), pick{} {
    if (8 * kLanes % group_size != 0) return;
    in_vector = 8 * kLanes / group_size;
    for (int l = 0; l < kLanes; ++l) pick[l] = static_cast<int32_t>(8 * l / group_size);
  }
};

// Values of the groups of each lane, from `values` of a row, for the vector of nibbles that starts at column `first`.
// Lanes behind the last column get those of the last group.
template <class T>
DSKERNELS_INLINE VecF lane_values(const LaneGroups& lanes, const T* values, int64_t first) {
#if defined(DSKERNELS_TIER_AVX512)
  if (lanes.in_vector > 0) {
    const int64_t group = first / lanes.group_size;
    const uint32_t mask = (1u << min_of(lanes.in_vector, lanes.groups - group)) - 1;
    VecF some;
    if constexpr (__is_same(T, float)) {
      some = _mm512_castps256_ps512(_mm256_maskz_loadu_ps(static_cast<__mmask8>(mask), values + group));
    } else {
      const __m128i bytes = _mm_maskz_loadu_epi8(static_cast<__mmask16>(mask), values + group);
      some = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    }
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(lanes.pick), some);
  }
#endif
  VecF result;
  if (lanes.in_vector > 0) {
    const int64_t group = first / lanes.group_size, last = lanes.groups - 1;
    DSKERNELS_UNROLL
    for (int l = 0; l < kLanes; ++l) result[l] = static_cast<float>(values[min_of(group + lanes.pick[l], last)]);
    return result;
  }
  for (int l = 0; l < kLanes; ++l) {
    result[l] = static_cast<float>(values[min_of((first + 8 * l) / lanes.group_size, lanes.groups - 1)]);
  }
  return result;
}

}  // namespace
}  // namespace dskernels
