// A list of Python tensors as a table of memory runs: what an op over thousands of tensors works on, since handing each
// one to the dispatcher costs more than the arithmetic.
#pragma once

#include <cstdint>

namespace dskernels {

enum class RunType : int64_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

// `count` elements, `stride` elements apart. The table is an int64 tensor [runs, 4] of these.
struct Run {
  void* data;
  int64_t count;
  int64_t stride;
  RunType type;
};
static_assert(sizeof(Run) == 4 * sizeof(int64_t));

}  // namespace dskernels
