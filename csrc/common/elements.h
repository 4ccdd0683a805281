// Element types and strided views as the kernels see them: plain bits and byte addresses, no tensor.
#pragma once

#include <cstdint>

namespace dskernels {

enum class Element : int32_t { kFloat32, kBFloat16, kFloat16 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline constexpr int64_t size_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

// A [batch, heads, rows, columns] tensor; strides count elements and may be 0 or negative.
struct View4 {
  void* data;
  Element element;
  int64_t stride[4];
};

}  // namespace dskernels
