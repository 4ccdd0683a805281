// What the CPU bindings of window attention share beyond binding.h.
#pragma once

#include "common/capability.h"
#include "window_attention/binding.h"

namespace dskernels {

DSKERNELS_DECLARE_TIERS(WindowAttentionKernels, window_attention_kernels)

namespace {

// Element i of a one-dimensional tensor of int32 or int64.
inline int64_t integer_at(const Tensor& t, int64_t i) {
  const int64_t place = i * t.stride(0);
  return t.scalar_type() == ScalarType::Int ? static_cast<const int32_t*>(t.data_ptr())[place]
                                            : static_cast<const int64_t*>(t.data_ptr())[place];
}

}  // namespace
}  // namespace dskernels
